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

from typing import Any, NamedTuple

import triton
import triton.language as tl

from backnorm.gpu.kernels.arithmetic import (
    add_compensated,
    join,
    narrow,
    two_sum,
    widen,
    zeros,
)
from backnorm.gpu.kernels.formulas import (
    coefficients_of,
    fold_forward,
    inverse_deviation,
    normalised,
    passed,
    relu,
)
from backnorm.gpu.kernels.tiles import (
    channels_of,
    collect,
    elements_of,
    offsets_of,
    partials_of,
    parts_of,
    per_column,
    sizes_of,
    span_of,
    store_bits,
    tile_of_parts,
)
from backnorm.gpu.kernels.tuning import tuned


class Elements(NamedTuple):
    """The arrays of elements besides y: x, the residual, and memory for a mask's bits."""

    x: Any
    residual: Any
    bits: Any


class Channels(NamedTuple):
    """The per-channel arrays that give y. If `variance` is None, `mean` has the three rows that
    `forward_finish` stores: the mean, the remainder of the mean, and the variance.
    """

    mean: Any
    variance: Any
    gamma: Any
    beta: Any


class Statistics(NamedTuple):
    """The per-channel results, and what moves running statistics.

    The running statistics are overwritten. The weight of the batch in them is `momentum` +
    `momentum_low`, because a number that Triton passes to a kernel has only the 24 significant bits
    of a float32.
    """

    mean: Any
    variance: Any
    running_mean: Any
    running_variance: Any
    momentum: Any
    momentum_low: Any


@tuned()
@triton.jit
def forward_sums(
    p_x, p_partials, sizes, FORM: tl.constexpr, KEY: tl.constexpr, STAGES: tl.constexpr
):
    """Store the partial results of each program in float64, in four planes (see `partials_of`).

    The planes have the pivot, the sum of x - pivot, the sum of its square, and the number of
    elements.
    """
    sizes = sizes_of(sizes)
    i_unit = tl.program_id(0) % sizes.units
    i_block = tl.program_id(0) // sizes.units
    span = span_of(i_unit, i_block, sizes)
    b_pivot, b_sum, b_squares, b_count = _add_up(p_x, span, sizes, FORM, STAGES)
    o_partials, m_partials, plane = partials_of(i_unit, i_block, sizes, FORM)
    tl.store(p_partials + o_partials, b_pivot, mask=m_partials)
    tl.store(p_partials + plane + o_partials, b_sum, mask=m_partials)
    tl.store(p_partials + 2 * plane + o_partials, b_squares, mask=m_partials)
    tl.store(p_partials + 3 * plane + o_partials, b_count, mask=m_partials)


@triton.jit
def forward_finish(p_partials, p_moments, statistics, parts, FORM: tl.constexpr):
    """Compute the mean and the variance of channels from partial results, and store them twice: for
    the next kernel as float64 (the mean, the remainder of the mean, the variance), and as the
    results that the operation returns.
    """
    parts = parts_of(parts)
    i_channels = tl.program_id(0) * FORM.tile_channels + tl.arange(0, FORM.tile_channels)
    m_channels = i_channels < parts.channels
    count = parts.rows.to(tl.int64) * parts.inner
    plane = count * parts.channels
    # Each part of a channel has its own pivot, and its sums are those of x - pivot and of the
    # square of this difference. The sums of all parts are converted to sums with the pivot of the
    # first part.
    o_pivot = i_channels.to(tl.int64) * parts.inner
    b_pivot = tl.load(p_partials + o_pivot, mask=m_channels, other=0.0)
    b_sum = tl.zeros((FORM.tile_parts, FORM.tile_channels), tl.float64)
    for i_step in range(tl.cdiv(count, FORM.tile_parts)):
        o_partials, m_there = tile_of_parts(i_step, i_channels, parts, FORM)
        p_parts = p_partials + o_partials
        b_count = tl.load(p_parts + 3 * plane, mask=m_there, other=0.0)
        b_apart = tl.load(p_parts, mask=m_there, other=0.0) - b_pivot[None, :]
        b_apart = tl.where(b_count > 0.0, b_apart, 0.0)
        b_sum += tl.load(p_parts + plane, mask=m_there, other=0.0) + b_count * b_apart
    number = tl.full((), 0.0, tl.float64) + parts.elements
    b_offset = tl.sum(b_sum, axis=0) / number
    b_squares = tl.zeros((FORM.tile_parts, FORM.tile_channels), tl.float64)
    for i_step in range(tl.cdiv(count, FORM.tile_parts)):
        o_partials, m_there = tile_of_parts(i_step, i_channels, parts, FORM)
        p_parts = p_partials + o_partials
        b_count = tl.load(p_parts + 3 * plane, mask=m_there, other=0.0)
        b_apart = tl.load(p_parts, mask=m_there, other=0.0) - b_pivot[None, :]
        b_apart = tl.where(b_count > 0.0, b_apart - b_offset[None, :], 0.0)
        b_part = tl.load(p_parts + plane, mask=m_there, other=0.0)
        b_around = tl.load(p_parts + 2 * plane, mask=m_there, other=0.0)
        b_squares += b_around + b_apart * (2.0 * b_part + b_count * b_apart)
    b_variance = tl.sum(b_squares, axis=0) / number
    b_variance = tl.where(b_variance < 0.0, 0.0, b_variance)
    b_mean, b_rest = _mean(b_pivot, b_offset)
    tl.store(p_moments + i_channels, b_mean, mask=m_channels)
    tl.store(p_moments + parts.channels + i_channels, b_rest, mask=m_channels)
    tl.store(p_moments + 2 * parts.channels + i_channels, b_variance, mask=m_channels)
    _store_statistics(statistics, b_mean, b_variance, number, i_channels, m_channels)


@tuned(restored=["p_y"])
@triton.jit
def forward_apply(
    elements, channels, p_y, sizes, FORM: tl.constexpr, KEY: tl.constexpr, STAGES: tl.constexpr
):
    """Store y and, with a ReLU in training, the mask of the ReLU."""
    sizes = sizes_of(sizes)
    # The kernel of the sums has read the tiles from first to last. The programs here compute the
    # tiles from last to first, because the tiles that were read last may still be in the cache.
    i_program = tl.num_programs(0) - 1 - tl.program_id(0)
    i_unit = i_program % sizes.units
    i_channels = channels_of(i_unit, sizes, FORM)
    b_mean = tl.load(channels.mean + i_channels).to(tl.float64)
    if channels.variance is None:
        b_rest = tl.load(channels.mean + sizes.channels + i_channels)
        b_variance = tl.load(channels.mean + 2 * sizes.channels + i_channels)
    else:
        b_rest = tl.zeros_like(b_mean)
        b_variance = tl.load(channels.variance + i_channels).to(tl.float64)
    coefficients = _coefficients(channels, b_mean, b_rest, b_variance, i_channels, FORM)
    span = span_of(i_unit, i_program // sizes.units, sizes)
    _write(elements, p_y, coefficients, span, sizes, FORM, STAGES)


@triton.jit
def forward_complete(
    elements, channels, statistics, p_y, sizes, FORM: tl.constexpr, STAGES: tl.constexpr
):
    """Store y and the statistics for the channels of one unit.

    A unit (of work) has all elements of its channels, so a single program computes the statistics
    of these channels.
    """
    sizes = sizes_of(sizes)
    i_unit = tl.program_id(0)
    i_channels = channels_of(i_unit, sizes, FORM)
    span = span_of(i_unit, i_unit * 0, sizes)
    b_pivot, b_sum, b_squares, b_count = _add_up(elements.x, span, sizes, FORM, STAGES)
    # Columns outside the array have no elements. For such a column, the number of elements is set
    # to 1, so that no sum is divided by 0.
    b_count = tl.where(b_count > 0.0, b_count, 1.0)
    b_offset = b_sum / b_count
    b_variance = (b_squares - b_sum * b_offset) / b_count
    b_variance = tl.where(b_variance < 0.0, 0.0, b_variance)
    b_mean, b_rest = _mean(b_pivot, b_offset)
    _, m_channels, _ = partials_of(i_unit, i_unit * 0, sizes, FORM)
    _store_statistics(statistics, b_mean, b_variance, b_count, i_channels, m_channels)
    coefficients = _coefficients(channels, b_mean, b_rest, b_variance, i_channels, FORM)
    _write(elements, p_y, coefficients, span, sizes, FORM, STAGES)


@triton.jit
def _add_up(p_x, span, sizes, FORM: tl.constexpr, STAGES: tl.constexpr):
    """Return the pivot, the sums of x - pivot and of its square, and the number of elements.

    In the geometry "columns", each of these has a value for every column.
    """
    moments: tl.constexpr = "compensated" if FORM.arithmetic == "compensated" else "float64"
    b_pivot = _pivot(p_x, span, sizes, FORM)
    b_from = per_column(b_pivot, FORM)
    b_sum = zeros(FORM, moments)
    b_low = b_sum
    b_squares = b_sum
    b_squares_low = b_sum
    b_elements = elements_of(span.first, span.unit, sizes, FORM) * 0
    for i_step in tl.range(0, span.last - span.first, num_stages=STAGES):
        i_tile = span.first + i_step
        o_elements, m_there = offsets_of(i_tile, span.unit, sizes, FORM)
        b_x = widen(tl.load(p_x + o_elements, mask=m_there, other=0.0), moments)
        b_elements += elements_of(i_tile, span.unit, sizes, FORM)
        b_part = tl.where(m_there, b_x - b_from, 0.0)
        if moments == "compensated":
            b_sum, b_low = add_compensated(b_sum, b_low, b_part)
            b_squares, b_squares_low = add_compensated(b_squares, b_squares_low, b_part * b_part)
        else:
            b_sum += b_part
            b_squares = tl.fma(b_part, b_part, b_squares)
    return (
        b_pivot,
        collect(join(b_sum, b_low, moments), FORM),
        collect(join(b_squares, b_squares_low, moments), FORM),
        b_elements.to(tl.float64),
    )


@triton.jit
def _pivot(p_x, span, sizes, FORM: tl.constexpr):
    """Return pivots that are computed from a program's first tile.

    In the geometry *columns*, they are the means of the tile's columns. In the geometry *segments*,
    there is one pivot, the mean of the whole tile.
    """
    o_elements, m_there = offsets_of(span.first, span.unit, sizes, FORM)
    b_x = widen(tl.load(p_x + o_elements, mask=m_there, other=0.0), FORM.arithmetic)
    # If a column has no element in the tile, its sum 0 is divided by 1, not by 0.
    b_count = tl.maximum(elements_of(span.first, span.unit, sizes, FORM), 1).to(tl.float64)
    b_pivot = collect(b_x.to(tl.float64), FORM) / b_count
    if FORM.arithmetic != "compensated":
        # The pivot may be any number near the mean. With a float32, more of the differences x -
        # pivot are exact.
        b_pivot = b_pivot.to(tl.float32).to(tl.float64)
    # If the pivot were infinite, the terms of finite elements would be infinite, too. So a pivot
    # that is not finite is replaced by 0.
    return tl.where(tl.abs(b_pivot) < float("inf"), b_pivot, 0.0)


@triton.jit
def _mean(b_pivot, b_offset):
    """Return the mean as a sum of two numbers; the second is 0 if the mean is not finite."""
    b_mean, b_rest = two_sum(b_pivot, b_offset)
    return b_mean, tl.where(tl.abs(b_mean) < float("inf"), b_rest, 0.0)


@triton.jit
def _store_statistics(statistics, b_mean, b_variance, b_count, i_channels, m_channels):
    """Store mean and variance, and update running statistics if there are any."""
    tl.store(statistics.mean + i_channels, narrow(b_mean, statistics.mean), mask=m_channels)
    p_variance = statistics.variance + i_channels
    tl.store(p_variance, narrow(b_variance, statistics.variance), mask=m_channels)
    if statistics.running_mean is not None:
        share = tl.full((), 0.0, tl.float64) + statistics.momentum + statistics.momentum_low
        _move(statistics.running_mean, b_mean, share, i_channels, m_channels)
        b_unbiased = b_variance * (b_count / (b_count - 1.0))
        _move(statistics.running_variance, b_unbiased, share, i_channels, m_channels)


@triton.jit
def _move(p_running, b_batch, share, i_channels, m_channels):
    """Update a running statistic, in which a batch has the weight `share`."""
    b_running = tl.load(p_running + i_channels, mask=m_channels, other=0.0).to(tl.float64)
    b_running = (1.0 - share) * b_running + share * b_batch
    tl.store(p_running + i_channels, narrow(b_running, p_running), mask=m_channels)


@triton.jit
def _coefficients(channels, b_mean, b_rest, b_variance, i_channels, FORM: tl.constexpr):
    """Return the coefficients that give y, in the arithmetic of elements."""
    b_gain = inverse_deviation(b_variance, FORM.epsilon)
    if channels.gamma is not None:
        b_gain = tl.load(channels.gamma + i_channels).to(tl.float64) * b_gain
    b_beta = tl.zeros_like(b_mean)
    if channels.beta is not None:
        b_beta = tl.load(channels.beta + i_channels).to(tl.float64)
    b_shift, b_slope = fold_forward(b_mean, b_rest, b_beta, b_gain, FORM)
    return coefficients_of(b_mean, b_shift, b_slope, b_gain, FORM)


@triton.jit
def _write(elements, p_y, coefficients, span, sizes, FORM: tl.constexpr, STAGES: tl.constexpr):
    """Store y in the tiles of a program, from the last tile to the first.

    If sums were computed before, the tiles were then read from the first to the last. So x of the
    last tiles may still be in the cache.
    """
    for i_step in tl.range(0, span.last - span.first, num_stages=STAGES):
        i_tile = span.last - 1 - i_step
        o_elements, m_there = offsets_of(i_tile, span.unit, sizes, FORM)
        b_x = tl.load(
            elements.x + o_elements, mask=m_there, other=0.0, eviction_policy="evict_first"
        )
        b_y = normalised(widen(b_x, FORM.arithmetic), coefficients)
        if elements.residual is not None:
            b_residual = tl.load(elements.residual + o_elements, mask=m_there, other=0.0)
            b_y += widen(b_residual, FORM.arithmetic)
        if FORM.relu:
            b_y = relu(b_y, FORM)
        b_y = narrow(b_y, p_y)
        if elements.bits is not None:
            # The bits are computed from the rounded values: if y is rounded to 0 or to the ceiling,
            # its bit is not set.
            store_bits(elements.bits, i_tile, span.unit, passed(b_y, FORM), sizes, FORM)
        tl.store(p_y + o_elements, b_y, mask=m_there)
