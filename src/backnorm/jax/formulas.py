"""Batch normalisation as `jax.numpy` code, for devices without kernels and for derivatives.

The arrays x, dy and y keep the order of axes that the caller chose. Per-channel arrays have the
shape (C,). They are float64 if x is float64, and float32 otherwise. Elements are computed and
summed up in the type of per-channel arrays, or in float64 if `options.arithmetic` is "float64". All
functions are differentiable, to any order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from backnorm import formulas
from backnorm.activations import RELU, Activation
from backnorm.arithmetics import Arithmetic
from backnorm.errors import ArgumentValueError
from backnorm.jax.inverse_std import inverse_std
from backnorm.options import Options
from backnorm.second_order.formulas import ABSENT, Channels, by_dy, by_x_alone, factors


def working_type(dtype: Any) -> Any:
    """Return the type of per-channel arrays for an x of type `dtype`."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def promoted(one: Any, other: Any) -> Any:
    """Return the type that JAX's standard promotion gives to two types.

    The setting ``jax_numpy_dtype_promotion="strict"`` has no effect here, because the layers accept
    mixed types.
    """
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(one, other)


def type_for(x: jax.Array, arithmetic: Arithmetic | None) -> Any:
    """Return the type that elements are computed in.

    Raises
    ------
    ArgumentValueError
        If `arithmetic` is float64 and JAX has no float64.
    """
    # If x has no elements, nothing is computed, so it does not matter whether JAX has float64.
    if arithmetic != "float64" or 0 in x.shape:
        return working_type(x.dtype)
    if jnp.result_type(float) != jnp.float64:
        raise ArgumentValueError(
            "arithmetic",
            "must be float32 where jax.numpy computes without jax_enable_x64",
            came="'float64'",
            accepted="'float32' or None",
            hint='jax.config.update("jax_enable_x64", True)',
        )
    return jnp.float64


def count_of(x: jax.Array, axis: int) -> int:
    """Return the number of elements of a channel, or 1 if there are none."""
    shape: tuple[int, ...] = x.shape
    count = math.prod(shape[:axis]) * math.prod(shape[axis + 1 :])
    # If a dimension is symbolic, `max(count, 1)` would fail: JAX knows that such a dimension is not
    # 0, but not whether it is more than 1.
    return 1 if count == 0 else count


class _Namespace:
    """The operations (`Namespace`) that `backnorm.formulas` needs, for arrays of x's shape."""

    def __init__(self, x: jax.Array, axis: int) -> None:
        self.axes = tuple(k for k in range(x.ndim) if k != axis)
        self._shape = tuple(-1 if k == axis else 1 for k in range(x.ndim))
        self.count: Any = count_of(x, axis)

    def sum(self, elements: jax.Array) -> jax.Array:
        return jnp.sum(elements, self.axes)

    def spread(self, channels: jax.Array, elements: jax.Array) -> jax.Array:
        return channels.reshape(self._shape)

    def scaled(self, elements: jax.Array, s: jax.Array, gamma: jax.Array) -> jax.Array:
        return elements * (gamma * s).reshape(self._shape)

    def rounded(self, channels: jax.Array, elements: jax.Array) -> jax.Array:
        return channels

    def at_least(self, channels: jax.Array, bound: Any) -> jax.Array:
        return jnp.maximum(channels, bound)


class _Masked(_Namespace):
    """The operations that `backnorm.formulas` needs, with sums over only the elements where `mask`
    is set.
    """

    def __init__(self, x: jax.Array, axis: int, mask: jax.Array) -> None:
        super().__init__(x, axis)
        self._mask = jnp.broadcast_to(mask, x.shape)
        self.elements = jnp.sum(self._mask, self.axes, dtype=x.dtype)
        self.count = jnp.maximum(self.elements, 1)

    def sum(self, elements: jax.Array) -> jax.Array:
        return super().sum(jnp.where(self._mask, elements, 0))


def statistics(x: jax.Array, options: Options) -> tuple[jax.Array, jax.Array]:
    """Return mean and biased variance of every channel, in the type chosen by `type_for`."""
    x = x.astype(type_for(x, options.arithmetic))
    return formulas.statistics(_Namespace(x, options.axis), x)


def masked_statistics(
    x: jax.Array, mask: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the statistics and the number of the elements where `mask` is set, for every channel.

    Mean and variance have the types that `statistics` returns. If `mask` is set for no element of a
    channel, the mean and the variance of the channel are 0.
    """
    # An element outside the mask may be NaN, which would propagate through derivatives. So such
    # elements are replaced by 0.
    x = jnp.where(mask, x, 0).astype(type_for(x, options.arithmetic))
    masked = _Masked(x, options.axis, mask)
    return *formulas.statistics(masked, x), masked.elements


def moments_of_all(
    mean: jax.Array, variance: jax.Array, count: jax.Array | None, groups: dict[str, Any]
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return mean, variance and number of elements of all parts of a batch, given those of a part.

    Sums of x and of its square are not used, because they would lose digits by cancellation. If all
    parts have the same number of elements, `count` may be None; the returned number is then None,
    too. `groups` are the arguments `axis_name` and `axis_index_groups` of `jax.lax.psum`: the
    mapped axes that the batch is split over.

    References
    ----------
    Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979.
    """
    if count is None:
        whole = jax.lax.pmean(mean, **groups)
        apart = mean - whole
        return whole, jax.lax.pmean(variance + apart * apart, **groups), None
    total = jax.lax.psum(count, **groups)
    weight = count / jnp.maximum(total, 1)
    whole = jax.lax.psum(weight * mean, **groups)
    apart = mean - whole
    return whole, jax.lax.psum(weight * (variance + apart * apart), **groups), total


def activated(y: jax.Array, residual: Any, activation: Activation | None) -> jax.Array:
    """Return the activation of y, or of y + residual.

    Where the input of a ReLU is 0 or equals the ceiling, its derivative is 0, as in the kernels.
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


def over_padding(function: Callable[[jax.Array], jax.Array], x: jax.Array, mask: Any) -> jax.Array:
    """Return function(x), an array of x's shape; `mask` may be None.

    Where the mask is not set and x is NaN or infinite, the result is NaN, and the function gets 0.
    Otherwise, a sum over elements in the function's derivative would be NaN, because 0 * NaN is
    NaN, even if the cotangent of such an element is 0.
    """
    if mask is None:
        return function(x)
    valid = mask | jnp.isfinite(x)
    return jnp.where(valid, function(jnp.where(valid, x, 0)), jnp.nan)


def forward(
    x: jax.Array, gamma: jax.Array, beta: jax.Array, options: Options
) -> tuple[jax.Array, ...]:
    """Return y, and the mean and the biased variance of every channel."""
    mean, variance = statistics(x, options)
    (y,) = normalize(x, mean, variance, gamma, beta, options)
    return y, *(each.astype(working_type(x.dtype)) for each in (mean, variance))


def forward_relu(
    x: jax.Array, gamma: jax.Array, beta: jax.Array, residual: Any = None, *, options: Options
) -> tuple[jax.Array, ...]:
    """Return relu(y + residual), and the mean and the biased variance of every channel."""
    y, *statistics = forward(x, gamma, beta, options)
    return activated(y, residual, RELU), *statistics


def normalize(
    x: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    options: Options,
) -> tuple[jax.Array]:
    """Return y = gamma * (x - mean) / sqrt(variance + epsilon) + beta, in a tuple."""
    wide, xp = type_for(x, options.arithmetic), _Namespace(x, options.axis)
    s = inverse_std(variance, options.epsilon, wide)
    y = formulas.normalized(xp, x.astype(wide) - xp.spread(mean, x), s, gamma, beta)
    return (_rounded(y, x.dtype),)


def backward(
    x: jax.Array,
    dy: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gamma: jax.Array,
    options: Options,
) -> tuple[jax.Array, ...]:
    """Return dx, dgamma and dbeta."""
    wide, xp = type_for(x, options.arithmetic), _Namespace(x, options.axis)
    s = inverse_std(variance, options.epsilon, wide)
    centred = x.astype(wide) - xp.spread(mean, x)
    dx, *sums = formulas.gradients(xp, centred, dy.astype(wide), s, gamma, options.training)
    return _rounded(dx, x.dtype), *(each.astype(gamma.dtype) for each in sums)


def second_order(
    operands: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...], options: Options
) -> tuple[jax.Array, ...]:
    """Return the cotangents of the five operands of `backward`, given cotangents of its results."""
    return rounded_like(wide_second_order(operands, cotangents, options), operands)


def wide_second_order(
    operands: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...], options: Options
) -> tuple[jax.Array, ...]:
    """Return the unrounded results of `second_order`, which are linear in the cotangents.

    `backnorm.second_order.formulas` has the formulas. The compute dtype is float64 if
    `jax_enable_x64` is set, else float32. `conformance.judge.check_double_backward` has the error
    budgets for both compute dtypes. If x has the compute dtype, a compiled call of this function
    allocates memory only for its results. If x has another type, XLA on a CPU first stores copies
    of the arrays in the compute dtype, and then sums up the copies.
    """
    x, dy, mean, variance, gamma = operands
    ddx, ddgamma, ddbeta = cotangents
    xp, wide = _Namespace(x, options.axis), jnp.result_type(float)
    s = inverse_std(variance, options.epsilon, wide)
    wide_x, wide_dy, wide_ddx = (each.astype(wide) for each in (x, dy, ddx))
    per_channel = (each.astype(wide) for each in (mean, s, gamma, ddgamma, ddbeta))
    channels = Channels(*(xp.spread(each, x) for each in per_channel))

    def reduce(left: jax.Array, right: jax.Array, pivot: Any) -> tuple[jax.Array, jax.Array]:
        product = right * (left - pivot)
        return tuple(jnp.sum(each, xp.axes, keepdims=True) for each in (right, product))

    share = jnp.ones((), wide) / xp.count if options.training else ABSENT
    k = factors(reduce, wide_x, wide_dy, wide_ddx, channels, share=share, alone=True)
    return (
        by_x_alone(k, wide_dy, wide_ddx),
        by_dy(k, k.s * (wide_x - channels.mean), wide_ddx - k.mean_ddx),
        *(jnp.squeeze(each, xp.axes) for each in (k.mean, k.variance, k.gamma)),
    )


def rounded_like(values: Any, arrays: Any) -> tuple[jax.Array, ...]:
    """Return each value, rounded once to the type of the array at the same position."""
    pairs = zip(values, arrays, strict=True)
    return tuple(_rounded(value, array.dtype) for value, array in pairs)


def statistics_pushed(
    x: jax.Array, mean: jax.Array, dx: jax.Array, axis: int
) -> tuple[jax.Array, jax.Array]:
    """Return the tangents of the mean and variance of x, given the tangent of x (`dx`).

    The results have the type of the mean.
    """
    xp, wide = _Namespace(x, axis), dx.astype(mean.dtype)
    centred = x.astype(mean.dtype) - xp.spread(mean, x)
    return xp.sum(wide) / xp.count, 2 * (xp.sum(wide * centred) / xp.count)


def through_statistics(
    x: jax.Array, mean: jax.Array, dmean: jax.Array, dvariance: jax.Array, axis: int
) -> jax.Array:
    """Return dmean/M + 2*(x - mean)*dvariance/M, the cotangent of x, in the type of the mean."""
    xp = _Namespace(x, axis)
    centred = x.astype(mean.dtype) - xp.spread(mean, x)
    # If the variance of a channel is 0, the cotangent of this variance may be infinite. For
    # elements that equal the mean, the term of the variance must still be 0, but the product 0 *
    # infinity would be NaN.
    of_variance = xp.spread(2 * dvariance / xp.count, x)
    of_variance = jnp.where((centred == 0) & jnp.isinf(of_variance), 0, of_variance)
    return xp.spread(dmean / xp.count, x) + centred * of_variance


def _rounded(value: jax.Array, dtype: Any) -> jax.Array:
    """Return values in another type, rounded once.

    On processors without an instruction that converts float64 to float16, XLA rounds to float32
    first. Some values near the midpoint between two float16 values are then rounded to the wrong
    one.
    """
    twice = value.dtype == jnp.float64 and jnp.dtype(dtype).itemsize == 2
    rounded: jax.Array = _rounded_from_odd(value, dtype) if twice else value.astype(dtype)
    return rounded


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded_from_odd(value: jax.Array, dtype: Any) -> jax.Array:
    # Round to odd: truncate, and set the last bit if any truncated bit was set. The result is
    # halfway between two 16-bit values only if the original value is. So XLA may convert the result
    # first to float32 and then to 16 bits: float32 can represent the result exactly, so only the
    # second conversion rounds. (Results that are subnormal in float32 are an exception, but XLA on
    # CPUs replaces them by zero anyway.)
    bits = jax.lax.bitcast_convert_type(value, jnp.int64)
    last = 1 << 29
    kept = bits & -last
    odd = jnp.where(bits == kept, bits, kept | last)
    return jax.lax.bitcast_convert_type(odd, jnp.float64).astype(dtype)


@_rounded_from_odd.defjvp
def _(dtype: Any, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (tangent,) = tangents
    return _rounded_from_odd(*primals, dtype), tangent.astype(dtype)
