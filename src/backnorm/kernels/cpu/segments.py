"""Kernels for channels whose elements lie in long contiguous runs (NCX with a large space).

The array is (outer, channels, inner), contiguous: a channel has `outer` segments of `inner`
elements. A channel is summed chunk by chunk, a chunk being `rows` segments, or of each long
segment a piece of `length` elements. A chunk's sums stay in registers; `block` chunks at a time
are added up as pairs, and blocks are added up in order. Chunks and blocks depend on the shape
alone, so a channel's sums have the same bits however the work is shared out.
"""

from __future__ import annotations

from backnorm.kernels.cpu.channels import solve
from backnorm.kernels.cpu.formulas import element, elements
from backnorm.kernels.cpu.jit import inlined, kernel
from backnorm.kernels.cpu.sums import empty_sum, pair_add, take, take_last, total
from backnorm.kernels.cpu.threads import claim, finish
from backnorm.kernels.cpu.vector import aligned_head, splat, store, store_one, stream

__all__ = ["apply", "fused", "reduce"]


@kernel
def reduce(x, dy, extents, chunk, channel, partial, cursor, items):
    """Sum every channel: partial[b, :, c] are the pairs of block b of channel c.

    Parameters
    ----------
    x : array
    dy : array or None
        None: sums of x - pivot and its square.
    extents : (outer, channels, inner)
    chunk : (rows, length, chunks, block)
    channel : float64 array (4, channels)
        Row 0: the mean, or the pivot if dy is None.
    partial : float64 array (blocks, 4, channels)
    """
    channels = extents[1]
    last = False
    item = claim(cursor)
    while item < items:
        block, c = divmod(item, channels)
        sums = _block_sums(x, dy, extents, chunk, c, channel[0, c], block)
        for i in range(4):
            partial[block, i, c] = sums[i]
        last = finish(cursor, items)
        item = claim(cursor)
    return last


@kernel
def apply(x, dy, out, extents, share, coefficients, streaming, cursor, items):
    """Write the output, `share` elements of memory an item.

    coefficients : float64 array (4, channels), rows mean, shift, slope, gain.
    """
    outer, channels, inner = extents
    size = outer * channels * inner
    last = False
    item = claim(cursor)
    while item < items:
        start = item * share
        stop = min(size, start + share)
        while start < stop:
            segment = start // inner
            end = min(stop, (segment + 1) * inner)
            c = segment % channels
            _write(x, dy, out, start, end, coefficients, c, streaming)
            start = end
        last = finish(cursor, items)
        item = claim(cursor)
    return last


@kernel
def fused(
    x, dy, out, extents, chunk, channel, coefficients, result, epsilon, streaming, cursor, items
):
    """Sum a channel and write its output while it is in the cache, a channel an item."""
    outer, channels, inner = extents
    blocks = (chunk[2] + chunk[3] - 1) // chunk[3]
    last = False
    c = claim(cursor)
    while c < items:
        sums = (0.0, 0.0, 0.0, 0.0)
        for block in range(blocks):
            part = _block_sums(x, dy, extents, chunk, c, channel[0, c], block)
            sums = pair_add(sums[0], sums[1], part[0], part[1]) + pair_add(
                sums[2], sums[3], part[2], part[3]
            )
        solve(dy, sums, outer * inner, channel, c, epsilon, coefficients, result)
        for n in range(outer):
            start = (n * channels + c) * inner
            _write(x, dy, out, start, start + inner, coefficients, c, streaming)
        last = finish(cursor, items)
        c = claim(cursor)
    return last


@inlined
def _block_sums(x, dy, extents, chunk, c, mean, block):
    outer, channels, inner = extents
    rows, length, chunks, size = chunk
    stride = channels * inner
    pieces = (inner + length - 1) // length
    sums = (0.0, 0.0, 0.0, 0.0)
    for index in range(block * size, min(chunks, (block + 1) * size)):
        row, piece = divmod(index, pieces)
        row *= rows
        start = row * stride + c * inner + piece * length
        part = _chunk_sums(
            x, dy, start, stride, min(rows, outer - row), min(length, inner - piece * length), mean
        )
        sums = pair_add(sums[0], sums[1], part[0], part[1]) + pair_add(
            sums[2], sums[3], part[2], part[3]
        )
    return sums


@inlined
def _chunk_sums(x, dy, start, stride, rows, length, mean):
    """Sum `rows` runs of `length` (8 or more) elements; four sums each hide the add's latency."""
    m = splat(mean)
    s0, s1, s2, s3 = empty_sum(x), empty_sum(x), empty_sum(x), empty_sum(x)
    p0, p1, p2, p3 = empty_sum(x), empty_sum(x), empty_sum(x), empty_sum(x)
    for row in range(rows):
        i = start + row * stride
        end = i + length
        while i + 32 <= end:
            s0, p0 = take(x, dy, i, m, s0, p0)
            s1, p1 = take(x, dy, i + 8, m, s1, p1)
            s2, p2 = take(x, dy, i + 16, m, s2, p2)
            s3, p3 = take(x, dy, i + 24, m, s3, p3)
            i += 32
        if i + 8 <= end:
            s0, p0 = take(x, dy, i, m, s0, p0)
            i += 8
        if i + 8 <= end:
            s1, p1 = take(x, dy, i, m, s1, p1)
            i += 8
        if i + 8 <= end:
            s2, p2 = take(x, dy, i, m, s2, p2)
            i += 8
        if i < end:
            s3, p3 = take_last(x, dy, end - 8, end - i, m, s3, p3)
    return total(s0, s1, s2, s3) + total(p0, p1, p2, p3)


@inlined
def _write(x, dy, out, i, end, coefficients, c, streaming):
    """Write elements i .. end-1, all of channel c."""
    mean, shift = coefficients[0, c], coefficients[1, c]
    slope, gain = coefficients[2, c], coefficients[3, c]
    means, shifts, slopes, gains = splat(mean), splat(shift), splat(slope), splat(gain)
    if streaming:
        head = min(end, i + aligned_head(out, i))
        while i < head:
            store_one(out, i, element(x, dy, i, mean, shift, slope, gain))
            i += 1
        while i + 8 <= end:
            stream(out, i, elements(x, dy, i, means, shifts, slopes, gains))
            i += 8
    else:
        while i + 8 <= end:
            store(out, i, elements(x, dy, i, means, shifts, slopes, gains))
            i += 8
    while i < end:
        store_one(out, i, element(x, dy, i, mean, shift, slope, gain))
        i += 1
