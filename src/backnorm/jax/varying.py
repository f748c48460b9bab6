"""The mapped axes over which a value varies, as `jax.shard_map` tracks them."""

from __future__ import annotations

from typing import Any

import jax


def alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays, all marked as varying over the same mapped axes: those over which at least
    one of the arrays varies.

    JAX marks the operands of its own operations in this way, too. JAX sums the cotangent of a value
    over the axes that the value does not vary over. The operands of a function with a custom
    derivative rule must all vary over the same axes; otherwise the types of their cotangents differ
    from the types that JAX expects.
    """
    axes = [_varying(array) for array in arrays]
    union = frozenset().union(*axes)
    return tuple(
        _cast(array, tuple(sorted(union - own, key=str))) if union - own else array
        for array, own in zip(arrays, axes, strict=True)
    )


def _varying(array: jax.Array) -> frozenset[Any]:
    kind: Any = jax.typeof(array)
    # The axes over which an array varies are in `vma` in versions of JAX before 0.9, and in
    # `mat.varying` in later ones.
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else kind.vma)


def _cast(array: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, axes, to="varying")
    return jax.lax.pvary(array, axes)
