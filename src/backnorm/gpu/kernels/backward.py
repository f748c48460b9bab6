"""Kernels of the backward pass.

``backward_sums``      x, dy -> partial sums of dy and dy·(x - mean) of every program
``backward_finish``    partial sums -> sum_dy, sum_dy_xmu, dgamma, dbeta
``backward_apply``     x, dy and the sums -> dx
``backward_complete``  all three for the channels of one unit, by one program

The arguments of a kernel are arrays, then sizes, then compile-time constants. None takes the place
of an array that is absent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from backnorm.gpu.kernels.arithmetic import (
    add_compensated,
    join,
    narrow,
    rounded,
    widen,
    zeros,
)
from backnorm.gpu.kernels.formulas import (
    coefficients_of,
    derivative,
    inverse_deviation,
    solve_backward,
)
from backnorm.gpu.kernels.tiles import (
    bits_of,
    channels_of,
    collect,
    load_bytes,
    offsets_of,
    partials_of,
    parts_of,
    per_column,
    sizes_of,
    span_of,
    tile_of_parts,
)
from backnorm.gpu.kernels.tuning import tuned


class Elements(NamedTuple):
    """The arrays of elements besides dx: x, dy, a mask's bits and the gradient of a residual."""

    x: Any
    dy: Any
    bits: Any
    dresidual: Any


class Channels(NamedTuple):
    """The per-channel arrays that give dx. `sums` is what `backward_finish` stores; it is None if
    the kernel itself adds up.
    """

    mean: Any
    variance: Any
    gamma: Any
    sums: Any


class Gradients(NamedTuple):
    """The per-channel results."""

    dgamma: Any
    dbeta: Any


@tuned()
@triton.jit
def backward_sums(
    elements, p_mean, p_partials, sizes, FORM: tl.constexpr, KEY: tl.constexpr, STAGES: tl.constexpr
):
    """Store partial sums as float64: a plane for each sum, with a row per block (see
    `partials_of`).
    """
    sizes = sizes_of(sizes)
    i_unit = tl.program_id(0) % sizes.units
    i_block = tl.program_id(0) // sizes.units
    span = span_of(i_unit, i_block, sizes)
    b_mean = tl.load(p_mean + channels_of(i_unit, sizes, FORM)).to(tl.float64)
    b_sum_dy, b_sum_dy_xmu = _add_up(elements, b_mean, span, sizes, FORM, STAGES)
    o_partials, m_partials, plane = partials_of(i_unit, i_block, sizes, FORM)
    tl.store(p_partials + o_partials, b_sum_dy, mask=m_partials)
    tl.store(p_partials + plane + o_partials, b_sum_dy_xmu, mask=m_partials)


@triton.jit
def backward_finish(p_partials, p_variance, p_sums, gradients, parts, FORM: tl.constexpr):
    """Store sum_dy, sum_dy_xmu and the element count as float64; store `gradients` if they are not
    None.
    """
    parts = parts_of(parts)
    i_channels = tl.program_id(0) * FORM.tile_channels + tl.arange(0, FORM.tile_channels)
    m_channels = i_channels < parts.channels
    count = parts.rows.to(tl.int64) * parts.inner
    plane = count * parts.channels
    b_sum_dy = tl.zeros((FORM.tile_parts, FORM.tile_channels), tl.float64)
    b_sum_dy_xmu = b_sum_dy
    for i_step in range(tl.cdiv(count, FORM.tile_parts)):
        o_partials, m_there = tile_of_parts(i_step, i_channels, parts, FORM)
        b_sum_dy += tl.load(p_partials + o_partials, mask=m_there, other=0.0)
        b_sum_dy_xmu += tl.load(p_partials + plane + o_partials, mask=m_there, other=0.0)
    b_total_dy = tl.sum(b_sum_dy, axis=0)
    b_total_dy_xmu = tl.sum(b_sum_dy_xmu, axis=0)
    tl.store(p_sums + i_channels, b_total_dy, mask=m_channels)
    tl.store(p_sums + parts.channels + i_channels, b_total_dy_xmu, mask=m_channels)
    # The number of elements per channel is stored after the sums, because a caller who adds up the
    # sums of several machines also needs the sum of these numbers.
    number = tl.full((), 0.0, tl.float64) + parts.elements
    tl.store(p_sums + 2 * parts.channels, number, mask=tl.program_id(0) == 0)
    if gradients is not None:
        b_variance = tl.load(p_variance + i_channels, mask=m_channels, other=1.0).to(tl.float64)
        b_scale = inverse_deviation(b_variance, FORM.epsilon)
        _store_gradients(gradients, b_total_dy, b_scale * b_total_dy_xmu, i_channels, m_channels)


@tuned(restored=["p_dx"])
@triton.jit
def backward_apply(
    elements, channels, p_dx, sizes, FORM: tl.constexpr, KEY: tl.constexpr, STAGES: tl.constexpr
):
    """Store dx, and the gradient of the residual if there is one. dx may overwrite x or dy."""
    sizes = sizes_of(sizes)
    # The first programs take the last blocks of the array, because the elements that were read last
    # for the sums may still be in the cache.
    i_program = tl.num_programs(0) - 1 - tl.program_id(0)
    i_unit = i_program % sizes.units
    i_channels = channels_of(i_unit, sizes, FORM)
    b_sum_dy = tl.load(channels.sums + i_channels)
    b_sum_dy_xmu = tl.load(channels.sums + sizes.channels + i_channels)
    count = tl.load(channels.sums + 2 * sizes.channels)
    coefficients = _coefficients(channels, b_sum_dy, b_sum_dy_xmu, count, i_channels, FORM)
    span = span_of(i_unit, i_program // sizes.units, sizes)
    _write(elements, p_dx, coefficients, span, sizes, FORM, STAGES)


@triton.jit
def backward_complete(
    elements, channels, gradients, p_dx, sizes, FORM: tl.constexpr, STAGES: tl.constexpr
):
    """Store dx, dgamma and dbeta of one unit's channels; a single program adds up all their
    elements.
    """
    sizes = sizes_of(sizes)
    i_unit = tl.program_id(0)
    i_channels = channels_of(i_unit, sizes, FORM)
    span = span_of(i_unit, i_unit * 0, sizes)
    b_mean = tl.load(channels.mean + i_channels).to(tl.float64)
    b_sum_dy, b_sum_dy_xmu = _add_up(elements, b_mean, span, sizes, FORM, STAGES)
    # This kernel stores no partial sums, but the mask for storing them says which columns exist.
    _, m_channels, _ = partials_of(i_unit, i_unit * 0, sizes, FORM)
    b_scale = inverse_deviation(
        tl.load(channels.variance + i_channels).to(tl.float64), FORM.epsilon
    )
    _store_gradients(gradients, b_sum_dy, b_scale * b_sum_dy_xmu, i_channels, m_channels)
    number = sizes.rows.to(tl.int64) * sizes.width_units * FORM.align
    count = tl.full((), 0.0, tl.float64) + (number // sizes.channels if FORM.columns else number)
    coefficients = _coefficients(channels, b_sum_dy, b_sum_dy_xmu, count, i_channels, FORM)
    _write(elements, p_dx, coefficients, span, sizes, FORM, STAGES)


@triton.jit
def _add_up(elements, b_mean, span, sizes, FORM: tl.constexpr, STAGES: tl.constexpr):
    """Return sum_dy and sum_dy_xmu over the tiles of a program, in float64.

    In the geometry *columns*, these are two sums for each column of the unit. In *segments*, they
    are two sums for the unit, which is one channel.
    """
    b_mean = rounded(per_column(b_mean, FORM), FORM.arithmetic)
    b_sum = zeros(FORM, FORM.arithmetic)
    b_low = b_sum
    b_sum_xmu = b_sum
    b_low_xmu = b_sum
    if FORM.relu:
        # The compiler prefetches x and dy, but not the mask, which is read as single bytes.
        # Therefore the loop reads the bytes of the next tile's mask while it computes the current
        # tile. The bytes of the first tile's mask are read here.
        b_next = load_bytes(elements.bits, span.first, span.unit, sizes, FORM)
    for i_step in tl.range(0, span.last - span.first, num_stages=STAGES):
        i_tile = span.first + i_step
        o_elements, m_there = offsets_of(i_tile, span.unit, sizes, FORM)
        if FORM.relu:
            b_bits = bits_of(b_next, FORM)
            b_next = load_bytes(elements.bits, i_tile + 1, span.unit, sizes, FORM)
        b_x = widen(tl.load(elements.x + o_elements, mask=m_there, other=0.0), FORM.arithmetic)
        b_dy = widen(tl.load(elements.dy + o_elements, mask=m_there, other=0.0), FORM.arithmetic)
        if FORM.relu:
            b_dy = tl.where(b_bits, b_dy, 0.0)
        # Elements of the tile that are outside the array have dy = 0, so they add 0 to both sums:
        # of dy, and of dy * (x - mean).
        if FORM.arithmetic == "float64":
            b_sum += b_dy
            b_sum_xmu = tl.fma(b_x - b_mean, b_dy, b_sum_xmu)
        else:
            b_sum, b_low = add_compensated(b_sum, b_low, b_dy)
            b_sum_xmu, b_low_xmu = add_compensated(b_sum_xmu, b_low_xmu, (b_x - b_mean) * b_dy)
    return (
        collect(join(b_sum, b_low, FORM.arithmetic), FORM),
        collect(join(b_sum_xmu, b_low_xmu, FORM.arithmetic), FORM),
    )


@triton.jit
def _store_gradients(gradients, b_dbeta, b_dgamma, i_channels, m_channels):
    tl.store(gradients.dgamma + i_channels, narrow(b_dgamma, gradients.dgamma), mask=m_channels)
    tl.store(gradients.dbeta + i_channels, narrow(b_dbeta, gradients.dbeta), mask=m_channels)


@triton.jit
def _coefficients(channels, b_sum_dy, b_sum_dy_xmu, count, i_channels, FORM: tl.constexpr):
    """Return the coefficients that give dx, in the arithmetic of elements."""
    b_mean = tl.load(channels.mean + i_channels).to(tl.float64)
    b_variance = tl.load(channels.variance + i_channels).to(tl.float64)
    b_scale = inverse_deviation(b_variance, FORM.epsilon)
    b_gain = b_scale
    if channels.gamma is not None:
        b_gain = tl.load(channels.gamma + i_channels).to(tl.float64) * b_scale
    b_shift, b_slope = solve_backward(b_sum_dy, b_sum_dy_xmu, b_scale, count)
    return coefficients_of(b_mean, b_shift, b_slope, b_gain, FORM)


@triton.jit
def _write(elements, p_dx, coefficients, span, sizes, FORM: tl.constexpr, STAGES: tl.constexpr):
    """Store dx in the tiles of a program.

    The last of these tiles is computed first, because its x and dy may still be in the cache.
    """
    if FORM.relu:
        b_next = load_bytes(elements.bits, span.last - 1, span.unit, sizes, FORM)
    for i_step in tl.range(0, span.last - span.first, num_stages=STAGES):
        i_tile = span.last - 1 - i_step
        o_elements, m_there = offsets_of(i_tile, span.unit, sizes, FORM)
        if FORM.relu:
            b_bits = bits_of(b_next, FORM)
            b_next = load_bytes(elements.bits, tl.maximum(i_tile - 1, 0), span.unit, sizes, FORM)
        b_dy = tl.load(
            elements.dy + o_elements, mask=m_there, other=0.0, eviction_policy="evict_first"
        )
        if FORM.relu:
            b_dy = tl.where(b_bits, b_dy, tl.zeros_like(b_dy))
            if elements.dresidual is not None:
                tl.store(elements.dresidual + o_elements, b_dy, mask=m_there)
        b_dy = widen(b_dy, FORM.arithmetic)
        if FORM.training:
            b_x = tl.load(
                elements.x + o_elements, mask=m_there, other=0.0, eviction_policy="evict_first"
            )
            b_dx = derivative(widen(b_x, FORM.arithmetic), b_dy, coefficients)
        else:
            b_dx = coefficients.gain * b_dy
        tl.store(p_dx + o_elements, narrow(b_dx, p_dx), mask=m_there)
