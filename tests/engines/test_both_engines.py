"""The engines beside each other: both are within the error budgets, and write the same bins."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

import backnorm
from backnorm.conformance.judge import check_backward, check_forward
from backnorm.reproducible_sums import bins_of
from tests.support.dtypes import ELEMENT_TYPES, FLOAT64, is_16_bit

pytest.importorskip("backnorm_kernels", reason="backnorm-kernels is not installed")

# One element of a channel and many, one channel and many, spans and blocks that are not whole.
SHAPES = [(4, 3, 5), (1, 1), (1, 4, 1), (2, 1), (7, 1, 1500), (6, 1100, 2), (3, 2, 2100)]
EPSILON = 1e-5


def scaled(rng, shape, dtype, size):
    """Return numbers of both signs of about a size."""
    values = rng.uniform(0.3, 1.0, shape) * rng.choice([-1, 1], shape)
    return (values * size).astype(dtype)


def normal(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


def of_all_sizes(rng, shape, dtype):
    most = 12 if dtype.itemsize == 2 else 30
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-most, 2, shape))).astype(dtype)


def with_(*values):
    """Return a maker of normal numbers, among which are some values."""

    def make(rng, shape, dtype):
        array = normal(rng, shape, dtype)
        array.reshape(-1)[rng.integers(0, array.size, len(values))] = values
        return array

    return make


def cancelling(rng, shape, dtype):
    array = normal(rng, shape, dtype)
    half = shape[0] // 2
    array[half : 2 * half] = -array[:half]
    return array


def huge(rng, shape, dtype):
    # Of float64, squares must be below 2^991, from which on a reproducible sum is infinite.
    largest = 1e148 if dtype == FLOAT64 else float(ml_dtypes.finfo(dtype).max)
    return scaled(rng, shape, dtype, largest)


def tiny(rng, shape, dtype):
    least = 1e-150 if dtype == FLOAT64 else float(ml_dtypes.finfo(dtype).smallest_normal) / 4
    return scaled(rng, shape, dtype, least)


def far_away(rng, shape, dtype):
    return (rng.standard_normal(shape) + (100 if dtype.itemsize == 2 else 1e6)).astype(dtype)


FINITE = {
    "normal": (normal, normal),
    "of all sizes": (of_all_sizes, of_all_sizes),
    "huge x": (huge, normal),
    "huge dy": (normal, huge),
    "tiny": (tiny, tiny),
    "cancelling dy": (far_away, cancelling),
    "constant x": (lambda rng, shape, dtype: np.full(shape, 3.25, dtype), normal),
}
NOT_FINITE = {
    "nan in x": (with_(np.nan), normal),
    "nan in dy": (normal, with_(np.nan)),
    "infinity in x": (with_(np.inf), normal),
    "infinity in dy": (normal, with_(-np.inf)),
    "both infinities": (with_(np.inf, -np.inf), with_(np.inf, -np.inf)),
}


def case(kind, shape, dtype, rng):
    """Return the operands of a backward pass, and beta."""
    make_x, make_dy = (FINITE | NOT_FINITE)[kind]
    x, dy = make_x(rng, shape, dtype), make_dy(rng, shape, dtype)
    statistics = np.float32 if is_16_bit(dtype) else dtype
    axes = (0, *range(2, x.ndim))
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        mean, variance = wide.mean(axes).astype(statistics), wide.var(axes).astype(statistics)
    variance = np.where(np.isfinite(variance), variance, np.ones_like(variance))
    gamma, beta = rng.standard_normal((2, shape[1])).astype(statistics)
    return (x, dy, mean, variance, gamma), beta


def with_each(call):
    """Return what a call returns with each engine, kernels first."""
    found = []
    for name in ("kernels", "numpy"):
        with backnorm.engine(name):
            found.append(call())
    return found


def classes(array):
    """Return of each element whether it is NaN, or which infinity, or finite: 2, 1, -1 or 0."""
    wide = array.astype(np.float64)
    return np.where(np.isnan(wide), 2, np.where(np.isinf(wide), np.sign(wide), 0))


@pytest.mark.covering(2)
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", FINITE)
def test_engines_keep_error_budget_for_hostile_numbers(
    kind, shape, dtype, training, reproducible, rng
):
    operands, beta = case(kind, shape, dtype, rng)
    x, _, _, _, gamma = operands
    options = {"epsilon": EPSILON, "training": training}
    gradients = with_each(
        lambda: backnorm.batch_norm_backward(*operands, reproducible=reproducible, **options)
    )
    normalized = with_each(lambda: backnorm.batch_norm_forward(x, gamma, beta, epsilon=EPSILON))
    # NumPy's engine computes in float64, whatever the arithmetic of the call.
    for name, arithmetic, k in (("kernels", None, 0), ("numpy", "float64", 1)):
        found = check_backward(*operands, gradients[k], arithmetic=arithmetic, **options)
        found |= check_forward(
            x, gamma, beta, normalized[k], epsilon=EPSILON, arithmetic=arithmetic
        )
        wrong = {key: verdict.detail for key, verdict in found.items() if not verdict.passed}
        assert not wrong, (name, wrong)


@pytest.mark.covering(2)
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", NOT_FINITE)
def test_engines_return_nan_and_infinities_at_the_same_places(
    kind, shape, dtype, training, reproducible, rng
):
    operands, beta = case(kind, shape, dtype, rng)
    x, _, _, _, gamma = operands
    options = {"epsilon": EPSILON, "reproducible": reproducible}
    for ours, theirs in (
        with_each(lambda: backnorm.batch_norm_backward(*operands, training=training, **options)),
        with_each(lambda: backnorm.batch_norm_forward(x, gamma, beta, **options)),
    ):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(classes(one), classes(other))


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (2, 0, 3), (0, 5)], ids=str)
def test_engines_return_same_results_of_no_elements(shape, dtype, same):
    x = np.ones(shape, dtype)
    ones = np.ones(shape[1], np.float32 if is_16_bit(dtype) else dtype)
    for call in (
        lambda: backnorm.batch_norm_forward(x, ones, ones, epsilon=EPSILON),
        lambda: backnorm.batch_norm_backward(x, x, ones, ones, ones, epsilon=EPSILON),
        lambda: [backnorm.reduce(x, x, ones, reproducible=True).bins],
        lambda: [backnorm.reduce_forward(x, reproducible=True).bins],
    ):
        same(*with_each(call))


def bins(x, dy, mean, **options):
    """Return the bins of both passes."""
    moments = backnorm.reduce_forward(x, reproducible=True, **options)
    sums = backnorm.reduce(x, dy, mean, reproducible=True, **options)
    return np.stack((moments.bins, sums.bins))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", FINITE | NOT_FINITE)
def test_reproducible_bins_of_both_engines_are_equal(kind, shape, dtype, rng):
    (x, dy, mean, *_), _ = case(kind, shape, dtype, rng)
    for data_format in ("NCX", "NXC"):
        if data_format == "NXC":
            x, dy = (np.ascontiguousarray(np.moveaxis(a, 1, -1)) for a in (x, dy))
        ours, theirs = with_each(functools.partial(bins, x, dy, mean, data_format=data_format))
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("factor", [0.0, 2.0**-100, 1.3 * 2.0**-60, -(2.0**-1000)])
@pytest.mark.parametrize("size", [np.finfo(float).max, 1.6e308, 1.7 * 2.0**1000, 2.0**1000])
def test_reproducible_bins_of_huge_and_small_factors_are_equal(size, factor):
    # The products are finite, but splitting the factors to compute their rounding errors could
    # overflow.
    small = np.full((3, 2), factor)
    huge = np.array([[size, 1.0], [-size / 3, 0.7], [1.1, 0.2]])
    for x, dy in ((small, huge), (huge, small)):
        ours, theirs = with_each(functools.partial(bins, x, dy, np.zeros(2)))
        np.testing.assert_array_equal(ours, theirs)


def test_reproducible_bins_at_limits_of_top_bins_are_equal():
    # The least magnitude that counts as infinite, the largest that has bins, the limits of some top
    # bins, and numbers below all bins.
    limits = [2.0**991, 2.0 ** (32 * 29 + 31), 2.0**31, 2.0**-1, 2.0**-961, 2.0**-929, 2.0**-1056]
    for limit in limits:
        dy = np.array([[limit, np.nextafter(limit, 0.0)], [np.nextafter(limit, 0.0), -limit]]).T
        dy = np.concatenate((dy, [[limit, 1.0], [np.pi * limit / 8, 5e-324]]))
        for dtype in (np.float64, np.float32):
            with np.errstate(all="ignore"):
                terms = dy.astype(dtype)
            x, mean = np.full_like(terms, 0.7), np.zeros(2, dtype)
            ours, theirs = with_each(functools.partial(bins, x, terms, mean))
            np.testing.assert_array_equal(ours, theirs)


def test_bins_of_terms_whose_rounding_error_is_not_finite_have_no_error():
    terms, factors = np.array([[1.6e308, 1.0]]), np.array([[0.0, 1.0]])
    with np.errstate(all="ignore"):
        found = bins_of(terms, factors, 8, np)[5:]
    with backnorm.engine("kernels"):
        expected = backnorm.reduce(factors.T, terms.T, np.zeros(1), reproducible=True).bins[5:]
    np.testing.assert_array_equal(found, expected)
