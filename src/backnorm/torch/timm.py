"""timm's batch normalisation with an activation, normalised by ours. Imports timm."""

from __future__ import annotations

import torch
from timm.layers import norm_act
from torch import Tensor
from torch.fx import Proxy

from backnorm.torch import modules
from backnorm.torch.activations import activation_of
from backnorm.torch.kinds import Activated, Frozen
from backnorm.torch.separable import as_node

__all__ = ["BatchNormAct2d", "FrozenBatchNormAct2d"]


class BatchNormAct2d(Activated, modules._BatchNorm, norm_act.BatchNormAct2d):
    """`timm.layers.BatchNormAct2d`: backnorm normalises; its `drop` and `act` are called then.

    With `at_once`, where nothing is dropped, backnorm computes the activation as well.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, drop some of it, and apply the activation."""
        if isinstance(x, Proxy):
            return as_node(self, x)
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        if self.at_once and self.why_not_fused() is None:
            return self._normalised(x, activation_of(self.act))
        return self.act(self.drop(self._normalised(x)))


class FrozenBatchNormAct2d(Frozen, norm_act.FrozenBatchNormAct2d):
    """`timm.layers.FrozenBatchNormAct2d`: backnorm normalises."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x with constants, drop some of it, and apply the activation."""
        if self._is_ordinary(x):
            return self.act(self.drop(self._normalised(x)))
        return super().forward(x)


#: Our classes by those that they stand for.
OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    norm_act.BatchNormAct2d: BatchNormAct2d,
    norm_act.FrozenBatchNormAct2d: FrozenBatchNormAct2d,
}
