"""backnorm itself, on PyTorch's tensors: what its modules and functions call, without autograd."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import backnorm
from benchmarks.cuda.device import TorchDevice
from benchmarks.model import OURS, Cell, Form
from benchmarks.peers.base import Data, Prepared
from benchmarks.peers.formula import OUTPUTS
from benchmarks.tensors import LayerTensors, named_arrays

__all__ = ["Backnorm"]


class Backnorm:
    """Ours: the kernels, allocating as every operator of PyTorch does."""

    name = OURS
    temporaries = 1.0

    def __init__(self, device: TorchDevice) -> None:
        self._device = device

    def start(self, threads: int) -> dict[str, str]:
        """Import the adapter; return our version and Triton's."""
        from backnorm.torch import kernels
        from backnorm.torch.options import eager_options

        self._kernels, self._options = kernels, eager_options
        versions = {"backnorm": backnorm.__version__}
        if importlib.util.find_spec("triton") is not None:
            versions["triton"] = importlib.metadata.version("triton")
        return versions

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the allocating form; it can do any cell."""
        call = self._call(cell, self._device.tensors, data.epsilon)

        def results(returned: Any) -> Any:
            tensors: Iterable[Any] = returned if isinstance(returned, tuple) else (returned,)
            last = cell.layout == "NXC"
            return named_arrays(self._device.torch, OUTPUTS[cell.op], tensors, last)

        return {"allocate": Prepared(call, results)}

    def _call(self, cell: Cell, tensors: LayerTensors, epsilon: float) -> Callable[[], Any]:
        x, dy, mean, variance, weight, bias = tensors
        kernels = self._kernels
        options = self._options(cell.op != "inference", epsilon, None, None, x.dtype)
        if cell.op == "backward":
            saved = kernels.Saved(x, weight, mean, variance)
            return lambda: kernels.backward(saved, dy, options, False)
        if cell.op == "forward":
            return lambda: kernels.forward(x, None, weight, bias, None, options)
        return lambda: kernels.inference(x, None, weight, bias, (mean, variance), options)
