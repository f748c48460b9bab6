"""Arithmetics: three with the accuracy of float64, and float32 with its own error budget.

==============  ==================================================================================
"float64"       elements of up to 32 bits in float64, on devices with fast float64
"compensated"   float64 elements; the rounding errors of their sums are added up separately
"pairs"         elements of up to 32 bits as sums of two float32, on devices with slow float64
"float32"       elements of up to 32 bits in float32; sums are compensated, but the difference and
                the product in a term are rounded
==============  ==================================================================================

The argument HOW of a function is one of these names. A kernel has two such names in FORM, its
compile-time parameters. Elements are computed with HOW = FORM.arithmetic. The sums for mean and
variance are computed with HOW = FORM.moments. FORM.moments differs from FORM.arithmetic only if
elements are computed in float32. In this case, the sums (of x - pivot and of its square) need more
precision than the elements. The reason is that the variance is computed from these sums by a
subtraction, which loses digits unless the pivot is the mean.

A pair (high, low) stands for high + low, with |low| at most half an ulp of high. A pair has 48
significant bits and the range of float32. The functions here use the error-free transformations of
Dekker and Knuth (T. J. Dekker, "A floating-point technique for extending the available precision",
1971). These transformations would be inexact if a product and a sum were fused, so kernels are
compiled without such fusion.
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
def narrow_pair(b_high, b_low, p_target):
    """Return a float32 that `narrow` rounds to the element nearest to the pair's exact value."""
    # If the high part is infinite, the low part may be NaN, and then the sum of both parts would be
    # NaN. In this case, the high part alone is the result.
    b_sum = b_high + b_low
    b_sum = tl.where(b_sum == b_sum, b_sum, b_high)
    if p_target.dtype.element_ty.primitive_bitwidth == 16:
        m_rest = (b_low == b_low) & (b_low != 0.0) & (tl.abs(b_high) < float("inf"))
        b_sum = _to_odd(b_sum, m_rest, (b_high > 0.0) != (b_low > 0.0))
    return b_sum


@triton.jit
def zeros(FORM: tl.constexpr, HOW: tl.constexpr):
    """Return a tile of zeros, of the type of the numbers that the arithmetic HOW uses."""
    if HOW == "pairs" or HOW == "float32":
        b_zeros = tl.zeros((FORM.tile_rows, FORM.tile_columns), tl.float32)
    else:
        b_zeros = tl.zeros((FORM.tile_rows, FORM.tile_columns), tl.float64)
    return b_zeros


@triton.jit
def split(b_value, HOW: tl.constexpr):
    """Return a float64 as two numbers of the type in which elements are computed. If HOW is
    "pairs", the two numbers are the high and the low part of a pair; otherwise, they are equal.
    """
    if HOW == "pairs":
        b_high = b_value.to(tl.float32)
        b_low = (b_value - b_high.to(tl.float64)).to(tl.float32)
        # If the value exceeds the range of float32, the high part is infinite, and the low part is
        # set to 0.
        b_low = tl.where(tl.abs(b_high) < float("inf"), b_low, 0.0)
    else:
        b_high = b_value
        if HOW == "float32":
            b_high = b_value.to(tl.float32)
        b_low = b_high
    return b_high, b_low


@triton.jit
def join(b_high, b_low, HOW: tl.constexpr):
    """Return a running sum as float64.

    Except in the arithmetic "float64", a running sum has a high and a low part, which are added.
    """
    b_value = b_high.to(tl.float64)
    if HOW != "float64":
        b_both = b_value + b_low.to(tl.float64)
        # If the sum is infinite, its low part is NaN, so the high part alone is returned.
        b_value = tl.where(b_both == b_both, b_both, b_value)
    return b_value


@triton.jit
def add_compensated(b_sum, b_low, b_term):
    """Return `b_sum` with a term added, and `b_low` with this addition's rounding error added."""
    b_sum, b_rest = _two_sum(b_sum, b_term)
    return b_sum, b_low + b_rest


@triton.jit
def subtract_pair(b_value, b_high, b_low):
    """Return `b_value` minus the pair (`b_high`, `b_low`), as a pair."""
    b_difference, b_rest = _two_sum(b_value, -b_high)
    return _quick_two_sum(b_difference, b_rest - b_low)


@triton.jit
def add_pair(b_a_high, b_a_low, b_high, b_low):
    """Return the sum of two pairs as a pair."""
    b_sum, b_rest = _two_sum(b_a_high, b_high)
    return _quick_two_sum(b_sum, b_rest + (b_a_low + b_low))


@triton.jit
def multiply_pairs(b_a_high, b_a_low, b_high, b_low):
    """Return the product of two pairs as a pair."""
    b_product = b_a_high * b_high
    b_rest = tl.fma(b_a_high, b_high, -b_product)
    return _quick_two_sum(b_product, b_rest + (b_a_high * b_low + b_a_low * b_high))


@triton.jit
def _two_sum(b_a, b_b):
    """Return the rounded sum and its rounding error, for a and b in any order of magnitude."""
    b_sum = b_a + b_b
    b_part = b_sum - b_a
    return b_sum, (b_a - (b_sum - b_part)) + (b_b - b_part)


@triton.jit
def _quick_two_sum(b_a, b_b):
    """Return the rounded sum and its rounding error, where |a| >= |b|."""
    b_sum = b_a + b_b
    return b_sum, b_b - (b_sum - b_a)


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
