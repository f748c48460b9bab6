"""cuDNN as PyTorch calls it: ``cudnn_batch_norm`` and its gradient, contiguous and channels_last.

What it declines, PyTorch's operator raises, and the cell is unsupported.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.cuda.device import TorchDevice
from benchmarks.model import Cell, Form
from benchmarks.peers.aten import NAMES
from benchmarks.peers.base import Data, Missing, Prepared
from benchmarks.tensors import LayerTensors, named_arrays

__all__ = ["CuDnn"]


class CuDnn:
    """Allocating, without autograd."""

    name = "cudnn"
    temporaries = 2.0

    def __init__(self, device: TorchDevice) -> None:
        self._device = device

    def start(self, threads: int) -> dict[str, str]:
        """Return cuDNN's version."""
        cudnn = self._device.torch.backends.cudnn
        if not cudnn.is_available():
            raise Missing("PyTorch comes without cuDNN")
        number = cudnn.version()
        # 91002 is 9.10.2, and before version 9 8907 was 8.9.7.
        major, rest = divmod(number, 10000 if number >= 90000 else 1000)
        return {"cudnn": f"{major}.{rest // 100}.{rest % 100}"}

    def operators(self) -> Any:
        """Return the namespace of the operators."""
        return self._device.torch.ops.aten

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the allocating form; a backward pass takes what a forward pass has kept."""
        torch, last = self._device.torch, cell.layout == "NXC"
        call = _call(self.operators(), cell, self._device.tensors, data.epsilon)

        def results(returned: Any) -> Any:
            return named_arrays(torch, NAMES[cell.op], returned, last)

        return {"allocate": Prepared(call, results)}


def _call(aten: Any, cell: Cell, tensors: LayerTensors, epsilon: float) -> Any:
    t = tensors
    operator = aten.cudnn_batch_norm.default
    running = (t.mean, t.variance) if cell.op == "inference" else (None, None)
    forward = partial(
        operator, t.x, t.gamma, t.beta, *running, cell.op != "inference", 0.0, epsilon
    )
    if cell.op != "backward":
        return forward
    # Its own statistics and its reserve, without which it refuses some layouts.
    _, mean, saved, reserve = forward()
    arguments = (t.x, t.dy, t.gamma, None, None, mean, saved, epsilon, reserve)
    return partial(aten.cudnn_batch_norm_backward.default, *arguments)
