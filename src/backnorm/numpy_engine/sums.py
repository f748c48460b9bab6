"""Sums of the terms of each channel, added up block by block. Terms have the shape (channels,
elements).
"""

from __future__ import annotations

import numpy as np

from backnorm.compensated import two_product, two_sum


class Sum:
    """A sum of each channel, as a pair of float64 arrays: the rounded sum, and the rest.

    Parameters
    ----------
    channels : int
    is_wide : bool
        Whether the elements are float64. The sum is then compensated, and the rounding errors of
        products are added, too. Sums of narrower elements have digits to spare in float64.
    """

    def __init__(self, channels: int, is_wide: bool) -> None:
        self._is_wide = is_wide
        self.high, self.low = np.zeros((2, channels))

    def add(self, terms: np.ndarray, factor: np.ndarray | None = None) -> None:
        """Add terms, or the products of terms and factors."""
        self._add(terms if factor is None else terms * factor)
        if factor is not None and self._is_wide:
            error = two_product(terms, factor, np)[1]
            self._add(np.where(np.isfinite(error), error, 0.0))

    @property
    def value(self) -> np.ndarray:
        """The sum rounded to float64."""
        return np.where(np.isfinite(self.high), self.high + self.low, self.high)

    def _add(self, terms: np.ndarray) -> None:
        added, rest = _folded(terms) if self._is_wide else (terms.sum(1), 0.0)
        self.high, cut = two_sum(self.high, added)
        self.low = self.low + (cut + rest)


def _folded(terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of each row, and what rounding has left: halves of rows are added, and the
    rounding errors of these sums are added up.
    """
    rest = np.zeros(len(terms))
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        both, cut = two_sum(terms[:, :half], terms[:, half : 2 * half])
        rest = rest + cut.sum(1)
        terms = np.concatenate((both, terms[:, 2 * half :]), 1)
    return terms.sum(1), rest
