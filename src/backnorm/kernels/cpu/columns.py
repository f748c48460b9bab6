"""Kernels for rows of many short runs (NXC, and NCX with a small space).

The array is a matrix of `rows` x `width`, contiguous. Column k belongs to channel
(k // inner) % channels: NXC has inner = 1, NCX with a small space has a row a sample, and where a
row would be shorter than two vectors several make one. Elements after the last full row are
`rest`. Vectors run along a row, so the shape of the space does not matter to them.

An item is a tile of columns and a block of rows; a column is summed down 64 rows in registers
at a time, those sums are added up as pairs, and blocks are added up in order. Blocks depend on
the shape alone and a column's sum on nothing but its column, so a channel's sums have the same
bits however the work is shared out.
"""

from __future__ import annotations

import numpy as np

from backnorm.kernels.cpu.channels import add_columns, fold, solve
from backnorm.kernels.cpu.formulas import element, elements
from backnorm.kernels.cpu.jit import inlined, kernel
from backnorm.kernels.cpu.sums import empty_sum, flush, take, take_last, take_one
from backnorm.kernels.cpu.threads import claim, finish
from backnorm.kernels.cpu.vector import LANES, aligned_head, load, store, store_one, stream

__all__ = ["apply", "fused", "reduce"]

# Additions in a row before a sum is kept as a pair: part of the error budget (128 would do), and
# of the bits of the result.
_RUN = 64


@kernel
def reduce(x, dy, grid, block, tile, channel, partial, cursor, items):
    """Sum every column: partial[b, :, k] are the pairs of block b of column k.

    Parameters
    ----------
    x : array
    dy : array or None
        None: sums of x - pivot and its square.
    grid : (rows, width, rest, inner, channels)
    block, tile : int
        Rows and columns of an item. If rest > 0, the last block is the rest.
    channel : float64 array (4, channels)
        Row 0: the mean, or the pivot if dy is None.
    partial : float64 array (blocks, 4, width)
    """
    rows, width, rest, inner, channels = grid
    tiles = (width + tile - 1) // tile
    full = (rows + block - 1) // block
    pivot = np.empty(tile + LANES)
    last = False
    item = claim(cursor)
    while item < items:
        b, t = divmod(item, tiles)
        first = t * tile
        w = min(tile, width - first)
        sums = partial[b, :, first : first + w]
        sums[:] = 0.0
        _spread(channel[0], pivot, first, w, inner, channels)
        if b < full:
            count = min(block, rows - b * block)
            _add_block(x, dy, b * block * width + first, width, count, w, pivot, sums)
        elif first < rest:
            _add_block(x, dy, rows * width + first, width, 1, min(w, rest - first), pivot, sums)
        last = finish(cursor, items)
        item = claim(cursor)
    return last


@kernel
def apply(x, dy, out, grid, block, tile, coefficients, streaming, cursor, items):
    """Write the output, a block of rows and a tile of columns an item.

    coefficients : float64 array (4, channels), rows mean, shift, slope, gain.
    """
    rows, width, rest, inner, channels = grid
    tiles = (width + tile - 1) // tile
    full = (rows + block - 1) // block
    wide = np.empty((4, tile + LANES))
    last = False
    item = claim(cursor)
    while item < items:
        b, t = divmod(item, tiles)
        first = t * tile
        w = min(tile, width - first)
        for i in range(4):
            _spread(coefficients[i], wide[i], first, w, inner, channels)
        if b < full:
            count = min(block, rows - b * block)
            _write_block(x, dy, out, b * block * width + first, width, count, w, wide, streaming)
        elif first < rest:
            start = rows * width + first
            _write(x, dy, out, start, start + min(w, rest - first), w, wide, streaming)
        last = finish(cursor, items)
        item = claim(cursor)
    return last


@kernel
def fused(
    x, dy, out, grid, block, tile, channel, coefficients, result, epsilon, streaming, cursor, items
):
    """Sum a tile of whole channels and write its output while it is in the cache.

    For grids without rest; `tile` is a multiple of inner.
    """
    rows, width, _, inner, channels = grid
    pivot = np.empty(tile + LANES)
    wide = np.empty((4, tile + LANES))
    part = np.empty((4, tile))
    sums = np.empty((4, tile))
    last = False
    t = claim(cursor)
    while t < items:
        first = t * tile
        w = min(tile, width - first)
        _spread(channel[0], pivot, first, w, inner, channels)
        sums[:] = 0.0
        for start in range(0, rows, block):
            part[:] = 0.0
            count = min(block, rows - start)
            _add_block(x, dy, start * width + first, width, count, w, pivot, part)
            add_columns(part, sums, w)
        for j in range(w // inner):
            c = first // inner + j
            folded = fold(sums, j * inner, inner, 1, w)
            solve(dy, folded, rows * inner, channel, c, epsilon, coefficients, result)
        for i in range(4):
            _spread(coefficients[i], wide[i], first, w, inner, channels)
        _write_block(x, dy, out, first, width, rows, w, wide, streaming)
        last = finish(cursor, items)
        t = claim(cursor)
    return last


@inlined
def _spread(values, wide, first, width, inner, channels):
    """Write the channel's value of each of `width` columns, then the first eight once more.

    The repetition lets a vector that runs over the end of a row go on with the next row.
    """
    c = (first // inner) % channels
    left = inner - first % inner
    for k in range(width):
        wide[k] = values[c]
        left -= 1
        if left == 0:
            left = inner
            c += 1
            if c == channels:
                c = 0
    for k in range(LANES):
        wide[width + k] = wide[k % width]


@inlined
def _add_block(x, dy, start, stride, rows, width, pivot, sums):
    """Add a block of rows to the pairs of its columns."""
    for row in range(0, rows, _RUN):
        run = min(_RUN, rows - row)
        origin = start + row * stride
        k = 0
        while k + 16 <= width:
            _add_two_strips(x, dy, origin + k, stride, run, pivot, sums, k)
            k += 16
        while k < width:
            if width < LANES:
                _add_column(x, dy, origin + k, stride, run, pivot, sums, k)
                k += 1
            else:
                j = min(k, width - LANES)
                _add_strip(x, dy, origin + j, stride, run, j + LANES - k, pivot, sums, j)
                k = j + LANES


@inlined
def _add_two_strips(x, dy, i, stride, rows, pivot, sums, k):
    s0, s1, p0, p1 = empty_sum(x), empty_sum(x), empty_sum(x), empty_sum(x)
    m0, m1 = load(pivot, k), load(pivot, k + LANES)
    for _ in range(rows):
        s0, p0 = take(x, dy, i, m0, s0, p0)
        s1, p1 = take(x, dy, i + LANES, m1, s1, p1)
        i += stride
    flush(s0, sums[0], sums[1], k)
    flush(s1, sums[0], sums[1], k + LANES)
    flush(p0, sums[2], sums[3], k)
    flush(p1, sums[2], sums[3], k + LANES)


@inlined
def _add_strip(x, dy, i, stride, rows, count, pivot, sums, k):
    """Add eight columns, of which only the last `count` are not counted yet."""
    s, p, m = empty_sum(x), empty_sum(x), load(pivot, k)
    for _ in range(rows):
        s, p = take_last(x, dy, i, count, m, s, p)
        i += stride
    flush(s, sums[0], sums[1], k)
    flush(p, sums[2], sums[3], k)


@inlined
def _add_column(x, dy, i, stride, rows, pivot, sums, k):
    column = (sums[0, k], sums[1, k], sums[2, k], sums[3, k])
    for _ in range(rows):
        column = take_one(x, dy, i, pivot[k], column)
        i += stride
    for part in range(4):
        sums[part, k] = column[part]


@inlined
def _write_block(x, dy, out, start, stride, rows, width, wide, streaming):
    if width == stride:
        _write(x, dy, out, start, start + rows * stride, width, wide, streaming)
    else:
        for row in range(rows):
            origin = start + row * stride
            _write(x, dy, out, origin, origin + width, width, wide, streaming)


@inlined
def _write(x, dy, out, i, end, period, wide, streaming):
    """Write elements i .. end-1; i is at column 0 of the tile, whose columns repeat by `period`."""
    mean, shift, slope, gain = wide[0], wide[1], wide[2], wide[3]
    k = 0
    if streaming:
        head = min(end, i + aligned_head(out, i))
        while i < head:
            store_one(out, i, element(x, dy, i, mean[k], shift[k], slope[k], gain[k]))
            i += 1
            k = _next(k, 1, period)
        while i + LANES <= end:
            stream(
                out,
                i,
                elements(x, dy, i, load(mean, k), load(shift, k), load(slope, k), load(gain, k)),
            )
            i += LANES
            k = _next(k, LANES, period)
    else:
        while i + LANES <= end:
            store(
                out,
                i,
                elements(x, dy, i, load(mean, k), load(shift, k), load(slope, k), load(gain, k)),
            )
            i += LANES
            k = _next(k, LANES, period)
    while i < end:
        store_one(out, i, element(x, dy, i, mean[k], shift[k], slope[k], gain[k]))
        i += 1
        k = _next(k, 1, period)


@inlined
def _next(column, step, period):
    """Return the column `step` further on (step <= period)."""
    column += step
    return column - period if column >= period else column
