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
from backnorm.kernels.cpu.memory import address, load_one, store_one
from backnorm.kernels.cpu.sums import pair_add, value

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


def solve(dy, sums, count, channel, c, channels, epsilon, coefficients, result):
    """Turn the sums of channel c into its coefficients and its result; arrays are addresses."""


@overload(solve)
def _solve(dy, sums, count, channel, c, channels, epsilon, coefficients, result):
    if isinstance(dy, types.NoneType):

        def forward(dy, sums, count, channel, c, channels, epsilon, coefficients, result):
            pivot = load_one(channel, c)
            mean, low, variance, scale = solve_forward(sums, count, pivot, epsilon)
            store_one(coefficients, c, mean)
            store_one(coefficients, c + channels, low)
            store_one(coefficients, c + 2 * channels, load_one(channel, c + 2 * channels))
            store_one(coefficients, c + 3 * channels, load_one(channel, c + channels) * scale)
            store_one(result, c, mean + low)
            store_one(result, c + channels, variance)

        return forward

    def backward(dy, sums, count, channel, c, channels, epsilon, coefficients, result):
        store_one(result, c, value(sums[0], sums[1]))
        store_one(result, c + channels, value(sums[2], sums[3]))
        _set_backward(count, channel, c, channels, coefficients, result)

    return backward


@inlined
def _set_backward(count, channel, c, channels, coefficients, result):
    """Fill the coefficients of channel c from its result."""
    scale = load_one(channel, c + channels)
    shift, slope = solve_backward(load_one(result, c), load_one(result, c + channels), count, scale)
    store_one(coefficients, c, load_one(channel, c))
    store_one(coefficients, c + channels, shift)
    store_one(coefficients, c + 2 * channels, slope)
    store_one(coefficients, c + 3 * channels, load_one(channel, c + 2 * channels))


@kernel
def settle(count, channel, coefficients, result):
    """Fill the coefficients of every channel from sums that came from elsewhere."""
    channels = channel.shape[1]
    given, table, results = address(channel), address(coefficients), address(result)
    for c in range(channels):
        _set_backward(count, given, c, channels, table, results)


@kernel
def combine(dy, partial, inner, repeats, count, channel, epsilon, coefficients, result):
    """Add up partial (blocks, 4, width) in order and solve every channel.

    A channel has `inner` neighbouring columns, `repeats` times.
    """
    blocks, _, width = partial.shape
    channels = channel.shape[1]
    sums = address(partial)
    for b in range(1, blocks):
        part = address(partial[b])
        for k in range(width):
            add_pairs(sums, k, width, quadruple(part, k, width))
    given, table, results = address(channel), address(coefficients), address(result)
    slopes = address(dy)
    for c in range(channels):
        pairs = (0.0, 0.0, 0.0, 0.0)
        for repeat in range(repeats):
            first = (repeat * channels + c) * inner
            for k in range(first, first + inner):
                pairs = _plus(pairs, quadruple(sums, k, width))
        solve(slopes, pairs, count, given, c, channels, epsilon, table, results)


@inlined
def quadruple(values, k, step):
    """Return the two pairs of column k: values[k], values[k + step], ..."""
    return (
        load_one(values, k),
        load_one(values, k + step),
        load_one(values, k + 2 * step),
        load_one(values, k + 3 * step),
    )


@inlined
def add_pairs(values, k, step, more):
    """Add two pairs to those of column k."""
    total = _plus(quadruple(values, k, step), more)
    for part in range(4):
        store_one(values, k + part * step, total[part])


@inlined
def _plus(left, right):
    """Return the sums of two pairs each."""
    return pair_add(left[0], left[1], right[0], right[1]) + pair_add(
        left[2], left[3], right[2], right[3]
    )


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
