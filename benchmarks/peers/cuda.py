"""The contestants on an NVIDIA GPU, except JAX: all take PyTorch tensors and allocate results.

NXC is channels_last memory (channels_last_3d for volumes, a permuted view for other ranks).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import backnorm
from benchmarks.cells import FLOOR, LEAST_PASSES, OURS, Cell, Form
from benchmarks.peers.aten import NAMES, native_call
from benchmarks.peers.base import Contestant, Data, Missing, Prepared
from benchmarks.peers.formula import INPUTS, OUTPUTS, Library, formula
from benchmarks.peers.tensors import LayerTensors, allocating
from benchmarks.turns import Timing

__all__ = ["Backnorm", "Compiled", "CuDnn", "Floor", "Native"]


class Backnorm(Contestant):
    """Ours: the kernels that modules and functions of `backnorm.torch` call, without autograd."""

    name = OURS

    def start(self, threads: int) -> dict[str, str]:
        """Import the adapter; return our version and Triton's."""
        from backnorm.torch import engines
        from backnorm.torch.checks import Operands
        from backnorm.torch.options import options_of

        self._engines, self._operands, self._options = engines, Operands, options_of
        versions = {"backnorm": backnorm.__version__}
        if importlib.util.find_spec("triton") is not None:
            versions["triton"] = importlib.metadata.version("triton")
        return versions

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the allocating form."""
        call = self._call(cell, self.device.tensors, data.epsilon)
        return allocating(cell, OUTPUTS[cell.op], call)

    def _call(self, cell: Cell, tensors: LayerTensors, epsilon: float) -> Callable[[], Any]:
        x, dy, mean, variance, weight, bias = tensors
        engines = self._engines
        options = self._options(cell.op != "inference", epsilon, None, None, x.dtype)
        if cell.op == "backward":
            operands = x, dy, None, mean, variance, weight
            backward = engines.backward(operands, options, False)
            return lambda: backward(operands, None)
        statistics = () if cell.op == "forward" else (mean, variance)
        operands = self._operands(x, None, weight, bias, *statistics)
        forward = engines.forward(operands, options)
        return lambda: forward(operands, 0.0)


class Floor(Contestant):
    """The floor: the bytes that a cell must move, at the speed of copying; not timed in turns.

    Inputs are read once and the output is written once: 3 arrays of x's size for a backward pass
    (x, dy, dx), 2 for a forward pass and for inference. A backward pass that goes over the data
    twice, for the sums and then for dx, moves 5 arrays, and such a forward pass 3. If the arrays do
    not stay in the L2 in between, these passes take 5/3 and 3/2 of the floor at the full speed of
    memory.
    """

    name = FLOOR
    temporaries = 0.0

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Timing]:
        """Return the time of the form "out"."""
        copies, moved = self.device.copies, LEAST_PASSES[cell.op] * cell.nbytes
        return {"out": Timing(*(moved * each for each in dataclasses.astuple(copies)))}


class Native(Contestant):
    """PyTorch's own kernels, ``native_batch_norm`` and its gradient; they never call cuDNN."""

    name = "torch"

    def start(self, threads: int) -> dict[str, str]:
        """Return PyTorch's version: the device has imported it."""
        return {"torch": str(self.device.torch.__version__)}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the allocating form."""
        torch = self.device.torch
        operator, arguments = native_call(torch, cell, self.device.tensors, data.epsilon)
        return allocating(cell, NAMES[cell.op], partial(operator.default, *arguments))


class CuDnn(Contestant):
    """cuDNN as PyTorch calls it: ``cudnn_batch_norm`` and its gradient.

    If cuDNN declines a cell, PyTorch's operator raises an error, and the cell is unsupported.
    """

    name = "cudnn"
    temporaries = 2.0

    def start(self, threads: int) -> dict[str, str]:
        """Return cuDNN's version."""
        cudnn = self.device.torch.backends.cudnn
        if not cudnn.is_available():
            raise Missing("PyTorch comes without cuDNN")
        return {"cudnn": str(cudnn.version())}

    def operators(self) -> Any:
        """Return the namespace of the operators."""
        return self.device.torch.ops.aten

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the allocating form; a backward pass takes the saved results of a forward pass."""
        aten, t = self.operators(), self.device.tensors
        running = (t.mean, t.variance) if cell.op == "inference" else (None, None)
        options = cell.op != "inference", 0.0, data.epsilon
        operands = (t.x, t.gamma, t.beta, *running, *options)
        call = partial(aten.cudnn_batch_norm.default, *operands)
        if cell.op == "backward":
            # cuDNN's own statistics and reserve; without the reserve it rejects some layouts.
            _, mean, saved, reserve = call()
            operands = (t.x, t.dy, t.gamma, None, None, mean, saved, data.epsilon, reserve)
            call = partial(aten.cudnn_batch_norm_backward.default, *operands)
        return allocating(cell, NAMES[cell.op], call)


class Compiled(Contestant):
    """``torch.compile`` of the plain formula with default options, anew for every cell."""

    name = "compile"
    temporaries = 3.0
    options: ClassVar[Mapping[str, Any]] = {"dynamic": False, "fullgraph": True}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the allocating form; it is compiled when it is first called."""
        torch = self.device.torch
        # After a few shapes of one function, torch.compile silently stops compiling it.
        torch.compiler.reset()
        library = Library(torch.rsqrt, lambda x, dtype: x.to(dtype), torch.float32)
        function = torch.compile(formula(library, cell, 1, data.epsilon), **self.options)
        arguments = [getattr(self.device.tensors, name) for name in INPUTS[cell.op]]
        return allocating(cell, OUTPUTS[cell.op], partial(function, *arguments))
