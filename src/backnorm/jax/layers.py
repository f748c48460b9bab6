"""The common code of the layers for linen and nnx: feature axes, types, training and inference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from backnorm.activations import check_activation
from backnorm.errors import ArgumentValueError
from backnorm.jax.formulas import activated, over_padding, promoted, working_type
from backnorm.jax.operators import batch_norm, batch_norm_inference
from backnorm.problem import residual_alone


def feature_axes(axis: Any, rank: int) -> tuple[int, ...]:
    """Return the axes of features as different numbers from 0 to rank - 1, in ascending order."""
    axes = tuple(axis) if isinstance(axis, Iterable) else (axis,)
    places = {int(each) + rank if int(each) < 0 else int(each) for each in axes}
    if not places or not places <= set(range(rank)):
        raise ArgumentValueError(
            "axis", f"must have axes of x, which has rank {rank}", came=axis,
            accepted=f"integers from {-rank} to {rank - 1}",
        )  # fmt: skip
    return tuple(sorted(places))


def normalised(
    layer: Any,
    x: jax.Array,
    statistics: Iterable[Any],
    parameters: Iterable[Any],
    out: Any,
    *,
    frozen: bool,
    activation: Any,
    residual: Any,
    mask: Any,
    groups: dict[str, Any],
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Return y, of the type `out`; if `frozen` is False, also the batch's mean and variance.

    Mean and variance have one value per feature, in row-major order of the feature axes. `layer` is
    a flax layer. `statistics` are the running mean and variance. `parameters` are scale and bias.
    `groups` is a dict: it has the arguments `axis_name` and `axis_index_groups` of `batch_norm`, or
    it is empty.
    """
    x = x.astype(promoted(x.dtype, out))
    axes = feature_axes(layer.axis, x.ndim)
    joined, axis, back = _at_one_axis(x, axes)
    options = {"axis": axis, "epsilon": layer.epsilon, "arithmetic": layer.arithmetic}
    gamma, beta = _channels(x, *parameters)
    if mask is not None:
        # Like flax's layers, this function also accepts a mask of numbers, which is converted to
        # bool.
        mask = _at_one_axis(jnp.broadcast_to(jnp.asarray(mask, bool), x.shape), axes)[0]
    if frozen:
        mean, variance = _channels(x, *statistics)
        channels = {"mean": mean, "variance": variance, "gamma": gamma, "beta": beta}
        y = back(over_padding(partial(batch_norm_inference, **channels, **options), joined, mask))
        follows = check_activation(activation, y.dtype)
        if residual is not None and (follows is None or follows.name != "relu"):
            raise residual_alone("inference")
        return activated(y, _checked(residual, x), follows).astype(out), ()
    if residual is not None:
        residual = _at_one_axis(_checked(residual, x), axes)[0]
    y, *batch = batch_norm(
        joined, gamma, beta, mask=mask, activation=activation, residual=residual,
        reproducible=layer.reproducible, **groups, **options,
    )  # fmt: skip
    return back(y).astype(out), batch


def _checked(residual: Any, x: jax.Array) -> Any:
    """Return `residual` in x's type; raise if it does not have x's shape."""
    if residual is None:
        return None
    if residual.shape != x.shape:
        raise ArgumentValueError(
            "residual", "must have x's shape", came=tuple(residual.shape), accepted=tuple(x.shape)
        )
    return residual.astype(x.dtype)


def _channels(x: jax.Array, *arrays: Any) -> list[Any]:
    """Return per-feature arrays in a type that `batch_norm` accepts with x."""
    work = working_type(x.dtype)
    return [None if each is None else jnp.asarray(each, work).reshape(-1) for each in arrays]


def _at_one_axis(
    x: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, int, Callable[[jax.Array], jax.Array]]:
    """Return x with its features on one axis, this axis, and a function that undoes the change."""
    if len(axes) == 1:
        return x, axes[0], lambda y: y
    first = x.ndim - len(axes)
    last = tuple(range(first, x.ndim))
    moved = jnp.moveaxis(x, axes, last)
    joined = moved.reshape(*moved.shape[:first], math.prod(moved.shape[first:]))
    return joined, first, lambda y: jnp.moveaxis(y.reshape(moved.shape), last, axes)
