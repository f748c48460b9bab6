"""Kernels for rows of channels (NXC, and NCX with a space of a few elements).

The array is a matrix of `rows` x `width`, contiguous. Column k belongs to channel
(k // inner) % channels: NXC has inner = 1, NCX with a tiny space has a row a sample, and where a
row would be shorter than two vectors several make one. Elements after the last full row are
`rest`.

An item of the reduction is a tile of columns and a block of rows. A column is summed down 64
rows as plain vectors, those sums are added up as pairs, and blocks are added up in order. Blocks
depend on the shape alone and a column's sum on nothing but its column, so a channel's sums have
the same bits however the work is shared out.
"""

from __future__ import annotations

from backnorm.kernels.cpu.channels import combine
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
    store_one,
    stream,
)
from backnorm.kernels.cpu.sums import merge_pairs, resume, suspend, take, take_first
from backnorm.kernels.cpu.threads import arrive, await_second, claim, finish, open_second
from backnorm.kernels.cpu.vector import LANES

__all__ = ["apply", "both", "reduce"]

# Additions in a row before a sum is kept as a pair: part of the error budget (128 would do), and
# of the bits of the result.
_RUN = 64

# Elements of a cache line of float32.
_LINE = 2 * LANES


@kernel
def reduce(x, dy, grid, cut, channel, partial, cursor, items):
    """Sum every column: partial[b, :, k] are the pairs of block b of column k.

    Parameters
    ----------
    x : array
    dy : array or None
        None: sums of x - pivot and its square.
    grid : (rows, width, rest, inner, channels)
    cut : (block, tile, depth, share, abreast)
        Rows and columns of an item of the reduction (if rest > 0, the last block is the rest)
        and rows summed side by side; rows of an item of the apply pass and rows written side by
        side.
    channel : float64 array (4, channels)
        Row 0: the mean, or the pivot if dy is None.
    partial : float64 array (blocks, 4, width)
    """
    memory = scratch(9 * _step(cut[1]))
    place = address(memory)
    x_, dy_, means, sums = address(x), address(dy), address(channel), address(partial)
    last = False
    item = claim(cursor)
    while item < items:
        _reduce_item(x_, dy_, grid, cut, means, sums, place, item)
        last = finish(cursor, items)
        item = claim(cursor)
    keep(memory)
    return last


@kernel
def apply(x, dy, out, grid, cut, coefficients, streaming, cursor, items):
    """Write the output, backwards: the end is what the reduction left in the cache.

    coefficients : float64 array (4, channels), rows mean, shift, slope, gain.
    """
    memory = scratch(4 * _step(grid[1]))
    wide = address(memory)
    x_, dy_, out_ = address(x), address(dy), address(out)
    _spread_all(address(coefficients), wide, grid)
    last = False
    item = claim(cursor)
    while item < items:
        _apply_item(x_, dy_, out_, grid, cut, wide, streaming, items - 1 - item)
        last = finish(cursor, items)
        item = claim(cursor)
    keep(memory)
    return last


@kernel
def both(
    x,
    dy,
    seen,
    out,
    grid,
    cut,
    repeats,
    channel,
    partial,
    coefficients,
    result,
    epsilon,
    streaming,
    cursor,
    items,
):
    """Reduce, combine and write, in one launch.

    The first items are those of the reduction. `seen` is x, or None where the output does not
    depend on it.
    """
    rows, width, _, inner, channels = grid
    memory = scratch(9 * _step(cut[1]) + 4 * _step(width))
    place, wide = address(memory), address(memory[9 * _step(cut[1]) :])
    x_, dy_, seen_, out_ = address(x), address(dy), address(seen), address(out)
    means, sums, table = address(channel), address(partial), address(coefficients)
    summed = partial.shape[0] * _tiles(width, cut[1])
    last = False
    item = claim(cursor)
    while item < summed:
        _reduce_item(x_, dy_, grid, cut, means, sums, place, item)
        if arrive(cursor, summed):
            count = (rows * width + grid[2]) // channels
            combine(dy, partial, inner, repeats, count, channel, epsilon, coefficients, result)
            open_second(cursor)
        last = finish(cursor, items)
        item = claim(cursor)
    if item < items:
        await_second(cursor)
        _spread_all(table, wide, grid)
    while item < items:
        _apply_item(seen_, dy_, out_, grid, cut, wide, streaming, items - 1 - item)
        last = finish(cursor, items)
        item = claim(cursor)
    keep(memory)
    return last


@inlined
def _tiles(width, tile):
    return (width + tile - 1) // tile


@inlined
def _reduce_item(x, dy, grid, cut, means, partial, place, item):
    rows, width, rest, inner, channels = grid
    block, tile, depth, _, _ = cut
    step = _step(tile)
    pivot, run, sums = place, offset(place, step), offset(place, 5 * step)
    b, t = divmod(item, _tiles(width, tile))
    first = t * tile
    w = min(tile, width - first)
    clear(sums, 4 * step)
    _spread(means, pivot, first, w, inner, channels)
    if b * block < rows:
        count = min(block, rows - b * block)
        origin = b * block * width + first
        _add_block(x, dy, origin, width, count, w, depth, pivot, run, sums, step)
    elif first < rest:
        origin = rows * width + first
        _add_block(x, dy, origin, width, 1, min(w, rest - first), depth, pivot, run, sums, step)
    for part in range(4):
        for k in range(w):
            store_one(partial, (b * 4 + part) * width + first + k, load_one(sums, part * step + k))


@inlined
def _apply_item(x, dy, out, grid, cut, wide, streaming, item):
    """Write the rows of one item, the last rows also the rest."""
    rows, width, rest, _, _ = grid
    _, _, _, share, abreast = cut
    step = _step(width)
    row = item * share
    end = min(rows, row + share)
    if abreast > 1 and width % _LINE == 0:
        while row + abreast <= end:
            _write_rows(x, dy, out, row * width, abreast, width, wide, step, streaming)
            row += abreast
    stop = end * width + rest if end == rows else end * width
    _write(x, dy, out, row * width, stop, width, wide, step, streaming)


@inlined
def _spread_all(coefficients, wide, grid):
    _, width, _, inner, channels = grid
    for part in range(4):
        place = offset(wide, part * _step(width))
        _spread(offset(coefficients, part * channels), place, 0, width, inner, channels)


@inlined
def _step(columns):
    """Return a distance between rows of scratch: whole vectors, and a spare one at the end."""
    return (columns + 2 * LANES - 1) // LANES * LANES


@inlined
def _spread(values, wide, first, width, inner, channels):
    """Write the channel's value of each of `width` columns, then the first eight once more.

    The repetition lets a vector that runs over the end of a row go on with the next row.
    """
    c = (first // inner) % channels
    k = 0
    end = inner - first % inner
    while k < width:
        end = min(end, width)
        value = load_one(values, c)
        while k < end:
            store_one(wide, k, value)
            k += 1
        end += inner
        c += 1
        if c == channels:
            c = 0
    for k in range(LANES):
        store_one(wide, width + k, load_one(wide, k % width))


@inlined
def _add_block(x, dy, start, stride, rows, width, depth, pivot, run, sums, step):
    """Add a block of rows to the pairs of its columns; `run` is scratch like `sums`."""
    for first in range(0, rows, _RUN):
        clear(run, 4 * step)
        end = min(rows, first + _RUN)
        for row in range(first, end, depth):
            origin = start + row * stride
            _add_rows(x, dy, origin, stride, min(depth, end - row), width, pivot, run, step)
        # The scratch is padded to whole vectors.
        for k in range(0, width, LANES):
            merge_pairs(sums, k, k + step, run, k, k + step)
            merge_pairs(sums, k + 2 * step, k + 3 * step, run, k + 2 * step, k + 3 * step)


@inlined
def _add_rows(x, dy, start, stride, rows, width, pivot, run, step):
    """Add a few rows to the running sums of their columns, sixteen columns at a time."""
    k = 0
    while k + 2 * LANES <= width:
        i = start + k
        j = k + LANES
        m0, m1 = load(pivot, k), load(pivot, j)
        s0, s1 = resume(x, run, k, k + step), resume(x, run, j, j + step)
        p0 = resume(x, run, k + 2 * step, k + 3 * step)
        p1 = resume(x, run, j + 2 * step, j + 3 * step)
        for _ in range(rows):
            s0, p0 = take(x, dy, i, m0, s0, p0)
            s1, p1 = take(x, dy, i + LANES, m1, s1, p1)
            i += stride
        suspend(s0, run, k, k + step)
        suspend(s1, run, j, j + step)
        suspend(p0, run, k + 2 * step, k + 3 * step)
        suspend(p1, run, j + 2 * step, j + 3 * step)
        k += 2 * LANES
    while k < width:
        i = start + k
        m = load(pivot, k)
        s, p = resume(x, run, k, k + step), resume(x, run, k + 2 * step, k + 3 * step)
        for _ in range(rows):
            s, p = take_first(x, dy, i, width - k, m, s, p)
            i += stride
        suspend(s, run, k, k + step)
        suspend(p, run, k + 2 * step, k + 3 * step)
        k += LANES


@inlined
def _write_rows(x, dy, out, i, rows, width, wide, step, streaming):
    """Write rows of whole lines from element i on, a line of each before the next line.

    Coefficients of wide rows are too many for the first-level cache; so they are read once for
    several rows.
    """
    head = aligned_head(out, i, _LINE) if streaming else 0
    end = width - _LINE + head if head > 0 else width
    if head > 0:
        for start in range(i, i + rows * width, width):
            _write_part(x, dy, out, start, head, wide, step, 0)
            _write_part(x, dy, out, start + end, width - end, wide, step, end)
    for k in range(head, end, _LINE):
        mean, shift, slope, gain = _coefficients(wide, step, k)
        mean1, shift1, slope1, gain1 = _coefficients(wide, step, k + LANES)
        for j in range(i + k, i + k + rows * width, width):
            left = elements(x, dy, j, mean, shift, slope, gain)
            right = elements(x, dy, j + LANES, mean1, shift1, slope1, gain1)
            if streaming:
                stream(out, j, left)
                stream(out, j + LANES, right)
            else:
                store(out, j, left)
                store(out, j + LANES, right)


@inlined
def _write(x, dy, out, i, end, period, wide, step, streaming):
    """Write elements i .. end-1 of memory; i is at column 0, and columns repeat by `period`."""
    k = 0
    if streaming:
        k = min(aligned_head(out, i, LANES), end - i)
        _write_part(x, dy, out, i, k, wide, step, 0)
        i += k
        while i + LANES <= end:
            mean, shift, slope, gain = _coefficients(wide, step, k)
            stream(out, i, elements(x, dy, i, mean, shift, slope, gain))
            i += LANES
            k = k + LANES - period if k + LANES >= period else k + LANES
    else:
        while i + LANES <= end:
            mean, shift, slope, gain = _coefficients(wide, step, k)
            store(out, i, elements(x, dy, i, mean, shift, slope, gain))
            i += LANES
            k = k + LANES - period if k + LANES >= period else k + LANES
    if i < end:
        _write_part(x, dy, out, i, end - i, wide, step, k)


@inlined
def _write_part(x, dy, out, i, count, wide, step, k):
    """Write `count` elements, fewer than a line, from column k on."""
    while count > 0:
        mean, shift, slope, gain = _coefficients(wide, step, k)
        store_first(out, i, count, first_elements(x, dy, i, count, mean, shift, slope, gain))
        i += LANES
        k += LANES
        count -= LANES


@inlined
def _coefficients(wide, step, k):
    return (
        load(wide, k),
        load(wide, k + step),
        load(wide, k + 2 * step),
        load(wide, k + 3 * step),
    )
