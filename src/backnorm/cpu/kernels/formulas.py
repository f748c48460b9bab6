"""The formulas, once: of an element of the output, and of a channel's coefficients.

Every output is an expression of one element and four coefficients of its channel,
(mean, shift, slope, gain), in float64 or in float32 (see `singles`):

==============================  =========================================================
backward, training              dx = gain * ((dy - shift) - (x - mean) * slope)
backward, frozen statistics     dx = gain * dy
forward and inference           y  = gain * ((x - mean) - shift) + slope
the same in float32             y  = gain * (x - mean) + slope
with a ReLU                     max(0, y), or max(0, y + residual); at most its ceiling
with another activation         its value of y, or its gradient: see `activation`
==============================  =========================================================

In the backward pass shift = sum_dy/M, slope = s²·sum_dy_xmu/M and gain = gamma·s, with
s = 1/sqrt(variance + epsilon). The mean is subtracted first and never folded into a constant:
with |mean| much larger than the deviation that would cancel. In the forward pass shift is the
part of the exact mean that a float64 cannot hold, slope is beta. The coefficients of float32 are
made of those: see `singles.narrow_coefficients`.

A missing array is None: without dy the kernels compute a forward pass (with a `ReLU` or an
`Activation` in its place, one that ends in that), without x the frozen backward pass. Which one is
decided when a kernel is compiled.
"""

from __future__ import annotations

from numba import types
from numba.extending import overload

from backnorm.cpu.kernels.activation import gradient, in_singles
from backnorm.cpu.kernels.activation import value as activated
from backnorm.cpu.kernels.jit import inlined
from backnorm.cpu.kernels.memory import (
    load,
    load_even_odd,
    load_first,
    load_singles,
    load_singles_first,
    prefetch,
)
from backnorm.cpu.kernels.relu import Activation, ReLU, has_values, relu, values_of
from backnorm.cpu.kernels.sums import value
from backnorm.cpu.kernels.vector import (
    EvenOdd,
    Singles,
    Vec,
    at_least_zero,
    high_half,
    joined,
    low_half,
    multiply_add,
    splat,
    square_root,
    two_product,
    two_sum,
    where_finite,
)
from backnorm.cpu.scratch import LANES

__all__ = [
    "both_elements",
    "elements",
    "first_elements",
    "in_pairs",
    "prefetch_elements",
    "solve_backward",
    "solve_forward",
]


# How a vector of the type of the coefficients is loaded.
_TAKE = {Vec: load, Singles: load_singles, EvenOdd: load_even_odd}


def elements(x, dy, index, mean, shift, slope, gain):
    """Return a vector of the output, from `index` on, of the type of the coefficients."""


def both_elements(x, dy, index, left, right):
    """Return two neighbouring vectors of the output, given the coefficients of each."""


def in_pairs(dy, coefficients):
    """Return whether two vectors at a time take less time."""


def first_elements(x, dy, index, count, mean, shift, slope, gain):
    """Return `count` elements of the output; memory after them is not touched."""


def prefetch_elements(x, dy, out, index, count, streaming):
    """Let all that elements of a forward pass take be in a cache when they are written.

    That is x, a residual, and unless they are streamed, the memory of the elements: new memory is
    read before it is written. In a model a convolution has just written x, but to the shared cache.
    A backward pass gains nothing: its sums have just read x and dy, and dx is often dy.
    """


@overload(prefetch_elements)
def _prefetch_elements(x, dy, out, index, count, streaming):
    if not isinstance(dy, types.NoneType | ReLU | Activation):
        return lambda x, dy, out, index, count, streaming: None

    @inlined
    def forward(x, dy, out, index, count, streaming):
        prefetch(x, index, count)
        if not streaming:
            prefetch(out, index, count)

    if not isinstance(dy, ReLU):
        return lambda x, dy, out, index, count, streaming: forward(
            x, dy, out, index, count, streaming
        )

    def with_residual(x, dy, out, index, count, streaming):
        forward(x, dy, out, index, count, streaming)
        if has_values(dy):
            prefetch(values_of(dy), index, count)

    return with_residual


@overload(elements)
def _elements(x, dy, index, mean, shift, slope, gain):
    take = _TAKE[mean]
    normalised = _normalised if mean == Vec else _normalised_single
    if isinstance(x, types.NoneType):
        return lambda x, dy, index, mean, shift, slope, gain: gain * take(dy, index)
    if isinstance(dy, types.NoneType):
        return lambda x, dy, index, mean, shift, slope, gain: normalised(
            take(x, index), mean, shift, slope, gain
        )
    if isinstance(dy, ReLU):
        return lambda x, dy, index, mean, shift, slope, gain: relu(
            dy, _plus_residual(dy, index, normalised(take(x, index), mean, shift, slope, gain))
        )
    if isinstance(dy, Activation):
        return lambda x, dy, index, mean, shift, slope, gain: _activated(
            dy, index, normalised(take(x, index), mean, shift, slope, gain)
        )
    return lambda x, dy, index, mean, shift, slope, gain: _derivative(
        take(x, index), take(dy, index), mean, shift, slope, gain
    )


@overload(both_elements)
def _both_elements(x, dy, index, left, right):
    kind = left.types[0]
    if isinstance(dy, Activation) and kind == Vec and in_singles(dy.dtype):

        def of_singles(x, dy, index, left, right):
            one = _normalised(load(x, index), left[0], left[1], left[2], left[3])
            other = load(x, index + LANES)
            other = _normalised(other, right[0], right[1], right[2], right[3])
            found = _activated(dy, index, joined(one, other))
            return low_half(found), high_half(found)

        return of_singles
    lanes = kind.lanes
    return lambda x, dy, index, left, right: (
        elements(x, dy, index, left[0], left[1], left[2], left[3]),
        elements(x, dy, index + lanes, right[0], right[1], right[2], right[3]),
    )


@overload(in_pairs)
def _in_pairs(dy, coefficients):
    # Of float64, two at a time gain nothing, unless they become one.
    single = coefficients.dtype == types.float32
    pairs = single or (isinstance(dy, Activation) and in_singles(dy.dtype))
    return lambda dy, coefficients: pairs


@overload(first_elements)
def _first_elements(x, dy, index, count, mean, shift, slope, gain):
    take, normalised = load_first, _normalised
    if mean == Singles:
        take, normalised = load_singles_first, _normalised_single
    if isinstance(x, types.NoneType):
        return lambda x, dy, index, count, mean, shift, slope, gain: gain * take(dy, index, count)
    if isinstance(dy, types.NoneType):
        return lambda x, dy, index, count, mean, shift, slope, gain: normalised(
            take(x, index, count), mean, shift, slope, gain
        )
    if isinstance(dy, ReLU):
        return lambda x, dy, index, count, mean, shift, slope, gain: relu(
            dy,
            _plus_residual_first(
                dy, index, count, normalised(take(x, index, count), mean, shift, slope, gain)
            ),
        )
    if isinstance(dy, Activation):
        return lambda x, dy, index, count, mean, shift, slope, gain: _activated_first(
            dy, index, count, normalised(take(x, index, count), mean, shift, slope, gain)
        )
    return lambda x, dy, index, count, mean, shift, slope, gain: _derivative(
        take(x, index, count), take(dy, index, count), mean, shift, slope, gain
    )


def _plus_residual(relu, index, value):
    """Return `value` with the residual, if there is one, added."""


@overload(_plus_residual)
def _plus_values_of(relu, index, value):
    take = _TAKE[value]

    def plus(relu, index, value):
        if has_values(relu):
            return value + take(values_of(relu), index)
        return value

    return plus


def _plus_residual_first(relu, index, count, value):
    """Return `value` with `count` elements of the residual, if there is one, added."""


@overload(_plus_residual_first)
def _plus_residual_first_of(relu, index, count, value):
    take = load_singles_first if value == Singles else load_first

    def plus_first(relu, index, count, value):
        if has_values(relu):
            return value + take(values_of(relu), index, count)
        return value

    return plus_first


def _activated(activation, index, z):
    """Return an activation's value of z, or its gradient if dy is given."""


@overload(_activated)
def _activated_of(activation, index, z):
    take = _TAKE[z]

    def of(activation, index, z):
        if has_values(activation):
            return gradient(activation, take(values_of(activation), index), z)
        return activated(activation, z)

    return of


def _activated_first(activation, index, count, z):
    """Return the same of `count` elements of dy."""


@overload(_activated_first)
def _activated_first_of(activation, index, count, z):
    take = load_singles_first if z == Singles else load_first

    def of_first(activation, index, count, z):
        if has_values(activation):
            return gradient(activation, take(values_of(activation), index, count), z)
        return activated(activation, z)

    return of_first


@inlined
def _normalised(x, mean, shift, slope, gain):
    return multiply_add(gain, (x - mean) - shift, slope)


@inlined
def _derivative(x, dy, mean, shift, slope, gain):
    # The gain last: where terms cancel, what was lost of it by rounding does not count.
    return gain * multiply_add(mean - x, slope, dy - shift)


@inlined
def _normalised_single(x, mean, shift, slope, gain):
    return multiply_add(gain, x - mean, slope)


@inlined
def solve_backward(sum_dy, sum_dy_xmu, count, scale):
    """Return (shift, slope) of channels; zero if they have no elements."""
    if count == 0:
        return splat(0.0), splat(0.0)
    elements = splat(float(count))
    # In this order a scale as large as 1/sqrt(smallest epsilon) does not overflow.
    return sum_dy / elements, scale * (scale * sum_dy_xmu / elements)


@inlined
def solve_forward(sums, count, pivot, epsilon):
    """Return (mean, rest of the mean, variance, scale) of channels with at least one element.

    The shifted-data algorithm: `sums` are those of x - pivot and (x - pivot)², each a pair. With d
    the mean of x - pivot, mean = pivot + d and variance = sum((x - pivot)²)/M - d². The pivot being
    the mean of some of the channel's own elements, (pivot - mean)² is at most M times the variance,
    so the difference loses at most log2(M) of the 53 bits, even for data made to make it lose; for
    data without order it loses none.
    """
    elements = splat(float(count))
    offset = value(sums[0], sums[1]) / elements
    product, cut = two_product(offset, elements)
    rest = ((sums[0] - product) + (sums[1] - cut)) / elements
    mean, low = two_sum(pivot, offset)
    low = where_finite(mean, low + rest, splat(0.0))
    square, cut = two_product(sums[0], offset)
    cut = cut + (sums[0] * rest + sums[1] * offset)
    variance = at_least_zero(((sums[2] - square) + (sums[3] - cut)) / elements)
    return mean, low, variance, splat(1.0) / square_root(variance + splat(epsilon))
