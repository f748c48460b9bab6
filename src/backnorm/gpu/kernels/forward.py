"""Kernels of the forward pass.

``forward_sums``      x -> partial sums of x - pivot and its square, and pivot and count
``forward_finish``    partial sums -> mean and variance, and updated running statistics
``forward_apply``     x and statistics -> y; with given statistics this is inference
``forward_complete``  all three for the channels of one unit, by one program

In the geometry "segments", the pivot of a program is the mean of the program's first tile. In
"columns", each column has its own pivot: the mean of the column's elements in the first tile. In
both geometries, a pivot is the mean of some of the elements that are summed. Therefore the
differences x - pivot are small even if the mean is large, and the variance, which is computed from
these differences, loses few digits by cancellation. The mean is kept as two numbers: a float64, and
a remainder, which is the exact mean minus this float64 (see `formulas`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from backnorm.gpu.kernels.arithmetic import (
    add_compensated,
    add_pair,
    join,
    multiply_pairs,
    narrow,
    split,
    subtract_pair,
    widen,
    zeros,
)
from backnorm.gpu.kernels.formulas import (
    fold_forward,
    inverse_deviation,
    normalised,
    passed,
    relu,
)
from backnorm.gpu.kernels.frame import CHANNELS, NUMBERS, PARTS, SIZES, Frame
from backnorm.gpu.kernels.tiles import (
    channels_of,
    collect,
    elements_of,
    first_and_last,
    partials_of,
    parts_of,
    per_column,
    place,
    store_bits,
)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=CHANNELS)
def forward_sums(
    p_x,
    rows,
    width_units,
    total_units,
    channels,
    inner,
    pieces,
    tiles,
    per_block,
    units,
    p_partials,
    FORM: tl.constexpr,
):
    """Store the partial results of each program in float64, in four planes (see `partials_of`).

    The planes have the pivot, the sum of x - pivot, the sum of its square, and the number of
    elements.
    """
    frame = Frame(rows, width_units, total_units, channels, inner, pieces, tiles, per_block, units)
    i_unit = tl.program_id(0) % units
    i_block = tl.program_id(0) // units
    i_first, i_last = first_and_last(i_block, frame)
    b_pivot, b_sum, b_squares, b_count = _add_up(p_x, i_unit, i_first, i_last, frame, FORM)
    o_partials, m_partials, plane = partials_of(i_unit, i_block, frame, FORM)
    tl.store(p_partials + o_partials, b_pivot, mask=m_partials)
    tl.store(p_partials + plane + o_partials, b_sum, mask=m_partials)
    tl.store(p_partials + 2 * plane + o_partials, b_squares, mask=m_partials)
    tl.store(p_partials + 3 * plane + o_partials, b_count, mask=m_partials)


@triton.jit(
    do_not_specialize=PARTS + NUMBERS,
    do_not_specialize_on_alignment=CHANNELS,
)
def forward_finish(
    p_partials,
    p_running_mean,
    p_running_variance,
    channels,
    inner,
    parts,
    elements,
    momentum,
    momentum_low,
    p_moments,
    p_mean,
    p_variance,
    p_moved_mean,
    p_moved_variance,
    TILE_CHANNELS: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    MOVING: tl.constexpr,
):
    """Compute the mean and the variance of channels from partial results, and store them twice: for
    the next kernel as float64 (the mean, the remainder of the mean, the variance), and as the
    results that the operation returns.
    """
    i_channels = tl.program_id(0) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    m_channels = i_channels < channels
    count = parts.to(tl.int64) * inner
    plane = count * channels
    # Each part of a channel has its own pivot, and its sums are those of x - pivot and of the
    # square of this difference. The sums of all parts are converted to sums with the pivot of the
    # first part.
    b_pivot = tl.load(p_partials + i_channels.to(tl.int64) * inner, mask=m_channels, other=0.0)
    b_sum = tl.zeros((TILE_PARTS, TILE_CHANNELS), tl.float64)
    for i_step in range(tl.cdiv(count, TILE_PARTS)):
        o_partials, m_there = parts_of(
            parts * 0 + i_step, i_channels, channels, inner, parts, TILE_PARTS
        )
        p_parts = p_partials + o_partials
        b_count = tl.load(p_parts + 3 * plane, mask=m_there, other=0.0)
        b_apart = tl.load(p_parts, mask=m_there, other=0.0) - b_pivot[None, :]
        b_apart = tl.where(b_count > 0.0, b_apart, 0.0)
        b_sum += tl.load(p_parts + plane, mask=m_there, other=0.0) + b_count * b_apart
    number = tl.full((), 0.0, tl.float64) + elements
    b_offset = tl.sum(b_sum, axis=0) / number
    b_squares = tl.zeros((TILE_PARTS, TILE_CHANNELS), tl.float64)
    for i_step in range(tl.cdiv(count, TILE_PARTS)):
        o_partials, m_there = parts_of(
            parts * 0 + i_step, i_channels, channels, inner, parts, TILE_PARTS
        )
        p_parts = p_partials + o_partials
        b_count = tl.load(p_parts + 3 * plane, mask=m_there, other=0.0)
        b_apart = tl.load(p_parts, mask=m_there, other=0.0) - b_pivot[None, :]
        b_apart = tl.where(b_count > 0.0, b_apart - b_offset[None, :], 0.0)
        b_part = tl.load(p_parts + plane, mask=m_there, other=0.0)
        b_around = tl.load(p_parts + 2 * plane, mask=m_there, other=0.0)
        b_squares += b_around + b_apart * (2.0 * b_part + b_count * b_apart)
    b_variance = tl.sum(b_squares, axis=0) / number
    b_variance = tl.where(b_variance < 0.0, 0.0, b_variance)
    b_mean, b_rest = _two_sum(b_pivot, b_offset)
    tl.store(p_moments + i_channels, b_mean, mask=m_channels)
    tl.store(p_moments + channels + i_channels, b_rest, mask=m_channels)
    tl.store(p_moments + 2 * channels + i_channels, b_variance, mask=m_channels)
    _store_statistics(
        b_mean, b_variance, number, i_channels, m_channels, p_running_mean, p_running_variance,
        momentum, momentum_low, p_mean, p_variance, p_moved_mean, p_moved_variance, MOVING,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=CHANNELS)
def forward_apply(
    p_x,
    p_residual,
    p_mean,
    p_variance,
    p_gamma,
    p_beta,
    rows,
    width_units,
    total_units,
    channels,
    inner,
    pieces,
    tiles,
    per_block,
    units,
    p_y,
    p_bits,
    FORM: tl.constexpr,
):
    """Store y and, with a ReLU in training, the mask of the ReLU.

    In training, `p_mean` has the three rows that `forward_finish` stores: the mean, the remainder
    of the mean, and the variance.
    """
    frame = Frame(rows, width_units, total_units, channels, inner, pieces, tiles, per_block, units)
    # The kernel of the sums has read the tiles from first to last. The programs here compute the
    # tiles from last to first, because the tiles that were read last may still be in the cache.
    i_program = tl.num_programs(0) - 1 - tl.program_id(0)
    i_unit = i_program % units
    i_first, i_last = first_and_last(i_program // units, frame)
    i_channels = channels_of(i_unit, frame, FORM)
    b_mean = tl.load(p_mean + i_channels).to(tl.float64)
    if FORM.training:
        b_rest = tl.load(p_mean + channels + i_channels).to(tl.float64)
        b_variance = tl.load(p_mean + 2 * channels + i_channels).to(tl.float64)
    else:
        b_rest = tl.zeros_like(b_mean)
        b_variance = tl.load(p_variance + i_channels).to(tl.float64)
    _write(
        p_x, p_residual, b_mean, b_rest, b_variance, p_gamma, p_beta, i_channels,
        i_unit, i_first, i_last, frame, p_y, p_bits, FORM,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES + NUMBERS, do_not_specialize_on_alignment=CHANNELS)
def forward_complete(
    p_x,
    p_residual,
    p_gamma,
    p_beta,
    p_running_mean,
    p_running_variance,
    rows,
    width_units,
    total_units,
    channels,
    inner,
    pieces,
    tiles,
    per_block,
    units,
    momentum,
    momentum_low,
    p_y,
    p_bits,
    p_mean,
    p_variance,
    p_moved_mean,
    p_moved_variance,
    FORM: tl.constexpr,
    MOVING: tl.constexpr,
):
    """Store y and the statistics for the channels of one unit.

    A unit (of work) has all elements of its channels, so a single program computes the statistics
    of these channels.
    """
    frame = Frame(rows, width_units, total_units, channels, inner, pieces, tiles, per_block, units)
    i_unit = tl.program_id(0)
    i_channels = channels_of(i_unit, frame, FORM)
    b_pivot, b_sum, b_squares, b_count = _add_up(p_x, i_unit, i_unit * 0, tiles, frame, FORM)
    # Columns outside the array have no elements. For such a column, the number of elements is set
    # to 1, so that no sum is divided by 0.
    b_count = tl.where(b_count > 0.0, b_count, 1.0)
    b_offset = b_sum / b_count
    b_variance = (b_squares - b_sum * b_offset) / b_count
    b_variance = tl.where(b_variance < 0.0, 0.0, b_variance)
    b_mean, b_rest = _two_sum(b_pivot, b_offset)
    _, m_channels, _ = partials_of(i_unit, i_unit * 0, frame, FORM)
    _store_statistics(
        b_mean, b_variance, b_count, i_channels, m_channels, p_running_mean, p_running_variance,
        momentum, momentum_low, p_mean, p_variance, p_moved_mean, p_moved_variance, MOVING,
    )  # fmt: skip
    _write(
        p_x, p_residual, b_mean, b_rest, b_variance, p_gamma, p_beta, i_channels,
        i_unit, i_unit * 0, tiles, frame, p_y, p_bits, FORM,
    )  # fmt: skip


@triton.jit
def _add_up(p_x, i_unit, i_first, i_last, frame, FORM: tl.constexpr):
    """Return the pivot, the sums of x - pivot and of its square, and the number of elements.

    In the geometry "columns", each of these has a value for every column.
    """
    b_pivot = _pivot(p_x, i_unit, i_first, frame, FORM)
    pivot = split(per_column(b_pivot, FORM), FORM.moments)
    b_sum = zeros(FORM, FORM.moments)
    b_low = b_sum
    b_squares = b_sum
    b_squares_low = b_sum
    b_elements = elements_of(i_first, i_unit, frame, FORM) * 0
    for i_step in tl.range(0, i_last - i_first, num_stages=FORM.stages):
        i_tile = i_first + i_step
        o_elements, m_there = place(i_tile, i_unit, frame, FORM)
        b_x = widen(tl.load(p_x + o_elements, mask=m_there, other=0.0), FORM.moments)
        b_elements += elements_of(i_tile, i_unit, frame, FORM)
        if FORM.moments == "pairs":
            b_part, b_part_low = subtract_pair(b_x, pivot[0], pivot[1])
            b_part = tl.where(m_there, b_part, 0.0)
            b_part_low = tl.where(m_there, b_part_low, 0.0)
            b_square, b_square_low = multiply_pairs(b_part, b_part_low, b_part, b_part_low)
            b_sum, b_low = add_pair(b_sum, b_low, b_part, b_part_low)
            b_squares, b_squares_low = add_pair(b_squares, b_squares_low, b_square, b_square_low)
        else:
            b_part = tl.where(m_there, b_x - pivot[0], 0.0)
            if FORM.moments == "compensated":
                b_sum, b_low = add_compensated(b_sum, b_low, b_part)
                b_squares, b_squares_low = add_compensated(
                    b_squares, b_squares_low, b_part * b_part
                )
            else:
                b_sum += b_part
                b_squares = tl.fma(b_part, b_part, b_squares)
    return (
        b_pivot,
        collect(join(b_sum, b_low, FORM.moments), FORM),
        collect(join(b_squares, b_squares_low, FORM.moments), FORM),
        b_elements.to(tl.float64),
    )


@triton.jit
def _pivot(p_x, i_unit, i_tile, frame, FORM: tl.constexpr):
    """Return pivots that are computed from a tile.

    In the geometry *columns*, they are the means of the tile's columns. In the geometry *segments*,
    there is one pivot, the mean of the whole tile.
    """
    o_elements, m_there = place(i_tile, i_unit, frame, FORM)
    b_x = tl.load(p_x + o_elements, mask=m_there, other=0.0)
    if FORM.moments != "compensated":
        b_x = b_x.to(tl.float32)
    # If a column has no element in the tile, its sum 0 is divided by 1, not by 0.
    b_count = tl.maximum(elements_of(i_tile, i_unit, frame, FORM), 1).to(tl.float64)
    b_pivot = collect(b_x.to(tl.float64), FORM) / b_count
    if FORM.moments != "compensated":
        # The pivot may be any number near the mean, so rounding it to float32 does no harm. If the
        # rounded pivot is later split into a pair of float32 (`split`), the low part of the pair is
        # 0.
        b_pivot = b_pivot.to(tl.float32).to(tl.float64)
    # If the pivot were infinite, the terms of finite elements would be infinite, too. So a pivot
    # that is not finite is replaced by 0.
    return tl.where(tl.abs(b_pivot) < float("inf"), b_pivot, 0.0)


@triton.jit
def _two_sum(b_pivot, b_offset):
    """Return the mean as a sum of two numbers; the second is 0 if the mean is not finite."""
    b_mean = b_pivot + b_offset
    b_part = b_mean - b_pivot
    b_rest = (b_pivot - (b_mean - b_part)) + (b_offset - b_part)
    return b_mean, tl.where(tl.abs(b_mean) < float("inf"), b_rest, 0.0)


@triton.jit
def _store_statistics(
    b_mean,
    b_variance,
    b_count,
    i_channels,
    m_channels,
    p_running_mean,
    p_running_variance,
    momentum,
    momentum_low,
    p_mean,
    p_variance,
    p_moved_mean,
    p_moved_variance,
    MOVING: tl.constexpr,
):
    """Store mean and variance and, if MOVING, the updated running statistics."""
    tl.store(p_mean + i_channels, narrow(b_mean, p_mean), mask=m_channels)
    tl.store(p_variance + i_channels, narrow(b_variance, p_variance), mask=m_channels)
    if MOVING:
        share = tl.full((), 0.0, tl.float64) + momentum + momentum_low
        b_running = tl.load(p_running_mean + i_channels, mask=m_channels, other=0.0).to(tl.float64)
        b_running = (1.0 - share) * b_running + share * b_mean
        b_moved = narrow(b_running, p_moved_mean)
        tl.store(p_moved_mean + i_channels, b_moved, mask=m_channels)
        b_running = tl.load(p_running_variance + i_channels, mask=m_channels, other=0.0)
        b_unbiased = b_variance * (b_count / (b_count - 1.0))
        b_running = (1.0 - share) * b_running.to(tl.float64) + share * b_unbiased
        b_moved = narrow(b_running, p_moved_variance)
        tl.store(p_moved_variance + i_channels, b_moved, mask=m_channels)


@triton.jit
def _write(
    p_x,
    p_residual,
    b_mean,
    b_rest,
    b_variance,
    p_gamma,
    p_beta,
    i_channels,
    i_unit,
    i_first,
    i_last,
    frame,
    p_y,
    p_bits,
    FORM: tl.constexpr,
):
    """Store y in the tiles of a unit, from the last tile to the first.

    If sums were computed before, the tiles were then read from the first to the last. So x of the
    last tiles may still be in the cache.
    """
    b_gain = inverse_deviation(b_variance, FORM.epsilon)
    if FORM.has_gamma:
        b_gain = tl.load(p_gamma + i_channels).to(tl.float64) * b_gain
    b_beta = tl.zeros_like(b_mean)
    if FORM.has_beta:
        b_beta = tl.load(p_beta + i_channels).to(tl.float64)
    b_shift, b_slope = fold_forward(b_mean, b_rest, b_beta, b_gain, FORM)
    mean = split(per_column(b_mean, FORM), FORM.arithmetic)
    shift = split(per_column(b_shift, FORM), FORM.arithmetic)
    slope = split(per_column(b_slope, FORM), FORM.arithmetic)
    gain = split(per_column(b_gain, FORM), FORM.arithmetic)
    for i_step in tl.range(0, i_last - i_first, num_stages=FORM.stages):
        i_tile = i_last - 1 - i_step
        o_elements, m_there = place(i_tile, i_unit, frame, FORM)
        b_x = tl.load(p_x + o_elements, mask=m_there, other=0.0, eviction_policy="evict_first")
        b_x = widen(b_x, FORM.arithmetic)
        b_residual = b_x
        if FORM.residual:
            b_residual = tl.load(p_residual + o_elements, mask=m_there, other=0.0)
            b_residual = widen(b_residual, FORM.arithmetic)
        b_y = normalised(b_x, b_residual, mean, shift, slope, gain, p_y, FORM)
        if FORM.relu:
            b_y = relu(b_y, FORM)
        b_y = narrow(b_y, p_y)
        if FORM.relu and FORM.training:
            # The bits are computed from the rounded values: if y is rounded to 0 or to the ceiling,
            # its bit is not set.
            store_bits(p_bits, i_tile, i_unit, passed(b_y, FORM), frame, FORM)
        tl.store(p_y + o_elements, b_y, mask=m_there)
