"""Primitives with a batching rule: `jax.vmap` gives their operands a leading batch axis.

A primitive has the parameter `batched`. If `batched` is set, every operand and every result has a
batch axis. If all problems of the batch share an operand, the batch axis of this operand has size
1, as in `jax.ffi.ffi_call` with ``vmap_method="expand_dims"``. The axes of nested `jax.vmap`s are
merged into one batch axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def new_primitive(name: str, result_types: Callable[..., Any], like: Sequence[int] = ()) -> Any:
    """Return a new JAX primitive that has a batching rule (for `jax.vmap`), but as yet no lowerings
    and no derivatives.

    Parameters
    ----------
    name : str
    result_types : callable
        Maps the abstract values of the operands, and the parameters, to the abstract values of the
        results.
    like : sequence of int
        The operands that the problems of a batch never share, because a result has their shape.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(result_types)
    primitive.def_impl(partial(_run_compiled, primitive))
    batching.primitive_batchers[primitive] = partial(_batched, primitive, like)
    return primitive


def batch_size(operands: Sequence[Any]) -> Any:
    """Return the size of the axis over which `jax.vmap` maps; the operands begin with this axis.

    This size is the number of problems in the batch. If all problems share an operand, the axis of
    this operand has the size 1 instead.
    """
    return next((x.shape[0] for x in operands if x.shape[0] != 1), 1)


def over_batch(function: Callable[..., Any], batched: bool) -> Callable[..., Any]:
    """Return a function that computes one problem or, if `batched` is true, a batch of problems.

    `function` computes one problem. If `batched` is false, `function` is returned unchanged. If
    `batched` is true, the returned function maps `function` over the batch axis of the operands.
    """

    def mapped(*operands: Any) -> Any:
        size = batch_size(operands)
        if size == 1:
            results = function(*(jax.lax.squeeze(x, (0,)) for x in operands))
            return [jax.lax.expand_dims(result, (0,)) for result in results]
        axes = tuple(0 if x.shape[0] == size else None for x in operands)
        shared = (x if axis == 0 else x[0] for x, axis in zip(operands, axes, strict=True))
        return jax.vmap(function, axes)(*shared)

    return mapped if batched else function


def lowering(function: Callable[..., Any]) -> Any:
    """Return the lowering rule of a primitive.

    `function` computes the primitive's results. All its operands must have a batch axis. If the
    primitive's operands have none, the rule adds a batch axis of size 1, and removes the axis from
    the results.
    """

    def lowered(*operands: Any, batched: bool, **parameters: Any) -> Any:
        if batched:
            return function(*operands, **parameters)
        results = function(*(jax.lax.expand_dims(x, (0,)) for x in operands), **parameters)
        return [jax.lax.squeeze(result, (0,)) for result in results]

    return mlir.lower_fun(lowered, multiple_results=True)


def _run_compiled(primitive: Any, *operands: jax.Array, **parameters: Any) -> Any:
    """Run a primitive that was called outside of compiled functions. The primitive is compiled on
    its own, even within `jax.disable_jit`.
    """
    with jax.disable_jit(False):
        return _compiled(primitive, tuple(sorted(parameters.items())))(*operands)


@functools.cache
def _compiled(primitive: Any, parameters: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(partial(primitive.bind, **dict(parameters)))


def _batched(
    primitive: Any,
    like: Sequence[int],
    operands: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    batched: bool,
    **parameters: Any,
) -> tuple[list[jax.Array], list[int]]:
    """Return the results of a primitive that `jax.vmap` maps over a new batch axis.

    Also return the batch axis of each result.
    """
    (size,) = {x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None}
    # In `pairs`, each operand has two batch axes. The first is the axis over which this `jax.vmap`
    # maps. The second is the batch axis of an earlier `jax.vmap`, or has size 1 if there was none.
    pairs = []
    for x, axis in zip(operands, axes, strict=True):
        x = x[None] if axis is None else jnp.moveaxis(x, axis, 0)
        pairs.append(x if batched else x[:, None])
    inner = next((x.shape[1] for x in pairs if x.shape[1] != 1), 1)
    merged = []
    for k, x in enumerate(pairs):
        if axes[k] is not None or x.shape[1] != 1 or k in like:
            x = jnp.broadcast_to(x, (size, inner, *x.shape[2:]))
        merged.append(x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]))
    results = primitive.bind(*merged, batched=True, **parameters)
    if batched:
        results = [result.reshape(size, inner, *result.shape[1:]) for result in results]
    return results, [0] * len(results)
