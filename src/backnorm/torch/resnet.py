"""torchvision's residual blocks with fused layers: a layer also computes the addition and the ReLU
that follow it. This module imports torchvision.

A block calls the same ReLU module after several layers, so no layer can be fused with this module.
Instead, the `forward` of the block's new class passes the ReLU and the identity to the layers.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn import Module
from torchvision.models import resnet

from backnorm.activations import RELU
from backnorm.torch.functional import unscriptable
from backnorm.torch.modules import (
    alteration_of,
    applies_activation,
    described_activation,
    has_another_forward,
)


@unscriptable
class _Block(Module):
    """A mixin for torchvision's residual blocks.

    A fused layer rounds ReLU(normalised + identity) once. torchvision's block also rounds the
    normalised values.
    """

    library_class: ClassVar[type[Module]]
    layer_names: ClassVar[tuple[str, ...]]

    def fusion_obstacle(self) -> str | None:
        """Return the reason why the block must call torchvision's `forward`, or None if it can fuse
        its layers.
        """
        if "forward" in self.__dict__ or has_another_forward(self.library_class):
            return "its block has a forward of its own"
        modules = self._modules
        relu = modules.get("relu")
        if type(relu) is not torch.nn.ReLU:
            return f"the activation of its block is a {type(relu).__name__}"
        if has_another_forward(torch.nn.ReLU):
            return "the activation of its block is of a class whose forward was replaced"
        if alteration := alteration_of(relu):
            return f"the activation of its block {alteration}"
        for name in self.layer_names:
            layer = modules.get(name)
            if layer is None or not applies_activation(type(layer)):
                return f"{name} of its block is a {type(layer).__name__}"
            if layer.activation is not None:
                return f"{name} of its block computes {described_activation(layer.activation)}"
            if alteration := alteration_of(layer):
                return f"{name} of its block {alteration}"
        return None

    def layer_outcomes(self) -> dict[Module, tuple[bool, str]]:
        """Return for each layer whether it is fused, and a text. If the layer is fused, the text
        names the operations that are fused with it. If not, the text says what prevents the fusion.
        """
        obstacle = self.fusion_obstacle()
        phrases = dict.fromkeys(self.layer_names, "a ReLU")
        phrases[self.layer_names[-1]] = "an addition and a ReLU"
        return {
            self._modules.get(name): (obstacle is None, obstacle or phrase)
            for name, phrase in phrases.items()
        }

    def _get_name(self) -> str:
        return f"backnorm.torch.{super()._get_name()}"

    def _is_fused(self, x: object) -> bool:
        return not isinstance(x, Proxy) and self.fusion_obstacle() is None

    def _sum(self, layer: Module, out: Tensor, x: Tensor) -> Tensor:
        """Return ReLU(layer(out) + identity). The identity is x, or `downsample` of x."""
        identity = x if self.downsample is None else self.downsample(x)
        if identity.shape == out.shape and identity.dtype == out.dtype:
            return _activated(layer, out, identity)
        out = layer(out)
        out += identity
        return self.relu(out)


def _activated(layer: Module, input: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return ReLU(layer(input) + residual)."""
    layer._check_input_dim(input)
    return layer._normalised(input, residual, RELU)


class BasicBlock(_Block, resnet.BasicBlock):
    """`torchvision.models.resnet.BasicBlock` with fused layers. The layer `bn2` also adds the
    identity, which is the output of the block's skip connection.
    """

    library_class = resnet.BasicBlock
    layer_names = "bn1", "bn2"

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result for x."""
        if not self._is_fused(x):
            return super().forward(x)
        out = _activated(self.bn1, self.conv1(x))
        return self._sum(self.bn2, self.conv2(out), x)


class Bottleneck(_Block, resnet.Bottleneck):
    """`torchvision.models.resnet.Bottleneck` with fused layers. The layer `bn3` also adds the
    identity, which is the output of the block's skip connection.
    """

    library_class = resnet.Bottleneck
    layer_names = "bn1", "bn2", "bn3"

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result for x."""
        if not self._is_fused(x):
            return super().forward(x)
        out = _activated(self.bn1, self.conv1(x))
        out = _activated(self.bn2, self.conv2(out))
        return self._sum(self.bn3, self.conv3(out), x)
