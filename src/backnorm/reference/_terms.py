"""Numbers that are sums of terms. Each number is evaluated together with a second one: the sum of
the magnitudes of its terms.
"""

from __future__ import annotations

import numpy as np

from backnorm.reference._doubledouble import Exact, FloatArray

# If variance + epsilon is smaller than this, it is scaled before its square root is computed (see
# `inverse_deviation`).
_SMALL = 2.0**-800


class Term:
    """Arrays of numbers, in the three forms in which the oracle evaluates every formula.

    Each arithmetic operator computes all three forms, so a formula is written once.

    Attributes
    ----------
    exact : Exact
        The value; meaningless once it is infinite or NaN.
    plain : numpy.ndarray
        The value in float64, which decides between infinity and NaN.
    size : numpy.ndarray
        T: the formula in which magnitudes replace terms, and plus replaces minus.
    """

    __slots__ = ("exact", "plain", "size")

    def __init__(self, exact: Exact, plain: FloatArray, size: FloatArray) -> None:
        self.exact, self.plain, self.size = exact, plain, size

    @classmethod
    def of(cls, values: FloatArray) -> Term:
        """Return float64 values as terms."""
        return cls(Exact.of(values), values, np.abs(values))

    def __add__(self, other: Term) -> Term:
        return Term(self.exact + other.exact, self.plain + other.plain, self.size + other.size)

    def __sub__(self, other: Term) -> Term:
        return Term(self.exact - other.exact, self.plain - other.plain, self.size + other.size)

    def __mul__(self, other: Term) -> Term:
        return Term(self.exact * other.exact, self.plain * other.plain, self.size * other.size)

    def __rmul__(self, factor: float) -> Term:
        return Term(self.exact * factor, self.plain * factor, self.size * factor)

    def __truediv__(self, divisor: float | Term) -> Term:
        if isinstance(divisor, Term):
            exact, plain = self.exact / divisor.exact, self.plain / divisor.plain
            return Term(exact, plain, self.size / np.abs(divisor.plain))
        return Term(self.exact / divisor, self.plain / divisor, self.size / divisor)

    def sum(self) -> Term:
        """Return the sum over the elements of each channel."""
        plain, size = (part.sum(1, keepdims=True) for part in (self.plain, self.size))
        return Term(self.exact.sum()[:, None], plain, size)

    def settled(self) -> Term:
        """Return the term with both values equal: `exact` where it is finite, else `plain`."""
        exact = self.exact.settled(self.plain)
        return Term(exact, exact.hi, self.size)

    def single(self) -> Term:
        """Return a copy of the term whose `size` (T) is the magnitude of its value.

        Formulas that use the result count it as one term.
        """
        return Term(self.exact, self.plain, np.abs(self.plain))


def inverse_deviation(variance: Term, epsilon: float) -> Term:
    """Return ``1 / sqrt(variance + epsilon)`` as one term."""
    total = variance.exact + epsilon
    # If variance + epsilon is small, it is scaled up before the root is taken. The method `sqrt`
    # corrects the root by a rounding error, which would underflow if the number were small.
    scale = np.where(np.abs(total.hi) < _SMALL, 2.0**400, 1.0)
    root = (total * (scale * scale)).sqrt()
    plain = 1.0 / np.sqrt(variance.exact.hi + epsilon)
    return Term((1.0 / root) * scale, plain, plain).settled().single()


def rectified(value: Term, ceiling: float | None) -> Term:
    """Return the ReLU of a settled term.

    The ReLU has the same T (`Term.size`) as `value`, because a ReLU does not enlarge an error.
    """
    hi, lo = value.exact.hi, value.exact.lo
    stays = (hi > 0) | np.isnan(hi)
    hi, lo = np.where(stays, hi, 0.0), np.where(stays, lo, 0.0)
    if ceiling is not None:
        # If the high part equals the ceiling, the sign of the low part says whether the value is
        # larger.
        more = (hi > ceiling) | ((hi == ceiling) & (lo > 0))
        hi, lo = np.where(more, ceiling, hi), np.where(more, 0.0, lo)
    return Term(Exact(hi, lo), hi, value.size)
