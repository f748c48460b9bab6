"""The kernel for channels whose elements are in contiguous runs (NCX).

The array is contiguous and has the shape (outer, channels, inner). So a channel has `outer`
segments, each of `inner` elements. `inner` is at least sixteen, or any number if there is only one
channel. The sums of several neighbouring channels (a group) are computed together, with separate
sums for each channel. So memory is read in long runs even where segments are short.

A channel is summed chunk by chunk. A chunk is `rows` segments, or a piece of `length` elements of a
long segment. Each chunk has its own running sums, which the module `sums` describes. In a backward
pass with float32 arithmetic, the terms of four vectors of elements are first added up in float32,
and this partial sum is added to a running sum. A block consists of `block` chunks, one after the
other. The sums of a block's chunks are added up as pairs of float64 (compensated sums), and then
the sums of the blocks are added up in the order of the blocks. Chunks and blocks depend only on the
shape, and channels are summed independently of each other. So sums have the same bits however the
work is divided among threads. If sums are reproducible, their terms are put into bins (see `bins`),
and a sum has the same bits for any order of its terms.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from numba import types

from backnorm_kernels.kernels.bins import (
    clear_bins,
    digits_of,
    merge_bins,
    pairs_of_bins,
    put_segment,
)
from backnorm_kernels.kernels.channels import combine, combine_bins, row_pitch, settle_means, solve
from backnorm_kernels.kernels.epilogue import is_forward, same_line
from backnorm_kernels.kernels.float32 import (
    add_strip,
    add_strip_first,
    coefficients_for,
    in_pairs,
    lanes_of,
    ordered_for,
    recentre,
    rows_for,
    splat_of,
)
from backnorm_kernels.kernels.formulas import both_elements, elements, prefetch_elements
from backnorm_kernels.kernels.jit import by_type, inlined, integer, outlined, rare
from backnorm_kernels.kernels.memory import (
    aligned_head,
    clear,
    load,
    load_one,
    offset,
    prefetch,
    store_one,
    store_some,
)
from backnorm_kernels.kernels.operands import Bins, Operands, Output, Pairs, Rows, Sums
from backnorm_kernels.kernels.record import (
    dy_of,
    output_of,
    segments_head,
    values_at,
)
from backnorm_kernels.kernels.skeleton import Steps, kernel
from backnorm_kernels.kernels.sums import add_totals, merge_pairs, resume, suspend, take, take_first
from backnorm_kernels.kernels.vector import blend, lane, splat, splat_single
from backnorm_kernels.kernels.writing import in_each_case, sum_each_case, writers
from backnorm_kernels.scratch import (
    GAIN,
    LANES,
    MEAN,
    ROWS,
    SHIFT,
    SINGLES,
    SLOPE,
    SUMS,
    TERMS,
    bins_own,
    whole,
)

_whole, _bins_own = inlined(whole), inlined(bins_own)

# Memory is prefetched this number of elements ahead of the elements that are being computed.
# Processors prefetch long runs themselves, but never beyond the end of a page. Loops that write the
# output use `_AHEAD`. Loops that sum channels use the shorter distance `_AHEAD_OF_SUMS`: a larger
# distance would reach elements of the next group of channels, which another thread may sum.
_AHEAD_OF_SUMS, _AHEAD = 512, 1024


class _Scratch(NamedTuple):
    """The parts of a participant's scratch memory.

    Attributes
    ----------
    terms
        Buffers of terms of reproducible sums.
    totals : Bins
        The bins of the channels of a group, followed by the bins of every lane of each channel.
    running
        The running sums of a group.
    part, sums : Pairs
        The pairs of a group: those of a block, and those of all blocks.
    alone : Pairs
        The pairs of a channel that is summed again, in float64.
    """

    terms: Any
    totals: Any
    running: Any
    part: Any
    sums: Any
    alone: Any


@inlined
def _extents(head):
    return head.outer, head.channels, head.inner


@inlined
def _sums_of(kind, head, cells, table, own):
    """Return what a participant needs to compute sums: the operands, and the memory to write to.

    Partial sums have the shape (blocks, 4, pitch): two pairs for every block and channel. If the
    sums are reproducible, the bins of every block are stored instead, in the shape that
    `channels.combine_bins` describes. The grouped schedule has no partial sums, because an item
    sums whole channels.
    """
    x, pitch, bins_pitch = values_at(kind, head.x), _whole(head.group), row_pitch(head.group)
    # If the sums are reproducible, the participant's memory begins with the buffers of terms,
    # followed by the bins.
    size = _bins_own(bins_pitch, 2 * (digits_of(x) + 1))
    running = offset(own, size) if head.binned != 0 else own
    part = offset(running, pitch * SUMS)
    scratch = _Scratch(
        own,
        Bins(offset(own, 3 * TERMS * LANES), bins_pitch),
        running,
        Pairs(part, pitch),
        Pairs(offset(part, 4 * pitch), pitch),
        Pairs(offset(part, 8 * pitch), integer(LANES)),
    )
    partial = Pairs(offset(table.values, ROWS * table.pitch), table.pitch)
    return Sums(Operands(x, dy_of(kind, cells)), table, scratch, partial)


@inlined
def _output_of(kind, head, cells, sums):
    out, channels = output_of(kind, cells), sums.table.channels
    exact = Rows(sums.table.values, sums.table.pitch)
    rows = rows_for(kind, exact, offset(sums.scratch.alone.values, 4 * LANES), channels)
    streaming = head.streaming != 0 and same_line(out)
    x, dy, frozen = sums.operands.x, sums.operands.dy, head.frozen != 0
    return Output(x, dy, out, exact, rows, channels, streaming, frozen)


@inlined
def _sum_item(kind, head, sums, output, item):
    """Sum one block of each channel in `batch` groups of channels.

    If the schedule is grouped, sum all blocks of these channels instead, and write the output of
    these channels.
    """
    group, batch = head.group, head.batch
    batches = (head.channels + group * batch - 1) // (group * batch)
    grouped = head.grouped != 0
    start, b = (0, item) if grouped else divmod(item, batches)
    stop = head.blocks if grouped else start + 1
    first, end = b * batch * group, min(head.channels, (b + 1) * batch * group)
    while first < end:
        span = (start, stop, first, min(end, first + group))
        _sum_group(kind, head, sums, span)
        if grouped:
            _solve_group(kind, head, sums.table, sums.scratch.sums, span)
            _write_group(head, output, span)
        first += group


@outlined
def _sum_group(kind, head, sums, span):
    """Add up the elements of a range of blocks, for a group of channels.

    `span` has four numbers: the first block, the number after the last block, the first channel,
    and the number after the last channel.
    """
    operands, table, scratch, partial = sums
    start, stop, first, end = span
    digits = digits_of(operands.x)
    if head.binned != 0:
        bins = scratch.totals
        if head.grouped == 0:
            at = 2 * (digits + 1) * start * table.pitch + first
            bins = Bins(offset(partial.values, at), table.pitch)
        _sum_bins(head, operands, table.values, scratch, span, bins)
        for j in range(end - first if head.grouped != 0 else 0):
            pairs_of_bins(bins, j, digits, scratch.sums, j)
        return
    values, pitch = scratch.sums
    clear(values, 4 * pitch)
    for block in range(start, stop):
        clear(scratch.part.values, 4 * pitch)
        task = (kind, head, (block, first, end), table.values, scratch)
        sum_each_case(_sum_block, operands, task)
        for j in range(0, end - first, LANES):
            merge_pairs(scratch.sums, j, scratch.part, j)
    if head.grouped == 0:
        for k in range(4):
            to = offset(partial.values, (4 * start + k) * table.pitch)
            for j in range(0, end - first, LANES):
                store_some(to, first + j, end - first - j, load(values, k * pitch + j))


@outlined
def _solve_group(kind, head, table, sums, span):
    """From the sums of a group of channels, compute the coefficients and per-channel results."""
    _, _, first, end = span
    for j in range(0, end - first, LANES):
        count = end - first - j
        solve(kind, sums, j, head.outer * head.inner, table, first + j, count, head.epsilon)
    if head.binned != 0:
        settle_means(kind, table, first, end)


@inlined
def _write_group(head, output, span):
    """Write the output of a group of channels."""
    outer, channels, inner = _extents(head)
    _, _, first, end = span
    coefficients_for(output, (first, end), head.in_float64 != 0)
    # The samples are written in reverse order, because the elements that were summed last are in
    # the nearest cache.
    for n in range(outer - 1, -1, -1):
        i = (n * channels + first) * inner
        _write(output, (i, i + (end - first) * inner, first, i + inner), inner)


@inlined
def _combine(kind, head, sums):
    one = integer(1)
    count, grid = head.outer * head.inner, (head.blocks, one, one)
    if head.binned != 0:
        digits, bins = digits_of(sums.operands.x), Bins(sums.pairs.values, sums.pairs.pitch)
        combine_bins(kind, head, digits, bins, grid, count, sums.table)
    else:
        combine(kind, head, sums.pairs, grid, count, sums.table)


@inlined
def _prepare(head, table, output):
    coefficients_for(output, (integer(0), table.channels), head.in_float64 != 0)


@inlined
def _write_item(head, output, item):
    """Write an item: `head.share` contiguous elements, or fewer at the end of the array."""
    outer, channels, inner = _extents(head)
    i = item * head.share
    row, end = i // inner, min(outer * channels * inner, i + head.share)
    _write(output, (i, end, row % channels, (row + 1) * inner), inner)


@by_type
def _sum_block(operands, task):
    """For each of several channels, add up the channel's elements in one block. The sums are added
    to the pairs in `scratch.part`, which must be zero before the call.

    `task` has the kind, the head, `span`, `means` and `scratch`. `span` is a tuple: the number of
    the block, its first channel, and the channel after its last channel.
    """

    def in_doubles(operands, task):
        _, head, span, means, scratch = task
        _add_block(_add_segment, head, operands, span, means, scratch.running, scratch.part)

    def in_singles(operands, task):
        _, head, span, means, scratch = task
        running, pairs, alone = scratch.running, scratch.part, scratch.alone
        if head.in_float64 == 0:
            _add_block(_add_strips, head, operands, span, means, running, pairs)
        block, first, end = span
        for j in range(0, end - first, LANES):
            kept = recentre(load(means, first + j), pairs, j)
            for k in range(min(LANES, end - first - j)):
                if not math.isfinite(lane(kept, k)):
                    c = first + j + k
                    clear(alone.values, 4 * LANES)
                    _add_block_again(head, operands, (block, c, c + 1), means, running, alone)
                    for part in range(4):
                        sums = load_one(alone.values, part * LANES)
                        store_one(pairs.values, j + part * pairs.pitch + k, sums)

    wide = is_forward(operands[1]) or task[0].arithmetic != types.float32
    return in_doubles if wide else in_singles


@rare
def _add_block_again(head, operands, span, means, running, pairs):
    _add_block(_add_segment, head, operands, span, means, running, pairs)


@inlined
def _add_block(add, head, operands, span, means, running, pairs):
    """Add one block of several channels to the compensated sums (pairs) of these channels. The
    argument `add` is the function that sums one segment.
    """
    block, first, end = span
    outer, channels, inner = _extents(head)
    height, length, size = head.rows, head.length, head.block
    pieces = (inner + length - 1) // length
    for index in range(block * size, min(head.chunks, (block + 1) * size)):
        row, piece = divmod(index, pieces)
        row *= height
        start = piece * length
        extent = min(length, inner - start)
        clear(running, (end - first) * SUMS)
        for n in range(row, min(outer, row + height)):
            i = (n * channels + first) * inner + start
            for c in range(first, end):
                add(operands, i, i + extent, load_one(means, c), running, (c - first) * SUMS)
                i += inner
        for j in range(0, end - first, LANES):
            sums = Pairs(offset(pairs.values, j), pairs.pitch)
            add_totals(operands.x, offset(running, j * SUMS), SUMS, sums)


@outlined
def _sum_bins(head, operands, means, scratch, span, totals):
    """Put the terms of blocks into bins. At first, each channel has separate bins for every lane of
    a vector. At the end, the bins of a channel's lanes are added up in `totals`.
    """
    start, stop, first, end = span
    outer, channels, inner = _extents(head)
    height, length, size = head.rows, head.length, head.block
    digits = digits_of(operands.x)
    rows = 2 * (digits + 1)
    channel_pitch = rows * LANES
    lanes = offset(scratch.totals.values, rows * scratch.totals.pitch)
    pieces = (inner + length - 1) // length
    for k in range(end - first):
        clear_bins(Bins(offset(lanes, k * channel_pitch), integer(LANES)), LANES, digits)
    for index in range(start * size, min(head.chunks, stop * size)):
        row, piece = divmod(index, pieces)
        row *= height
        begin = piece * length
        extent = min(length, inner - begin)
        for n in range(row, min(outer, row + height)):
            i = (n * channels + first) * inner + begin
            for c in range(first, end):
                bins = Bins(offset(lanes, (c - first) * channel_pitch), integer(LANES))
                put_segment(operands, i, i + extent, load_one(means, c), bins, scratch.terms)
                i += inner
    clear_bins(totals, end - first, digits)
    for k in range(end - first):
        bins = Bins(offset(lanes, k * channel_pitch), integer(LANES))
        for of_lane in range(LANES):
            merge_bins(totals, k, bins, of_lane, digits)


@inlined
def _add_segment(operands, i, end, mean, running, at):
    x, dy = operands
    m = splat(mean)
    s0, s1 = resume(x, running, at, LANES), resume(x, running, at + 2 * LANES, LANES)
    p0, p1 = (
        resume(x, running, at + 4 * LANES, LANES),
        resume(x, running, at + 6 * LANES, LANES),
    )
    while i + 2 * LANES <= end:
        prefetch(x, i + _AHEAD_OF_SUMS, 2 * LANES)
        prefetch(dy, i + _AHEAD_OF_SUMS, 2 * LANES)
        s0, p0 = take(operands, i, m, s0, p0)
        s1, p1 = take(operands, i + LANES, m, s1, p1)
        i += 2 * LANES
    if i + LANES <= end:
        s0, p0 = take(operands, i, m, s0, p0)
        i += LANES
    if i < end:
        s1, p1 = take_first(operands, i, end - i, m, (s1, p1))
    suspend(s0, running, at, LANES)
    suspend(s1, running, at + 2 * LANES, LANES)
    suspend(p0, running, at + 4 * LANES, LANES)
    suspend(p1, running, at + 6 * LANES, LANES)


@inlined
def _add_strips(operands, i, end, mean, running, at):
    """Do what `_add_segment` does, but with four vectors of float32 at a time."""
    x, dy = operands
    m = splat_single(mean)
    totals = (
        resume(x, running, at, LANES),
        resume(x, running, at + 2 * LANES, LANES),
        resume(x, running, at + 4 * LANES, LANES),
        resume(x, running, at + 6 * LANES, LANES),
    )
    while i + 4 * SINGLES <= end:
        prefetch(x, i + _AHEAD_OF_SUMS, 4 * SINGLES)
        prefetch(dy, i + _AHEAD_OF_SUMS, 4 * SINGLES)
        totals = add_strip(operands, i, SINGLES, m, totals)
        i += 4 * SINGLES
    if i < end:
        left = end - i
        counts = (left, left - SINGLES, left - 2 * SINGLES, left - 3 * SINGLES)
        totals = add_strip_first(operands, i, SINGLES, counts, m, totals)
    suspend(totals[0], running, at, LANES)
    suspend(totals[1], running, at + 2 * LANES, LANES)
    suspend(totals[2], running, at + 4 * LANES, LANES)
    suspend(totals[3], running, at + 6 * LANES, LANES)


@inlined
def _next(c, channels):
    return c + 1 if c + 1 < channels else 0


@inlined
def _coefficients(rows, c):
    values, pitch = rows
    return (
        splat_of(values, MEAN * pitch + c),
        splat_of(values, SHIFT * pitch + c),
        splat_of(values, SLOPE * pitch + c),
        splat_of(values, GAIN * pitch + c),
    )


@inlined
def _of_two(rows, left, c, channels):
    """Return vectors of coefficients: the first `left` lanes belong to channel c, and the other
    lanes to the next channel.
    """
    coefficients, other = _coefficients(rows, c), _coefficients(rows, _next(c, channels))
    return (
        blend(left, coefficients[0], other[0]),
        blend(left, coefficients[1], other[1]),
        blend(left, coefficients[2], other[2]),
        blend(left, coefficients[3], other[3]),
    )


@inlined
def _exact_at(output, position, first):
    # In this geometry, `position` (see `writing`) has two numbers: the channel of the vector's
    # first element, and how many elements that channel's segment has from this element on.
    return _of_two(output.exact, position[1] - first, position[0], output.period)


_write_two, _write_one, _write_first = writers(_exact_at)


@outlined
def _write(output, span, inner):
    """Write contiguous elements: see `_write_span`."""
    in_each_case(_write_span, output, (span, inner))


@inlined
def _write_span(output, task):
    """Write contiguous elements, which may belong to several channels.

    `span` has four numbers: the index of the first element, the index after the last element, the
    channel of the first element, and the index at which that channel's segment ends. A vector that
    extends from one channel to the next is computed with the coefficients of both channels. So
    whole aligned vectors can be written for segments of any length.
    """
    _, _, out, _, rows, channels, streaming, _ = output
    span, inner = task
    lanes = lanes_of(rows.values)
    i, end, c, border = span
    if streaming:
        head = min(aligned_head(out, i, lanes), end - i)
        _write_across(output, i, head, border - i, c, streaming)
        i += head
    while i < end:
        if i >= border:
            border += inner
            c = _next(c, channels)
        coefficients = ordered_for(out, _coefficients(rows, c))
        stop = min(border, end) - lanes
        while in_pairs(rows.values) and i <= stop - lanes:
            prefetch_elements(output, i + _AHEAD, 2 * lanes, streaming)
            position = (c, lanes)
            _write_two(
                output,
                i,
                both_elements(output, i, coefficients, coefficients),
                (position, position),
                streaming,
            )
            i += 2 * lanes
        while i <= stop:
            _write_one(output, i, (c, lanes), elements(output, i, None, coefficients), streaming)
            i += lanes
        if i < border and i < end:
            count = min(lanes, end - i)
            _write_across(output, i, count, border - i, c, streaming)
            i += count


@inlined
def _write_across(output, i, count, left, c, streaming):
    """Write `count` elements: the first `left` are of channel c, the others of the next channel."""
    coefficients = _of_two(output.rows, left, c, output.period)
    if count < lanes_of(output.rows.values):
        _write_first(output, i, count, (c, left), coefficients)
    else:
        _write_one(output, i, (c, left), elements(output, i, None, coefficients), streaming)


#: The kernel.
run = kernel(
    Steps(
        segments_head,
        _extents,
        _sums_of,
        _output_of,
        _sum_item,
        _combine,
        _prepare,
        _write_item,
    )
)
