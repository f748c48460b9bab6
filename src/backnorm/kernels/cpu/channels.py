r"""Kernels over channels: from statistics to coefficients, from partial sums to results.

They work on a table, a float64 array of a few rows with a place for every channel, rows `step`
elements apart:

=======  =====================================================================================
MEAN     mean, or before it is known (forward pass) the pivot that is subtracted in its place
SHIFT    \\
SLOPE     > coefficients, see `formulas`; before a forward pass is solved SLOPE and GAIN hold
GAIN     /  beta and gamma, before a backward pass is solved GAIN holds gamma·s
SCALE    s = 1/sqrt(variance + epsilon)
FIRST    sum_dy, or mean
SECOND   sum_dy_xmu, or variance
=======  =====================================================================================

A row is longer than the number of channels by at least eight places. After the coefficients of
the last channel come those of the first again, so that a vector may run over the end of a row
of memory and go on with the next.
"""

from __future__ import annotations

import math

from numba import types
from numba.extending import overload

from backnorm.kernels.cpu.formulas import solve_backward, solve_forward
from backnorm.kernels.cpu.jit import inlined, kernel
from backnorm.kernels.cpu.memory import (
    address,
    load,
    load_apart,
    load_one,
    load_some,
    offset,
    store_one,
    store_some,
)
from backnorm.kernels.cpu.sums import merge_pairs, pair_add, value
from backnorm.kernels.cpu.vector import (
    LANES,
    any_not_positive,
    blend,
    splat,
    square_root,
    sums_of_lanes,
    where_finite,
)

__all__ = [
    "FIRST",
    "GAIN",
    "MEAN",
    "ROWS",
    "SECOND",
    "SHIFT",
    "SLOPE",
    "combine",
    "finish_backward",
    "finish_forward",
    "prepare",
    "prepare_forward",
    "row_step",
    "settle",
    "solve",
    "table_step",
]

MEAN, SHIFT, SLOPE, GAIN, SCALE, FIRST, SECOND = range(7)
ROWS = 7

# Elements of a column whose mean is its pivot.
_SAMPLE = 16


def table_step(count: int) -> int:
    """Return the length of a row of `count` places: whole vectors, and one to spare."""
    return (count + 2 * LANES - 1) // LANES * LANES


#: The same within kernels.
row_step = inlined(table_step)


def read(values, c, count, otherwise):
    """Return `count` values from c on, or `otherwise` everywhere where values is None."""


@overload(read)
def _read(values, c, count, otherwise):
    if isinstance(values, types.NoneType):
        return lambda values, c, count, otherwise: splat(otherwise)
    return lambda values, c, count, otherwise: load_some(values, c, count)


@kernel
def prepare(mean, variance, gamma, beta, epsilon, table):
    """Fill mean, scale and the coefficients of inference; return the first channel refused, or -1.

    Refused is a variance + epsilon <= 0. NaN is not, nor is an infinite sum: they propagate.
    """
    channels = mean.shape[0]
    step = table.shape[0] // ROWS
    rows = address(table)
    for c in range(0, channels, LANES):
        count = channels - c
        total = load_some(variance, c, count) + splat(epsilon)
        total = blend(count, total, splat(1.0))
        if any_not_positive(total):
            for refused in range(c, min(c + LANES, channels)):
                one = load_one(variance, refused) + epsilon
                if one <= 0.0 and math.isfinite(one):
                    return refused
        scale = splat(1.0) / square_root(total)
        store_some(rows, MEAN * step + c, count, load_some(mean, c, count))
        store_some(rows, SHIFT * step + c, count, splat(0.0))
        store_some(rows, SLOPE * step + c, count, read(beta, c, count, 0.0))
        store_some(rows, GAIN * step + c, count, read(gamma, c, count, 1.0) * scale)
        store_some(rows, SCALE * step + c, count, scale)
    _wrap(rows, step, channels)
    return -1


@kernel
def prepare_forward(x, outer, channels, inner, gamma, beta, table):
    """Fill pivot, gamma and beta; a pivot is the mean of a few elements of its channel."""
    step = table.shape[0] // ROWS
    rows = address(table)
    zero = splat(0.0)
    for c in range(0, channels, LANES):
        count = channels - c
        store_some(rows, SLOPE * step + c, count, read(beta, c, count, 0.0))
        store_some(rows, GAIN * step + c, count, read(gamma, c, count, 1.0))
        total = zero
        if inner == 1:
            sample = _power_of_two(_SAMPLE, outer)
            for n in range(sample):
                total = total + load_some(x, n * channels + c, count)
        elif outer * inner > 0:
            sample = _power_of_two(LANES, inner)
            total = sums_of_lanes(
                (
                    _sample(x, c, channels, inner, sample),
                    _sample(x, c + 1, channels, inner, sample),
                    _sample(x, c + 2, channels, inner, sample),
                    _sample(x, c + 3, channels, inner, sample),
                    _sample(x, c + 4, channels, inner, sample),
                    _sample(x, c + 5, channels, inner, sample),
                    _sample(x, c + 6, channels, inner, sample),
                    _sample(x, c + 7, channels, inner, sample),
                )
            )
        else:
            sample = 0
        pivot = total / splat(float(max(sample, 1)))
        # A pivot that is not finite would hide what the sums themselves come to.
        store_some(rows, MEAN * step + c, count, where_finite(pivot, pivot, zero))
    _wrap(rows, step, channels)


@inlined
def _power_of_two(most, limit):
    """Return the largest power of two up to both: dividing by it is exact."""
    while most > limit:
        most //= 2
    return most


@inlined
def _sample(x, c, channels, inner, sample):
    return load_some(x, min(c, channels - 1) * inner, sample)


def solve(dy, sums, far, total, rows, step, c, channels, epsilon):
    """Turn the sums of up to eight channels from c on into their coefficients and results.

    `sums` are their pairs, parts `far` elements apart; `total` is the number of elements of a
    channel; `channels` the end of the channels that are wanted. Arrays are addresses.
    """


@overload(solve)
def _solve(dy, sums, far, total, rows, step, c, channels, epsilon):
    if isinstance(dy, types.NoneType):

        def forward(dy, sums, far, total, rows, step, c, channels, epsilon):
            count = channels - c
            pairs = _quadruple(sums, far)
            pivot = load(rows, MEAN * step + c)
            mean, low, variance, scale = solve_forward(pairs, total, pivot, epsilon)
            gain = load(rows, GAIN * step + c) * scale
            store_some(rows, MEAN * step + c, count, mean)
            store_some(rows, SHIFT * step + c, count, low)
            store_some(rows, GAIN * step + c, count, gain)
            store_some(rows, FIRST * step + c, count, mean + low)
            store_some(rows, SECOND * step + c, count, variance)

        return forward

    def backward(dy, sums, far, total, rows, step, c, channels, epsilon):
        count = channels - c
        first, low, second, second_low = _quadruple(sums, far)
        store_some(rows, FIRST * step + c, count, value(first, low))
        store_some(rows, SECOND * step + c, count, value(second, second_low))
        _set_backward(total, rows, step, c, count)

    return backward


@inlined
def _set_backward(total, rows, step, c, count):
    """Fill the coefficients of `count` channels from their results."""
    first, second = load(rows, FIRST * step + c), load(rows, SECOND * step + c)
    shift, slope = solve_backward(first, second, total, load(rows, SCALE * step + c))
    store_some(rows, SHIFT * step + c, count, shift)
    store_some(rows, SLOPE * step + c, count, slope)


@kernel
def settle(total, channels, table):
    """Fill the coefficients of every channel from sums that came from elsewhere."""
    step = table.shape[0] // ROWS
    rows = address(table)
    for c in range(0, channels, LANES):
        _set_backward(total, rows, step, c, channels - c)
    _wrap(rows, step, channels)


@inlined
def combine(dy, partial, blocks, far, inner, repeats, total, rows, step, channels, epsilon):
    """Add up the partial sums (blocks, 4, far) in order and solve every channel.

    A channel has `inner` neighbouring columns, `repeats` times.
    """
    width = channels * inner * repeats
    for b in range(1, blocks):
        for k in range(0, width, LANES):
            merge_pairs(offset(partial, k), far, offset(partial, 4 * b * far + k), far)
    for c in range(0, channels, LANES):
        # The columns of channels up to here have been read: their places are free.
        if inner * repeats > 1:
            _gather(partial, far, inner, repeats, c, channels)
        sums = offset(partial, c)
        solve(dy, sums, far, total, rows, step, c, channels, epsilon)
    _wrap(rows, step, channels)


@inlined
def _gather(partial, far, inner, repeats, c, channels):
    """Add the pairs of all columns of eight channels, and leave them at columns c .. c+7."""
    zero = splat(0.0)
    first, low, second, second_low = zero, zero, zero, zero
    last = channels * inner * repeats - 1
    for repeat in range(repeats):
        for k in range(inner):
            at = (repeat * channels + c) * inner + k
            first, low = pair_add(
                first,
                low,
                load_apart(partial, at, inner, last),
                load_apart(partial, at + far, inner, last + far),
            )
            at += 2 * far
            second, second_low = pair_add(
                second,
                second_low,
                load_apart(partial, at, inner, last + 2 * far),
                load_apart(partial, at + far, inner, last + 3 * far),
            )
    count = min(channels - c, LANES)
    store_some(partial, c, count, first)
    store_some(partial, c + far, count, low)
    store_some(partial, c + 2 * far, count, second)
    store_some(partial, c + 3 * far, count, second_low)


@inlined
def _quadruple(sums, far):
    return load(sums, 0), load(sums, far), load(sums, 2 * far), load(sums, 3 * far)


@inlined
def _wrap(rows, step, channels):
    """Repeat the coefficients of the first channels after those of the last."""
    if channels > 0:
        for k in range(LANES):
            for row in range(SCALE):
                at = row * step
                store_one(rows, at + channels + k, load_one(rows, at + k % channels))


@kernel
def finish_backward(table, dgamma, dbeta):
    """Write dgamma = s·sum_dy_xmu and dbeta = sum_dy, each rounded once."""
    channels = dgamma.shape[0]
    step = table.shape[0] // ROWS
    rows = address(table)
    for c in range(0, channels, LANES):
        scale, sums = load(rows, SCALE * step + c), load(rows, SECOND * step + c)
        store_some(dgamma, c, channels - c, scale * sums)
        store_some(dbeta, c, channels - c, load(rows, FIRST * step + c))


@kernel
def finish_forward(table, epsilon, mean, variance):
    """Write mean and variance, each rounded once; return the first channel refused, or -1."""
    channels = mean.shape[0]
    step = table.shape[0] // ROWS
    rows = address(table)
    refused = -1
    for c in range(0, channels, LANES):
        count = channels - c
        values = load(rows, SECOND * step + c)
        store_some(mean, c, count, load(rows, FIRST * step + c))
        store_some(variance, c, count, values)
        if any_not_positive(blend(count, values + splat(epsilon), splat(1.0))) and refused < 0:
            refused = c
            while load_one(rows, SECOND * step + refused) + epsilon > 0.0:
                refused += 1
    return refused
