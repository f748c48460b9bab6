"""Kernels over channels: from statistics to coefficients, from partial sums to results.

They are small and serial. `channel` is a float64 array (4, channels) with what a channel brings:
in the backward pass rows mean, scale s, gain gamma·s; in the forward pass rows pivot, gamma, beta.
`coefficients` is a float64 array (4, channels) with rows mean, shift, slope, gain (see `formulas`).
`result` is a float64 array (2, channels): sum_dy and sum_dy_xmu, or mean and variance.
Per-channel arrays of the caller are read and written in their own type.
"""

from __future__ import annotations

import math

from numba import types
from numba.extending import overload

from backnorm.kernels.cpu.formulas import solve_backward, solve_forward
from backnorm.kernels.cpu.jit import inlined, kernel
from backnorm.kernels.cpu.sums import pair_add, value
from backnorm.kernels.cpu.vector import load_one, store_one

__all__ = [
    "combine",
    "finish_backward",
    "pivots",
    "prepare",
    "prepare_forward",
    "settle",
    "solve",
    "write",
]

# Elements of a channel whose mean is its pivot.
_SAMPLE = 16


def read(values, c, otherwise):
    """Return values[c], or `otherwise` where values is None."""


@overload(read)
def _read(values, c, otherwise):
    if isinstance(values, types.NoneType):
        return lambda values, c, otherwise: otherwise
    return lambda values, c, otherwise: load_one(values, c)


@kernel
def prepare(mean, variance, gamma, epsilon, channel):
    """Fill mean, scale and gain; return the first channel of variance + epsilon <= 0, or -1.

    NaN is not refused, nor is an infinite sum: they propagate.
    """
    refused = -1
    for c in range(channel.shape[1]):
        total = load_one(variance, c) + epsilon
        if total <= 0.0 and math.isfinite(total) and refused < 0:
            refused = c
        scale = 1.0 / math.sqrt(total)
        channel[0, c] = load_one(mean, c)
        channel[1, c] = scale
        channel[2, c] = read(gamma, c, 1.0) * scale
    return refused


@kernel
def prepare_forward(gamma, beta, channel):
    """Fill gamma and beta."""
    for c in range(channel.shape[1]):
        channel[1, c] = read(gamma, c, 1.0)
        channel[2, c] = read(beta, c, 0.0)


@kernel
def pivots(x, extents, channel):
    """Fill the pivot of every channel: the mean of its first elements."""
    outer, channels, inner = extents
    sample = min(_SAMPLE, outer * inner)
    for c in range(channels):
        total = 0.0
        for e in range(sample):
            n, s = divmod(e, inner)
            total += load_one(x, (n * channels + c) * inner + s)
        # A pivot that is not finite would hide what the sums themselves come to.
        pivot = total / max(sample, 1)
        channel[0, c] = pivot if math.isfinite(pivot) else 0.0


def solve(dy, sums, count, channel, c, epsilon, coefficients, result):
    """Turn the sums of channel c into its coefficients and its result."""


@overload(solve)
def _solve(dy, sums, count, channel, c, epsilon, coefficients, result):
    if isinstance(dy, types.NoneType):

        def forward(dy, sums, count, channel, c, epsilon, coefficients, result):
            mean, low, variance, scale = solve_forward(sums, count, channel[0, c], epsilon)
            coefficients[0, c] = mean
            coefficients[1, c] = low
            coefficients[2, c] = channel[2, c]
            coefficients[3, c] = channel[1, c] * scale
            result[0, c] = mean + low
            result[1, c] = variance

        return forward

    def backward(dy, sums, count, channel, c, epsilon, coefficients, result):
        result[0, c] = value(sums[0], sums[1])
        result[1, c] = value(sums[2], sums[3])
        set_backward(count, channel, c, coefficients, result)

    return backward


@inlined
def set_backward(count, channel, c, coefficients, result):
    """Fill the coefficients of channel c from its sums."""
    shift, slope = solve_backward(result[0, c], result[1, c], count, channel[1, c])
    coefficients[0, c] = channel[0, c]
    coefficients[1, c] = shift
    coefficients[2, c] = slope
    coefficients[3, c] = channel[2, c]


@kernel
def settle(count, channel, coefficients, result):
    """Fill the coefficients of every channel from sums that came from elsewhere."""
    for c in range(channel.shape[1]):
        set_backward(count, channel, c, coefficients, result)


@kernel
def combine(dy, partial, inner, repeats, count, channel, epsilon, coefficients, result):
    """Add up partial (blocks, 4, width) in order and solve every channel."""
    sums = partial[0]
    width = sums.shape[1]
    for b in range(1, partial.shape[0]):
        add_columns(partial[b], sums, width)
    step = channel.shape[1] * inner
    for c in range(channel.shape[1]):
        folded = fold(sums, c * inner, inner, repeats, step)
        solve(dy, folded, count, channel, c, epsilon, coefficients, result)


@inlined
def add_columns(part, sums, width):
    """Add the pairs of `part` to those of `sums`, column by column."""
    for k in range(width):
        sums[0, k], sums[1, k] = pair_add(sums[0, k], sums[1, k], part[0, k], part[1, k])
        sums[2, k], sums[3, k] = pair_add(sums[2, k], sums[3, k], part[2, k], part[3, k])


@inlined
def fold(sums, first, inner, repeats, step):
    """Add up the pairs of one channel: `inner` columns from `first`, `repeats` times `step` on."""
    high, low, product_high, product_low = 0.0, 0.0, 0.0, 0.0
    for repeat in range(repeats):
        for k in range(first + repeat * step, first + repeat * step + inner):
            high, low = pair_add(high, low, sums[0, k], sums[1, k])
            product_high, product_low = pair_add(product_high, product_low, sums[2, k], sums[3, k])
    return high, low, product_high, product_low


@kernel
def finish_backward(channel, result, dgamma, dbeta):
    """Write dgamma = s·sum_dy_xmu and dbeta = sum_dy, each rounded once."""
    for c in range(channel.shape[1]):
        store_one(dgamma, c, channel[1, c] * result[1, c])
        store_one(dbeta, c, result[0, c])


@kernel
def write(values, target):
    """Write float64 values to `target`, each rounded once."""
    for c in range(values.shape[0]):
        store_one(target, c, values[c])
