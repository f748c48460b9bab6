"""Derivatives of primitives that are given by a rule, in forward and in reverse mode.

A derivative is a linear map. `Rule.push` takes tangents of the operands to those of the results,
`Rule.pull`, which is its transpose, cotangents of the results to those of the operands. To JAX
the map is one primitive: forward mode runs it, reverse mode transposes it, and keeps nothing for
that but what the rule says. (A `jax.custom_vjp` has no forward mode, and with a `jax.custom_jvp`
reverse mode keeps whatever JAX finds in its formulas.) Derivatives of a higher order are those of
`push` and `pull`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad, mlir

from backnorm.jax.instances import new_primitive, of_instances

__all__ = ["Arrays", "Rule", "give_derivative"]

Arrays = tuple[Any, ...]


class Rule(NamedTuple):
    """The derivative of a primitive, of one instance.

    `push` and `pull` take the primitive's parameters by name.
    """

    #: From operands and results to what `push` and `pull` need of them.
    keep: Callable[[Arrays, Arrays], Arrays]
    #: From what was kept and a tangent of every operand, None for one that is zero, to the
    #: tangents of the results.
    push: Callable[..., Arrays]
    #: From what was kept and a cotangent of every result, None for one that is zero, to the
    #: cotangents of the operands.
    pull: Callable[..., Arrays]
    #: For every result, the array of what is kept that has its shape and type.
    like: tuple[int, ...]


def give_derivative(primitive: Any, rule: Rule) -> None:
    """Give a primitive of `backnorm.jax.instances` a derivative.

    Its operands must vary over the same mapped axes (`mapped.alike`).
    """
    derivative = _derivative(primitive.name, rule)

    def differentiated(
        operands: Sequence[Any],
        tangents: Sequence[Any],
        *,
        instances: int | None,
        spread: Sequence[bool],
        **parameters: Any,
    ) -> tuple[Any, Any]:
        results = primitive.bind(*operands, instances=instances, spread=spread, **parameters)
        kept = rule.keep(tuple(operands), tuple(results))
        kept_spread = rule.keep(tuple(spread), (instances is not None,) * len(results))
        present = _which(tangents)
        found = derivative.bind(
            *kept,
            *_chosen(tangents, present),
            present=present,
            instances=instances,
            spread=(*kept_spread, *_chosen(spread, present)),
            **parameters,
        )
        return results, found

    ad.primitive_jvps[primitive] = differentiated


def _derivative(name: str, rule: Rule) -> Any:
    """Return a derivative as a primitive.

    Its operands are what was kept, and the tangents that are `present` among those of all
    operands.
    """

    def kinds(*operands: Any, instances: int | None, spread: Any, **_: Any) -> list[Any]:
        found = []
        for k in rule.like:
            kind = operands[k].update(weak_type=False)
            if instances is not None and not spread[k]:
                kind = kind.update(shape=(instances, *kind.shape))
            found.append(kind)
        return found

    def pushed(
        *operands: Any, present: Any, instances: int | None, spread: Any, **parameters: Any
    ) -> Any:
        count = len(operands) - sum(present)

        def of_one(*operands: Any) -> Arrays:
            return rule.push(operands[:count], _filled(operands[count:], present), **parameters)

        return of_instances(of_one, instances, spread)(*operands)

    def differentiated(
        operands: Sequence[Any],
        tangents: Sequence[Any],
        *,
        present: Sequence[bool],
        instances: int | None,
        spread: Sequence[bool],
        **parameters: Any,
    ) -> tuple[Any, Any]:
        count, moved = len(operands) - sum(present), _which(tangents)
        parameters |= {"instances": instances}
        if any(moved[:count]):
            function = partial(pushed, present=present, spread=spread, **parameters)
            return _differentiated(function, operands, tangents, moved)
        # Linear in its tangents: the derivative is the same map, of those that are not zero.
        left = iter(moved[count:])
        return (
            made.bind(*operands, present=present, spread=spread, **parameters),
            made.bind(
                *operands[:count],
                *_chosen(tangents, moved),
                present=tuple(is_there and next(left) for is_there in present),
                spread=(*spread[:count], *_chosen(spread, moved)),
                **parameters,
            ),
        )

    def transposed(
        cotangents: Sequence[Any],
        *operands: Any,
        present: Sequence[bool],
        instances: int | None,
        spread: Sequence[bool],
        **parameters: Any,
    ) -> list[Any]:
        count, there = len(operands) - sum(present), _which(cotangents)
        if not any(there):
            return [None] * count + [ad.Zero(each.aval) for each in operands[count:]]

        def of_one(*arguments: Any) -> list[Any]:
            setting = tuple(sorted(parameters.items()))
            return _chosen(
                pull(setting, arguments[:count], _filled(arguments[count:], there)), present
            )

        spreads = (*spread[:count], *[True] * sum(there))
        found = of_instances(of_one, instances, spreads)(
            *operands[:count], *_chosen(cotangents, there)
        )
        if instances is not None:
            # What all instances share has the cotangents of all.
            found = [
                each if is_spread else jnp.sum(each, 0)
                for each, is_spread in zip(found, spread[count:], strict=True)
            ]
        return [None] * count + list(found)

    # Compiled also where the caller does not: under `jax.grad` alone JAX runs a backward pass step
    # by step. Within a compiled function this is no function of its own.
    @partial(jax.jit, static_argnums=(0,), inline=True)
    def pull(setting: tuple[tuple[str, Any], ...], kept: Arrays, cotangents: Arrays) -> Arrays:
        return rule.pull(kept, cotangents, **dict(setting))

    made = new_primitive(f"{name}_derivative", kinds)
    mlir.register_lowering(made, mlir.lower_fun(pushed, multiple_results=True))
    ad.primitive_jvps[made] = differentiated
    ad.primitive_transposes[made] = transposed
    return made


def _differentiated(
    function: Callable[..., Any], operands: Sequence[Any], tangents: Sequence[Any], moved: Any
) -> tuple[Any, Any]:
    """Return the results of a function and their tangents, by those operands that are `moved`."""

    def of_moved(*arguments: Any) -> Any:
        each = iter(arguments)
        pairs = zip(operands, moved, strict=True)
        return function(*(next(each) if is_moved else operand for operand, is_moved in pairs))

    return jax.jvp(of_moved, tuple(_chosen(operands, moved)), tuple(_chosen(tangents, moved)))


def _which(tangents: Sequence[Any]) -> tuple[bool, ...]:
    """Return which tangents, or cotangents, are not known to be zero."""
    return tuple(type(each) is not ad.Zero for each in tangents)


def _chosen(values: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [value for value, is_chosen in zip(values, which, strict=True) if is_chosen]


def _filled(values: Sequence[Any], which: Sequence[bool]) -> Arrays:
    """Return the values at their places, and None at the others."""
    left = iter(values)
    return tuple(next(left) if is_there else None for is_there in which)
