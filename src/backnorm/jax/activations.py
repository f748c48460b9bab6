"""Activations, computed by JAX functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from backnorm.activations import Activation


def activated(y: jax.Array, residual: Any, activation: Activation | None) -> jax.Array:
    """Return the activation of y, or of y + residual.

    Where the input of a ReLU is 0 or equals the ceiling, its derivative is 0, as in the kernels.
    """
    if activation is None:
        return y
    if activation.name == "silu":
        return jax.nn.silu(y)
    if activation.name == "hardswish":
        return jax.nn.hard_swish(y)
    total = y if residual is None else y + residual
    positive = jax.nn.relu(total)
    if activation.ceiling is None:
        return positive
    return jnp.where(total >= activation.ceiling, activation.ceiling, positive)
