"""Kernels of the backward pass.

``backward_sums``      x, dy -> partial sums of dy and dy·(x - mean) of every program
``backward_finish``    partial sums -> sum_dy, sum_dy_xmu, dgamma, dbeta
``backward_apply``     x, dy and the sums -> dx
``backward_complete``  all three for the channels of one unit, by one program

The arguments of a kernel are, in this order, inputs, sizes, outputs, and compile-time constants. A
pointer that a kernel does not use may have any value.
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
from backnorm.gpu.kernels.formulas import derivative, inverse_deviation, scaled, solve_backward
from backnorm.gpu.kernels.frame import CHANNELS, PARTS, SIZES, Frame
from backnorm.gpu.kernels.tiles import (
    bits_of,
    channels_of,
    collect,
    first_and_last,
    load_bytes,
    partials_of,
    parts_of,
    per_column,
    place,
)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=CHANNELS)
def backward_sums(
    p_x,
    p_dy,
    p_bits,
    p_mean,
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
    """Store partial sums as float64: a plane for each sum, with a row per block (see
    `partials_of`).
    """
    frame = Frame(rows, width_units, total_units, channels, inner, pieces, tiles, per_block, units)
    i_unit = tl.program_id(0) % units
    i_block = tl.program_id(0) // units
    i_first, i_last = first_and_last(i_block, frame)
    b_mean = tl.load(p_mean + channels_of(i_unit, frame, FORM)).to(tl.float64)
    b_sum_dy, b_sum_dy_xmu = _add_up(
        p_x, p_dy, p_bits, b_mean, i_unit, i_first, i_last, frame, FORM
    )
    o_partials, m_partials, plane = partials_of(i_unit, i_block, frame, FORM)
    tl.store(p_partials + o_partials, b_sum_dy, mask=m_partials)
    tl.store(p_partials + plane + o_partials, b_sum_dy_xmu, mask=m_partials)


@triton.jit(do_not_specialize=PARTS, do_not_specialize_on_alignment=CHANNELS)
def backward_finish(
    p_partials,
    p_variance,
    channels,
    inner,
    parts,
    elements,
    p_sums,
    p_dgamma,
    p_dbeta,
    TILE_CHANNELS: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    EPSILON: tl.constexpr,
    GRADIENTS: tl.constexpr,
):
    """Store sum_dy, sum_dy_xmu and the element count as float64.

    If GRADIENTS is true, also store dgamma and dbeta.
    """
    i_channels = tl.program_id(0) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    m_channels = i_channels < channels
    count = parts.to(tl.int64) * inner
    plane = count * channels
    b_sum_dy = tl.zeros((TILE_PARTS, TILE_CHANNELS), tl.float64)
    b_sum_dy_xmu = b_sum_dy
    for i_step in range(tl.cdiv(count, TILE_PARTS)):
        o_partials, m_there = parts_of(
            parts * 0 + i_step, i_channels, channels, inner, parts, TILE_PARTS
        )
        b_sum_dy += tl.load(p_partials + o_partials, mask=m_there, other=0.0)
        b_sum_dy_xmu += tl.load(p_partials + plane + o_partials, mask=m_there, other=0.0)
    b_total_dy = tl.sum(b_sum_dy, axis=0)
    b_total_dy_xmu = tl.sum(b_sum_dy_xmu, axis=0)
    tl.store(p_sums + i_channels, b_total_dy, mask=m_channels)
    tl.store(p_sums + channels + i_channels, b_total_dy_xmu, mask=m_channels)
    # The number of elements per channel is stored after the sums, because a caller who adds up the
    # sums of several machines also needs the sum of these numbers.
    number = tl.full((), 0.0, tl.float64) + elements
    tl.store(p_sums + 2 * channels, number, mask=tl.program_id(0) == 0)
    if GRADIENTS:
        b_variance = tl.load(p_variance + i_channels, mask=m_channels, other=1.0).to(tl.float64)
        b_dgamma = inverse_deviation(b_variance, EPSILON) * b_total_dy_xmu
        tl.store(p_dgamma + i_channels, narrow(b_dgamma, p_dgamma), mask=m_channels)
        tl.store(p_dbeta + i_channels, narrow(b_total_dy, p_dbeta), mask=m_channels)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=CHANNELS)
def backward_apply(
    p_x,
    p_dy,
    p_bits,
    p_mean,
    p_variance,
    p_gamma,
    p_sums,
    rows,
    width_units,
    total_units,
    channels,
    inner,
    pieces,
    tiles,
    per_block,
    units,
    p_dx,
    p_dresidual,
    FORM: tl.constexpr,
):
    """Store dx, and the gradient of the residual if there is one."""
    frame = Frame(rows, width_units, total_units, channels, inner, pieces, tiles, per_block, units)
    # The first programs take the last blocks of the array, because the elements that were read last
    # for the sums may still be in the cache.
    i_program = tl.num_programs(0) - 1 - tl.program_id(0)
    i_unit = i_program % units
    i_first, i_last = first_and_last(i_program // units, frame)
    i_channels = channels_of(i_unit, frame, FORM)
    b_mean = tl.load(p_mean + i_channels).to(tl.float64)
    b_variance = tl.load(p_variance + i_channels).to(tl.float64)
    b_sum_dy = tl.load(p_sums + i_channels)
    b_sum_dy_xmu = tl.load(p_sums + channels + i_channels)
    count = tl.load(p_sums + 2 * channels)
    _write(
        p_x, p_dy, p_bits, b_mean, b_variance, p_gamma, b_sum_dy, b_sum_dy_xmu, count, i_channels,
        i_unit, i_first, i_last, frame, p_dx, p_dresidual, FORM,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=CHANNELS)
def backward_complete(
    p_x,
    p_dy,
    p_bits,
    p_mean,
    p_variance,
    p_gamma,
    rows,
    width_units,
    total_units,
    channels,
    inner,
    pieces,
    tiles,
    per_block,
    units,
    p_dx,
    p_dresidual,
    p_dgamma,
    p_dbeta,
    FORM: tl.constexpr,
):
    """Store dx, dgamma and dbeta of one unit's channels; a single program adds up all their
    elements.
    """
    frame = Frame(rows, width_units, total_units, channels, inner, pieces, tiles, per_block, units)
    i_unit = tl.program_id(0)
    i_channels = channels_of(i_unit, frame, FORM)
    b_mean = tl.load(p_mean + i_channels).to(tl.float64)
    b_variance = tl.load(p_variance + i_channels).to(tl.float64)
    b_sum_dy, b_sum_dy_xmu = _add_up(
        p_x, p_dy, p_bits, b_mean, i_unit, i_unit * 0, tiles, frame, FORM
    )
    # This kernel stores no partial sums, but the mask for storing them says which columns exist.
    _, m_channels, _ = partials_of(i_unit, i_unit * 0, frame, FORM)
    b_dgamma = inverse_deviation(b_variance, FORM.epsilon) * b_sum_dy_xmu
    tl.store(p_dgamma + i_channels, narrow(b_dgamma, p_dgamma), mask=m_channels)
    tl.store(p_dbeta + i_channels, narrow(b_sum_dy, p_dbeta), mask=m_channels)
    elements = rows.to(tl.int64) * width_units * FORM.align
    count = tl.full((), 0.0, tl.float64) + (elements // channels if FORM.columns else elements)
    _write(
        p_x, p_dy, p_bits, b_mean, b_variance, p_gamma, b_sum_dy, b_sum_dy_xmu, count, i_channels,
        i_unit, i_unit * 0, tiles, frame, p_dx, p_dresidual, FORM,
    )  # fmt: skip


@triton.jit
def _add_up(p_x, p_dy, p_bits, b_mean, i_unit, i_first, i_last, frame, FORM: tl.constexpr):
    """Return sum_dy and sum_dy_xmu over the tiles `i_first` to `i_last` - 1 of a unit, in float64.

    In the geometry *columns*, these are two sums for each column of the unit. In *segments*, they
    are two sums for the unit, which is one channel.
    """
    b_mean_high, b_mean_low = split(per_column(b_mean, FORM), FORM.arithmetic)
    b_sum = zeros(FORM, FORM.arithmetic)
    b_low = b_sum
    b_sum_xmu = b_sum
    b_low_xmu = b_sum
    if FORM.relu:
        # The compiler prefetches x and dy, but not the mask, which is read as single bytes.
        # Therefore the loop reads the bytes of the next tile's mask while it computes the current
        # tile. The bytes of the first tile's mask are read here.
        b_next = load_bytes(p_bits, i_first, i_unit, frame, FORM)
    for i_step in tl.range(0, i_last - i_first, num_stages=FORM.stages):
        i_tile = i_first + i_step
        o_elements, m_there = place(i_tile, i_unit, frame, FORM)
        if FORM.relu:
            b_bits = bits_of(b_next, FORM)
            b_next = load_bytes(p_bits, i_tile + 1, i_unit, frame, FORM)
        b_x = widen(tl.load(p_x + o_elements, mask=m_there, other=0.0), FORM.arithmetic)
        b_dy = widen(tl.load(p_dy + o_elements, mask=m_there, other=0.0), FORM.arithmetic)
        if FORM.relu:
            b_dy = tl.where(b_bits, b_dy, 0.0)
        # Places of the tile that are outside the array have dy = 0, so they add 0 to both sums: of
        # dy, and of dy * (x - mean).
        if FORM.arithmetic == "pairs":
            b_none = tl.zeros_like(b_dy)
            b_part, b_part_low = subtract_pair(b_x, b_mean_high, b_mean_low)
            b_term, b_term_low = multiply_pairs(b_part, b_part_low, b_dy, b_none)
            b_sum, b_low = add_pair(b_sum, b_low, b_dy, b_none)
            b_sum_xmu, b_low_xmu = add_pair(b_sum_xmu, b_low_xmu, b_term, b_term_low)
        elif FORM.arithmetic == "float64":
            b_sum += b_dy
            b_sum_xmu = tl.fma(b_x - b_mean_high, b_dy, b_sum_xmu)
        else:
            b_sum, b_low = add_compensated(b_sum, b_low, b_dy)
            b_sum_xmu, b_low_xmu = add_compensated(b_sum_xmu, b_low_xmu, (b_x - b_mean_high) * b_dy)
    return (
        collect(join(b_sum, b_low, FORM.arithmetic), FORM),
        collect(join(b_sum_xmu, b_low_xmu, FORM.arithmetic), FORM),
    )


@triton.jit
def _write(
    p_x,
    p_dy,
    p_bits,
    b_mean,
    b_variance,
    p_gamma,
    b_sum_dy,
    b_sum_dy_xmu,
    count,
    i_channels,
    i_unit,
    i_first,
    i_last,
    frame,
    p_dx,
    p_dresidual,
    FORM: tl.constexpr,
):
    """Store dx in the tiles `i_first` to `i_last` - 1 of a unit.

    The last of these tiles is computed first, because its x and dy may still be in the cache.
    """
    b_scale = inverse_deviation(b_variance, FORM.epsilon)
    b_gain = b_scale
    if FORM.has_gamma:
        b_gain = tl.load(p_gamma + i_channels).to(tl.float64) * b_scale
    b_shift, b_slope = solve_backward(b_sum_dy, b_sum_dy_xmu, b_scale, count)
    mean = split(per_column(b_mean, FORM), FORM.arithmetic)
    shift = split(per_column(b_shift, FORM), FORM.arithmetic)
    slope = split(per_column(b_slope, FORM), FORM.arithmetic)
    gain = split(per_column(b_gain, FORM), FORM.arithmetic)
    if FORM.relu:
        b_next = load_bytes(p_bits, i_last - 1, i_unit, frame, FORM)
    for i_step in tl.range(0, i_last - i_first, num_stages=FORM.stages):
        i_tile = i_last - 1 - i_step
        o_elements, m_there = place(i_tile, i_unit, frame, FORM)
        if FORM.relu:
            b_bits = bits_of(b_next, FORM)
            b_next = load_bytes(p_bits, tl.maximum(i_tile - 1, 0), i_unit, frame, FORM)
        b_dy = tl.load(p_dy + o_elements, mask=m_there, other=0.0, eviction_policy="evict_first")
        if FORM.relu:
            b_dy = tl.where(b_bits, b_dy, tl.zeros_like(b_dy))
            if FORM.residual:
                tl.store(p_dresidual + o_elements, b_dy, mask=m_there)
        b_dy = widen(b_dy, FORM.arithmetic)
        if FORM.training:
            b_x = tl.load(p_x + o_elements, mask=m_there, other=0.0, eviction_policy="evict_first")
            b_x = widen(b_x, FORM.arithmetic)
            b_dx = derivative(b_x, b_dy, mean, shift, slope, gain, p_dx, FORM)
        else:
            b_dx = scaled(b_dy, gain, p_dx, FORM)
        tl.store(p_dx + o_elements, narrow(b_dx, p_dx), mask=m_there)
