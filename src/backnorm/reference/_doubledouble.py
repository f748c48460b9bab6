"""Double-double arithmetic on arrays: about 106 significant bits, in plain NumPy.

A number is an unevaluated sum of two float64, ``hi + lo`` with ``|lo|`` at most half a unit in
the last place of ``hi``. The building blocks are the error-free sum of Knuth and a product after
Dekker; see Hida, Li and Bailey, "Algorithms for Quad-Double Precision Floating Point Arithmetic"
(2001).

The relative error of one operation is below 2**-100 as long as neither ``hi`` nor ``lo`` overflows
or underflows. If a value is not finite, ``hi`` is NaN or infinity, but possibly the wrong one of
the two. Callers therefore replace such values by a plain float64 result (`Exact.settled`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
_Operand: TypeAlias = "Exact | FloatArray | float"

# This mask keeps a float64's sign, exponent and upper 26 of 53 significant bits. The other 27 bits
# are the lower part of the split number. Splitting by a mask cannot overflow. Veltkamp's method of
# splitting could overflow, because it multiplies the number by a constant. The product of two lower
# parts has up to 54 bits, one more than a float64. So the last bit of this product may be lost.
# This error is about 2**-106 of the product of the two numbers.
_UPPER_BITS = np.int64(-(1 << 27))


class Exact:
    """An array of double-double numbers, with Python's operators.

    Parameters
    ----------
    hi, lo : array_like of float64
        The value is ``hi + lo``; the shapes are equal.
    """

    # Because this attribute is None, `ndarray + Exact` calls the reflected operators below.
    # Otherwise NumPy would loop over the elements of the array.
    __array_ufunc__ = None
    __slots__ = ("hi", "lo")

    def __init__(self, hi: npt.ArrayLike, lo: npt.ArrayLike) -> None:
        self.hi: FloatArray = np.asarray(hi, np.float64)
        self.lo: FloatArray = np.asarray(lo, np.float64)

    @classmethod
    def of(cls, value: npt.ArrayLike) -> Exact:
        """Return double-double numbers equal to values of float64 or of a narrower type."""
        hi = np.asarray(value, np.float64)
        return cls(hi, np.zeros_like(hi))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.hi.shape

    def __getitem__(self, index: Any) -> Exact:
        return Exact(self.hi[index], self.lo[index])

    def __repr__(self) -> str:
        return f"Exact(hi={self.hi!r}, lo={self.lo!r})"

    def __neg__(self) -> Exact:
        return Exact(-self.hi, -self.lo)

    def __add__(self, other: _Operand) -> Exact:
        if not isinstance(other, Exact):
            hi, lo = _two_sum(self.hi, other)
            return Exact(*_quick_two_sum(hi, lo + self.lo))
        hi, lo = _two_sum(self.hi, other.hi)
        carry, rest = _two_sum(self.lo, other.lo)
        hi, lo = _quick_two_sum(hi, lo + carry)
        return Exact(*_quick_two_sum(hi, lo + rest))

    __radd__ = __add__

    def __sub__(self, other: _Operand) -> Exact:
        return self + (-other)

    def __rsub__(self, other: _Operand) -> Exact:
        return (-self) + other

    def __mul__(self, other: _Operand) -> Exact:
        if not isinstance(other, Exact):
            hi, lo = _two_product(self.hi, other)
            return Exact(*_quick_two_sum(hi, lo + self.lo * other))
        hi, lo = _two_product(self.hi, other.hi)
        return Exact(*_quick_two_sum(hi, lo + (self.hi * other.lo + self.lo * other.hi)))

    __rmul__ = __mul__

    def __truediv__(self, other: _Operand) -> Exact:
        divisor = other if isinstance(other, Exact) else Exact.of(other)
        # This is long division, in which each digit of the quotient is a float64.
        first = self.hi / divisor.hi
        rest = self - divisor * first
        second = rest.hi / divisor.hi
        rest = rest - divisor * second
        third = rest.hi / divisor.hi
        return Exact(*_quick_two_sum(first, second)) + third

    def __rtruediv__(self, other: _Operand) -> Exact:
        return Exact.of(np.broadcast_to(np.asarray(other, np.float64), self.shape)) / self

    def sqrt(self) -> Exact:
        """Return the square root, by one Newton step from the float64 root."""
        root = np.sqrt(self.hi)
        rest = self - Exact(*_two_product(root, root))
        return Exact(*_quick_two_sum(root, rest.hi / (2.0 * root)))

    def sum(self) -> Exact:
        """Return the sum along the last axis, by a balanced tree of double-double sums."""
        if self.shape[-1] == 0:
            return Exact.of(np.zeros(self.shape[:-1]))
        value = self
        while (length := value.shape[-1]) > 1:
            half = length // 2
            pairs = value[..., :half] + value[..., half : 2 * half]
            if length % 2:
                last = value[..., -1:]
                pairs = Exact(
                    np.concatenate([pairs.hi, last.hi], axis=-1),
                    np.concatenate([pairs.lo, last.lo], axis=-1),
                )
            value = pairs
        return value[..., 0]

    def settled(self, plain: FloatArray) -> Exact:
        """Return this value where it is finite, and the float64 value `plain` elsewhere."""
        finite = np.isfinite(self.hi) & np.isfinite(self.lo)
        if finite.all():
            return self
        return Exact(np.where(finite, self.hi, plain), np.where(finite, self.lo, 0.0))


def _two_sum(a: FloatArray, b: FloatArray | float) -> tuple[FloatArray, FloatArray]:
    """Return the rounded sum and its exact error."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def _quick_two_sum(a: FloatArray, b: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the rounded sum and its exact error, given ``|a| >= |b|``."""
    total = a + b
    return total, b - (total - a)


def _split(a: FloatArray | float) -> tuple[FloatArray, FloatArray]:
    """Split the 53 bits of `a`: return a number with the upper 26 bits, and the remainder."""
    array = np.asarray(a, np.float64)
    high: FloatArray = (array.view(np.int64) & _UPPER_BITS).view(np.float64)
    return high, array - high


def _two_product(a: FloatArray, b: FloatArray | float) -> tuple[FloatArray, FloatArray]:
    """Return the rounded product and its error."""
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error
