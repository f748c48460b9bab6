"""torchvision's frozen batch normalisation, computed by ours. Imports torchvision."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import misc

from backnorm.torch.kinds import Frozen

__all__ = ["FrozenBatchNorm2d"]


class FrozenBatchNorm2d(Frozen, misc.FrozenBatchNorm2d):
    """`torchvision.ops.FrozenBatchNorm2d`, computed by backnorm."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x with constants."""
        return self._normalised(x) if self._is_ordinary(x) else super().forward(x)


#: Our classes by those that they stand for.
OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    misc.FrozenBatchNorm2d: FrozenBatchNorm2d
}
