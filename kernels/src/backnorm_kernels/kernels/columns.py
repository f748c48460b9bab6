"""The kernel for arrays whose rows have several channels (NXC, and NCX with few spatial elements).

The array is a matrix of `rows` x `width`, contiguous. Column k belongs to channel (k // inner) %
channels. Here `inner` is the number of elements of one channel that are next to each other in
memory (1 in NXC). A row has the channels of one position in NXC, and is a whole sample in NCX. If a
position's channels (NXC) or a sample (NCX) have fewer elements than two vectors, several positions
or samples make one row. If the number of elements of the array is not a multiple of `width`, the
elements after the last full row are called the `rest`.

An item of the reduction is one tile of columns in one block of rows. A running sum (see `sums`)
adds up 64 rows of a column. In a backward pass with float32 arithmetic, four rows are first added
up in float32, and their sum is then added to the running sum. The running sums of a block are added
to pairs of float64 (compensated sums), and the sums of blocks are added up in order. The division
into blocks depends only on the shape, and the sum of a column does not depend on the tile that the
column is in. So a channel's sums have the same bits, however the work is distributed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types

from backnorm_kernels.kernels.bins import clear_bins, digits_of, put_columns
from backnorm_kernels.kernels.channels import combine, combine_bins, row_pitch, solve_columns, wrap
from backnorm_kernels.kernels.epilogue import is_forward, same_line
from backnorm_kernels.kernels.float32 import (
    add_strip,
    add_strip_first,
    coefficients_for,
    end_strip,
    in_pairs,
    lanes_of,
    ordered_for,
    recentre,
    repeat_first,
    rows_for,
    vector_of,
)
from backnorm_kernels.kernels.formulas import both_elements, elements, prefetch_elements
from backnorm_kernels.kernels.jit import boolean, by_type, inlined, integer, outlined, rare
from backnorm_kernels.kernels.memory import (
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
    store_one,
)
from backnorm_kernels.kernels.operands import Bins, Operands, Output, Pairs, Rows, Sums
from backnorm_kernels.kernels.record import (
    columns_head,
    dy_of,
    output_of,
    values_at,
)
from backnorm_kernels.kernels.skeleton import Steps, kernel
from backnorm_kernels.kernels.sums import merge_pairs, resume, suspend
from backnorm_kernels.kernels.tiles import add_rows, ahead_of_rows
from backnorm_kernels.kernels.vector import (
    all_finite,
    magnitude,
    multiply_add,
    splat,
    where_equal,
    where_finite,
)
from backnorm_kernels.kernels.writing import in_each_case, sum_each_case, writers
from backnorm_kernels.scratch import LANES, MEAN, ROWS, SINGLES, bins_own, whole

# A running sum adds up at most this number of rows. The running sum is then added to the column's
# compensated sum, which is a pair of float64. The error budget would allow 128 rows. The bits of
# results depend on this number.
_RUN = 64

_whole, _bins_own = inlined(whole), inlined(bins_own)


class _Scratch(NamedTuple):
    """The parts of a participant's scratch memory.

    Attributes
    ----------
    terms
        Buffers of terms of reproducible sums.
    tile
        Twelve rows of a tile of columns: a pivot, then running sums.
    """

    terms: Any
    tile: Any


@inlined
def _extents(head):
    total = (head.rows * head.width + head.rest) // max(1, head.channels * head.inner)
    return total, head.channels, head.inner


@inlined
def _sums_of(kind, head, cells, table, own):
    """Return what a participant needs to compute sums: the operands, and the memory to write to.

    The partial sums are an array of shape (blocks, 4, pitch), where `pitch` is the pitch of a row
    with `head.width` columns. For each block and each column, the array has four numbers: two pairs
    (high and low), one for each of the two sums. If sums are reproducible, the partial sums are
    bins instead of pairs (see `channels.combine_bins`).
    """
    x = values_at(kind, head.x)
    # `own` is the participant's memory. If sums are reproducible, it begins with buffers of terms,
    # and the memory of the tile follows. Otherwise it begins with the memory of the tile.
    tile = offset(own, _bins_own(0, 2 * (digits_of(x) + 1))) if head.binned != 0 else own
    partial = Pairs(offset(table.values, ROWS * table.pitch), row_pitch(head.width))
    return Sums(Operands(x, dy_of(kind, cells)), table, _Scratch(own, tile), partial)


@inlined
def _output_of(kind, head, cells, sums):
    out, width = output_of(kind, cells), head.width
    exact = Rows(sums.table.values, sums.table.pitch)
    place = offset(sums.scratch.tile, 12 * row_pitch(head.tile))
    # If a row has more columns than there are channels, each column gets a copy of the coefficients
    # of its channel.
    if width != head.channels:
        exact = Rows(place, row_pitch(width))
        place = offset(place, 4 * row_pitch(width))
    rows = rows_for(kind, exact, place, width)
    streaming = head.streaming != 0 and same_line(out)
    x, dy, frozen = sums.operands.x, sums.operands.dy, head.frozen != 0
    return Output(x, dy, out, exact, rows, width, streaming, frozen)


@inlined
def _solves_alone(head):
    """Return whether the participant that sums a tile also computes its channels' coefficients.

    It does if the tile has all elements of its channels (all rows, and all columns of each
    channel), because the sums are then complete, and are in the participant's cache. (Reproducible
    sums, which are stored in bins, are always combined later.)
    """
    single = head.blocks == 1 and head.repeats == 1
    return single and head.tile % head.inner == 0 and head.binned == 0


@inlined
def _sum_item(kind, head, sums, output, item):
    _sum_tile(kind, head, sums, item)


@outlined
def _sum_tile(kind, head, sums, item):
    """Sum one block of rows in one tile of columns. Elements after the last full row, if there are
    any, make up the last block.
    """
    operands, table, scratch, partial = sums
    width, tile, block = head.width, head.tile, head.block
    digits = digits_of(operands.x)
    values, pitch = partial
    b, t = divmod(item, (width + tile - 1) // tile)
    first = t * tile
    w = min(tile, width - first)
    pivot = offset(table.values, MEAN + first)
    if width != head.channels:
        pivot = scratch.tile
        _spread(table.values, pivot, first, w, head.inner, head.channels)
    part = (b * block * width + first, width, min(block, head.rows - b * block), w)
    if b * block >= head.rows:
        part = (head.rows * width + first, width, 1, min(w, head.rest - first))
    empty = b * block >= head.rows and first >= head.rest
    if head.binned != 0:
        bins = Bins(offset(values, 2 * (digits + 1) * b * pitch + first), pitch)
        clear_bins(bins, _whole(w), digits)
        if not empty:
            put_columns(operands, part, pivot, bins, scratch.terms)
        return
    pairs = Pairs(offset(values, 4 * b * pitch + first), pitch)
    for row in range(4):
        clear(offset(pairs.values, row * pitch), _whole(w))
    if not empty:
        running = Pairs(offset(scratch.tile, row_pitch(tile)), row_pitch(tile))
        sum_each_case(_sum_block, operands, (kind, head, part, pivot, running, pairs))
    if _solves_alone(head):
        start, cut = first // head.inner, (head.inner, integer(1))
        span = (start, min(head.channels, start + tile // head.inner))
        count = _extents(head)[0] * head.inner
        solve_columns(kind, partial, cut, span, count, table, head.epsilon)


@inlined
def _combine(kind, head, sums):
    total, _, inner = _extents(head)
    grid = (head.blocks, inner, head.repeats)
    if _solves_alone(head):
        wrap(sums.table)
    elif head.binned != 0:
        digits, bins = digits_of(sums.operands.x), Bins(sums.pairs.values, sums.pairs.pitch)
        combine_bins(kind, head, digits, bins, grid, total * inner, sums.table)
    else:
        combine(kind, head, sums.pairs, grid, total * inner, sums.table)


@inlined
def _prepare(head, table, output):
    width = head.width
    for row in range(4 if width != head.channels else 0):
        channels = offset(table.values, row * table.pitch)
        columns = offset(output.exact.values, row * output.exact.pitch)
        _spread(channels, columns, integer(0), width, head.inner, head.channels)
    coefficients_for(output, (integer(0), width), head.in_float64 != 0)
    repeat_first(output.rows, width)


@outlined
def _write_item(head, output, item):
    """Write an item: see `_write_share`."""
    in_each_case(_write_share, output, (head, item))


@inlined
def _write_share(output, task):
    """Write the rows of one item; the item with the last rows also writes the elements after the
    last full row.
    """
    head, item = task
    rows, width, share, abreast = head.rows, head.width, head.share, head.abreast
    row = item * share
    end = min(rows, row + share)
    line = 2 * lanes_of(output.rows.values)
    # `_write_rows` writes the two ends of a row by ordinary stores. The ends are a large part of a
    # short row, so short rows are not written by `_write_rows`.
    short = output.streaming and width < 16 * line and line_head(output.out, row * width) > 0
    if abreast > 1 and width % line == 0 and not short:
        while row + abreast <= end:
            _write_rows(output, row * width, abreast)
            row += abreast
    stop = end * width + head.rest if end == rows else end * width
    _write(output, row * width, stop)


@inlined
def _spread(values, columns, first, width, inner, channels):
    """Write, for each of `width` columns, the value of its channel; then repeat the first eight.

    The first eight values are repeated after the row, so that a vector that crosses the end of the
    row is loaded like any other.
    """
    c = (first // inner) % channels
    k = 0
    end = inner - first % inner
    while k < width:
        end = min(end, width)
        value = load_one(values, c)
        while k < end:
            store_one(columns, k, value)
            k += 1
        end += inner
        c += 1
        if c == channels:
            c = 0
    for k in range(LANES):
        store_one(columns, width + k, load_one(columns, k % width))


@by_type
def _sum_block(operands, task):
    """Add up a block of rows, and store the sums of its columns in pairs.

    `task` has the kind, the head, `part`, `pivot`, `running` and `pairs`. Before the call, `pairs`
    must be zero.

    `part` has the index of the first element, the distance from one row to the next, the number of
    rows, and the number of columns. `running` is a tuple: the address of eleven rows of scratch
    memory, and the pitch of these rows.
    """

    def in_doubles(operands, task):
        _, head, part, pivot, running, pairs = task
        _add_block(add_rows, operands, part, head.depth, pivot, running, pairs)

    def in_singles(operands, task):
        _, head, part, pivot, running, pairs = task
        start, stride, rows, width = part
        run, pitch = running
        singles = singles_within(offset(run, 6 * pitch))
        for k in range(0, width, LANES):
            store(singles, k, load(pivot, k))
        # `_add_strip_by_rows` and `_add_strip_at_once` add in the same order, but read memory in
        # different orders.
        if head.in_float64 != 0:
            pass
        elif head.depth < 4:
            _add_block(_add_strip_by_rows, operands, part, 4, singles, running, pairs)
        else:
            _add_block(_add_strip_at_once, operands, part, 4, singles, running, pairs)
        for k in range(0, width, LANES):
            place = offset(pairs.values, k)
            # The lanes after the last column have sums of 0, which `recentre` does not change.
            kept = recentre(load_some(pivot, k, width - k), pairs, k)
            columns = (start + k, stride, rows, min(LANES, width - k))
            if not all_finite(kept, width - k) and head.in_float64 == 0:
                kept = _or_without_gradient(
                    operands.dy, columns, load(place, 2 * pairs.pitch), kept
                )
            if not all_finite(kept, width - k):
                again = offset(run, 4 * pitch)
                clear(again, 4 * LANES)
                _add_block_again(
                    operands, columns, offset(pivot, k), run, Pairs(again, integer(LANES))
                )
                for row in range(4):
                    at = row * pairs.pitch
                    store(place, at, where_finite(kept, load(place, at), load(again, row * LANES)))

    wide = is_forward(operands[1]) or task[0].arithmetic != types.float32
    return in_doubles if wide else in_singles


@rare
def _or_without_gradient(dy, part, sum_dy_xmu, kept):
    """Return `kept`, with 0 in each lane (column) where dy is 0 in all rows and sum_dy_xmu is not
    NaN. If a lane of the returned vector is not finite, the caller computes the sums of this lane
    again.

    Sums of zeros are exact, so they need not be computed again. If a ReLU follows the
    normalisation, there are often channels in which every dy is zero. Without this function, the
    sums of such channels would be computed again in float64. If one channel in ten was such a
    channel, the backward pass of a bfloat16 array of shape (2, 64, 32, 32) then took 1.5 times as
    long.
    """
    start, stride, rows, width = part
    size = splat(0.0)
    i = start
    for _ in range(rows):
        size = size + magnitude(load_first(dy, i, width))
        i += stride
    return where_equal(size, splat(0.0), sum_dy_xmu - sum_dy_xmu, kept)


@rare
def _add_block_again(operands, part, pivot, run, pairs):
    _add_block(add_rows, operands, part, integer(8), pivot, Pairs(run, integer(2 * LANES)), pairs)


@inlined
def _add_block(add, operands, part, depth, pivot, running, pairs):
    """Add the rows of `part` to `pairs`, which has a compensated sum for each column of `part`. The
    function `add` adds `depth` rows at a time.
    """
    start, stride, rows, width = part
    for first in range(0, rows, _RUN):
        clear(running.values, 4 * running.pitch)
        end = min(rows, first + _RUN)
        # This is not a `range` with the step `depth`: Numba would then compile a check that raises
        # an error if the step is zero, but kernels must not raise.
        row = first
        while row < end:
            some = (start + row * stride, stride, min(depth, end - row), width)
            add(operands, some, pivot, running)
            row += depth
        # Rows of sums are padded to whole vectors. So all lanes of the last vector are merged, even
        # if some of them are after the last column.
        for k in range(0, width, LANES):
            merge_pairs(pairs, k, running, k)


@inlined
def _add_strip_at_once(operands, part, pivot, running):
    """Add at most four rows to the running sums, one vector of columns after the other."""
    _add_strips(operands, part, 0, pivot, running)


@inlined
def _add_strip_by_rows(operands, part, pivot, running):
    """Add at most four rows to the running sums.

    If there are four rows, they are read one after the other, not side by side as in
    `_add_strip_at_once`.
    """
    start, stride, rows, width = part
    run, pitch = running
    first = 0
    if rows == 4:
        first = width // SINGLES * SINGLES
        # `pair` is two float32 rows of scratch memory, for the sums of dy and of dy * (x - mean)
        # over the first two rows of the strip. `third` is two more, for dy and dy * (x - mean) of
        # the third row. Each of these four rows takes the memory of a float64 row.
        pair = Pairs(singles_within(offset(run, 7 * pitch)), 2 * pitch)
        third = Pairs(offset(pair.values, 2 * pair.pitch), pair.pitch)
        _begin_pair(operands, start, first, pivot, pair)
        _end_pair(operands, start + stride, first, pivot, pair)
        _begin_pair(operands, start + 2 * stride, first, pivot, third)
        for k in range(0, first, SINGLES):
            i = start + 3 * stride + k
            totals = _resume_four(operands.x, running, k)
            before = (
                load_singles(pair.values, k),
                load_singles(pair.values, k + pair.pitch),
                load_singles(third.values, k),
                load_singles(third.values, k + pair.pitch),
            )
            totals = end_strip(operands, i, load_singles(pivot, k), before, totals)
            _suspend_four(totals, running, k)
    _add_strips(operands, part, first, pivot, running)


@inlined
def _begin_pair(operands, start, width, pivot, pair):
    """Store the terms of one row of the array in `pair`.

    dy is written to the first row of `pair`, and dy * (x - mean) to the second row.
    """
    for k in range(0, width, SINGLES):
        gradient = load_singles(operands.dy, start + k)
        centred = load_singles(operands.x, start + k) - load_singles(pivot, k)
        store(pair.values, k, gradient)
        store(pair.values, k + pair.pitch, gradient * centred)


@inlined
def _end_pair(operands, start, width, pivot, pair):
    """Add the terms of one row of the array to `pair`.

    dy is added to the first row of `pair`, and dy * (x - mean) to the second row.
    """
    values, pitch = pair
    for k in range(0, width, SINGLES):
        gradient = load_singles(operands.dy, start + k)
        centred = load_singles(operands.x, start + k) - load_singles(pivot, k)
        store(values, k, load_singles(values, k) + gradient)
        store(values, k + pitch, multiply_add(gradient, centred, load_singles(values, k + pitch)))


@inlined
def _add_strips(operands, part, first, pivot, running):
    """Add up at most four rows in float32, in the columns from `first` on; add the results to the
    running sums.
    """
    start, stride, rows, width = part
    ahead = start + ahead_of_rows(rows, width) * stride
    for k in range(first, width, SINGLES):
        mean, totals = load_singles(pivot, k), _resume_four(operands.x, running, k)
        count = width - k
        if rows == 4 and count >= SINGLES:
            for row in range(4):
                prefetch(operands.x, ahead + k + row * stride, SINGLES)
                prefetch(operands.dy, ahead + k + row * stride, SINGLES)
            totals = add_strip(operands, start + k, stride, mean, totals)
        else:
            counts = (count, _if(rows > 1, count), _if(rows > 2, count), _if(rows > 3, count))
            totals = add_strip_first(operands, start + k, stride, counts, mean, totals)
        _suspend_four(totals, running, k)


@inlined
def _resume_four(x, running, k):
    """Return the running sums of sixteen columns, from column k on, as four vectors.

    The first two vectors are sums of dy, the other two are sums of dy * (x - mean).
    """
    run, pitch = running
    products = offset(run, 2 * pitch)
    return (
        resume(x, run, k, pitch),
        resume(x, run, k + LANES, pitch),
        resume(x, products, k, pitch),
        resume(x, products, k + LANES, pitch),
    )


@inlined
def _suspend_four(totals, running, k):
    run, pitch = running
    products = offset(run, 2 * pitch)
    suspend(totals[0], run, k, pitch)
    suspend(totals[1], run, k + LANES, pitch)
    suspend(totals[2], products, k, pitch)
    suspend(totals[3], products, k + LANES, pitch)


@inlined
def _if(there, count):
    return count if there else 0


@inlined
def _along(k, lanes, period):
    """Return the column that is `lanes` columns after column k, counted modulo `period`."""
    return k + lanes - period if k + lanes >= period else k + lanes


@inlined
def _coefficients(rows, k):
    table, pitch = rows
    return (
        vector_of(table, k),
        vector_of(table, k + pitch),
        vector_of(table, k + 2 * pitch),
        vector_of(table, k + 3 * pitch),
    )


@inlined
def _exact_at(output, position, first):
    # In this geometry, `position` (see `writing`) is the column of a vector's first element.
    k = position if first == 0 else _along(position, first, output.period)
    return _coefficients(output.exact, k)


_write_two, _write_one, _write_first = writers(_exact_at)


@inlined
def _write_rows(output, i, rows):
    """Write `rows` rows, the first of which begins at element i. Each row consists of whole cache
    lines. The first line of every row is written first, then the second line of every row, and so
    on.

    The coefficients for a wide row do not fit in the first-level cache. Therefore the coefficients
    of a line's columns are read once, and used for that line of all `rows` rows.

    If stores are streaming, the two ends of a row are still written by ordinary stores, because
    they share cache lines with other rows. The rest of the row is written by streaming stores
    alone: after an ordinary store, the processor would prefetch neighbouring lines of the output
    into a cache. A streaming store to a line that is in a cache takes five times as long as one to
    a line that is in no cache (AMD Zen 3, shape (50, 64, 112, 112), float32 arithmetic).
    """
    width, line = output.period, 2 * lanes_of(output.rows.values)
    head = line_head(output.out, i) if output.streaming else 0
    end = width - line + head if head > 0 else width
    if head > 0:
        start = i
        while start < i + rows * width:
            _write_part(output, start, head, 0)
            _write_part(output, start + end, width - end, end)
            start += width
    _write_lines(output, i, rows, (head, end), output.streaming)


@inlined
def _write_lines(output, i, rows, columns, streaming):
    """Write that part of `rows` rows which lies between two columns and consists of whole cache
    lines. The first row begins at element i.
    """
    _, _, out, _, coefficients, width, _, _ = output
    lanes = lanes_of(coefficients.values)
    line = 2 * lanes
    ahead = ahead_of_rows(rows, width) * width
    for k in range(columns[0], columns[1], line):
        of_left = ordered_for(out, _coefficients(coefficients, k))
        of_right = ordered_for(out, _coefficients(coefficients, k + lanes))
        j, below = i + k, i + k + rows * width
        while j < below:
            prefetch_elements(output, j + ahead, line, streaming)
            values = both_elements(output, j, of_left, of_right)
            _write_two(output, j, values, (k, k + lanes), streaming)
            j += width


@inlined
def _write(output, i, end):
    """Write the elements from i to end - 1 in the order of memory; element i is in column 0."""
    k = 0
    if output.streaming:
        k = min(aligned_head(output.out, i, lanes_of(output.rows.values)), end - i)
        _write_part(output, i, k, 0)
        i, k = _write_whole(output, i + k, k, end, boolean(True))
    else:
        i, k = _write_whole(output, i, k, end, boolean(False))
    if i < end:
        _write_part(output, i, end - i, k)


@inlined
def _write_whole(output, i, k, end, streaming):
    """Write whole vectors from element i, column k, on; return the element and column behind them.

    Callers pass `streaming` as a constant: ``boolean(True)`` or ``boolean(False)``. If it were a
    variable, LLVM might test it in every iteration of the loops.
    """
    _, _, _, _, coefficients, period, _, _ = output
    lanes = lanes_of(coefficients.values)
    while in_pairs(coefficients.values) and i + 2 * lanes <= end:
        after = _along(k, lanes, period)
        left, right = _coefficients(coefficients, k), _coefficients(coefficients, after)
        _write_two(output, i, both_elements(output, i, left, right), (k, after), streaming)
        i += 2 * lanes
        k = _along(after, lanes, period)
    while i + lanes <= end:
        value = elements(output, i, None, _coefficients(coefficients, k))
        _write_one(output, i, k, value, streaming)
        i += lanes
        k = _along(k, lanes, period)
    return i, k


@inlined
def _write_part(output, i, count, k):
    """Write `count` elements, fewer than a cache line has. The first one has the index i in the
    output, and is in column k.
    """
    lanes = lanes_of(output.rows.values)
    while count > 0:
        _write_first(output, i, count, k, _coefficients(output.rows, k))
        i += lanes
        k += lanes
        count -= lanes


#: The kernel.
run = kernel(
    Steps(
        columns_head,
        _extents,
        _sums_of,
        _output_of,
        _sum_item,
        _combine,
        _prepare,
        _write_item,
    )
)
