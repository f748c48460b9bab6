"""The formulas of a channel's coefficients and of an element of the output.

==========================  =============================================================
backward, training           dx = gain * ((dy - shift) - (x - mean) * slope)
backward, frozen statistics  dx = gain * dy
forward and inference        y  = gain * ((x - mean) - shift) + slope
with a ReLU                  max(0, y), or max(0, y + residual); at most the ceiling
==========================  =============================================================

In the backward pass, shift = sum_dy/M, slope = s²·sum_dy_xmu/M and gain = gamma·s, with s =
1/sqrt(variance + epsilon). In the forward pass, slope is beta, and shift is the exact mean minus
the float64 `mean`. The coefficients are few, and are computed in float64 on every device.
The functions here compute in the arithmetic of elements, to which `arithmetic.split` converts the
coefficients.

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

import triton
import triton.language as tl

from backnorm.gpu.kernels.arithmetic import (
    add_pair,
    multiply_pairs,
    narrow_pair,
    subtract_pair,
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
def derivative(b_x, b_dy, mean, shift, slope, gain, p_target, FORM: tl.constexpr):
    """Return a tile of dx for a backward pass in training (statistics are not constants)."""
    if FORM.arithmetic == "pairs":
        b_part, b_part_low = subtract_pair(b_x, mean[0], mean[1])
        b_part, b_part_low = multiply_pairs(b_part, b_part_low, slope[0], slope[1])
        b_value, b_low = subtract_pair(b_dy, shift[0], shift[1])
        b_value, b_low = add_pair(b_value, b_low, -b_part, -b_part_low)
        b_value, b_low = multiply_pairs(b_value, b_low, gain[0], gain[1])
        b_dx = narrow_pair(b_value, b_low, p_target)
    else:
        b_dx = gain[0] * tl.fma(mean[0] - b_x, slope[0], b_dy - shift[0])
    return b_dx


@triton.jit
def scaled(b_dy, gain, p_target, FORM: tl.constexpr):
    """Return dx for statistics that are constants (frozen): gain * dy."""
    b_dx = gain[0] * b_dy
    if FORM.arithmetic == "pairs":
        b_value, b_low = multiply_pairs(b_dy, tl.zeros_like(b_dy), gain[0], gain[1])
        b_dx = narrow_pair(b_value, b_low, p_target)
    return b_dx


@triton.jit
def normalised(b_x, b_residual, mean, shift, slope, gain, p_target, FORM: tl.constexpr):
    """Return y, with the residual added if there is one."""
    if FORM.arithmetic == "pairs":
        b_value, b_low = subtract_pair(b_x, mean[0], mean[1])
        b_value, b_low = multiply_pairs(b_value, b_low - shift[0], gain[0], gain[1])
        b_value, b_low = add_pair(b_value, b_low, slope[0], slope[1])
        if FORM.residual:
            b_value, b_low = add_pair(b_value, b_low, b_residual, tl.zeros_like(b_residual))
        b_y = narrow_pair(b_value, b_low, p_target)
    else:
        b_y = tl.fma(gain[0], (b_x - mean[0]) - shift[0], slope[0])
        if FORM.residual:
            b_y = b_y + b_residual
    return b_y


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
