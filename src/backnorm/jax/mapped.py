"""What `jax.shard_map` knows of every value: over which mapped axes it varies."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["alike"]


def alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays as values that vary over the same mapped axes, those of any of them.

    JAX does the same for the operands of its own operations, and adds the cotangents of a value
    that does not vary over those axes. A function with a derivative of its own must be given
    operands of one kind, or its cotangents are not of the kind that JAX expects.
    """
    kinds = [_varying(array) for array in arrays]
    union = frozenset().union(*kinds)
    return tuple(
        _cast(array, tuple(sorted(union - kind, key=str))) if union - kind else array
        for array, kind in zip(arrays, kinds, strict=True)
    )


def _varying(array: jax.Array) -> frozenset[Any]:
    """Return the mapped axes over which a value is known to vary."""
    kind: Any = jax.typeof(array) if hasattr(jax, "typeof") else None
    # `vma` until JAX 0.9, a part of `mat` since; neither before JAX 0.6.
    axes = kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())
    return frozenset(axes)


def _cast(array: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, axes, to="varying")
    return jax.lax.pvary(array, axes)
