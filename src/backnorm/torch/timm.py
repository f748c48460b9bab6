"""timm's layers of batch normalisation and activation, normalised by backnorm. Imports timm."""

from __future__ import annotations

from types import CodeType

import torch
from timm.layers import norm_act
from torch import Tensor
from torch.fx import Proxy

from backnorm.torch.activations import activation_of
from backnorm.torch.modules import FrozenLayer, _BatchNorm, alteration_of


class BatchNormAct2d(_BatchNorm, norm_act.BatchNormAct2d):
    """timm's layer of the same name, with the normalisation computed by backnorm.

    After the normalisation, the layer calls its modules `drop` and `act`. If `fuse_activation` is
    set, backnorm computes the activation instead, unless `fusion_obstacle` returns a reason.
    """

    fuse_activation: bool = False

    def following(self) -> str | None:
        """Return the last of `drop` and `act` that computes something, as a phrase, or None."""
        others = [each for each in (self.act, self.drop) if type(each) is not torch.nn.Identity]
        return f"its {type(others[0]).__name__}" if others else None

    def lost_by(self, caller: CodeType) -> str | None:
        """Return what would be lost if a function replaces the layer; timm's keep everything."""
        return None if caller.co_filename == norm_act.__file__ else super().lost_by(caller)

    def fusion_obstacle(self) -> str | None:
        """Return why backnorm cannot compute the activation (then `act` does), or None."""
        drop, act = self.drop, self.act
        if not self.fuse_activation:
            return "it was converted without fuse=True"
        if activation_of(act) is None:
            return f"its activation is {type(act).__name__}"
        if type(drop) is not torch.nn.Identity:
            return f"{type(drop).__name__} comes before its activation"
        alteration = alteration_of(act) or alteration_of(drop)
        return f"its activation {alteration}" if alteration else None

    def layer_outcomes(self) -> dict[torch.nn.Module, tuple[bool, str]]:
        """Return whether the layer computes its activation, and what prevents it."""
        obstacle = self.fusion_obstacle()
        return {self: (obstacle is None, obstacle or "its own activation")}

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Normalise x, apply the dropout, and apply the activation."""
        if isinstance(x, Proxy):
            return self.as_node(x)
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
