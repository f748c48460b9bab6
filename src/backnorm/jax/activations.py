"""Activations: a ReLU in one pass with the forward, y = max(0, batch_norm(x) + residual).

XLA joins no loop of its own with a call of ours: a ReLU behind it is one more reading and one more
writing of all elements. So it is a primitive. Its derivative keeps y, which whatever comes next
has to keep anyway, in the place of the mask that kernels make: what is positive there says the
same, and XLA joins that selection with what stands before it. Other activations are JAX's own
functions, applied to y.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from backnorm.activations import RELU, Activation
from backnorm.jax import cpu, derivatives, ffi, sharding
from backnorm.jax.differentiable import Arrays, Rule, give_derivative
from backnorm.jax.instances import new_primitive
from backnorm.jax.primitives import FORWARD, bind
from backnorm.jax.problems import is_known

__all__ = ["activated", "forward_relu"]

# Of x, gamma, beta and maybe a residual: which has the shape and type of each result.
_LIKE = (0, 1, 1)


def forward_relu(*operands: jax.Array, **parameters: Any) -> Arrays:
    """Return relu(y + residual), mean and variance from x, gamma, beta and maybe a residual."""
    return bind(_FORWARD_RELU, *operands, residual=len(operands) > 3, **parameters)


def activated(y: jax.Array, residual: Any, activation: Activation | None) -> jax.Array:
    """Return the activation of y, or of y + residual.

    The derivative of a ReLU is 0 at 0 and at its ceiling, as that of the kernels.
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


def _kinds(*operands: Any, **_: Any) -> list[Any]:
    return [operands[k].update(weak_type=False) for k in _LIKE]


def _composed(
    *operands: jax.Array, residual: bool, spread: Any, **parameters: Any
) -> list[jax.Array]:
    """Return the results by the primitive without a ReLU: where no kernel has one."""
    y, mean, variance = FORWARD.bind(*operands[:3], spread=spread[:3], **parameters)
    return [activated(y, operands[3] if residual else None, RELU), mean, variance]


def _by_kernel(*operands: jax.Array, residual: bool, reproducible: bool, **parameters: Any) -> Any:
    kinds = [operands[k] for k in _LIKE]
    return cpu.call("forward", operands, kinds, activation=RELU, residual=residual, **parameters)


def _primitive() -> Any:
    made = new_primitive("backnorm_forward_relu", _kinds, _LIKE)
    composed = mlir.lower_fun(_composed, multiple_results=True)
    by_kernel = mlir.lower_fun(_by_kernel, multiple_results=True)

    def lowered_for_cpu(context: Any, *operands: Any, reproducible: bool, **parameters: Any) -> Any:
        known = is_known(context.avals_in[0].shape) and ffi.reason_against() is None
        # The mask that a kernel writes cannot be cut as x is.
        alone = known and not reproducible and not sharding.devices_of(context)
        lowered = by_kernel if alone else composed
        return lowered(context, *operands, reproducible=reproducible, **parameters)

    mlir.register_lowering(made, composed)
    mlir.register_lowering(made, lowered_for_cpu, platform="cpu")
    return made


_FORWARD_RELU = _primitive()


def _pushed(kept: Arrays, tangents: Arrays, *, residual: bool, **parameters: Any) -> Arrays:
    *of_normalisation, y = kept
    dy, dmean, dvariance = derivatives.forward_pushed(
        tuple(of_normalisation), tangents[:3], **parameters
    )
    moved = tangents[3] if residual else None
    if moved is not None:
        dy = moved if dy is None else dy + moved
    return _where_positive(y, dy), dmean, dvariance


def _pulled(kept: Arrays, cotangents: Arrays, *, residual: bool, **parameters: Any) -> Arrays:
    *of_normalisation, y = kept
    dy, *of_statistics = cotangents
    dy = _where_positive(y, jnp.zeros_like(y) if dy is None else dy)
    found = derivatives.forward_pulled(tuple(of_normalisation), (dy, *of_statistics), **parameters)
    return (*found, dy) if residual else found


def _where_positive(y: jax.Array, dy: jax.Array) -> jax.Array:
    return jnp.where(y > 0, dy, jnp.zeros_like(dy))


give_derivative(
    _FORWARD_RELU,
    Rule(
        keep=lambda operands, results: (operands[0], *results[1:], operands[1], results[0]),
        push=_pushed,
        pull=_pulled,
        like=_LIKE,
    ),
)
