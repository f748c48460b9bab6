"""Kernels over channels: from statistics to coefficients, from partial sums to results.

They work on the table of channels, see `backnorm.cpu.scratch`.
"""

from __future__ import annotations

import math

from numba import types
from numba.extending import overload

from backnorm.cpu.kernels.bins import (
    clear_bins,
    digits_of,
    merge_bins,
    pairs_of_bins,
    read_bins,
    write_bins,
)
from backnorm.cpu.kernels.formulas import solve_backward, solve_forward
from backnorm.cpu.kernels.jit import inlined, outlined
from backnorm.cpu.kernels.memory import (
    clear,
    load,
    load_apart,
    load_one,
    load_some,
    offset,
    store,
    store_one,
    store_some,
)
from backnorm.cpu.kernels.record import doubles_at
from backnorm.cpu.kernels.sums import merge_pairs, pair_add, value
from backnorm.cpu.kernels.vector import (
    any_not_positive,
    blend,
    multiply_add,
    splat,
    square_root,
    sums_of_lanes,
    where_finite,
    where_less,
)
from backnorm.cpu.scratch import (
    FIRST,
    GAIN,
    LANES,
    MEAN,
    SCALE,
    SECOND,
    SHIFT,
    SLOPE,
    table_pitch,
)

__all__ = [
    "combine",
    "combine_bins",
    "finish_backward",
    "finish_forward",
    "prepare",
    "prepare_forward",
    "prepare_means",
    "row_pitch",
    "settle",
    "settle_bins",
    "settle_forward",
    "settle_means",
    "solve",
    "solve_columns",
    "take",
    "wrap",
]

# Elements of a column whose mean is its pivot.
_SAMPLE = 16

# In the place of an infinite inverse standard deviation, which would make NaN of differences of
# zero: results overflow, as they should.
_MOST = 1e150


#: See `scratch.table_pitch`.
row_pitch = inlined(table_pitch)


@inlined
def _read(values, given, c, count, otherwise):
    """Return `count` values from c on, or `otherwise` everywhere if none are given."""
    return load_some(values, c, count) if given else splat(otherwise)


@outlined
def prepare(table, pitch, channels, given, present, epsilon, inverse):
    """Fill mean, scale and the coefficients of inference; return the first channel refused, or -1.

    Refused is a variance + epsilon <= 0, or an inverse standard deviation < 0. NaN is not, nor is
    an infinite sum: they propagate.

    Parameters
    ----------
    table, pitch
        The table.
    channels : int
    given : (address, address, address, address)
        Mean, variance (or its inverse standard deviation), gamma and beta.
    present : (bool, bool)
        Whether there is gamma, and whether there is beta.
    epsilon : float
    inverse : bool
        Whether 1/sqrt(variance + epsilon) is given for the variance.
    """
    mean, variance, gamma, beta = given
    for c in range(0, channels, LANES):
        count = channels - c
        stored = load_some(variance, c, count)
        total = blend(count, stored if inverse else stored + splat(epsilon), splat(1.0))
        if any_not_positive(total):
            for refused in range(c, min(c + LANES, channels)):
                one = load_one(variance, refused)
                total_one = one + epsilon
                if one < 0.0 if inverse else total_one <= 0.0 and math.isfinite(total_one):
                    return refused
        if inverse:
            scale = where_less(splat(_MOST), total, splat(_MOST), total)
        else:
            scale = splat(1.0) / square_root(total)
        store_some(table, MEAN * pitch + c, count, load_some(mean, c, count))
        store_some(table, SHIFT * pitch + c, count, splat(0.0))
        store_some(table, SLOPE * pitch + c, count, _read(beta, present[1], c, count, 0.0))
        store_some(table, GAIN * pitch + c, count, _read(gamma, present[0], c, count, 1.0) * scale)
        store_some(table, SCALE * pitch + c, count, scale)
    wrap(table, pitch, channels)
    return -1


@outlined
def prepare_means(table, pitch, channels, mean):
    """Fill the mean alone, which is all that sums need."""
    for c in range(0, channels, LANES):
        store_some(table, MEAN * pitch + c, channels - c, load_some(mean, c, channels - c))


@outlined
def prepare_forward(table, pitch, x, extents, gamma, beta, present):
    """Fill pivot, gamma and beta; a pivot is the mean of a few elements of its channel."""
    outer, channels, inner = extents
    zero = splat(0.0)
    for c in range(0, channels, LANES):
        count = channels - c
        store_some(table, SLOPE * pitch + c, count, _read(beta, present[1], c, count, 0.0))
        store_some(table, GAIN * pitch + c, count, _read(gamma, present[0], c, count, 1.0))
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
        store_some(table, MEAN * pitch + c, count, where_finite(pivot, pivot, zero))
    wrap(table, pitch, channels)


@inlined
def _power_of_two(most, limit):
    """Return the largest power of two up to both: dividing by it is exact."""
    while most > limit:
        most //= 2
    return most


@inlined
def _sample(x, c, channels, inner, sample):
    return load_some(x, min(c, channels - 1) * inner, sample)


def solve(dy, sums, far, total, table, pitch, c, channels, epsilon):
    """Turn the sums of up to eight channels from c on into their coefficients and results.

    `sums` are their pairs, parts `far` elements apart; `total` is the number of elements of a
    channel; `channels` the end of the channels that are wanted. Arrays are addresses.
    """


@overload(solve)
def _solve(dy, sums, far, total, table, pitch, c, channels, epsilon):
    if isinstance(dy, types.NoneType):

        def forward(dy, sums, far, total, table, pitch, c, channels, epsilon):
            count = channels - c
            pairs = _quadruple(sums, far)
            pivot = load(table, MEAN * pitch + c)
            mean, low, variance, scale = solve_forward(pairs, total, pivot, epsilon)
            gain = load(table, GAIN * pitch + c) * scale
            store_some(table, MEAN * pitch + c, count, mean)
            store_some(table, SHIFT * pitch + c, count, low)
            store_some(table, GAIN * pitch + c, count, gain)
            store_some(table, FIRST * pitch + c, count, mean + low)
            store_some(table, SECOND * pitch + c, count, variance)

        return forward

    def backward(dy, sums, far, total, table, pitch, c, channels, epsilon):
        count = channels - c
        first, low, second, second_low = _quadruple(sums, far)
        store_some(table, FIRST * pitch + c, count, value(first, low))
        store_some(table, SECOND * pitch + c, count, value(second, second_low))
        _set_backward(total, table, pitch, c, count)

    return backward


@inlined
def _set_backward(total, table, pitch, c, count):
    """Fill the coefficients of `count` channels from their results."""
    first, second = load(table, FIRST * pitch + c), load(table, SECOND * pitch + c)
    shift, slope = solve_backward(first, second, total, load(table, SCALE * pitch + c))
    store_some(table, SHIFT * pitch + c, count, shift)
    store_some(table, SLOPE * pitch + c, count, slope)


@outlined
def take(table, pitch, channels, rows):
    """Fill the sums, or mean and variance, of every channel from two rows of an array."""
    for c in range(0, channels, LANES):
        count = channels - c
        store_some(table, FIRST * pitch + c, count, load_some(rows, c, count))
        store_some(table, SECOND * pitch + c, count, load_some(rows, channels + c, count))


@outlined
def settle(table, pitch, channels, total):
    """Fill the coefficients of every channel from sums that came from elsewhere."""
    for c in range(0, channels, LANES):
        _set_backward(total, table, pitch, c, channels - c)
    wrap(table, pitch, channels)


@outlined
def settle_bins(x, dy, given, total, table, pitch, channels, epsilon):
    """Fill results and coefficients of every channel from bins that came from elsewhere.

    `given` are those, as `write_bins` writes them, and room for the bins and pairs of eight
    channels. It is what `combine_bins` does with its own, operation by operation.
    """
    bins, room = given
    digits = digits_of(x)
    sums = offset(room, 2 * (digits + 1) * LANES)
    clear(sums, 4 * LANES)
    for c in range(0, channels, LANES):
        stop = min(channels, c + LANES)
        for k in range(stop - c):
            read_bins(bins, c + k, channels, digits, room, k, LANES)
            pairs_of_bins(room, k, LANES, digits, sums, k, LANES)
        solve(dy, sums, LANES, total, table, pitch, c, channels, epsilon)
    settle_means(dy, table, pitch, 0, channels)
    wrap(table, pitch, channels)


@outlined
def settle_forward(table, pitch, channels, epsilon):
    """Fill the coefficients of every channel from a mean and a variance that came from elsewhere.

    Before, SLOPE and GAIN hold beta and gamma.
    """
    for c in range(0, channels, LANES):
        count = channels - c
        total = load(table, SECOND * pitch + c) + splat(epsilon)
        gain = load(table, GAIN * pitch + c) * (splat(1.0) / square_root(total))
        store_some(table, MEAN * pitch + c, count, load(table, FIRST * pitch + c))
        store_some(table, SHIFT * pitch + c, count, splat(0.0))
        store_some(table, GAIN * pitch + c, count, gain)
    wrap(table, pitch, channels)


@inlined
def combine(dy, partial, blocks, far, inner, repeats, total, table, pitch, channels, epsilon):
    """Add up the partial sums (blocks, 4, far) in order and solve every channel.

    A channel has `inner` neighbouring columns, `repeats` times.
    """
    width = channels * inner * repeats
    for b in range(1, blocks):
        for k in range(0, width, LANES):
            merge_pairs(offset(partial, k), far, offset(partial, 4 * b * far + k), far)
    ends = (0, channels, channels)
    solve_columns(dy, partial, far, inner, repeats, ends, total, table, pitch, epsilon)
    wrap(table, pitch, channels)


@outlined
def combine_bins(kind, head, x, dy, partial, grid, total, table, pitch, channels):
    """Add up the bins (blocks, rows, far) of columns, solve every channel; write bins if asked to.

    `grid` is how many blocks there are, how far apart rows are, and a channel's neighbouring
    columns and how often it has them. After the bins there is room for those of channels, and for
    their pairs.
    """
    blocks, far, inner, repeats = grid
    digits = digits_of(x)
    rows = 2 * (digits + 1)
    totals = offset(partial, blocks * rows * far)
    sums = offset(totals, rows * pitch)
    clear_bins(totals, pitch, channels, digits)
    for b in range(blocks):
        bins = offset(partial, b * rows * far)
        for repeat in range(repeats):
            for c in range(channels):
                column = (repeat * channels + c) * inner
                for k in range(inner):
                    merge_bins(totals, c, pitch, bins, column + k, far, digits)
    if head.exchanged != 0:
        write_bins(totals, pitch, digits, channels, doubles_at(kind, head.exchanged))
    for c in range(channels):
        pairs_of_bins(totals, c, pitch, digits, sums, c, pitch)
    ends = (0, channels, channels)
    solve_columns(dy, sums, pitch, 1, 1, ends, total, table, pitch, head.epsilon)
    settle_means(dy, table, pitch, 0, channels)
    wrap(table, pitch, channels)


def settle_means(dy, table, pitch, first, stop):
    """Round means to float64, which is what phases tell each other.

    So reproducible results are the same of one call and of two.
    """


@overload(settle_means)
def _settle_means(dy, table, pitch, first, stop):
    if not isinstance(dy, types.NoneType):
        return lambda dy, table, pitch, first, stop: None

    def forward(dy, table, pitch, first, stop):
        for c in range(first, stop, LANES):
            count = stop - c
            store_some(table, MEAN * pitch + c, count, load(table, FIRST * pitch + c))
            store_some(table, SHIFT * pitch + c, count, splat(0.0))

    return forward


@outlined
def solve_columns(dy, partial, far, inner, repeats, ends, total, table, pitch, epsilon):
    """Solve some channels from the pairs of their columns, which are used up.

    `ends` are the first of these channels, the one after the last, and the number of all. Where
    channels are repeated these are all.
    """
    start, stop, channels = ends
    for c in range(start, stop, LANES):
        # The columns of channels up to here have been read: their places are free.
        k = start * inner + c - start
        if inner * repeats > 1:
            _gather(partial, far, inner, repeats, (c, stop, channels), k)
        sums = offset(partial, k)
        solve(dy, sums, far, total, table, pitch, c, stop, epsilon)


@inlined
def _gather(partial, far, inner, repeats, ends, to):
    """Add the pairs of all columns of eight channels, and leave them at columns to .. to+7."""
    c, stop, channels = ends
    zero = splat(0.0)
    first, low, second, second_low = zero, zero, zero, zero
    last = ((repeats - 1) * channels + stop) * inner - 1
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
    count = min(stop - c, LANES)
    store_some(partial, to, count, first)
    store_some(partial, to + far, count, low)
    store_some(partial, to + 2 * far, count, second)
    store_some(partial, to + 3 * far, count, second_low)


@inlined
def _quadruple(sums, far):
    return load(sums, 0), load(sums, far), load(sums, 2 * far), load(sums, 3 * far)


@inlined
def wrap(table, pitch, channels):
    """Repeat the coefficients of the first channels after those of the last."""
    if channels >= LANES:
        for row in range(SCALE):
            store(table, row * pitch + channels, load(table, row * pitch))
    elif channels > 0:
        for k in range(LANES):
            for row in range(SCALE):
                at = row * pitch
                store_one(table, at + channels + k, load_one(table, at + k % channels))


@outlined
def finish_backward(table, pitch, channels, dgamma, dbeta):
    """Write dgamma = s·sum_dy_xmu and dbeta = sum_dy, each rounded once."""
    for c in range(0, channels, LANES):
        scale, sums = load(table, SCALE * pitch + c), load(table, SECOND * pitch + c)
        store_some(dgamma, c, channels - c, scale * sums)
        store_some(dbeta, c, channels - c, load(table, FIRST * pitch + c))


@outlined
def finish_forward(table, pitch, channels, results, epsilon, inverse, running):
    """Write mean and variance, each rounded once; return the first channel refused, or -1.

    Parameters
    ----------
    table, pitch, channels
        The table.
    results : (address, address)
        Where to write mean and variance.
    epsilon : float
    inverse : bool
        Whether 1/sqrt(variance + epsilon) is written for the variance.
    running : (address, address, bool, float, float)
        Running mean, running variance, and whether there are any; by which share they move towards
        those of the batch, and by what the variance of the batch is multiplied before.
    """
    mean, variance = results
    running_mean, running_variance, tracked, momentum, correction = running
    refused = -1
    for c in range(0, channels, LANES):
        count = channels - c
        average, values = load(table, FIRST * pitch + c), load(table, SECOND * pitch + c)
        store_some(mean, c, count, average)
        total = values + splat(epsilon)
        if inverse:
            store_some(variance, c, count, splat(1.0) / square_root(total))
        else:
            store_some(variance, c, count, values)
        if tracked:
            _move(running_mean, c, count, average, momentum)
            _move(running_variance, c, count, values * splat(correction), momentum)
        if any_not_positive(blend(count, total, splat(1.0))) and refused < 0:
            refused = c
            while load_one(table, SECOND * pitch + refused) + epsilon > 0.0:
                refused += 1
    return refused


@inlined
def _move(running, c, count, value, momentum):
    """Move running statistics towards those of a batch."""
    kept = load_some(running, c, count) * splat(1.0 - momentum)
    store_some(running, c, count, multiply_add(value, splat(momentum), kept))
