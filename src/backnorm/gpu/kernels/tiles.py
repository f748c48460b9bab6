"""Offsets of the elements of a tile, and of its bits in the mask of a ReLU.

All offsets have 64 bits. The width of a row and the total size are passed as numbers of units, each
of FORM.align elements. A kernel multiplies these numbers of units by FORM.align. So the compiler
knows that the products are multiples of FORM.align, and it emits load instructions that read 16
bytes each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from backnorm.gpu.kernels.parameters import Parts, Sizes


class Span(NamedTuple):
    """The tiles of a program: from `first` to `last` - 1 of a unit."""

    unit: Any
    first: Any
    last: Any


@triton.jit
def sizes_of(sizes):
    """Return the sizes that a kernel received."""
    return Sizes(
        sizes.rows >> 1,
        sizes.width_units >> 1,
        sizes.total_units >> 1,
        sizes.channels >> 1,
        sizes.inner >> 1,
        sizes.pieces >> 1,
        sizes.tiles >> 1,
        sizes.per_block >> 1,
        sizes.units >> 1,
    )


@triton.jit
def parts_of(parts):
    """Return the sizes that a kernel of partial results received."""
    return Parts(parts.channels >> 1, parts.inner >> 1, parts.rows >> 1, parts.elements >> 1)


@triton.jit
def span_of(i_unit, i_block, sizes):
    """Return the tiles of a program."""
    i_first = i_block * sizes.per_block
    return Span(i_unit, i_first, tl.minimum(i_first + sizes.per_block, sizes.tiles))


@triton.jit
def offsets_of(i_tile, i_unit, sizes, FORM: tl.constexpr):
    """Return the offsets of a tile's elements, and a mask.

    A tile at the edge of the array extends beyond the array. The mask says which elements exist.
    """
    i_row, i_column, base, width, stride = _corner(i_tile, i_unit, sizes, FORM)
    i_rows = i_row + tl.arange(0, FORM.tile_rows)
    i_columns = i_column + tl.arange(0, FORM.tile_columns)
    o_elements = base + i_rows[:, None] * stride + i_columns[None, :]
    m_there = (i_columns < width)[None, :]
    if FORM.partial:
        m_there = m_there & (o_elements < sizes.total_units.to(tl.int64) * FORM.align)
    else:
        m_there = m_there & (i_rows < sizes.rows)[:, None]
    return o_elements, m_there


@triton.jit
def elements_of(i_tile, i_unit, sizes, FORM: tl.constexpr):
    """Return how many elements of a tile exist: one count per column, or one for the whole tile."""
    i_row, i_column, _, width, _ = _corner(i_tile, i_unit, sizes, FORM)
    rows = tl.minimum(sizes.rows - i_row, FORM.tile_rows)
    if FORM.columns:
        i_columns = i_column + tl.arange(0, FORM.tile_columns)
        b_elements = tl.where(i_columns < width, rows, 0)
        if FORM.partial:
            # The last row is partial: its last columns do not exist.
            i_last = sizes.rows - 1
            m_short = i_last * width + i_columns >= sizes.total_units.to(tl.int64) * FORM.align
            b_elements -= (m_short & (b_elements > 0) & (i_row + rows > i_last)).to(tl.int64)
    else:
        b_elements = rows * tl.minimum(width - i_column, FORM.tile_columns)
    return b_elements


@triton.jit
def load_bytes(p_bits, i_tile, i_unit, sizes, FORM: tl.constexpr):
    """Return the bytes of the mask that contain a tile's bits."""
    o_bytes, m_bytes = _offsets_of_bytes(i_tile, i_unit, sizes, FORM)
    return tl.load(p_bits + o_bytes, mask=m_bytes, other=0)


@triton.jit
def bits_of(b_bytes, FORM: tl.constexpr):
    """Return the bits of a tile as booleans, given their bytes."""
    b_bits = b_bytes.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]
    return (tl.reshape(b_bits, (FORM.tile_rows, FORM.tile_columns)) & 1) != 0


@triton.jit
def store_bits(p_bits, i_tile, i_unit, b_positive, sizes, FORM: tl.constexpr):
    """Store the booleans of a tile as bits."""
    o_bytes, m_bytes = _offsets_of_bytes(i_tile, i_unit, sizes, FORM)
    b_bits = tl.reshape(b_positive.to(tl.int32), (FORM.tile_rows, FORM.tile_columns // 8, 8))
    b_bytes = tl.sum(b_bits << tl.arange(0, 8)[None, None, :], axis=2)
    tl.store(p_bits + o_bytes, b_bytes.to(tl.uint8), mask=m_bytes)


@triton.jit
def channels_of(i_unit, sizes, FORM: tl.constexpr):
    """Return the channel of a unit; in the geometry "columns", the channel of each column."""
    i_channels = i_unit
    if FORM.columns:
        i_columns = i_unit * FORM.tile_columns + tl.arange(0, FORM.tile_columns)
        i_channels = (i_columns // sizes.inner) % sizes.channels
    return i_channels


@triton.jit
def per_column(b_value, FORM: tl.constexpr):
    """Return one value per column, or one for the tile, in a shape that broadcasts with a tile."""
    if FORM.columns:
        b_value = b_value[None, :]
    return b_value


@triton.jit
def collect(b_tile, FORM: tl.constexpr):
    """Return the sum of each column (geometry *columns*) or of the whole tile, in a fixed order."""
    b_sums = tl.sum(b_tile, axis=0)
    if not FORM.columns:
        b_sums = tl.sum(b_sums, axis=0)
    return b_sums


@triton.jit
def partials_of(i_unit, i_block, sizes, FORM: tl.constexpr):
    """Return the offsets of a program's partial results, their mask, and the size of a plane.

    The mask says which of these results exist. A plane is an array with the partial results of one
    sum. The plane has a row for each block. In the geometry *columns*, a row has an element for
    every column; in *segments*, it has an element for every unit.
    """
    blocks = tl.cdiv(sizes.tiles, sizes.per_block).to(tl.int64)
    if FORM.columns:
        width = sizes.width_units.to(tl.int64) * FORM.align
        i_partial = i_unit * FORM.tile_columns + tl.arange(0, FORM.tile_columns)
    else:
        width = sizes.units.to(tl.int64)
        i_partial = i_unit
    return i_block * width + i_partial, i_partial < width, blocks * width


@triton.jit
def tile_of_parts(i_tile, i_channels, parts, FORM: tl.constexpr):
    """Return the offsets of a tile of partial results in a plane, and a mask of those that exist.

    A plane has all partial results of one sum. It is an array of shape (parts, channels, inner).
    """
    i_parts = i_tile * FORM.tile_parts + tl.arange(0, FORM.tile_parts).to(tl.int64)
    o_parts = (i_parts // parts.inner) * parts.channels * parts.inner + i_parts % parts.inner
    o_partials = o_parts[:, None] + (i_channels.to(tl.int64) * parts.inner)[None, :]
    count = parts.rows.to(tl.int64) * parts.inner
    return o_partials, (i_parts < count)[:, None] & (i_channels < parts.channels)[None, :]


@triton.jit
def _corner(i_tile, i_unit, sizes, FORM: tl.constexpr):
    """Return five numbers that locate a tile: its first row, its first column, the offset `base` of
    its unit, the length of a row, and the distance of two rows. The element in a row and a column
    of the unit has the offset base + column + row * distance.
    """
    width = sizes.width_units.to(tl.int64) * FORM.align
    if FORM.columns:
        i_row = i_tile.to(tl.int64) * FORM.tile_rows
        i_column = i_unit.to(tl.int64) * FORM.tile_columns
        base = width * 0
        stride = width
    else:
        i_row = (i_tile // sizes.pieces).to(tl.int64) * FORM.tile_rows
        i_column = (i_tile % sizes.pieces).to(tl.int64) * FORM.tile_columns
        base = i_unit.to(tl.int64) * width
        stride = width * sizes.channels
    return i_row, i_column, base, width, stride


@triton.jit
def _offsets_of_bytes(i_tile, i_unit, sizes, FORM: tl.constexpr):
    """Return the offsets, within the ReLU's mask, of the bytes for a tile's elements.

    Return also which of these bytes exist: a tile at the border of the array has offsets that are
    outside the mask.
    """
    i_row, i_column, base, width, stride = _corner(i_tile, i_unit, sizes, FORM)
    i_rows = i_row + tl.arange(0, FORM.tile_rows)
    i_bytes = tl.arange(0, FORM.tile_columns // 8)
    o_bytes = (base + i_column + i_rows * stride)[:, None] // 8 + i_bytes[None, :]
    m_there = (i_column + i_bytes * 8 < width)[None, :]
    if FORM.partial:
        m_there = m_there & (o_bytes * 8 < sizes.total_units.to(tl.int64) * FORM.align)
    else:
        m_there = m_there & (i_rows < sizes.rows)[:, None]
    return o_bytes, m_there
