"""The formulas of a channel's coefficients and of an element of the output.

==========================  =============================================================
backward, training           dx = gain * ((dy - shift) - (x - mean) * slope)
backward, frozen statistics  dx = gain * dy
forward and inference        y  = gain * ((x - mean) - shift) + slope
with a ReLU                  max(0, y), or max(0, y + residual); at most the ceiling
==========================  =============================================================

In the backward pass, shift = sum_dy/M, slope = s²·sum_dy_xmu/M and gain = gamma·s, with s =
1/sqrt(variance + epsilon). In the forward pass, slope is beta, and shift is the exact mean minus
the float64 `mean`. The coefficients are few, and are computed in float64. The functions of elements
compute in the arithmetic of elements, to which `arithmetic.rounded` converts the coefficients.

In float32 arithmetic, the float32 nearest to the mean is subtracted from x. The remainder of the
mean is the mean minus this float32; in a forward pass, the product of gain and this remainder is
subtracted from `slope`. No element of 32 bits or less is nearer to the mean than this float32. So
the magnitude of the remainder is at most |x - mean| for every element x. Therefore gain times the
remainder is not larger in magnitude than gain * (x - mean), so few digits are lost when the formula
combines the two. In a backward pass or in inference, the caller gives the mean. In this case the
remainder is 0, for the following reason. Elements that are computed in float32 arithmetic have at
most 32 bits. For such elements a given mean also has at most 32 bits (`dtypes.statistics_types`),
so it is equal to the float32 that is subtracted. `conformance.judge` derives the error budget.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from backnorm.gpu.kernels.arithmetic import rounded
from backnorm.gpu.kernels.tiles import per_column


class Coefficients(NamedTuple):
    """The coefficients of the formulas, for each column of a tile or for the whole tile."""

    mean: Any
    shift: Any
    slope: Any
    gain: Any


@triton.jit
def coefficients_of(b_mean, b_shift, b_slope, b_gain, FORM: tl.constexpr):
    """Return coefficients in the arithmetic of elements, in a shape that broadcasts with a tile."""
    return Coefficients(
        rounded(per_column(b_mean, FORM), FORM.arithmetic),
        rounded(per_column(b_shift, FORM), FORM.arithmetic),
        rounded(per_column(b_slope, FORM), FORM.arithmetic),
        rounded(per_column(b_gain, FORM), FORM.arithmetic),
    )


@triton.jit
def inverse_deviation(b_variance, EPSILON: tl.constexpr):
    """Return s = 1/sqrt(variance + epsilon)."""
    # Triton would convert EPSILON, a Python number, to float32. So EPSILON is made a float64 tensor
    # here.
    return 1.0 / tl.sqrt(b_variance + tl.full((), EPSILON, tl.float64))


@triton.jit
def solve_backward(b_sum_dy, b_sum_dy_xmu, b_scale, count):
    """Return shift and slope, two coefficients of dx, from the sums of the channel."""
    # The parentheses avoid scale * scale, which would overflow for the smallest epsilon.
    return b_sum_dy / count, b_scale * (b_scale * b_sum_dy_xmu / count)


@triton.jit
def fold_forward(b_mean, b_shift, b_slope, b_gain, FORM: tl.constexpr):
    """Return shift and slope for the mean that the kernel subtracts from x.

    In float32 arithmetic, the kernel subtracts only m, the float32 nearest to the mean. To make up
    for this, gain * (mean - m + shift) is subtracted from slope, and the returned shift is 0.
    """
    if FORM.arithmetic == "float32":
        b_slope = b_slope - b_gain * (_beside(b_mean) + b_shift)
        b_shift = tl.zeros_like(b_shift)
    return b_shift, b_slope


@triton.jit
def derivative(b_x, b_dy, coefficients):
    """Return a tile of dx for a backward pass in training (statistics are not constants)."""
    mean, shift, slope, gain = coefficients
    return gain * tl.fma(mean - b_x, slope, b_dy - shift)


@triton.jit
def normalised(b_x, coefficients):
    """Return a tile of y."""
    mean, shift, slope, gain = coefficients
    return tl.fma(gain, (b_x - mean) - shift, slope)


@triton.jit
def relu(b_y, FORM: tl.constexpr):
    """Return y clipped to the range from 0 to the ceiling; NaN stays NaN."""
    b_y = tl.where(b_y <= 0.0, tl.zeros_like(b_y), b_y)
    if FORM.ceiling != float("inf"):
        b_ceiling = tl.full(b_y.shape, FORM.ceiling, b_y.dtype)
        b_y = tl.where(b_y > b_ceiling, b_ceiling, b_y)
    return b_y


@triton.jit
def passed(b_y, FORM: tl.constexpr):
    """Return the mask of a ReLU: which elements of y are between 0 and the ceiling."""
    m_passed = b_y.to(tl.float32) > 0.0
    if FORM.ceiling != float("inf"):
        m_passed = m_passed & (b_y < tl.full(b_y.shape, FORM.ceiling, b_y.dtype))
    return m_passed


@triton.jit
def _beside(b_mean):
    """Return a mean minus the float32 nearest to it, or 0 if this float32 is infinite."""
    b_nearest = b_mean.to(tl.float32).to(tl.float64)
    return tl.where(tl.abs(b_nearest) < float("inf"), b_mean - b_nearest, 0.0)
