"""Kernels for channels whose elements lie in contiguous runs (NCX).

The array is (outer, channels, inner), contiguous: a channel has `outer` segments of `inner`
elements, at least eight unless it is the only channel. Neighbouring channels are summed
together, a group at a time, so that memory is read in long runs even where segments are short.

A channel is summed chunk by chunk, a chunk being `rows` segments, or of each long segment a
piece of `length` elements. Within a chunk sums are plain vectors; `block` chunks at a time are
added up as pairs, and blocks are added up in order. Chunks and blocks depend on the shape alone
and a channel's sums on nothing but the channel, so they have the same bits however the work is
shared out.
"""

from __future__ import annotations

from backnorm.kernels.cpu.channels import add_pairs, quadruple, solve
from backnorm.kernels.cpu.formulas import elements, first_elements
from backnorm.kernels.cpu.jit import inlined, kernel
from backnorm.kernels.cpu.memory import (
    address,
    aligned_head,
    clear,
    keep,
    load_one,
    scratch,
    store,
    store_first,
    stream,
)
from backnorm.kernels.cpu.sums import resume, suspend, take, take_first, total
from backnorm.kernels.cpu.threads import claim, finish
from backnorm.kernels.cpu.vector import LANES, blend, splat

__all__ = ["apply", "fused", "reduce"]

# Running sums of a channel: two of dy and two of the product, to hide the latency of additions,
# and places for their low parts.
_SUMS = 8 * LANES


@kernel
def reduce(x, dy, extents, chunk, group, channel, partial, cursor, items):
    """Sum every channel: partial[b, :, c] are the pairs of block b of channel c.

    Parameters
    ----------
    x : array
    dy : array or None
        None: sums of x - pivot and its square.
    extents : (outer, channels, inner)
    chunk : (rows, length, chunks, block)
    group : int
        Channels of an item.
    channel : float64 array (4, channels)
        Row 0: the mean, or the pivot if dy is None.
    partial : float64 array (blocks, 4, channels)
    """
    channels = extents[1]
    groups = (channels + group - 1) // group
    memory = scratch(group * (_SUMS + 4))
    running, sums = address(memory), address(memory[group * _SUMS :])
    x_, dy_, means = address(x), address(dy), address(channel)
    last = False
    item = claim(cursor)
    while item < items:
        block, g = divmod(item, groups)
        first, end = g * group, min(channels, (g + 1) * group)
        clear(sums, 4 * group)
        _add_block(x_, dy_, extents, chunk, block, first, end, means, running, sums, group)
        for part in range(4):
            for c in range(first, end):
                partial[block, part, c] = load_one(sums, part * group + c - first)
        last = finish(cursor, items)
        item = claim(cursor)
    keep(memory)
    return last


@kernel
def apply(x, dy, out, extents, share, coefficients, streaming, cursor, items):
    """Write the output, `share` elements of memory an item.

    coefficients : float64 array (4, channels), rows mean, shift, slope, gain.
    """
    outer, channels, inner = extents
    size = outer * channels * inner
    x_, dy_, out_, table = address(x), address(dy), address(out), address(coefficients)
    last = False
    item = claim(cursor)
    while item < items:
        # Backwards: the end is what the reduction left in the cache.
        start = (items - 1 - item) * share
        stop = min(size, start + share)
        _write(x_, dy_, out_, start, stop, channels, inner, table, streaming)
        last = finish(cursor, items)
        item = claim(cursor)
    return last


@kernel
def fused(
    x,
    dy,
    out,
    extents,
    chunk,
    group,
    channel,
    coefficients,
    result,
    epsilon,
    streaming,
    cursor,
    items,
):
    """Sum a group of channels and write its output while it is in the cache, a group an item."""
    outer, channels, inner = extents
    blocks = (chunk[2] + chunk[3] - 1) // chunk[3]
    memory = scratch(group * (_SUMS + 8))
    running, part = address(memory), address(memory[group * _SUMS :])
    sums = address(memory[group * (_SUMS + 4) :])
    x_, dy_, out_ = address(x), address(dy), address(out)
    given, table, results = address(channel), address(coefficients), address(result)
    last = False
    g = claim(cursor)
    while g < items:
        first, end = g * group, min(channels, (g + 1) * group)
        clear(sums, 4 * group)
        for block in range(blocks):
            clear(part, 4 * group)
            _add_block(x_, dy_, extents, chunk, block, first, end, given, running, part, group)
            for j in range(end - first):
                add_pairs(sums, j, group, quadruple(part, j, group))
        for j in range(end - first):
            pairs = quadruple(sums, j, group)
            solve(dy_, pairs, outer * inner, given, first + j, channels, epsilon, table, results)
        for n in range(outer):
            start = (n * channels + first) * inner
            stop = (n * channels + end) * inner
            _write(x_, dy_, out_, start, stop, channels, inner, table, streaming)
        last = finish(cursor, items)
        g = claim(cursor)
    keep(memory)
    return last


@inlined
def _add_block(x, dy, extents, chunk, block, first, end, means, running, sums, group):
    """Add a block of channels first .. end-1 to their pairs."""
    outer, channels, inner = extents
    rows, length, chunks, size = chunk
    pieces = (inner + length - 1) // length
    for index in range(block * size, min(chunks, (block + 1) * size)):
        row, piece = divmod(index, pieces)
        row *= rows
        offset = piece * length
        extent = min(length, inner - offset)
        clear(running, (end - first) * _SUMS)
        for n in range(row, min(outer, row + rows)):
            start = (n * channels + first) * inner + offset
            for c in range(first, end):
                mean = load_one(means, c)
                _add_segment(x, dy, start, start + extent, mean, running, (c - first) * _SUMS)
                start += inner
        for j in range(end - first):
            add_pairs(sums, j, group, _chunk_total(x, running, j * _SUMS))


@inlined
def _add_segment(x, dy, i, end, mean, running, place):
    m = splat(mean)
    s0, s1, p0, p1 = _resume_all(x, running, place)
    while i + 2 * LANES <= end:
        s0, p0 = take(x, dy, i, m, s0, p0)
        s1, p1 = take(x, dy, i + LANES, m, s1, p1)
        i += 2 * LANES
    if i + LANES <= end:
        s0, p0 = take(x, dy, i, m, s0, p0)
        i += LANES
    if i < end:
        s1, p1 = take_first(x, dy, i, end - i, m, s1, p1)
    suspend(s0, running, place, place + LANES)
    suspend(s1, running, place + 2 * LANES, place + 3 * LANES)
    suspend(p0, running, place + 4 * LANES, place + 5 * LANES)
    suspend(p1, running, place + 6 * LANES, place + 7 * LANES)


@inlined
def _chunk_total(x, running, place):
    s0, s1, p0, p1 = _resume_all(x, running, place)
    return total(s0, s1) + total(p0, p1)


@inlined
def _resume_all(x, running, place):
    return (
        resume(x, running, place, place + LANES),
        resume(x, running, place + 2 * LANES, place + 3 * LANES),
        resume(x, running, place + 4 * LANES, place + 5 * LANES),
        resume(x, running, place + 6 * LANES, place + 7 * LANES),
    )


@inlined
def _write(x, dy, out, i, end, channels, inner, coefficients, streaming):
    """Write elements i .. end-1 of memory, whatever channels they belong to.

    A vector that reaches from one channel into the next takes its coefficients from both, so
    that whole aligned vectors can be written however long the segments are.
    """
    c = (i // inner) % channels
    border = (i // inner + 1) * inner
    if streaming:
        head = min(aligned_head(out, i, LANES), end - i)
        _write_across(x, dy, out, i, head, border - i, c, channels, coefficients, False)
        i += head
    while i < end:
        if i >= border:
            border += inner
            c = _next(c, channels)
        mean, shift, slope, gain = _coefficients(coefficients, c, channels)
        stop = min(border, end) - LANES
        if streaming:
            while i <= stop:
                stream(out, i, elements(x, dy, i, mean, shift, slope, gain))
                i += LANES
        else:
            while i <= stop:
                store(out, i, elements(x, dy, i, mean, shift, slope, gain))
                i += LANES
        if i < border and i < end:
            count = min(LANES, end - i)
            _write_across(x, dy, out, i, count, border - i, c, channels, coefficients, streaming)
            i += count


@inlined
def _write_across(x, dy, out, i, count, left, c, channels, coefficients, streaming):
    """Write `count` elements: the first `left` of channel c, the others of the next."""
    mean, shift, slope, gain = _coefficients(coefficients, c, channels)
    mean1, shift1, slope1, gain1 = _coefficients(coefficients, _next(c, channels), channels)
    mean, shift = blend(left, mean, mean1), blend(left, shift, shift1)
    slope, gain = blend(left, slope, slope1), blend(left, gain, gain1)
    if count < LANES:
        value = first_elements(x, dy, i, count, mean, shift, slope, gain)
        store_first(out, i, count, value)
    elif streaming:
        stream(out, i, elements(x, dy, i, mean, shift, slope, gain))
    else:
        store(out, i, elements(x, dy, i, mean, shift, slope, gain))


@inlined
def _next(c, channels):
    return c + 1 if c + 1 < channels else 0


@inlined
def _coefficients(coefficients, c, channels):
    return (
        splat(load_one(coefficients, c)),
        splat(load_one(coefficients, c + channels)),
        splat(load_one(coefficients, c + 2 * channels)),
        splat(load_one(coefficients, c + 3 * channels)),
    )
