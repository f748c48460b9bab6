"""PyTorch's own operators on the CPU, without autograd: ``native_batch_norm`` and its gradient.

NXC is channels_last memory (channels_last_3d for volumes, a permuted view for other ranks).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.cells import Cell, Form
from benchmarks.peers.aten import NAMES, native_call
from benchmarks.peers.base import Contestant, Data, Missing, Prepared
from benchmarks.peers.tensors import elements, layer_tensors, named_arrays

__all__ = ["Torch"]


class Torch(Contestant):
    """PyTorch, in both forms: the allocating operators, and their ``.out`` variants."""

    name = "torch"

    def start(self, threads: int) -> dict[str, str]:
        """Import PyTorch and set its threads."""
        try:
            import torch
        except ModuleNotFoundError as error:
            raise Missing("torch is not installed") from error
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch = torch
        return {"torch": torch.__version__}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return both forms."""
        last = cell.layout == "NXC"
        tensors = layer_tensors(data)
        operator, arguments = native_call(self._torch, cell, tensors, data.epsilon)
        allocate, write = operator.default, operator.out
        names = ("out", "save_mean", "save_invstd")
        if cell.op == "backward":
            names = ("out0", "out1", "out2")
        out = elements(data.out, last)
        others = (tensors.gamma.clone() for _ in range(2))
        targets = dict(zip(names, (out, *others), strict=True))

        def results(returned: Any) -> Mapping[str, np.ndarray]:
            return named_arrays(NAMES[cell.op], returned, last)

        return {
            "out": Prepared(lambda: write(*arguments, **targets), results),
            "allocate": Prepared(lambda: allocate(*arguments), results),
        }
