"""The kernel for rows of channels (NXC, and NCX with a space of a few elements).

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

from backnorm.kernels.cpu.channels import MEAN, ROWS, combine
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
from backnorm.kernels.cpu.threads import (
    arrive,
    await_second,
    claim,
    enter,
    finish,
    leave,
    open_second,
)
from backnorm.kernels.cpu.vector import LANES

__all__ = ["run"]

# Additions in a row before a sum is kept as a pair: part of the error budget (128 would do), and
# of the bits of the result.
_RUN = 64

# Elements of a cache line of float32.
_LINE = 2 * LANES


@kernel
def run(
    x, dy, seen, out, geometry, table, partial, epsilon, streaming, cursor, summed, items, index
):
    """Sum every column, solve for the coefficients of the channels, and write the output.

    Parameters
    ----------
    x : array
    dy : array or None
        None: sums of x - pivot and its square.
    seen : array or None
        x, or None where the output does not depend on it.
    out : array
    geometry : int64 array
        rows, width, rest, inner, channels, repeats, block, blocks, tile, depth, share, abreast:
        an item of the sums is `block` rows (if rest > 0, the last block is the rest) of `tile`
        columns, `depth` rows side by side; one of the output `share` rows, `abreast` side by side.
    table : float64 array
        See `channels`.
    partial : float64 array
        (blocks, 4, step of `width` columns): the pairs of every block of every column.
    epsilon : float
        Used by the forward pass.
    streaming : bool
        Whether the output is written past the caches.
    summed : int
        The first so many items are sums, the others are of the output.
    """
    rung = enter(cursor)
    rows, width, rest, inner, channels = (
        geometry[0],
        geometry[1],
        geometry[2],
        geometry[3],
        geometry[4],
    )
    grid = (rows, width, rest, inner, channels)
    repeats, blocks = geometry[5], geometry[7]
    cut = (geometry[6], geometry[8], geometry[9], geometry[10], geometry[11])
    # Columns are channels: what is known of the channels need not be spread over columns.
    plain = width == channels
    step = table.shape[0] // ROWS
    wide_step = step if plain else _step(width)
    far = _step(width)
    memory = scratch(5 * _step(cut[1]) + (0 if plain else 4 * wide_step))
    place = address(memory)
    x_, dy_, seen_, out_ = address(x), address(dy), address(seen), address(out)
    known, pairs = address(table), address(partial)
    wide = known if plain else offset(place, 5 * _step(cut[1]))
    spread = plain
    last = False
    item = claim(cursor, summed, items, index)
    while item < items:
        if item < summed:
            _reduce_item(x_, dy_, grid, cut, known, plain, pairs, far, place, item)
            if arrive(cursor, summed):
                count = (rows * width + rest) // channels
                combine(
                    dy_, pairs, blocks, far, inner, repeats, count, known, step, channels, epsilon
                )
                open_second(cursor)
        else:
            if summed > 0:
                await_second(cursor)
            if not spread:
                for row in range(4):
                    _spread(
                        offset(known, row * step),
                        offset(wide, row * wide_step),
                        0,
                        width,
                        inner,
                        channels,
                    )
                spread = True
            _apply_item(seen_, dy_, out_, grid, cut, wide, wide_step, streaming, item - summed)
        last = finish(cursor, items)
        item = claim(cursor, summed, items, index)
    keep(memory)
    return leave(cursor, items, index, rung, last)


@inlined
def _reduce_item(x, dy, grid, cut, known, plain, partial, far, place, item):
    rows, width, rest, inner, channels = grid
    block, tile, depth, _, _ = cut
    step = _step(tile)
    b, t = divmod(item, (width + tile - 1) // tile)
    first = t * tile
    w = min(tile, width - first)
    sums = offset(partial, 4 * b * far + first)
    for part in range(4):
        clear(offset(sums, part * far), _whole(w))
    pivot = offset(known, MEAN + first) if plain else place
    if not plain:
        _spread(known, pivot, first, w, inner, channels)
    run = offset(place, step)
    if b * block < rows:
        count = min(block, rows - b * block)
        origin = b * block * width + first
        _add_block(x, dy, origin, width, count, w, depth, pivot, run, step, sums, far)
    elif first < rest:
        origin = rows * width + first
        w = min(w, rest - first)
        _add_block(x, dy, origin, width, 1, w, depth, pivot, run, step, sums, far)


@inlined
def _apply_item(x, dy, out, grid, cut, wide, step, streaming, item):
    """Write the rows of one item, the last rows also the rest."""
    rows, width, rest, _, _ = grid
    _, _, _, share, abreast = cut
    row = item * share
    end = min(rows, row + share)
    if abreast > 1 and width % _LINE == 0:
        while row + abreast <= end:
            _write_rows(x, dy, out, row * width, abreast, width, wide, step, streaming)
            row += abreast
    stop = end * width + rest if end == rows else end * width
    _write(x, dy, out, row * width, stop, width, wide, step, streaming)


@inlined
def _whole(columns):
    return (columns + LANES - 1) // LANES * LANES


@inlined
def _step(columns):
    """Return a distance between rows: whole vectors, and a spare one at the end."""
    return _whole(columns) + LANES


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
def _add_block(x, dy, start, stride, rows, width, depth, pivot, run, step, sums, far):
    """Add a block of rows to the pairs of its columns; `run` is scratch like `sums`."""
    for first in range(0, rows, _RUN):
        clear(run, 4 * step)
        end = min(rows, first + _RUN)
        for row in range(first, end, depth):
            origin = start + row * stride
            _add_rows(x, dy, origin, stride, min(depth, end - row), width, pivot, run, step)
        # Rows of sums are padded to whole vectors.
        for k in range(0, width, LANES):
            merge_pairs(offset(sums, k), far, offset(run, k), step)


@inlined
def _add_rows(x, dy, start, stride, rows, width, pivot, run, step):
    """Add a few rows to the running sums of their columns, sixteen columns at a time."""
    products = offset(run, 2 * step)
    k = 0
    while k + 2 * LANES <= width:
        i = start + k
        j = k + LANES
        m0, m1 = load(pivot, k), load(pivot, j)
        s0, s1 = resume(x, run, k, step), resume(x, run, j, step)
        p0, p1 = resume(x, products, k, step), resume(x, products, j, step)
        for _ in range(rows):
            s0, p0 = take(x, dy, i, m0, s0, p0)
            s1, p1 = take(x, dy, i + LANES, m1, s1, p1)
            i += stride
        suspend(s0, run, k, step)
        suspend(s1, run, j, step)
        suspend(p0, products, k, step)
        suspend(p1, products, j, step)
        k += 2 * LANES
    while k < width:
        i = start + k
        m = load(pivot, k)
        s, p = resume(x, run, k, step), resume(x, products, k, step)
        for _ in range(rows):
            s, p = take_first(x, dy, i, width - k, m, s, p)
            i += stride
        suspend(s, run, k, step)
        suspend(p, products, k, step)
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
