"""timm's batch normalisation with an activation, normalised by backnorm. Imports timm."""

from __future__ import annotations

import torch
from timm.layers import norm_act
from torch import Tensor
from torch.fx import Proxy

from backnorm.torch import modules
from backnorm.torch.activations import activation_of
from backnorm.torch.library_layers import REPLACEMENTS, FrozenLayer, LayerWithActivation
from backnorm.torch.separable import as_node

__all__ = ["BatchNormAct2d", "FrozenBatchNormAct2d"]


class BatchNormAct2d(LayerWithActivation, modules._BatchNorm, norm_act.BatchNormAct2d):
    """`timm.layers.BatchNormAct2d`: backnorm normalises, then `drop` and `act` are called.

    With `fuse_activation`, backnorm computes the activation too, unless there is an obstacle.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, apply the dropout, and apply the activation."""
        if isinstance(x, Proxy):
            return as_node(self, x)
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        if self.fusion_obstacle() is None:
            return self._normalised(x, None, activation_of(self.act))
        return self.act(self.drop(self._normalised(x, None, None)))


class FrozenBatchNormAct2d(FrozenLayer, norm_act.FrozenBatchNormAct2d):
    """`timm.layers.FrozenBatchNormAct2d`: backnorm normalises."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x with constants, apply the dropout, and apply the activation."""
        if self._is_ordinary(x):
            return self.act(self.drop(self._normalised(x)))
        return super().forward(x)


REPLACEMENTS[norm_act.BatchNormAct2d] = BatchNormAct2d
REPLACEMENTS[norm_act.FrozenBatchNormAct2d] = FrozenBatchNormAct2d
