"""Sums and products with their rounding errors, for arrays of float64 of any framework."""

from __future__ import annotations

from typing import Any

# An array of float64, of NumPy or of another framework.
Array = Any


def two_sum(left: Array, right: Array) -> tuple[Array, Array]:
    """Return a sum and its rounding error, by the algorithm of Knuth."""
    total = left + right
    moved = total - left
    return total, (left - (total - moved)) + (right - moved)


def two_product(left: Array, right: Array) -> tuple[Array, Array]:
    """Return a product and its rounding error, by the algorithm of Dekker and Veltkamp.

    The error is NaN if a factor is larger than 2^996.
    """
    product = left * right
    upper, lower = _split(left)
    upper_right, lower_right = _split(right)
    error = (upper * upper_right - product) + upper * lower_right + lower * upper_right
    return product, error + lower * lower_right


def _split(value: Array) -> tuple[Array, Array]:
    moved = value * 134217729.0
    upper = moved - (moved - value)
    return upper, value - upper
