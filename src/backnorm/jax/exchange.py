"""What the parts of a batch tell each other: the moments or sums of each become those of all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from backnorm import binned
from backnorm.jax.mapped import alike

__all__ = ["bins_of_all", "moments_of_all"]


def moments_of_all(
    mean: jax.Array, variance: jax.Array, count: jax.Array | None, groups: dict[str, Any]
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the statistics of all parts of a batch from those of the parts, and of what count.

    Never from the sums of x and of its square, which cancel. Without counts all are the same.

    Parameters
    ----------
    mean, variance : array
        Of the elements of this part.
    count : array, optional
        How many those are.
    groups : dict
        Arguments of `jax.lax.psum`: the mapped axes that the parts are on, and their groups.

    References
    ----------
    Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979.
    """
    of_all: Callable[[jax.Array], jax.Array] = partial(jax.lax.pmean, **groups)
    total = share = None
    if count is not None:
        total = jax.lax.psum(count, **groups)
        share = count / alike(jnp.maximum(total, 1), count)[0]
        of_all = partial(jax.lax.psum, **groups)

    def weighed(values: jax.Array) -> jax.Array:
        return values if share is None else share * values

    whole = of_all(weighed(mean))
    apart = mean - alike(whole, mean)[0]
    return whole, of_all(weighed(variance + apart * apart)), total


def bins_of_all(own: jax.Array, **groups: Any) -> jax.Array:
    """Return the reproducible sums of all parts from those of this part: see `binned`.

    Parameters
    ----------
    own : array, shape (rows, C) or (instances, rows, C)
    **groups
        Arguments of `jax.lax.psum`.
    """
    bins = jnp.moveaxis(own, -2, 0)
    tops = jax.lax.pmax(binned.tops_of(bins), **groups)
    total = jax.lax.psum(binned.raised(bins, tops, jnp), **groups)
    return jnp.moveaxis(binned.with_tops(total, tops, jnp), 0, -2)
