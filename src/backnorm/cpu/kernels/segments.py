"""The kernel for channels whose elements lie in contiguous runs (NCX).

The array is (outer, channels, inner), contiguous: a channel has `outer` segments of `inner`
elements, at least sixteen unless it is the only channel. Neighbouring channels are summed
together, a group at a time, so that memory is read in long runs even where segments are short.

A channel is summed chunk by chunk, a chunk being `rows` segments, or of each long segment a
piece of `length` elements. Within a chunk sums are plain vectors (gradients of 16 bits are first
added up in float32, four vectors at a time); `block` chunks at a time are
added up as pairs, and blocks are added up in order. Chunks and blocks depend on the shape alone
and a channel's sums on nothing but the channel, so they have the same bits however the work is
shared out. Terms of reproducible sums are put into `bins`, and have the same bits in any order.
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
    put_segment,
)
from backnorm.cpu.kernels.channels import combine, combine_bins, row_pitch, settle_means, solve
from backnorm.cpu.kernels.cursor import (
    arrive,
    await_second,
    claim,
    claim_next,
    finish,
    open_second,
)
from backnorm.cpu.kernels.formulas import (
    both_elements,
    elements,
    first_elements,
    in_pairs,
    prefetch_elements,
)
from backnorm.cpu.kernels.jit import inlined, outlined
from backnorm.cpu.kernels.memory import (
    aligned_head,
    clear,
    load,
    load_one,
    offset,
    prefetch,
    store,
    store_first,
    store_one,
    store_some,
    stream,
)
from backnorm.cpu.kernels.record import (
    cells_of,
    gradient_of,
    other_of,
    output_of,
    own_of,
    scratch_of,
    seen_of,
    segments_head,
    values_at,
)
from backnorm.cpu.kernels.relu import same_line
from backnorm.cpu.kernels.singles import (
    add_strip,
    add_strip_first,
    as_singles,
    both_hold,
    coefficients_for,
    holds,
    lanes_of,
    narrow_coefficients,
    ordered_for,
    recentre,
    splat_of,
)
from backnorm.cpu.kernels.stages import after, before
from backnorm.cpu.kernels.sums import (
    add_totals,
    merge_pairs,
    resume,
    suspend,
    take,
    take_first,
)
from backnorm.cpu.kernels.vector import (
    Singles,
    blend,
    high_half,
    lane,
    low_half,
    marked,
    splat,
    splat_single,
    where_finite,
)
from backnorm.cpu.record import JOINED
from backnorm.cpu.scratch import (
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

__all__ = ["run"]

_whole, _bins_own = inlined(whole), inlined(bins_own)

# Elements between what is summed, or written, and what is prefetched. Processors read such runs
# ahead, but not beyond a page of memory. Of the sums more would be of the next group of channels,
# which another thread may take.
_AHEAD_OF_SUMS, _AHEAD = 512, 1024


@outlined
def run(kind, record, index):
    """Sum every channel, solve for its coefficients, and write the output: see `record`.

    Items of the first phase are sums: of `batch` groups of channels, of one block of theirs
    unless grouped. The others write `share` elements of memory each. Partial sums are
    (blocks, 4, pitch): the pairs of every block of every channel, none if grouped; of reproducible
    sums the bins of every block: see `channels.combine_bins`.

    Returns
    -------
    int
        0, or when it has joined what `record.ended` says.
    """
    head, cells = segments_head(record), cells_of(record)
    outer, channels, inner = head.outer, head.channels, head.inner
    extents = (outer, channels, inner)
    pitch = row_pitch(channels)
    table = scratch_of(kind, head, record)
    if index == JOINED:
        return after(kind, head, table, pitch, channels)
    terms = own_of(kind, head, record, index)
    chunk = (head.rows, head.length, head.chunks, head.block)
    blocks, group, batch, share = head.blocks, head.group, head.batch, head.share
    batches = (channels + group * batch - 1) // (group * batch)
    far = _whole(group)
    x_, dy_, other_ = (
        values_at(kind, head.x),
        gradient_of(kind, head, cells),
        other_of(kind, head, cells),
    )
    seen_, out_ = seen_of(kind, head), output_of(kind, head, cells)
    epsilon, grouped, binned = head.epsilon, head.grouped != 0, head.binned != 0
    rows = 2 * (digits_of(x_) + 1)
    # What bins take comes first, where there are any.
    own = offset(terms, _bins_own(row_pitch(group), rows)) if binned else terms
    totals = offset(terms, 3 * TERMS * LANES)
    streaming = head.streaming != 0 and same_line(out_)
    running, part = own, offset(own, far * SUMS)
    sums, alone = offset(part, 4 * far), offset(part, 8 * far)
    place = offset(alone, 4 * LANES)
    pairs = offset(table, ROWS * pitch)
    before(kind, head, cells, index, table, pitch, extents, terms)
    summed, items = head.summed, head.items
    exact = (table, pitch)
    coefficients = coefficients_for(kind, table, pitch, place, channels)
    narrowed = False
    item = claim(cells, summed, items, index)
    while item < items:
        if item < summed:
            start, b = (0, item) if grouped else divmod(item, batches)
            stop_block = blocks if grouped else start + 1
            first, end_batch = b * batch * group, min(channels, (b + 1) * batch * group)
            while first < end_batch:
                stop = min(end_batch, first + group)
                if binned:
                    held, wide = totals, row_pitch(group)
                    if not grouped:
                        held, wide = offset(pairs, rows * start * pitch + first), pitch
                    span = (start, stop_block, first, stop)
                    lanes = offset(totals, rows * row_pitch(group))
                    _sum_bins(x_, dy_, extents, chunk, span, table, terms, lanes, held, wide)
                    for j in range(stop - first if grouped else 0):
                        pairs_of_bins(held, j, wide, digits_of(x_), sums, j, far)
                else:
                    clear(sums, 4 * far)
                    for block in range(start, stop_block):
                        clear(part, 4 * far)
                        summing = (block, first, stop)
                        places = (running, part, far, alone)
                        _sum_block(kind, head, x_, dy_, extents, chunk, summing, table, places)
                        for j in range(0, stop - first, LANES):
                            merge_pairs(offset(sums, j), far, offset(part, j), far)
                if grouped:
                    for j in range(0, stop - first, LANES):
                        solve(
                            dy_,
                            offset(sums, j),
                            far,
                            outer * inner,
                            table,
                            pitch,
                            first + j,
                            stop,
                            epsilon,
                        )
                    if binned:
                        settle_means(dy_, table, pitch, first, stop)
                    narrow_coefficients(head, seen_, dy_, table, pitch, first, stop, coefficients)
                    # Backwards: what was summed last is in the nearest cache.
                    for n in range(outer - 1, -1, -1):
                        i = (n * channels + first) * inner
                        span = (i, i + (stop - first) * inner, first, i + inner)
                        _write(seen_, other_, out_, span, extents, exact, coefficients, streaming)
                elif not binned:
                    for k in range(4):
                        to = offset(pairs, (4 * start + k) * pitch)
                        for j in range(0, stop - first, LANES):
                            count = stop - first - j
                            store_some(to, first + j, count, load(sums, k * far + j))
                first = stop
            if not grouped and arrive(cells, summed):
                count = outer * inner
                if binned:
                    grid = (blocks, pitch, 1, 1)
                    combine_bins(kind, head, x_, dy_, pairs, grid, count, table, pitch, channels)
                else:
                    combine(dy_, pairs, blocks, pitch, 1, 1, count, table, pitch, channels, epsilon)
                open_second(cells)
        else:
            if summed > 0:
                await_second(cells)
            if not narrowed:
                narrow_coefficients(head, seen_, dy_, table, pitch, 0, channels, coefficients)
                narrowed = True
            i = (item - summed) * share
            row, end = i // inner, min(outer * channels * inner, i + share)
            span = (i, end, row % channels, (row + 1) * inner)
            _write(seen_, other_, out_, span, extents, exact, coefficients, streaming)
        finish(cells)
        item = claim_next(cells, summed, items, index)
    return 0


def _sum_block(kind, head, x, dy, extents, chunk, span, table, places):
    """Add the block of channels that `span` says to their pairs, which are zero.

    `places` are those of running sums, of the pairs, how far apart their parts are, and scratch for
    the pairs of eight channels.
    """


@overload(_sum_block)
def _sum_block_of(kind, head, x, dy, extents, chunk, span, table, places):
    if isinstance(dy, types.NoneType) or kind.arithmetic != types.float32:
        return lambda kind, head, x, dy, extents, chunk, span, table, places: _add_block(
            _add_segment, x, dy, extents, chunk, span, table, places[0], places[1], places[2]
        )

    def in_singles(kind, head, x, dy, extents, chunk, span, table, places):
        running, sums, far, alone = places
        if head.in_float64 == 0:
            _add_block(_add_strips, x, dy, extents, chunk, span, table, running, sums, far)
        block, first, end = span
        for j in range(0, end - first, LANES):
            place = offset(sums, j)
            kept = recentre(load(table, first + j), place, far)
            for k in range(min(LANES, end - first - j)):
                if not math.isfinite(lane(kept, k)):
                    c = first + j + k
                    clear(alone, 4 * LANES)
                    _add_block_anew(x, dy, extents, chunk, (block, c, c + 1), table, running, alone)
                    for part in range(4):
                        store_one(place, part * far + k, load_one(alone, part * LANES))

    return in_singles


@outlined
def _add_block_anew(x, dy, extents, chunk, span, table, running, sums):
    _add_block(_add_segment, x, dy, extents, chunk, span, table, running, sums, LANES)


@inlined
def _add_block(add, x, dy, extents, chunk, span, table, running, sums, far):
    """Add a block of channels first .. end-1 to their pairs, each segment by `add`."""
    block, first, end = span
    outer, channels, inner = extents
    height, length, chunks, size = chunk
    pieces = (inner + length - 1) // length
    for index in range(block * size, min(chunks, (block + 1) * size)):
        row, piece = divmod(index, pieces)
        row *= height
        start = piece * length
        extent = min(length, inner - start)
        clear(running, (end - first) * SUMS)
        for n in range(row, min(outer, row + height)):
            i = (n * channels + first) * inner + start
            for c in range(first, end):
                mean = load_one(table, c)
                add(x, dy, i, i + extent, mean, running, (c - first) * SUMS)
                i += inner
        for j in range(0, end - first, LANES):
            add_totals(x, offset(running, j * SUMS), SUMS, offset(sums, j), far)


@outlined
def _sum_bins(x, dy, extents, chunk, span, table, terms, lanes, totals, wide):
    """Put blocks of channels, which `span` says, into bins: of every lane, and then into `totals`.

    Those are rows of `wide` channels.
    """
    start, stop, first, end = span
    outer, channels, inner = extents
    height, length, chunks, size = chunk
    digits = digits_of(x)
    apart = 2 * (digits + 1) * LANES
    pieces = (inner + length - 1) // length
    for k in range(end - first):
        clear_bins(offset(lanes, k * apart), LANES, LANES, digits)
    for index in range(start * size, min(chunks, stop * size)):
        row, piece = divmod(index, pieces)
        row *= height
        begin = piece * length
        extent = min(length, inner - begin)
        for n in range(row, min(outer, row + height)):
            i = (n * channels + first) * inner + begin
            for c in range(first, end):
                bins = offset(lanes, (c - first) * apart)
                put_segment(x, dy, i, i + extent, load_one(table, c), bins, terms)
                i += inner
    clear_bins(totals, wide, end - first, digits)
    for k in range(end - first):
        for of_lane in range(LANES):
            merge_bins(totals, k, wide, offset(lanes, k * apart), of_lane, LANES, digits)


@inlined
def _add_segment(x, dy, i, end, mean, running, place):
    m = splat(mean)
    s0, s1 = resume(x, running, place, LANES), resume(x, running, place + 2 * LANES, LANES)
    p0, p1 = (
        resume(x, running, place + 4 * LANES, LANES),
        resume(x, running, place + 6 * LANES, LANES),
    )
    while i + 2 * LANES <= end:
        prefetch(x, i + _AHEAD_OF_SUMS, 2 * LANES)
        prefetch(dy, i + _AHEAD_OF_SUMS, 2 * LANES)
        s0, p0 = take(x, dy, i, m, s0, p0)
        s1, p1 = take(x, dy, i + LANES, m, s1, p1)
        i += 2 * LANES
    if i + LANES <= end:
        s0, p0 = take(x, dy, i, m, s0, p0)
        i += LANES
    if i < end:
        s1, p1 = take_first(x, dy, i, end - i, m, s1, p1)
    suspend(s0, running, place, LANES)
    suspend(s1, running, place + 2 * LANES, LANES)
    suspend(p0, running, place + 4 * LANES, LANES)
    suspend(p1, running, place + 6 * LANES, LANES)


@inlined
def _add_strips(x, dy, i, end, mean, running, place):
    """Add a segment like `_add_segment`, four vectors of float32 at a time."""
    m = splat_single(mean)
    totals = (
        resume(x, running, place, LANES),
        resume(x, running, place + 2 * LANES, LANES),
        resume(x, running, place + 4 * LANES, LANES),
        resume(x, running, place + 6 * LANES, LANES),
    )
    while i + 4 * SINGLES <= end:
        prefetch(x, i + _AHEAD_OF_SUMS, 4 * SINGLES)
        prefetch(dy, i + _AHEAD_OF_SUMS, 4 * SINGLES)
        totals = add_strip(x, dy, i, SINGLES, m, totals)
        i += 4 * SINGLES
    if i < end:
        left = end - i
        counts = (left, left - SINGLES, left - 2 * SINGLES, left - 3 * SINGLES)
        totals = add_strip_first(x, dy, i, SINGLES, counts, m, totals)
    suspend(totals[0], running, place, LANES)
    suspend(totals[1], running, place + 2 * LANES, LANES)
    suspend(totals[2], running, place + 4 * LANES, LANES)
    suspend(totals[3], running, place + 6 * LANES, LANES)


@outlined
def _write(x, dy, out, span, extents, exact, coefficients, streaming):
    """Write elements of memory, whatever channels they belong to.

    `span` is the first element, the end, the channel of the first, and where its segment ends. A
    vector that reaches from one channel into the next takes its coefficients from both, so that
    whole aligned vectors can be written however long the segments are.
    """
    _, channels, inner = extents
    lanes = lanes_of(coefficients[0])
    i, end, c, border = span
    if streaming:
        head = min(aligned_head(out, i, lanes), end - i)
        _write_across(x, dy, out, i, head, border - i, c, channels, exact, coefficients, False)
        i += head
    while i < end:
        if i >= border:
            border += inner
            c = _next(c, channels)
        used = ordered_for(out, _coefficients(coefficients, c))
        stop = min(border, end) - lanes
        while in_pairs(dy, coefficients[0]) and i <= stop - lanes:
            prefetch_elements(x, dy, out, i + _AHEAD, 2 * lanes, streaming)
            left, right = both_elements(x, dy, i, used, used)
            if not both_hold(x, dy, out, left, right):
                _write_anew(x, dy, out, i, lanes, lanes, c, channels, exact, as_singles(left))
                more = i + lanes
                _write_anew(x, dy, out, more, lanes, lanes, c, channels, exact, as_singles(right))
            elif streaming:
                stream(out, i, left)
                stream(out, i + lanes, right)
            else:
                store(out, i, left)
                store(out, i + lanes, right)
            i += 2 * lanes
        while i <= stop:
            value = elements(x, dy, i, used[0], used[1], used[2], used[3])
            if not holds(value, lanes):
                _write_anew(x, dy, out, i, lanes, lanes, c, channels, exact, as_singles(value))
            elif streaming:
                stream(out, i, value)
            else:
                store(out, i, value)
            i += lanes
        if i < border and i < end:
            count = min(lanes, end - i)
            left = border - i
            _write_across(x, dy, out, i, count, left, c, channels, exact, coefficients, streaming)
            i += count


@inlined
def _write_across(x, dy, out, i, count, left, c, channels, exact, coefficients, streaming):
    """Write `count` elements: the first `left` of channel c, the others of the next."""
    lanes = lanes_of(coefficients[0])
    mean, shift, slope, gain = _of_two(coefficients, left, c, channels)
    if count < lanes:
        value = first_elements(x, dy, i, count, mean, shift, slope, gain)
    else:
        value = elements(x, dy, i, mean, shift, slope, gain)
    if not holds(value, count):
        _write_anew(x, dy, out, i, count, left, c, channels, exact, value)
    elif count < lanes:
        store_first(out, i, count, value)
    elif streaming:
        stream(out, i, value)
    else:
        store(out, i, value)


def _write_anew(x, dy, out, i, count, left, c, channels, exact, value):
    """Write `count` elements of which some do not hold: those as float64 has them."""


@overload(_write_anew)
def _write_anew_of(x, dy, out, i, count, left, c, channels, exact, value):
    if value != Singles:
        return lambda x, dy, out, i, count, left, c, channels, exact, value: None
    return lambda x, dy, out, i, count, left, c, channels, exact, value: _write_halves(
        x, dy, out, i, count, left, c, channels, exact, value
    )


@outlined
def _write_halves(x, dy, out, i, count, left, c, channels, exact, value):
    value = marked(value)
    _write_half(x, dy, out, i, count, left, c, channels, exact, low_half(value))
    more = count - LANES
    _write_half(x, dy, out, i + LANES, more, left - LANES, c, channels, exact, high_half(value))


@inlined
def _write_half(x, dy, out, i, count, left, c, channels, exact, value):
    mean, shift, slope, gain = _of_two(exact, left, c, channels)
    anew = first_elements(x, dy, i, count, mean, shift, slope, gain)
    store_first(out, i, count, where_finite(value, value, anew))


@inlined
def _next(c, channels):
    return c + 1 if c + 1 < channels else 0


@inlined
def _of_two(coefficients, left, c, channels):
    """Return coefficients of channel c in the first `left` lanes, of the next in the others."""
    mean, shift, slope, gain = _coefficients(coefficients, c)
    mean1, shift1, slope1, gain1 = _coefficients(coefficients, _next(c, channels))
    return (
        blend(left, mean, mean1),
        blend(left, shift, shift1),
        blend(left, slope, slope1),
        blend(left, gain, gain1),
    )


@inlined
def _coefficients(coefficients, c):
    values, pitch = coefficients
    return (
        splat_of(values, MEAN * pitch + c),
        splat_of(values, SHIFT * pitch + c),
        splat_of(values, SLOPE * pitch + c),
        splat_of(values, GAIN * pitch + c),
    )
