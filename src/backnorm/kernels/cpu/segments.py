"""The kernel for channels whose elements lie in contiguous runs (NCX).

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

from backnorm.kernels.cpu.channels import GAIN, MEAN, ROWS, SHIFT, SLOPE, combine, solve
from backnorm.kernels.cpu.formulas import elements, first_elements
from backnorm.kernels.cpu.jit import inlined, kernel
from backnorm.kernels.cpu.memory import (
    address,
    aligned_head,
    clear,
    keep,
    load,
    load_one,
    offset,
    scratch,
    store,
    store_first,
    store_some,
    stream,
)
from backnorm.kernels.cpu.sums import (
    add_totals,
    merge_pairs,
    resume,
    suspend,
    take,
    take_first,
)
from backnorm.kernels.cpu.threads import (
    arrive,
    await_second,
    claim,
    enter,
    finish,
    leave,
    open_second,
)
from backnorm.kernels.cpu.vector import LANES, blend, splat

__all__ = ["run"]

# Running sums of a channel: two of dy and two of the product, to hide the latency of additions,
# and places for their low parts.
_SUMS = 8 * LANES


@kernel
def run(
    x,
    dy,
    seen,
    out,
    geometry,
    table,
    partial,
    epsilon,
    streaming,
    fused,
    cursor,
    summed,
    items,
    index,
):
    """Sum every channel, solve for its coefficients, and write the output.

    Parameters
    ----------
    x : array
    dy : array or None
        None: sums of x - pivot and its square.
    seen : array or None
        x, or None where the output does not depend on it.
    out : array
    geometry : int64 array
        outer, channels, inner, rows, length, chunks, block, blocks, group, batch, share.
    table : float64 array
        See `channels`.
    partial : float64 array
        (blocks, 4, step): the pairs of every block of every channel, unless fused.
    epsilon : float
        Used by the forward pass.
    streaming : bool
        Whether the output is written past the caches.
    fused : bool
        A group's output is written while the group is in the cache.
    summed : int
        The first so many items are sums: of `batch` groups of channels, of one block of theirs
        unless fused. The others write `share` elements of memory each.
    """
    rung = enter(cursor)
    outer, channels, inner = geometry[0], geometry[1], geometry[2]
    extents = (outer, channels, inner)
    chunk = (geometry[3], geometry[4], geometry[5], geometry[6])
    blocks, group, batch, share = geometry[7], geometry[8], geometry[9], geometry[10]
    batches = (channels + group * batch - 1) // (group * batch)
    far = _whole(group)
    step = table.shape[0] // ROWS
    memory = scratch(far * (_SUMS + 8))
    running, part = address(memory), address(memory[far * _SUMS :])
    sums = address(memory[far * (_SUMS + 4) :])
    x_, dy_, seen_, out_ = address(x), address(dy), address(seen), address(out)
    rows, pairs = address(table), address(partial)
    last = False
    item = claim(cursor, summed, items, index)
    while item < items:
        if item < summed:
            begin, b = (0, item) if fused else divmod(item, batches)
            stop_block = blocks if fused else begin + 1
            first, end_batch = b * batch * group, min(channels, (b + 1) * batch * group)
            while first < end_batch:
                end = min(end_batch, first + group)
                clear(sums, 4 * far)
                for block in range(begin, stop_block):
                    clear(part, 4 * far)
                    _add_block(x_, dy_, extents, chunk, block, first, end, rows, running, part, far)
                    for j in range(0, end - first, LANES):
                        merge_pairs(offset(sums, j), far, offset(part, j), far)
                if fused:
                    for j in range(0, end - first, LANES):
                        place, c = offset(sums, j), first + j
                        solve(dy_, place, far, outer * inner, rows, step, c, end, epsilon)
                    for n in range(outer):
                        start, stop = (n * channels + first) * inner, (n * channels + end) * inner
                        _write(
                            seen_, dy_, out_, start, stop, channels, inner, rows, step, streaming
                        )
                else:
                    for k in range(4):
                        place = offset(pairs, (4 * begin + k) * step)
                        for j in range(0, end - first, LANES):
                            count = end - first - j
                            store_some(place, first + j, count, load(sums, k * far + j))
                first = end
            if not fused and arrive(cursor, summed):
                count = outer * inner
                combine(dy_, pairs, blocks, step, 1, 1, count, rows, step, channels, epsilon)
                open_second(cursor)
        else:
            if summed > 0:
                await_second(cursor)
            start = (item - summed) * share
            stop = min(outer * channels * inner, start + share)
            _write(seen_, dy_, out_, start, stop, channels, inner, rows, step, streaming)
        last = finish(cursor, items)
        item = claim(cursor, summed, items, index)
    keep(memory)
    return leave(cursor, items, index, rung, last)


@inlined
def _whole(count):
    return (count + LANES - 1) // LANES * LANES


@inlined
def _add_block(x, dy, extents, chunk, block, first, end, rows, running, sums, far):
    """Add a block of channels first .. end-1 to their pairs."""
    outer, channels, inner = extents
    height, length, chunks, size = chunk
    pieces = (inner + length - 1) // length
    for index in range(block * size, min(chunks, (block + 1) * size)):
        row, piece = divmod(index, pieces)
        row *= height
        start = piece * length
        extent = min(length, inner - start)
        clear(running, (end - first) * _SUMS)
        for n in range(row, min(outer, row + height)):
            i = (n * channels + first) * inner + start
            for c in range(first, end):
                mean = load_one(rows, c)
                _add_segment(x, dy, i, i + extent, mean, running, (c - first) * _SUMS)
                i += inner
        for j in range(0, end - first, LANES):
            add_totals(x, offset(running, j * _SUMS), _SUMS, offset(sums, j), far)


@inlined
def _add_segment(x, dy, i, end, mean, running, place):
    m = splat(mean)
    s0, s1 = resume(x, running, place, LANES), resume(x, running, place + 2 * LANES, LANES)
    p0, p1 = (
        resume(x, running, place + 4 * LANES, LANES),
        resume(x, running, place + 6 * LANES, LANES),
    )
    while i + 2 * LANES <= end:
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
def _write(x, dy, out, i, end, channels, inner, rows, step, streaming):
    """Write elements i .. end-1 of memory, whatever channels they belong to.

    A vector that reaches from one channel into the next takes its coefficients from both, so
    that whole aligned vectors can be written however long the segments are.
    """
    c = (i // inner) % channels
    border = (i // inner + 1) * inner
    if streaming:
        head = min(aligned_head(out, i, LANES), end - i)
        _write_across(x, dy, out, i, head, border - i, c, channels, rows, step, False)
        i += head
    while i < end:
        if i >= border:
            border += inner
            c = _next(c, channels)
        mean, shift, slope, gain = _coefficients(rows, step, c)
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
            left = border - i
            _write_across(x, dy, out, i, count, left, c, channels, rows, step, streaming)
            i += count


@inlined
def _write_across(x, dy, out, i, count, left, c, channels, rows, step, streaming):
    """Write `count` elements: the first `left` of channel c, the others of the next."""
    mean, shift, slope, gain = _coefficients(rows, step, c)
    mean1, shift1, slope1, gain1 = _coefficients(rows, step, _next(c, channels))
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
def _coefficients(rows, step, c):
    return (
        splat(load_one(rows, MEAN * step + c)),
        splat(load_one(rows, SHIFT * step + c)),
        splat(load_one(rows, SLOPE * step + c)),
        splat(load_one(rows, GAIN * step + c)),
    )
