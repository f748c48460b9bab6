"""Sums and products with their rounding errors, for arrays of float64 of any framework."""

from __future__ import annotations

from typing import Any

# An array of float64, of NumPy or of another framework.
Array = Any

# The largest number of 26 bits.
_LARGEST_UPPER = float.fromhex("0x1.ffffff8p+1023")


def two_sum(left: Array, right: Array) -> tuple[Array, Array]:
    """Return a sum and its rounding error, by the algorithm of Knuth."""
    total = left + right
    moved = total - left
    return total, (left - (total - moved)) + (right - moved)


def two_product(left: Array, right: Array, xp: Any) -> tuple[Array, Array]:
    """Return a product and its rounding error, by the algorithm of Dekker.

    The error is NaN if the magnitude of the product is above 2^1023. `xp` is the namespace of the
    arrays.
    """
    product = left * right
    upper, lower = _split(left, xp)
    upper_right, lower_right = _split(right, xp)
    error = (upper * upper_right - product) + upper * lower_right + lower * upper_right
    return product, error + lower * lower_right


def _split(value: Array, xp: Any) -> tuple[Array, Array]:
    """Return two numbers of 26 bits whose sum is `value`; from 2^1024 - 2^997 on, the second number
    has 27 bits.
    """
    # The bits are rounded, because Veltkamp's product, value * (2^27 + 1), can overflow.
    upper = ((value.view(xp.int64) + (1 << 26)) & -(1 << 27)).view(xp.float64)
    # Rounding the largest numbers up gives infinity. With 27 bits, products of lower numbers are
    # still exact, because only one of the two factors can be so large.
    upper = xp.clip(upper, -_LARGEST_UPPER, _LARGEST_UPPER)
    return upper, value - upper
