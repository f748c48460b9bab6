"""timm's batch normalisation with an activation, normalised by ours. Imports timm."""

from __future__ import annotations

import torch
from timm.layers import norm_act
from torch import Tensor
from torch.fx import Proxy

from backnorm.torch import modules
from backnorm.torch.activations import activation_of
from backnorm.torch.kinds import Activated, Frozen

__all__ = ["BatchNormAct2d", "FrozenBatchNormAct2d", "FusedBatchNormAct2d"]


class BatchNormAct2d(Activated, modules._BatchNorm, norm_act.BatchNormAct2d):
    """`timm.layers.BatchNormAct2d`: backnorm normalises; its `drop` and `act` are called then."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, drop some of it, and apply the activation."""
        if isinstance(x, Proxy):
            return self._as_node(x)
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        return self.act(self.drop(self._normalised(x)))


class FusedBatchNormAct2d(BatchNormAct2d):
    """The same at once, where the activation is known and nothing is dropped."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, drop some of it, and apply the activation."""
        if isinstance(x, Proxy) or self.why_not_fused() is not None:
            return super().forward(x)
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        activation = activation_of(self.act)
        assert activation is not None
        return self.with_activation(x, None, activation)

    def _get_name(self) -> str:
        return BatchNormAct2d.__name__


class FrozenBatchNormAct2d(Frozen, norm_act.FrozenBatchNormAct2d):
    """`timm.layers.FrozenBatchNormAct2d`: backnorm normalises."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x with constants, drop some of it, and apply the activation."""
        if self._is_ordinary(x):
            return self.act(self.drop(self._normalised(x)))
        return super().forward(x)


#: Our classes by those that they stand for; and those with the activation, by those without.
OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    norm_act.BatchNormAct2d: BatchNormAct2d,
    norm_act.FrozenBatchNormAct2d: FrozenBatchNormAct2d,
}
FUSED: dict[type[torch.nn.Module], type[torch.nn.Module]] = {BatchNormAct2d: FusedBatchNormAct2d}
