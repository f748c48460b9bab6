"""ResNet-18 in flax.nnx."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from flax import nnx

from backnorm.jax.nnx import BatchNorm

__all__ = ["activated", "norm_of", "resnet18"]

# The weight of the old running statistics, as in PyTorch's models.
_MOMENTUM = 0.9

_STAGES = (64, 128, 256, 512)

_Conv = partial(nnx.Conv, use_bias=False)


def activated(norm: Any, x: jax.Array, residual: Any = None, *, fused: bool) -> jax.Array:
    """Return relu(norm(x) + residual), computed by the layer if `fused`."""
    if fused:
        y: jax.Array = norm(x, activation="relu", residual=residual)
        return y
    y = norm(x)
    return nnx.relu(y if residual is None else y + residual)


def norm_of(variant: str) -> Any:
    """Return the layer class of a variant."""
    if variant == "flax":
        return nnx.BatchNorm
    return partial(BatchNorm, arithmetic="float32") if variant.endswith("float32") else BatchNorm


class _Block(nnx.Module):
    """A residual block of two convolutions."""

    def __init__(
        self, channels: int, features: int, strides: int, norm: Any, rngs: Any, fused: bool
    ) -> None:
        self.activated = partial(activated, fused=fused)
        self.conv_1 = _Conv(channels, features, (3, 3), strides, rngs=rngs)
        self.norm_1 = norm(features)
        self.conv_2 = _Conv(features, features, (3, 3), rngs=rngs)
        self.norm_2 = norm(features)
        self.is_projected = strides > 1 or channels != features
        if self.is_projected:
            self.conv_0 = _Conv(channels, features, (1, 1), strides, rngs=rngs)
            self.norm_0 = norm(features)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the input of the next block."""
        y = self.conv_2(self.activated(self.norm_1, self.conv_1(x)))
        if self.is_projected:
            x = self.norm_0(self.conv_0(x))
        return self.activated(self.norm_2, y, x)


class _ResNet(nnx.Module):
    """The network; `small`: for small images, without strides in the stem."""

    def __init__(self, norm: Any, rngs: Any, *, classes: int, small: bool, fused: bool) -> None:
        self.activated = partial(activated, fused=fused)
        size, strides = (3, 1) if small else (7, 2)
        self.small = small
        self.conv = _Conv(3, _STAGES[0], (size, size), strides, rngs=rngs)
        self.norm = norm(_STAGES[0])
        blocks, channels = [], _STAGES[0]
        for number, features in enumerate(_STAGES):
            for strides in (1 if number == 0 else 2, 1):
                blocks.append(_Block(channels, features, strides, norm, rngs, fused))
                channels = features
        self.blocks = nnx.List(blocks)
        self.linear = nnx.Linear(channels, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits."""
        x = self.activated(self.norm, self.conv(x))
        if not self.small:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.linear(x.mean((1, 2)))


def resnet18(variant: str, *, classes: int, small: bool) -> nnx.Module:
    """Return the network in training mode, with the same weights for every variant."""
    rngs = nnx.Rngs(0)
    norm = partial(norm_of(variant), momentum=_MOMENTUM, rngs=rngs)
    model = _ResNet(norm, rngs, classes=classes, small=small, fused="fused" in variant)
    model.train()
    return model
