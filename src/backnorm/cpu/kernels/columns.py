"""The kernel for rows of channels (NXC, and NCX with a space of a few elements).

The array is a matrix of `rows` x `width`, contiguous. Column k belongs to channel
(k // inner) % channels: NXC has inner = 1, NCX with a tiny space has a row a sample, and where a
row would be shorter than two vectors several make one. Elements after the last full row are
`rest`.

An item of the reduction is a tile of columns and a block of rows. A column is summed down 64
rows as plain vectors (gradients of 16 bits in float32 first, four rows at a time), those sums are
added up as pairs, and blocks are added up in order. Blocks depend on the shape alone and a
column's sum on nothing but its column, so a channel's sums have the same bits however the work is
shared out.
"""

from __future__ import annotations

from numba import types
from numba.extending import overload

from backnorm.cpu.kernels.bins import clear_bins, digits_of, put_columns
from backnorm.cpu.kernels.channels import combine, combine_bins, row_pitch, solve_columns, wrap
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
    line_head,
    load,
    load_first,
    load_one,
    load_singles,
    load_some,
    offset,
    prefetch,
    singles_within,
    store,
    store_first,
    store_one,
    stream,
)
from backnorm.cpu.kernels.record import (
    cells_of,
    columns_head,
    gradient_of,
    other_of,
    output_of,
    own_of,
    scratch_of,
    seen_of,
    values_at,
)
from backnorm.cpu.kernels.relu import same_line
from backnorm.cpu.kernels.singles import (
    add_strip,
    add_strip_first,
    as_singles,
    both_hold,
    coefficients_for,
    end_strip,
    holds,
    lanes_of,
    narrow_coefficients,
    ordered_for,
    recentre,
    repeat_first,
    vector_of,
)
from backnorm.cpu.kernels.stages import after, before
from backnorm.cpu.kernels.sums import merge_pairs, resume, suspend
from backnorm.cpu.kernels.tiles import add_rows, ahead_of_rows
from backnorm.cpu.kernels.vector import (
    Singles,
    all_finite,
    high_half,
    low_half,
    magnitude,
    marked,
    multiply_add,
    splat,
    where_equal,
    where_finite,
)
from backnorm.cpu.record import JOINED
from backnorm.cpu.scratch import LANES, MEAN, ROWS, SINGLES, bins_own, whole

__all__ = ["run"]

# Additions in a row before a sum is kept as a pair: part of the error budget (128 would do), and
# of the bits of the result.
_RUN = 64

_whole, _bins_own = inlined(whole), inlined(bins_own)


@outlined
def run(kind, record, index):
    """Sum every column, solve for the coefficients of the channels, and write the output.

    See `record`. An item of the sums is `block` rows (if rest > 0, the last block is the
    rest) of `tile` columns, `depth` rows side by side; one of the output `share` rows, `abreast`
    side by side, of all columns or, where there are as many items, of a tile. Partial sums are
    (blocks, 4, pitch of `width` columns): the pairs of every block of every column; of reproducible
    sums the bins: see `channels.combine_bins`.

    Returns
    -------
    int
        0, or when it has joined what `record.ended` says.
    """
    head, cells = columns_head(record), cells_of(record)
    rows, width, rest = head.rows, head.width, head.rest
    inner, channels, repeats, blocks = head.inner, head.channels, head.repeats, head.blocks
    grid = (rows, width, rest, inner, channels)
    cut = (head.block, head.tile, head.depth, head.share, head.abreast)
    pitch = row_pitch(channels)
    table = scratch_of(kind, head, record)
    if index == JOINED:
        return after(kind, head, table, pitch, channels)
    terms = own_of(kind, head, record, index)
    # Columns are channels: what is known of the channels need not be spread over columns.
    plain = width == channels
    wide_pitch = pitch if plain else row_pitch(width)
    far = row_pitch(width)
    spreads = 0 if plain else 4 * wide_pitch
    x_, dy_, other_ = (
        values_at(kind, head.x),
        gradient_of(kind, head, cells),
        other_of(kind, head, cells),
    )
    seen_, out_ = seen_of(kind, head), output_of(kind, head, cells)
    epsilon, binned = head.epsilon, head.binned != 0
    # What bins take comes first, where there are any.
    place = offset(terms, _bins_own(0, 2 * (digits_of(x_) + 1))) if binned else terms
    streaming = head.streaming != 0 and same_line(out_)
    pairs = offset(table, ROWS * pitch)
    total = (rows * width + rest) // max(1, channels * inner)
    before(kind, head, cells, index, table, pitch, (total, channels, inner), terms)
    summed, items = head.summed, head.items
    place_of_wide = offset(place, 12 * row_pitch(cut[1]))
    wide = table if plain else place_of_wide
    exact = (wide, wide_pitch)
    used = coefficients_for(kind, wide, wide_pitch, offset(place_of_wide, spreads), width)
    spread = False
    parts = max(1, (rows + cut[3] - 1) // max(1, cut[3]))
    by_tile = items - summed > parts
    # Whoever has summed all rows of a tile solves its channels, while the sums are in the cache.
    alone = blocks == 1 and repeats == 1 and cut[1] % inner == 0 and not binned
    count = total * inner
    item = claim(cells, summed, items, index)
    while item < items:
        if item < summed:
            if binned:
                _reduce_bins(x_, dy_, grid, cut, table, plain, pairs, far, place, terms, item)
            else:
                _reduce_item(kind, head, x_, dy_, grid, cut, table, plain, pairs, far, place, item)
            if alone:
                start = item * cut[1] // inner
                ends = (start, min(channels, start + cut[1] // inner), channels)
                solve_columns(dy_, pairs, far, inner, 1, ends, count, table, pitch, epsilon)
            if arrive(cells, summed):
                if alone:
                    wrap(table, pitch, channels)
                elif binned:
                    cells_of_all = (blocks, far, inner, repeats)
                    combine_bins(
                        kind, head, x_, dy_, pairs, cells_of_all, count, table, pitch, channels
                    )
                else:
                    combine(
                        dy_, pairs, blocks, far, inner, repeats, count, table, pitch, channels,
                        epsilon,
                    )  # fmt: skip
                open_second(cells)
        else:
            if summed > 0:
                await_second(cells)
            if not spread:
                for row in range(0 if plain else 4):
                    _spread(
                        offset(table, row * pitch),
                        offset(wide, row * wide_pitch),
                        0,
                        width,
                        inner,
                        channels,
                    )
                narrow_coefficients(head, seen_, dy_, wide, wide_pitch, 0, width, used)
                repeat_first(used, width)
                spread = True
            if by_tile:
                tile, part = divmod(item - summed, parts)
                _apply_tile(seen_, other_, out_, grid, cut, exact, used, part, tile * cut[1])
            else:
                _apply_item(seen_, other_, out_, grid, cut, exact, used, streaming, item - summed)
        finish(cells)
        item = claim_next(cells, summed, items, index)
    return 0


@outlined
def _reduce_item(kind, head, x, dy, grid, cut, table, plain, partial, far, place, item):
    rows, width, rest, inner, channels = grid
    block, tile, depth, _, _ = cut
    pitch = row_pitch(tile)
    b, t = divmod(item, (width + tile - 1) // tile)
    first = t * tile
    w = min(tile, width - first)
    sums = offset(partial, 4 * b * far + first)
    for part in range(4):
        clear(offset(sums, part * far), _whole(w))
    pivot = offset(table, MEAN + first) if plain else place
    if not plain:
        _spread(table, pivot, first, w, inner, channels)
    run = offset(place, pitch)
    if b * block < rows:
        count = min(block, rows - b * block)
        cells = (b * block * width + first, width, count, w)
        _sum_block(kind, head, x, dy, cells, depth, pivot, run, pitch, sums, far)
    elif first < rest:
        cells = (rows * width + first, width, 1, min(w, rest - first))
        _sum_block(kind, head, x, dy, cells, depth, pivot, run, pitch, sums, far)


@outlined
def _reduce_bins(x, dy, grid, cut, table, plain, partial, far, place, terms, item):
    """Put the terms of an item into bins of their columns."""
    rows, width, rest, inner, channels = grid
    block, tile = cut[0], cut[1]
    digits = digits_of(x)
    b, t = divmod(item, (width + tile - 1) // tile)
    first = t * tile
    w = min(tile, width - first)
    bins = offset(partial, 2 * (digits + 1) * b * far + first)
    clear_bins(bins, far, _whole(w), digits)
    pivot = offset(table, MEAN + first) if plain else place
    if not plain:
        _spread(table, pivot, first, w, inner, channels)
    if b * block < rows:
        part = (b * block * width + first, width, min(block, rows - b * block), w)
        put_columns(x, dy, part, pivot, bins, far, terms)
    elif first < rest:
        part = (rows * width + first, width, 1, min(w, rest - first))
        put_columns(x, dy, part, pivot, bins, far, terms)


@outlined
def _apply_item(x, dy, out, grid, cut, exact, used, streaming, item):
    """Write the rows of one item, the last rows also the rest."""
    rows, width, rest, _, _ = grid
    _, _, _, share, abreast = cut
    row = item * share
    end = min(rows, row + share)
    line = 2 * lanes_of(used[0])
    # Of short rows the ends, which cannot be streamed, would be too much.
    short = streaming and width < 16 * line and line_head(out, row * width) > 0
    if abreast > 1 and width % line == 0 and not short:
        while row + abreast <= end:
            _write_rows(x, dy, out, row * width, abreast, width, exact, used, streaming)
            row += abreast
    stop = end * width + rest if end == rows else end * width
    _write(x, dy, out, row * width, stop, width, exact, used, streaming)


@outlined
def _apply_tile(x, dy, out, grid, cut, exact, used, part, first):
    """Write the rows of one part, of a tile of columns: whole lines, by ordinary stores."""
    rows, width, _, _, _ = grid
    _, tile, _, share, abreast = cut
    row, columns = part * share, (first, min(width, first + tile))
    end = min(rows, row + share)
    while row < end:
        count = min(abreast, end - row)
        _write_lines(x, dy, out, row * width, count, width, columns, exact, used, False)
        row += count


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


def _sum_block(kind, head, x, dy, part, depth, pivot, run, pitch, sums, far):
    """Add a part of the rows to the pairs of its columns, which are zero.

    A part is its first element, the distance of rows, their number, and that of columns. `run` is
    scratch, eleven rows of float64 of length `pitch`.
    """


@overload(_sum_block)
def _sum_block_of(kind, head, x, dy, part, depth, pivot, run, pitch, sums, far):
    if isinstance(dy, types.NoneType) or kind.arithmetic != types.float32:
        return lambda kind, head, x, dy, part, depth, pivot, run, pitch, sums, far: _add_block(
            add_rows, x, dy, part, depth, pivot, run, pitch, sums, far
        )

    def in_singles(kind, head, x, dy, part, depth, pivot, run, pitch, sums, far):
        start, stride, rows, width = part
        singles = singles_within(offset(run, 6 * pitch))
        for k in range(0, width, LANES):
            store(singles, k, load(pivot, k))
        # The same sums in the same order, read in another.
        if head.in_float64 != 0:
            pass
        elif depth < 4:
            _add_block(_add_strip_by_rows, x, dy, part, 4, singles, run, pitch, sums, far)
        else:
            _add_block(_add_strip_at_once, x, dy, part, 4, singles, run, pitch, sums, far)
        for k in range(0, width, LANES):
            place = offset(sums, k)
            # Columns after the last have no rows: whatever their means are, their sums stay zero.
            kept = recentre(load_some(pivot, k, width - k), place, far)
            columns = (start + k, stride, rows, min(LANES, width - k))
            if not all_finite(kept, width - k) and head.in_float64 == 0:
                kept = _or_without_gradient(dy, columns, load(place, 2 * far), kept)
            if not all_finite(kept, width - k):
                anew = offset(run, 4 * pitch)
                clear(anew, 4 * LANES)
                _add_block_anew(x, dy, columns, offset(pivot, k), run, anew)
                for row in range(4):
                    value = where_finite(kept, load(place, row * far), load(anew, row * LANES))
                    store(place, row * far, value)

    return in_singles


@outlined
def _or_without_gradient(dy, part, sum_dy_xmu, kept):
    """Return `kept` with zero for columns of no gradient but zero, unless they have a NaN.

    Their sums are right, as small as they are. A ReLU leaves such channels: with one in ten the
    backward pass of (2, 64, 32, 32) in bfloat16 took 1.5 times as long.
    """
    start, stride, rows, width = part
    size = splat(0.0)
    i = start
    for _ in range(rows):
        size = size + magnitude(load_first(dy, i, width))
        i += stride
    return where_equal(size, splat(0.0), sum_dy_xmu - sum_dy_xmu, kept)


@outlined
def _add_block_anew(x, dy, part, pivot, run, sums):
    _add_block(add_rows, x, dy, part, 8, pivot, run, 2 * LANES, sums, LANES)


@inlined
def _add_block(add, x, dy, part, depth, pivot, run, pitch, sums, far):
    """Add the rows of a part to the pairs of its columns, `depth` rows at a time by `add`."""
    start, stride, rows, width = part
    for first in range(0, rows, _RUN):
        clear(run, 4 * pitch)
        end = min(rows, first + _RUN)
        # A range with a pitch that may be zero could raise an error.
        row = first
        while row < end:
            origin = start + row * stride
            add(x, dy, origin, stride, min(depth, end - row), width, pivot, run, pitch)
            row += depth
        # Rows of sums are padded to whole vectors.
        for k in range(0, width, LANES):
            merge_pairs(offset(sums, k), far, offset(run, k), pitch)


@inlined
def _add_strip_at_once(x, dy, start, stride, rows, width, pivot, run, pitch):
    """Add up to four rows to the running sums, all for a vector of columns."""
    _add_strips(x, dy, start, stride, rows, 0, width, pivot, run, pitch)


@inlined
def _add_strip_by_rows(x, dy, start, stride, rows, width, pivot, run, pitch):
    """Add up to four rows to the running sums, in the order of memory."""
    first = 0
    if rows == 4:
        first = width // SINGLES * SINGLES
        # A row of float32 in the place of one of float64.
        held, far = singles_within(offset(run, 7 * pitch)), 2 * pitch
        _begin_pair(x, dy, start, first, pivot, held, far)
        _end_pair(x, dy, start + stride, first, pivot, held, far)
        _begin_pair(x, dy, start + 2 * stride, first, pivot, offset(held, 2 * far), far)
        for k in range(0, first, SINGLES):
            i = start + 3 * stride + k
            totals = _resume_four(x, run, k, pitch)
            before = (
                load_singles(held, k),
                load_singles(held, k + far),
                load_singles(held, k + 2 * far),
                load_singles(held, k + 3 * far),
            )
            totals = end_strip(x, dy, i, load_singles(pivot, k), before, totals)
            _suspend_four(totals, run, k, pitch)
    _add_strips(x, dy, start, stride, rows, first, width, pivot, run, pitch)


@inlined
def _begin_pair(x, dy, start, width, pivot, held, far):
    for k in range(0, width, SINGLES):
        gradient = load_singles(dy, start + k)
        store(held, k, gradient)
        store(held, k + far, gradient * (load_singles(x, start + k) - load_singles(pivot, k)))


@inlined
def _end_pair(x, dy, start, width, pivot, held, far):
    for k in range(0, width, SINGLES):
        gradient = load_singles(dy, start + k)
        centred = load_singles(x, start + k) - load_singles(pivot, k)
        store(held, k, load_singles(held, k) + gradient)
        store(held, k + far, multiply_add(gradient, centred, load_singles(held, k + far)))


@inlined
def _add_strips(x, dy, start, stride, rows, first, width, pivot, run, pitch):
    """Add up to four rows of the columns first .. width-1, in float32 among themselves."""
    ahead = start + ahead_of_rows(rows, width) * stride
    for k in range(first, width, SINGLES):
        mean, totals = load_singles(pivot, k), _resume_four(x, run, k, pitch)
        count = width - k
        if rows == 4 and count >= SINGLES:
            for row in range(4):
                prefetch(x, ahead + k + row * stride, SINGLES)
                prefetch(dy, ahead + k + row * stride, SINGLES)
            totals = add_strip(x, dy, start + k, stride, mean, totals)
        else:
            counts = (count, _if(rows > 1, count), _if(rows > 2, count), _if(rows > 3, count))
            totals = add_strip_first(x, dy, start + k, stride, counts, mean, totals)
        _suspend_four(totals, run, k, pitch)


@inlined
def _resume_four(x, run, k, pitch):
    """Return the running sums of sixteen columns: of dy and of the products, eight columns each."""
    products = offset(run, 2 * pitch)
    return (
        resume(x, run, k, pitch),
        resume(x, run, k + LANES, pitch),
        resume(x, products, k, pitch),
        resume(x, products, k + LANES, pitch),
    )


@inlined
def _suspend_four(totals, run, k, pitch):
    products = offset(run, 2 * pitch)
    suspend(totals[0], run, k, pitch)
    suspend(totals[1], run, k + LANES, pitch)
    suspend(totals[2], products, k, pitch)
    suspend(totals[3], products, k + LANES, pitch)


@inlined
def _if(there, count):
    return count if there else 0


@inlined
def _write_rows(x, dy, out, i, rows, width, exact, used, streaming):
    """Write rows of whole lines from element i on, a line of each before the next line.

    Coefficients of wide rows are too many for the first-level cache; so they are read once for
    several rows.

    The ends of a row that are in cache lines with another's are not streamed. They must be no more
    than that: an ordinary store has the lines beside its own prefetched, and to stream to what is
    in a cache takes five times as long (AMD Zen 3: (50, 64, 112, 112) in float32 arithmetic).
    """
    lanes = lanes_of(used[0])
    line = 2 * lanes
    head = line_head(out, i) if streaming else 0
    end = width - line + head if head > 0 else width
    if head > 0:
        start = i
        while start < i + rows * width:
            _write_part(x, dy, out, start, head, width, exact, used, 0)
            _write_part(x, dy, out, start + end, width - end, width, exact, used, end)
            start += width
    _write_lines(x, dy, out, i, rows, width, (head, end), exact, used, streaming)


@inlined
def _write_lines(x, dy, out, i, rows, width, columns, exact, used, streaming):
    """Write the whole lines between two columns of rows, which begin at element i."""
    lanes = lanes_of(used[0])
    line = 2 * lanes
    ahead = ahead_of_rows(rows, width) * width
    for k in range(columns[0], columns[1], line):
        of_left = ordered_for(out, _coefficients(used, k))
        of_right = ordered_for(out, _coefficients(used, k + lanes))
        j, below = i + k, i + k + rows * width
        while j < below:
            prefetch_elements(x, dy, out, j + ahead, line, streaming)
            left, right = both_elements(x, dy, j, of_left, of_right)
            if not both_hold(x, dy, out, left, right):
                _write_anew(x, dy, out, j, lanes, width, exact, k, as_singles(left))
                _write_anew(
                    x, dy, out, j + lanes, lanes, width, exact, k + lanes, as_singles(right)
                )
            elif streaming:
                stream(out, j, left)
                stream(out, j + lanes, right)
            else:
                store(out, j, left)
                store(out, j + lanes, right)
            j += width


@inlined
def _write(x, dy, out, i, end, period, exact, used, streaming):
    """Write elements i .. end-1 of memory; i is at column 0, and columns repeat by `period`."""
    k = 0
    if streaming:
        k = min(aligned_head(out, i, lanes_of(used[0])), end - i)
        _write_part(x, dy, out, i, k, period, exact, used, 0)
        i, k = _write_whole(stream, x, dy, out, i + k, k, end, period, exact, used)
    else:
        i, k = _write_whole(store, x, dy, out, i, k, end, period, exact, used)
    if i < end:
        _write_part(x, dy, out, i, end - i, period, exact, used, k)


@inlined
def _write_whole(put, x, dy, out, i, k, end, period, exact, used):
    """Write whole vectors from element i, of column k, on; return where they end.

    A loop for each way to `put` them: of one for both LLVM does not always make two.
    """
    lanes = lanes_of(used[0])
    while in_pairs(dy, used[0]) and i + 2 * lanes <= end:
        other, more = _along(k, lanes, period), i + lanes
        of_left, of_right = _coefficients(used, k), _coefficients(used, other)
        left, right = both_elements(x, dy, i, of_left, of_right)
        if both_hold(x, dy, out, left, right):
            put(out, i, left)
            put(out, more, right)
        else:
            _write_anew(x, dy, out, i, lanes, period, exact, k, left)
            _write_anew(x, dy, out, more, lanes, period, exact, other, right)
        i += 2 * lanes
        k = _along(other, lanes, period)
    while i + lanes <= end:
        mean, shift, slope, gain = _coefficients(used, k)
        value = elements(x, dy, i, mean, shift, slope, gain)
        if holds(value, lanes):
            put(out, i, value)
        else:
            _write_anew(x, dy, out, i, lanes, period, exact, k, value)
        i += lanes
        k = _along(k, lanes, period)
    return i, k


@inlined
def _along(k, lanes, period):
    """Return the column of the vector after that of column k."""
    return k + lanes - period if k + lanes >= period else k + lanes


@inlined
def _write_part(x, dy, out, i, count, period, exact, used, k):
    """Write `count` elements, fewer than a line, from column k on."""
    lanes = lanes_of(used[0])
    while count > 0:
        mean, shift, slope, gain = _coefficients(used, k)
        value = first_elements(x, dy, i, count, mean, shift, slope, gain)
        if holds(value, count):
            store_first(out, i, count, value)
        else:
            _write_anew(x, dy, out, i, count, period, exact, k, value)
        i += lanes
        k += lanes
        count -= lanes


def _write_anew(x, dy, out, i, count, period, exact, k, value):
    """Write `count` elements of which some do not hold: those as float64 has them."""


@overload(_write_anew)
def _write_anew_of(x, dy, out, i, count, period, exact, k, value):
    if value != Singles:
        return lambda x, dy, out, i, count, period, exact, k, value: None
    return lambda x, dy, out, i, count, period, exact, k, value: _write_halves(
        x, dy, out, i, count, period, exact, k, value
    )


@outlined
def _write_halves(x, dy, out, i, count, period, exact, k, value):
    value = marked(value)
    _write_half(x, dy, out, i, count, exact, k, low_half(value))
    k = _along(k, LANES, period)
    _write_half(x, dy, out, i + LANES, count - LANES, exact, k, high_half(value))


@inlined
def _write_half(x, dy, out, i, count, exact, k, value):
    mean, shift, slope, gain = _coefficients(exact, k)
    anew = first_elements(x, dy, i, count, mean, shift, slope, gain)
    store_first(out, i, count, where_finite(value, value, anew))


@inlined
def _coefficients(values, k):
    table, pitch = values
    return (
        vector_of(table, k),
        vector_of(table, k + pitch),
        vector_of(table, k + 2 * pitch),
        vector_of(table, k + 3 * pitch),
    )
