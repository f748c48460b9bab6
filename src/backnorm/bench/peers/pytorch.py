"""PyTorch's own operators on the CPU, without autograd: ``native_batch_norm`` and its gradient.

NXC is channels_last memory (channels_last_3d for volumes, a permuted view for other ranks).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from backnorm.bench.model import Cell, Form
from backnorm.bench.peers.base import Data, Missing, Prepared
from backnorm.dtypes import BFLOAT16

__all__ = ["Torch"]


class Torch:
    """Allocating, and the operators' ``.out`` variants."""

    name = "torch"
    temporaries = 1.0

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
        aten = self._torch.ops.aten
        last = cell.layout == "NXC"
        x, dy, out = (self._tensor(a, last) for a in (data.x, data.dy, data.out))
        mean, variance, gamma, beta = map(
            self._torch.from_numpy, (data.mean, data.variance, data.gamma, data.beta)
        )
        arguments: tuple[Any, ...]
        if cell.op == "backward":
            saved = 1.0 / self._torch.sqrt(variance.double() + data.epsilon)
            saved = saved.to(variance.dtype)
            arguments = (dy, x, gamma, None, None, mean, saved, True, data.epsilon, [True] * 3)
            operator = aten.native_batch_norm_backward
            targets = {"out0": out, "out1": gamma.clone(), "out2": gamma.clone()}
        else:
            running = (mean, variance) if cell.op == "inference" else (None, None)
            arguments = (x, gamma, beta, *running, cell.op == "forward", 0.0, data.epsilon)
            operator = aten.native_batch_norm
            targets = {"out": out, "save_mean": gamma.clone(), "save_invstd": gamma.clone()}
        allocate, given = operator.default, operator.out

        def results(returned: Any) -> Mapping[str, np.ndarray]:
            first = self._array(returned[0], last)
            if cell.op == "inference":
                return {"y": first}
            second, third = returned[1].numpy(), returned[2].numpy()
            if cell.op == "backward":
                return {"dx": first, "dgamma": second, "dbeta": third}
            return {"y": first, "mean": second}

        return {
            "out": Prepared(lambda: given(*arguments, **targets), results),
            "allocate": Prepared(lambda: allocate(*arguments), results),
        }

    def _tensor(self, array: np.ndarray, last: bool) -> Any:
        """Return a tensor (N, C, spatial ...) over the array's own memory."""
        if array.dtype == BFLOAT16:
            tensor = self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        else:
            tensor = self._torch.from_numpy(array)
        return tensor.movedim(-1, 1) if last else tensor

    def _array(self, tensor: Any, last: bool) -> np.ndarray:
        if last:
            tensor = tensor.movedim(1, -1)
        if tensor.dtype == self._torch.bfloat16:
            array: np.ndarray = tensor.view(self._torch.int16).numpy().view(BFLOAT16)
            return array
        return tensor.numpy()  # type: ignore[no-any-return]
