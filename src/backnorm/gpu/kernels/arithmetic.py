"""Arithmetics: two with the accuracy of float64, and float32 with its own error budget.

==============  ==================================================================================
"float64"       elements of up to 32 bits in float64
"compensated"   float64 elements; the rounding errors of their sums are added up separately
"float32"       elements of up to 32 bits in float32; sums are compensated, but the difference and
                the product in a term are rounded
==============  ==================================================================================

The argument HOW of a function is one of these names. Elements are computed with HOW =
FORM.arithmetic. If this is "float32", the sums for mean and variance (of x - pivot and of its
square) are nevertheless computed in "float64": the variance is computed from these sums by a
subtraction, which loses digits unless the pivot is the mean.

A compensated sum is two numbers, the sum and the sum of its rounding errors (T. J. Dekker, "A
floating-point technique for extending the available precision", 1971). A rounding error would be
inexact if a product and a sum were fused, so kernels are compiled without such fusion.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen(b_value, HOW: tl.constexpr):
    """Return elements in the type that they are computed in."""
    # 16-bit elements are converted to float32 first, and then, if necessary, to float64: each of
    # the two conversions is one instruction.
    if HOW != "compensated":
        b_value = b_value.to(tl.float32)
    if HOW == "float64":
        b_value = b_value.to(tl.float64)
    return b_value


@triton.jit
def narrow(b_value, p_target):
    """Return values rounded to the type that `p_target` points to."""
    # float64 is rounded to float32 first and then to bfloat16, because not every device has one
    # instruction for the whole conversion.
    if p_target.dtype.element_ty == tl.bfloat16 and b_value.dtype == tl.float64:
        b_nearest = b_value.to(tl.float32)
        b_back = b_nearest.to(tl.float64)
        b_value = _to_odd(b_nearest, b_back != b_value, tl.abs(b_back) > tl.abs(b_value))
    return b_value.to(p_target.dtype.element_ty)


@triton.jit
def zeros(FORM: tl.constexpr, HOW: tl.constexpr):
    """Return a tile of zeros, of the type of the numbers that the arithmetic HOW uses."""
    if HOW == "float32":
        b_zeros = tl.zeros((FORM.tile_rows, FORM.tile_columns), tl.float32)
    else:
        b_zeros = tl.zeros((FORM.tile_rows, FORM.tile_columns), tl.float64)
    return b_zeros


@triton.jit
def rounded(b_value, HOW: tl.constexpr):
    """Return a float64 in the type of the numbers that the arithmetic HOW uses."""
    if HOW == "float32":
        b_value = b_value.to(tl.float32)
    return b_value


@triton.jit
def join(b_sum, b_low, HOW: tl.constexpr):
    """Return a running sum as float64.

    Except in the arithmetic "float64", a running sum is compensated: `b_low` is added to it.
    """
    b_value = b_sum.to(tl.float64)
    if HOW != "float64":
        b_both = b_value + b_low.to(tl.float64)
        # If the sum is infinite, its low part is NaN, so the high part alone is returned.
        b_value = tl.where(b_both == b_both, b_both, b_value)
    return b_value


@triton.jit
def add_compensated(b_sum, b_low, b_term):
    """Return `b_sum` with a term added, and `b_low` with this addition's rounding error added."""
    b_sum, b_rest = two_sum(b_sum, b_term)
    return b_sum, b_low + b_rest


@triton.jit
def two_sum(b_a, b_b):
    """Return the rounded sum and its rounding error, for a and b in any order of magnitude.

    If the sum is not finite, its rounding error is NaN.
    """
    b_sum = b_a + b_b
    b_part = b_sum - b_a
    return b_sum, (b_a - (b_sum - b_part)) + (b_b - b_part)


@triton.jit
def _to_odd(b_nearest, m_inexact, m_beyond):
    """Return a value rounded to odd in float32, so that rounding it to 16 bits is correct.

    One of the two float32 neighbours of an inexact value has an odd last bit. A float32 with an odd
    last bit is neither a 16-bit number nor halfway between two 16-bit numbers. Therefore this
    neighbour is rounded to the same 16-bit number as the value. The nearest float32, in contrast,
    may be halfway between two 16-bit numbers and be rounded to the wrong one (S. Boldo and G.
    Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to
    odd", 2008). `m_beyond` says where `b_nearest` is larger in magnitude than the value.
    """
    b_pattern = b_nearest.to(tl.int32, bitcast=True)
    b_pattern = tl.where(m_inexact, (b_pattern - m_beyond.to(tl.int32)) | 1, b_pattern)
    return b_pattern.to(tl.float32, bitcast=True)
