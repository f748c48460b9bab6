"""The formulas of an element of the output, and of a channel's coefficients.

Every output is an expression of one element and four coefficients of its channel,
(mean, shift, slope, gain), in float64 or in float32 (see `float32`):

==============================  =========================================================
backward, training              dx = gain * ((dy - shift) - (x - mean) * slope)
backward, frozen statistics     dx = gain * dy
forward and inference           y  = gain * ((x - mean) - shift) + slope
the same in float32             y  = gain * (x - mean) + slope
with a ReLU                     max(0, y), or max(0, y + residual); at most its ceiling
==============================  =========================================================

In the backward pass, shift = sum_dy/M, slope = s²·sum_dy_xmu/M and gain = gamma·s, with s =
1/sqrt(variance + epsilon). The mean is always subtracted from x first. The formula is never
rewritten as gain·x + constant, with the mean in the constant, because gain·x and the constant would
cancel if |mean| is much larger than the standard deviation. In the forward pass, the coefficient
slope is beta, and the coefficient mean is the exact mean rounded to float64. The coefficient shift
is the error of this rounding: the exact mean minus the rounded one. `float32.coefficients_for`
derives the coefficients for float32 arithmetic from these float64 coefficients.

The type of the operand dy selects the direction when a kernel is compiled (see `epilogue`).
"""

from __future__ import annotations

from backnorm_kernels.kernels.epilogue import has_relu, has_values, is_forward, relu, values_of
from backnorm_kernels.kernels.jit import by_type, inlined, nothing
from backnorm_kernels.kernels.memory import load_like, prefetch
from backnorm_kernels.kernels.sums import value
from backnorm_kernels.kernels.vector import (
    Vec,
    at_least_zero,
    multiply_add,
    splat,
    square_root,
    two_product,
    two_sum,
    where_finite,
)


@by_type
def elements(output, index, count, coefficients):
    """Return a vector of output elements from `index` on.

    The vector has the type of the channel's `coefficients`. If `count` is None, all lanes of the
    vector have elements. Otherwise, only the first `count` lanes have elements, and memory after
    these elements is not accessed.
    """
    normalised = _normalised if coefficients.dtype == Vec else _normalised_single

    def forward(output, index, count, coefficients):
        epilogue = output.dy
        z = normalised(load_like(output.x, index, count, coefficients[0]), coefficients)
        if not has_relu(epilogue):
            return z
        if has_values(epilogue):
            return relu(epilogue, z + load_like(values_of(epilogue), index, count, z))
        return relu(epilogue, z)

    def backward(output, index, count, coefficients):
        dy = load_like(output.dy, index, count, coefficients[3])
        if output.frozen:
            return coefficients[3] * dy
        return _derivative(load_like(output.x, index, count, dy), dy, coefficients)

    return forward if is_forward(output[1]) else backward


@by_type
def both_elements(output, index, left, right):
    """Return two neighbouring whole vectors of the output, given the coefficients of each."""
    lanes = left.dtype.lanes
    return lambda output, index, left, right: (
        elements(output, index, None, left),
        elements(output, index + lanes, None, right),
    )


@by_type
def prefetch_elements(output, index, count, streaming):
    """Prefetch the memory that `count` elements of a forward pass read and write.

    The memory of x and of the residual is prefetched. If stores are ordinary, the output is
    prefetched, too, because an ordinary store first reads the cache line that it writes. In a
    backward pass, nothing is prefetched here, because this never made a call faster
    (docs/decisions/reading-ahead.md).
    """

    def forward(output, index, count, streaming):
        prefetch(output.x, index, count)
        if not streaming:
            prefetch(output.out, index, count)
        if has_relu(output.dy) and has_values(output.dy):
            prefetch(values_of(output.dy), index, count)

    return forward if is_forward(output[1]) else nothing


@inlined
def _normalised(x, coefficients):
    mean, shift, slope, gain = coefficients
    return multiply_add(gain, (x - mean) - shift, slope)


@inlined
def _normalised_single(x, coefficients):
    mean, _, slope, gain = coefficients
    return multiply_add(gain, x - mean, slope)


@inlined
def _derivative(x, dy, coefficients):
    mean, shift, slope, gain = coefficients
    # The gain is multiplied last, so that its rounding error is not enlarged where terms cancel.
    return gain * multiply_add(mean - x, slope, dy - shift)


@inlined
def solve_backward(sum_dy, sum_dy_xmu, count, scale):
    """Return (shift, slope) of each channel, or zeros if channels have no elements."""
    if count == 0:
        return splat(0.0), splat(0.0)
    elements = splat(float(count))
    # The parentheses avoid scale * scale, which would overflow for the smallest epsilon.
    return sum_dy / elements, scale * (scale * sum_dy_xmu / elements)


@inlined
def solve_forward(sums, count, pivot, epsilon):
    """Return (mean, remainder of the mean, variance, scale) of channels with at least one element.

    This is the shifted-data algorithm: `sums` has two pairs, the sum of x - pivot and the sum of (x
    - pivot)². Let d be the mean of x - pivot. Then mean = pivot + d, and variance = sum((x -
    pivot)²)/M - d². The pivot is the mean of some of the channel's elements, so (pivot - mean)² is
    at most M times the variance, where M is the channel's number of elements. Therefore, for
    any data, the subtraction of d² loses at most about log2(M) of the 53 significant bits of a
    float64. If the elements are in random order, the subtraction loses hardly any bits.
    Reproducible sums have the pivot 0, so the subtraction may lose more bits. But reproducible sums
    have more than the 53 bits: each of their terms is rounded by at most 2^-64 of the largest term
    (see `bins`).
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
