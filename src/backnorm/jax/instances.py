"""Primitives that take several instances of their problem at once, which is what `jax.vmap` makes.

Such a primitive has two parameters beside its own: `instances`, how many there are or None, and
`spread`, which operands have one for each along a leading axis. All results have, if there are any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

__all__ = ["new_primitive", "of_instances", "one_by_one"]


def new_primitive(name: str, kinds: Callable[..., list[Any]], like: Sequence[int] = ()) -> Any:
    """Return a primitive that can be mapped over more and more axes.

    Parameters
    ----------
    name : str
    kinds : callable
        From the abstract values of the operands and the parameters to those of the results.
    like : sequence of int
        The operands that have one for each instance whenever there are instances, because a
        result is to be like them.
    """
    made = Primitive(name)
    made.multiple_results = True
    made.def_abstract_eval(kinds)
    made.def_impl(partial(_run_at_once, made))
    batching.primitive_batchers[made] = partial(_spread_out, made, like)
    return made


def one_by_one(count: int) -> dict[str, Any]:
    """Return the parameters of a call with `count` operands that is not mapped."""
    return {"instances": None, "spread": (False,) * count}


def of_instances(
    function: Callable[..., Any], instances: int | None, spread: Sequence[bool]
) -> Callable[..., Any]:
    """Return a function of one instance as one of the operands of a primitive."""
    if instances is None:
        return function
    return jax.vmap(function, tuple(0 if each else None for each in spread))


def _run_at_once(primitive: Any, *operands: jax.Array, **setting: Any) -> Any:
    """Run a primitive outside of any compiled function, as happens under `jax.disable_jit`."""
    with jax.disable_jit(False):
        return _compiled(primitive, tuple(sorted(setting.items())))(*operands)


@functools.cache
def _compiled(primitive: Any, setting: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(partial(primitive.bind, **dict(setting)))


def _spread_out(
    primitive: Any,
    like: Sequence[int],
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
    moved, now = [], []
    for k, (operand, axis) in enumerate(zip(operands, axes, strict=True)):
        # What is the same for all instances stays one array, unless a result is to be like it.
        is_spread = axis is not None or spread[k] or k in like
        if is_spread:
            outer = operand[None] if axis is None else jnp.moveaxis(operand, axis, 0)
            both = outer if spread[k] else outer[:, None]
            both = jnp.broadcast_to(both, (size, inner, *both.shape[2:]))
            operand = both.reshape(size * inner, *both.shape[2:])
        moved.append(operand)
        now.append(is_spread)
    found = primitive.bind(*moved, instances=size * inner, spread=tuple(now), **setting)
    if instances is not None:
        found = [result.reshape(size, inner, *result.shape[1:]) for result in found]
    return found, [0] * len(found)
