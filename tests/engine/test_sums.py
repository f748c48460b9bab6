"""The compensated sums against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import backnorm


def _exact_sums(x, dy, mean):
    centred = [Fraction(float(a)) - Fraction(float(mean)) for a in x]
    slopes = [Fraction(float(a)) for a in dy]
    return sum(slopes), sum(s * c for s, c in zip(slopes, centred, strict=True))


@pytest.mark.parametrize("form", ["segments", "columns"])
def test_reduce_of_cancelling_float64_terms_matches_exact_sums(rng, form):
    """Sums that cancel by twelve digits still come out to the last one."""
    count = 5000
    half = rng.standard_normal(count // 2) * 1e8
    dy = np.concatenate([half, -half]) + rng.standard_normal(count) * 1e-4
    # Centred values of few bits, so that x - mean is exact and only the sums are judged.
    x = rng.integers(-1000, 1000, count).astype(np.float64)
    mean = np.array([3.0])
    order = rng.permutation(count)
    x, dy = x[order], dy[order]
    if form == "segments":
        sums = backnorm.reduce(x.reshape(1, 1, -1), dy.reshape(1, 1, -1), mean)
    else:
        twice = lambda a: np.repeat(a[:, None], 2, axis=1)  # noqa: E731
        sums = backnorm.reduce(twice(x), twice(dy), np.repeat(mean, 2))
    exact_dy, exact_product = _exact_sums(x, dy, 3.0)
    for got, exact, terms in (
        (sums.sum_dy[0], exact_dy, np.abs(dy).sum()),
        (sums.sum_dy_xmu[0], exact_product, np.abs(dy * (x - 3.0)).sum()),
    ):
        error = abs(Fraction(float(got)) - exact)
        assert (
            error
            <= Fraction(float(np.spacing(abs(float(exact))))) / 2 + Fraction(float(terms)) / 2**90
        )
