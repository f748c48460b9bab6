"""Compute coefficients of channels from statistics, and results from sums.

The functions read and write the table of channels, which `backnorm_kernels.scratch` describes.
"""

from __future__ import annotations

import math

from backnorm_kernels.kernels.bins import (
    clear_bins,
    merge_bins,
    pairs_of_bins,
    write_bins,
)
from backnorm_kernels.kernels.formulas import solve_backward, solve_forward
from backnorm_kernels.kernels.jit import by_type, inlined, integer, nothing, outlined
from backnorm_kernels.kernels.memory import (
    load,
    load_apart,
    load_one,
    load_some,
    offset,
    store,
    store_one,
    store_some,
)
from backnorm_kernels.kernels.operands import Bins, Pairs
from backnorm_kernels.kernels.record import doubles_at
from backnorm_kernels.kernels.sums import merge_pairs, pair_add, value
from backnorm_kernels.kernels.vector import (
    any_not_positive,
    blend,
    multiply_add,
    splat,
    square_root,
    sums_of_lanes,
    where_finite,
    where_less,
)
from backnorm_kernels.scratch import (
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

# If `inner` is 1 (NXC), the pivot of a channel is the mean of at most this many elements.
_SAMPLE = 16

# An inverse standard deviation that is larger than this number is replaced by this number. Without
# this limit, the inverse could be infinite, and a difference x - mean of 0 times infinity would be
# NaN. A difference other than 0 times this number is still infinite in float32, like such a
# difference times infinity.
_MOST = 1e150


#: See `scratch.table_pitch`.
row_pitch = inlined(table_pitch)


@inlined
def _read(values, present, c, count, otherwise):
    """Return `count` values of a per-channel array, from channel c on.

    If the array is absent, return a vector with `otherwise` in every lane.
    """
    return load_some(values, c, count) if present else splat(otherwise)


@outlined
def prepare(table, statistics, present, epsilon, inverse):
    """Write each channel's mean, scale and coefficients of inference to the table.

    The number of the first invalid channel is returned, or -1 if all channels are valid. A channel
    is invalid if variance + epsilon <= 0, or if its inverse standard deviation is negative. NaN and
    an infinite variance + epsilon are valid and propagate.

    Parameters
    ----------
    table : Table
    statistics : (address, address, address, address)
        Mean, variance (or the inverse standard deviation), gamma and beta.
    present : (bool, bool)
        Whether there is gamma, and whether there is beta.
    epsilon : float
    inverse : bool
        Whether the second statistic is 1/sqrt(variance + epsilon).
    """
    values, pitch, channels = table
    mean, variance, gamma, beta = statistics
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
        store_some(values, MEAN * pitch + c, count, load_some(mean, c, count))
        store_some(values, SHIFT * pitch + c, count, splat(0.0))
        store_some(values, SLOPE * pitch + c, count, _read(beta, present[1], c, count, 0.0))
        gain = _read(gamma, present[0], c, count, 1.0) * scale
        store_some(values, GAIN * pitch + c, count, gain)
        store_some(values, SCALE * pitch + c, count, scale)
    wrap(table)
    return -1


@outlined
def prepare_means(table, mean):
    """Write only the means to the table: the sums of a backward pass need no other coefficient."""
    values, pitch, channels = table
    for c in range(0, channels, LANES):
        store_some(values, MEAN * pitch + c, channels - c, load_some(mean, c, channels - c))


@outlined
def prepare_forward(table, x, extents, affine, present):
    """Write pivot, gamma and beta of every channel to the table.

    The pivot of a channel is the mean of a few of its elements.
    """
    values, pitch, _ = table
    outer, channels, inner = extents
    gamma, beta = affine
    zero = splat(0.0)
    for c in range(0, channels, LANES):
        count = channels - c
        store_some(values, SLOPE * pitch + c, count, _read(beta, present[1], c, count, 0.0))
        store_some(values, GAIN * pitch + c, count, _read(gamma, present[0], c, count, 1.0))
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
        # A pivot that is not finite is replaced by 0, because such a pivot would make the sums of
        # finite elements infinite or NaN.
        store_some(values, MEAN * pitch + c, count, where_finite(pivot, pivot, zero))
    wrap(table)


@inlined
def _power_of_two(most, limit):
    """Return the largest power of two that is at most `most` (a power of two) and at most `limit`.

    Dividing a sum by a power of two does not round.
    """
    while most > limit:
        most //= 2
    return most


@inlined
def _sample(x, c, channels, inner, sample):
    return load_some(x, min(c, channels - 1) * inner, sample)


@by_type
def solve(kind, pairs, k, total, table, c, count, epsilon):
    """Compute the coefficients and results of `count` channels, from channel c on, from their sums.

    `pairs` has the sums of channel c in column k, those of the next channel in column k + 1, and so
    on. `total` is the number of elements of a channel.
    """

    def forward(kind, pairs, k, total, table, c, count, epsilon):
        values, pitch, _ = table
        pivot = load(values, MEAN * pitch + c)
        mean, low, variance, scale = solve_forward(_quadruple(pairs, k), total, pivot, epsilon)
        gain = load(values, GAIN * pitch + c) * scale
        store_some(values, MEAN * pitch + c, count, mean)
        store_some(values, SHIFT * pitch + c, count, low)
        store_some(values, GAIN * pitch + c, count, gain)
        store_some(values, FIRST * pitch + c, count, mean + low)
        store_some(values, SECOND * pitch + c, count, variance)

    def backward(kind, pairs, k, total, table, c, count, epsilon):
        values, pitch, _ = table
        first, low, second, second_low = _quadruple(pairs, k)
        store_some(values, FIRST * pitch + c, count, value(first, low))
        store_some(values, SECOND * pitch + c, count, value(second, second_low))
        _set_backward(total, table, c, count)

    return forward if kind.direction == "forward" else backward


@inlined
def _set_backward(total, table, c, count):
    """Fill the coefficients of `count` channels from their sums in the table."""
    values, pitch, _ = table
    first, second = load(values, FIRST * pitch + c), load(values, SECOND * pitch + c)
    shift, slope = solve_backward(first, second, total, load(values, SCALE * pitch + c))
    store_some(values, SHIFT * pitch + c, count, shift)
    store_some(values, SLOPE * pitch + c, count, slope)


@outlined
def take(table, rows):
    """Copy two rows of an array to the table: the sums, or mean and variance, of every channel."""
    values, pitch, channels = table
    for c in range(0, channels, LANES):
        count = channels - c
        store_some(values, FIRST * pitch + c, count, load_some(rows, c, count))
        store_some(values, SECOND * pitch + c, count, load_some(rows, channels + c, count))


@outlined
def settle(table, total):
    """Compute the coefficients of every channel from the sums in the table."""
    for c in range(0, table.channels, LANES):
        _set_backward(total, table, c, table.channels - c)
    wrap(table)


@outlined
def settle_forward(table, epsilon):
    """Fill the coefficients of every channel from the mean and the variance in the table.

    Before the call, the rows SLOPE and GAIN of the table contain beta and gamma.
    """
    values, pitch, channels = table
    for c in range(0, channels, LANES):
        count = channels - c
        total = load(values, SECOND * pitch + c) + splat(epsilon)
        gain = load(values, GAIN * pitch + c) * (splat(1.0) / square_root(total))
        store_some(values, MEAN * pitch + c, count, load(values, FIRST * pitch + c))
        store_some(values, SHIFT * pitch + c, count, splat(0.0))
        store_some(values, GAIN * pitch + c, count, gain)
    wrap(table)


@outlined
def combine(kind, head, partial, grid, total, table):
    """Add up the partial sums of every column in the order of the blocks, and compute the results
    and the coefficients of the channels.

    `partial` is a `Pairs`: the address of the partial sums, and the pitch of their rows. Each
    block has four rows: the high and the low parts of two sums. `combine_bins` explains `grid`.
    """
    blocks, inner, repeats = grid
    sums, pitch = partial
    for b in range(1, blocks):
        block = Pairs(offset(sums, 4 * b * pitch), pitch)
        for k in range(0, table.channels * inner * repeats, LANES):
            merge_pairs(partial, k, block, k)
    span = (integer(0), table.channels)
    solve_columns(kind, partial, (inner, repeats), span, total, table, head.epsilon)
    wrap(table)


@outlined
def combine_bins(kind, head, digits, partial, grid, total, table):
    """Add up the bins of columns, and compute results and coefficients of channels. If
    `head.exchanged` is an address (not 0), write the bins of channels there.

    `partial` is a `Bins`: the address of the bins of columns, and the pitch of their rows. The
    memory at this address has three arrays, one after the other: the bins of columns, of shape
    (blocks, 2 * (digits + 1), pitch); the bins of channels; the pairs of channels. `grid` has three
    numbers: how many blocks there are, how many neighbouring columns a channel has, and how often a
    row repeats the sequence of all channels.
    """
    blocks, inner, repeats = grid
    values, pitch = partial
    rows, channels = 2 * (digits + 1), table.channels
    totals = Bins(offset(values, blocks * rows * pitch), table.pitch)
    pairs = Pairs(offset(totals.values, rows * table.pitch), table.pitch)
    clear_bins(totals, channels, digits)
    for b in range(blocks):
        bins = Bins(offset(values, b * rows * pitch), pitch)
        for repeat in range(repeats):
            for c in range(channels):
                column = (repeat * channels + c) * inner
                for k in range(inner):
                    merge_bins(totals, c, bins, column + k, digits)
    if head.exchanged != 0:
        write_bins(totals, digits, channels, doubles_at(kind, head.exchanged))
    for c in range(channels):
        pairs_of_bins(totals, c, digits, pairs, c)
    one, span = integer(1), (integer(0), channels)
    solve_columns(kind, pairs, (one, one), span, total, table, head.epsilon)
    settle_means(kind, table, integer(0), channels)
    wrap(table)


@by_type
def settle_means(kind, table, first, stop):
    """Round means to float64, the type in which `reduce_forward` returns them.

    Because of this rounding, the reproducible results of `forward` have the same bits as those of
    `reduce_forward` followed by `apply_forward`.
    """
    if kind.direction != "forward":
        return nothing

    def forward(kind, table, first, stop):
        values, pitch, _ = table
        for c in range(first, stop, LANES):
            count = stop - c
            store_some(values, MEAN * pitch + c, count, load(values, FIRST * pitch + c))
            store_some(values, SHIFT * pitch + c, count, splat(0.0))

    return forward


@outlined
def solve_columns(kind, pairs, cut, span, total, table, epsilon):
    """Compute results and coefficients of the channels from start to stop - 1, where `span` is
    (start, stop). `pairs` has the compensated sums of each column of these channels, and is
    overwritten.

    `cut` is two numbers: how many neighbouring columns a channel has, and how often a row contains
    all channels. If a row contains all channels more than once, the span must be all channels.
    """
    start, stop = span
    inner, repeats = cut
    for c in range(start, stop, LANES):
        # The sums of eight channels are written from column k on. They overwrite pairs of columns
        # that have already been read.
        k = start * inner + c - start
        if inner * repeats > 1:
            _gather(pairs, cut, (c, stop, table.channels), k)
        solve(kind, pairs, k, total, table, c, stop - c, epsilon)


@inlined
def _gather(pairs, cut, ends, to):
    """Add up the pairs of all columns of each of eight channels.

    The sums of the eight channels are written to the elements from `to` on.
    """
    partial, pitch = pairs
    inner, repeats = cut
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
                load_apart(partial, at + pitch, inner, last + pitch),
            )
            at += 2 * pitch
            second, second_low = pair_add(
                second,
                second_low,
                load_apart(partial, at, inner, last + 2 * pitch),
                load_apart(partial, at + pitch, inner, last + 3 * pitch),
            )
    count = min(stop - c, LANES)
    store_some(partial, to, count, first)
    store_some(partial, to + pitch, count, low)
    store_some(partial, to + 2 * pitch, count, second)
    store_some(partial, to + 3 * pitch, count, second_low)


@inlined
def _quadruple(pairs, k):
    sums, pitch = pairs
    return (
        load(sums, k),
        load(sums, k + pitch),
        load(sums, k + 2 * pitch),
        load(sums, k + 3 * pitch),
    )


@inlined
def wrap(table):
    """Repeat the coefficients of the first channels at the end of each row of the table.

    They are written after the coefficients of the last channel, so that a vector of coefficients
    can be loaded even for elements that begin in one row of the array and end in the next row.
    """
    values, pitch, channels = table
    if channels >= LANES:
        for row in range(SCALE):
            store(values, row * pitch + channels, load(values, row * pitch))
    elif channels > 0:
        for k in range(LANES):
            for row in range(SCALE):
                at = row * pitch
                store_one(values, at + channels + k, load_one(values, at + k % channels))


@outlined
def finish_backward(table, dgamma, dbeta):
    """Write dgamma = s·sum_dy_xmu and dbeta = sum_dy, each rounded once."""
    values, pitch, channels = table
    for c in range(0, channels, LANES):
        scale, sums = load(values, SCALE * pitch + c), load(values, SECOND * pitch + c)
        store_some(dgamma, c, channels - c, scale * sums)
        store_some(dbeta, c, channels - c, load(values, FIRST * pitch + c))


@outlined
def finish_forward(table, results, epsilon, inverse, running):
    """Write mean and variance, each rounded once; return the first invalid channel, or -1.

    Parameters
    ----------
    table : Table
    results : (address, address)
        Mean and variance, which are written.
    epsilon : float
    inverse : bool
        Whether 1/sqrt(variance + epsilon) is written instead of the variance.
    running : (address, address, bool, float, float)
        Running mean, running variance, and whether they exist; the weight of the batch in them,
        and the factor by which the variance of the batch is multiplied first.
    """
    rows, pitch, channels = table
    mean, variance = results
    running_mean, running_variance, tracked, momentum, correction = running
    refused = -1
    for c in range(0, channels, LANES):
        count = channels - c
        average, values = load(rows, FIRST * pitch + c), load(rows, SECOND * pitch + c)
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
            # Find the first channel whose variance + epsilon is not positive. A NaN is not an
            # error, because it propagates to the results, so channels with NaN are skipped.
            while not load_one(rows, SECOND * pitch + refused) + epsilon <= 0.0:
                refused += 1
    return refused


@inlined
def _move(running, c, count, value, momentum):
    """Replace a running statistic by (1 - momentum) * running + momentum * value."""
    kept = load_some(running, c, count) * splat(1.0 - momentum)
    store_some(running, c, count, multiply_add(value, splat(momentum), kept))
