"""The formulas, once: of a channel's coefficients, and of an element of the output.

==========================  =============================================================
backward, training           dx = gain * ((dy - shift) - (x - mean) * slope)
backward, frozen statistics  dx = gain * dy
forward and inference        y  = gain * ((x - mean) - shift) + slope
with a ReLU                  max(0, y), or max(0, y + residual); at most its ceiling
==========================  =============================================================

In the backward pass shift = sum_dy/M, slope = s²·sum_dy_xmu/M and gain = gamma·s, with
s = 1/sqrt(variance + epsilon); in the forward pass shift is the part of the exact mean that a
float64 cannot hold, and slope is beta. Coefficients are found in float64 on every device, there
are few, and come here as `arithmetic.split` returns them.

In float32 arithmetic it is the float32 nearest to the mean that is subtracted from x. The rest of
a mean that a forward pass has found is part of the constant `slope`, in which it does not cancel:
no element of 32 bits or less is nearer to the mean than its nearest float32, so the rest is not
more than x - mean. A mean that is given, in a backward pass or for inference, has no rest: none is
wider than float32 beside such elements (`dtypes.statistics_types`). The budget of
`conformance.judge` has the argument.
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

__all__ = [
    "derivative",
    "fold_forward",
    "inverse_deviation",
    "normalised",
    "passed",
    "relu",
    "scaled",
    "solve_backward",
]


@triton.jit
def inverse_deviation(b_variance, EPSILON: tl.constexpr):
    """Return s = 1/sqrt(variance + epsilon)."""
    # A bare number would be taken for a float32.
    return 1.0 / tl.sqrt(b_variance + tl.full((), EPSILON, tl.float64))


@triton.jit
def solve_backward(b_sum_dy, b_sum_dy_xmu, b_scale, count):
    """Return shift and slope."""
    # In this order a scale as large as 1/sqrt(smallest epsilon) does not overflow.
    return b_sum_dy / count, b_scale * (b_scale * b_sum_dy_xmu / count)


@triton.jit
def fold_forward(b_mean, b_shift, b_slope, b_gain, FORM: tl.constexpr):
    """Return shift and slope for the mean that the kernel subtracts."""
    if FORM.arithmetic == "float32":
        b_slope = b_slope - b_gain * (_beside(b_mean) + b_shift)
        b_shift = tl.zeros_like(b_shift)
    return b_shift, b_slope


@triton.jit
def derivative(b_x, b_dy, mean, shift, slope, gain, p_target, FORM: tl.constexpr):
    """Return dx in training."""
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
    """Return dx of frozen statistics."""
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
    """Return y, 0 in the place of what is less, the ceiling of what is more; NaN is kept."""
    b_y = tl.where(b_y <= 0.0, tl.zeros_like(b_y), b_y)
    if FORM.ceiling != float("inf"):
        b_ceiling = tl.full(b_y.shape, FORM.ceiling, b_y.dtype)
        b_y = tl.where(b_y > b_ceiling, b_ceiling, b_y)
    return b_y


@triton.jit
def passed(b_y, FORM: tl.constexpr):
    """Return which elements of y a ReLU has left as they were."""
    m_passed = b_y.to(tl.float32) > 0.0
    if FORM.ceiling != float("inf"):
        m_passed = m_passed & (b_y < tl.full(b_y.shape, FORM.ceiling, b_y.dtype))
    return m_passed


@triton.jit
def _beside(b_mean):
    """Return what is left of a mean beside its nearest float32; nothing beside an infinity."""
    b_nearest = b_mean.to(tl.float32).to(tl.float64)
    return tl.where(tl.abs(b_nearest) < float("inf"), b_mean - b_nearest, 0.0)
