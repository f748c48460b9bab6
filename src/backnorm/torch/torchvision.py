"""torchvision's frozen batch normalisation, computed by backnorm. It imports torchvision."""

from __future__ import annotations

from torch import Tensor
from torchvision.ops import misc

from backnorm.torch.modules import FrozenLayer


class FrozenBatchNorm2d(FrozenLayer, misc.FrozenBatchNorm2d):
    """`torchvision.ops.FrozenBatchNorm2d`, computed by backnorm."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x with the layer's constant statistics."""
        return self._normalised(x) if self._is_ordinary(x) else super().forward(x)
