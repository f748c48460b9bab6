"""Derivatives of primitives, in forward and in reverse mode, from a rule for each primitive.

A derivative is a linear map. `push` maps tangents of the operands to tangents of the results; its
transpose, `pull`, maps cotangents of the results to cotangents of the operands. In JAX this linear
map is one primitive. Its operands are the tangents, and the arrays that the rule keeps for the
derivative (here called *residuals*). Forward mode runs this primitive. Reverse mode transposes this
primitive; of the forward pass, it saves only the residuals. (A `jax.custom_vjp` has no forward
mode. With a `jax.custom_jvp`, reverse mode saves the intermediate values of the derivative's
formula.) Higher derivatives are derivatives of `push` and `pull`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, mlir

from backnorm.jax.batching import batch_size, new_primitive, over_batch
from backnorm.options import Options

Arrays = tuple[Any, ...]
Map = Callable[[Arrays, Arrays, Options], Arrays]


def give_derivative(
    primitive: Any,
    *,
    keep: Callable[[Arrays, Arrays], Arrays],
    push: Map,
    pull: Map,
    like: tuple[int, ...],
) -> None:
    """Register the derivative of a primitive of `backnorm.jax.batching`.

    All operands of the primitive must be marked as varying over the same mapped axes of
    `jax.shard_map`. The function `primitives.alike` marks arrays so.

    Parameters
    ----------
    primitive : Primitive
    keep : callable
        Takes operands and results of one problem, and returns the residuals.
    push : callable
        Takes the residuals, the tangents of the operands (None if zero) and the options. Returns
        the tangents of the results.
    pull : callable
        Takes the residuals, the cotangents of the results (None if zero) and the options. Returns
        the cotangents of all operands, including optional ones.
    like : tuple of int
        For every result, the residual that has its shape and type.
    """
    derivative = _derivative(primitive.name, push, pull, like)

    def differentiated(
        operands: Sequence[Any], tangents: Sequence[Any], **parameters: Any
    ) -> tuple[Any, Any]:
        results = primitive.bind(*operands, **parameters)
        residuals = keep(tuple(operands), tuple(results))
        present = _nonzero(tangents)
        nonzero = _selected(tangents, present)
        return results, derivative.bind(*residuals, *nonzero, present=present, **parameters)

    ad.primitive_jvps[primitive] = differentiated


def _derivative(name: str, push: Map, pull: Map, like: tuple[int, ...]) -> Any:
    """Return a JAX primitive that computes the derivative of the primitive `name`.

    The operands of the derivative are the residuals, which determine the batch size, and the
    tangents that are not zero. The parameter `present` says which operands of the primitive `name`
    have a tangent that is not zero.
    """

    def types(*operands: Any, batched: bool, **_: Any) -> list[Any]:
        results = [operands[k].update(weak_type=False) for k in like]
        if not batched:
            return results
        size = batch_size(operands)
        return [result.update(shape=(size, *result.shape[1:])) for result in results]

    def pushed(*operands: Any, present: Any, options: Options, batched: bool) -> Any:
        count = len(operands) - sum(present)

        def of_one(*operands: Any) -> Arrays:
            return push(operands[:count], _restored(operands[count:], present), options)

        return over_batch(of_one, batched)(*operands)

    def differentiated(
        operands: Sequence[Any],
        tangents: Sequence[Any],
        *,
        present: Sequence[bool],
        **parameters: Any,
    ) -> tuple[Any, Any]:
        count, moved = len(operands) - sum(present), _nonzero(tangents)
        if any(moved[:count]):
            function = partial(pushed, present=present, **parameters)
            return _differentiated(function, operands, tangents, moved)
        # The map is linear in the tangents, so its derivative is the same map, applied to the
        # tangents of the tangents.
        remaining = iter(moved[count:])
        nonzero = tuple(is_present and next(remaining) for is_present in present)
        results = primitive.bind(*operands, present=present, **parameters)
        selected = _selected(tangents, moved)
        return results, primitive.bind(*operands[:count], *selected, present=nonzero, **parameters)

    def transposed(
        cotangents: Sequence[Any],
        *operands: Any,
        present: Sequence[bool],
        options: Options,
        batched: bool,
    ) -> list[Any]:
        count, nonzero = len(operands) - sum(present), _nonzero(cotangents)
        if not any(nonzero):
            return [None] * count + [ad.Zero(each.aval) for each in operands[count:]]

        def of_one(*arrays: Any) -> list[Any]:
            pulled = compiled_pull(options, arrays[:count], _restored(arrays[count:], nonzero))
            return _selected(pulled[: len(present)], present)

        arrays = (*operands[:count], *_selected(cotangents, nonzero))
        results: list[Any] = list(over_batch(of_one, batched)(*arrays))
        if batched:
            # If all problems of a batch share an operand, the cotangent of this operand is the sum
            # of the cotangents from all problems.
            results = [
                result if result.shape == each.aval.shape else jnp.sum(result, 0, keepdims=True)
                for result, each in zip(results, operands[count:], strict=True)
            ]
        return [None] * count + results

    # This function is compiled even if its caller is not, because `jax.grad` without `jax.jit`
    # would run each operation of the backward pass separately. In a compiled caller, the call is
    # inlined.
    @partial(jax.jit, static_argnums=(0,), inline=True)
    def compiled_pull(options: Options, residuals: Arrays, cotangents: Arrays) -> Arrays:
        return pull(residuals, cotangents, options)

    primitive = new_primitive(f"{name}_derivative", types)
    mlir.register_lowering(primitive, mlir.lower_fun(pushed, multiple_results=True))
    ad.primitive_jvps[primitive] = differentiated
    ad.primitive_transposes[primitive] = transposed
    return primitive


def _differentiated(
    function: Callable[..., Any],
    operands: Sequence[Any],
    tangents: Sequence[Any],
    moved: Sequence[bool],
) -> tuple[Any, Any]:
    """Return a function's results and their tangents; `moved` says which operands have tangents."""

    def of_moved(*arrays: Any) -> Any:
        remaining = iter(arrays)
        pairs = zip(operands, moved, strict=True)
        return function(*(next(remaining) if is_moved else operand for operand, is_moved in pairs))

    primals, nonzero = _selected(operands, moved), _selected(tangents, moved)
    return jax.jvp(of_moved, tuple(primals), tuple(nonzero))


def _nonzero(tangents: Sequence[Any]) -> tuple[bool, ...]:
    """Return a flag for each tangent or cotangent.

    The flag is False if the tangent or cotangent is a symbolic zero of JAX, and True otherwise.
    """
    return tuple(type(each) is not ad.Zero for each in tangents)


def _selected(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [value for value, flag in zip(values, flags, strict=True) if flag]


def _restored(values: Sequence[Any], flags: Sequence[bool]) -> Arrays:
    """Undo `_selected`: return None in the place of each value that was left out."""
    remaining = iter(values)
    return tuple(next(remaining) if flag else None for flag in flags)
