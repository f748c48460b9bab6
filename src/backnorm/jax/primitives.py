"""The three computations as primitives of JAX: our kernels on a CPU and, where they can be
launched, on CUDA devices; elsewhere the formulas.

Which it is is decided when a function is lowered for its platform. Under `jax.vmap` a primitive
takes several instances of its problem at once, along a leading axis of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from backnorm.jax import choice, cpu, cuda, formulas, launches
from backnorm.signature import Operation

__all__ = ["Setting", "backward", "forward", "normalize"]


class Setting(NamedTuple):
    """What is the same for every call of a compiled function: epsilon, and the channel axis."""

    epsilon: float
    axis: int


# Compiled also where the caller does not: under `jax.grad` alone JAX runs a backward pass step by
# step. Within a compiled function these are no functions of their own.
_compiled = partial(jax.jit, inline=True)


@partial(_compiled, static_argnums=(0,))
def forward(
    setting: Setting, x: jax.Array, gamma: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return y, mean and variance."""
    y, mean, variance = _bind(_forward, x, gamma, beta, **setting._asdict())
    return y, mean, variance


@partial(_compiled, static_argnums=(0,))
def normalize(
    setting: Setting,
    x: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
) -> jax.Array:
    """Return y from given statistics."""
    (y,) = _bind(_normalize, x, mean, variance, gamma, beta, **setting._asdict())
    return y


@partial(_compiled, static_argnums=(0, 1))
def backward(
    setting: Setting,
    training: bool,
    x: jax.Array,
    dy: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gamma: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dx, dgamma and dbeta."""
    operands = (x, dy, mean, variance, gamma)
    dx, dgamma, dbeta = _bind(_backward, *operands, training=training, **setting._asdict())
    return dx, dgamma, dbeta


def _bind(primitive: Any, *operands: jax.Array, **setting: Any) -> list[jax.Array]:
    alone = (False,) * len(operands)
    found: list[jax.Array] = primitive.bind(*operands, instances=None, spread=alone, **setting)
    return found


def _primitive(
    name: str,
    formula: Callable[..., tuple[jax.Array, ...]],
    operation: Operation,
    like: tuple[int, ...],
) -> Any:
    """Return a new primitive.

    Parameters
    ----------
    name : str
    formula : callable
        What it computes.
    operation : str
        The same by kernels. They also take `instances`, how many there are or None, and `spread`,
        which operands have one for each along a leading axis.
    like : tuple of int
        For every result, the operand that has its shape and type.
    """
    made = Primitive(f"backnorm_{name}")
    made.multiple_results = True

    def elsewhere(*operands: jax.Array, instances: int | None, spread: Any, **setting: Any) -> Any:
        function = partial(formula, **setting)
        if instances is not None:
            function = jax.vmap(function, tuple(0 if each else None for each in spread))
        return function(*operands)

    made.def_abstract_eval(lambda *kinds, **_: [kinds[k].update(weak_type=False) for k in like])
    made.def_impl(partial(_run_at_once, made))
    by_formulas = mlir.lower_fun(elsewhere, multiple_results=True)
    mlir.register_lowering(made, by_formulas)
    on_cpu = partial(cpu.computed, operation, like, elsewhere)
    lowered_for_cpu = mlir.lower_fun(on_cpu, multiple_results=True)
    mlir.register_lowering(made, lowered_for_cpu, platform="cpu")
    on_cuda = partial(cuda.computed, operation, like)
    by_kernels = mlir.lower_fun(on_cuda, multiple_results=True)

    def lowered_for_cuda(context: Any, *operands: Any, **how: Any) -> Any:
        shape, devices = context.avals_in[like[0]].shape, context.module_context.axis_context
        if not choice.by_kernels(shape, devices):
            return by_formulas(context, *operands, **how)
        with launches.compiling():
            return by_kernels(context, *operands, **how)

    mlir.register_lowering(made, lowered_for_cuda, platform="cuda")
    batching.primitive_batchers[made] = partial(_spread_out, made, like)
    return made


def _run_at_once(primitive: Any, *operands: jax.Array, **setting: Any) -> Any:
    """Run a primitive outside of any compiled function, as happens under `jax.disable_jit`."""
    with jax.disable_jit(False):
        return jax.jit(partial(primitive.bind, **setting))(*operands)


def _spread_out(
    primitive: Any,
    like: tuple[int, ...],
    operands: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    instances: int | None,
    spread: tuple[bool, ...],
    **setting: Any,
) -> tuple[list[jax.Array], list[int]]:
    """Let the instances of a primitive be mapped over one more axis."""
    places = zip(operands, axes, strict=True)
    (size,) = {operand.shape[axis] for operand, axis in places if axis is not None}
    inner = 1 if instances is None else instances
    given, now = [], []
    for k, (operand, axis) in enumerate(zip(operands, axes, strict=True)):
        # What is the same for all instances stays one array, unless a result is to be like it.
        is_spread = axis is not None or spread[k] or k in like
        if is_spread:
            outer = operand[None] if axis is None else jnp.moveaxis(operand, axis, 0)
            both = outer if spread[k] else outer[:, None]
            both = jnp.broadcast_to(both, (size, inner, *both.shape[2:]))
            operand = both.reshape(size * inner, *both.shape[2:])
        given.append(operand)
        now.append(is_spread)
    found = primitive.bind(*given, instances=size * inner, spread=tuple(now), **setting)
    if instances is not None:
        found = [result.reshape(size, inner, *result.shape[1:]) for result in found]
    return found, [0] * len(found)


def _alone(formula: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array]]:
    return lambda *operands, **setting: (formula(*operands, **setting),)


_forward = _primitive("forward", formulas.forward, "forward", like=(0, 1, 1))
_normalize = _primitive("normalize", _alone(formulas.normalize), "inference", like=(0,))
_backward = _primitive("backward", formulas.backward, "backward", like=(1, 4, 4))
