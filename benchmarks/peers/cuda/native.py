"""PyTorch's own CUDA kernels, ``native_batch_norm`` and its gradient: they never ask cuDNN.

NXC is channels_last memory (channels_last_3d for volumes, a permuted view for other ranks).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.cuda.device import TorchDevice
from benchmarks.model import Cell, Form
from benchmarks.peers.aten import NAMES, native_call
from benchmarks.peers.base import Data, Prepared
from benchmarks.tensors import named_arrays

__all__ = ["Native"]


class Native:
    """Allocating, without autograd."""

    name = "torch"
    temporaries = 1.0

    def __init__(self, device: TorchDevice) -> None:
        self._device = device

    def start(self, threads: int) -> dict[str, str]:
        """Return PyTorch's version: the device has imported it."""
        return {"torch": str(self._device.torch.__version__)}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the allocating form."""
        torch, last = self._device.torch, cell.layout == "NXC"
        operator, arguments = native_call(torch, cell, self._device.tensors, data.epsilon)

        def results(returned: Any) -> Any:
            return named_arrays(torch, NAMES[cell.op], returned, last)

        return {"allocate": Prepared(partial(operator.default, *arguments), results)}
