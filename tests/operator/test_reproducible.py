"""Reproducible sums: the same bits however a batch is cut, ordered, laid out and shared out."""

from __future__ import annotations

import itertools
from fractions import Fraction

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

import backnorm
from backnorm import ReproducibleMoments, ReproducibleSums
from backnorm.conformance.judge import check_backward, check_forward
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.executable import CALLS, forget
from backnorm.reproducible_sums import tops_of

BFLOAT16 = ml_dtypes.bfloat16
TYPES = [np.float64, np.float32, np.float16, BFLOAT16]

# Segments in pieces and in rows, short ones, rows of columns, a space of a few elements, joined
# rows with a rest, one channel, one element.
SHAPES = [
    (3, 5, 9001),
    (8, 6, 1100),
    (31, 17, 49),
    (40, 70, 17),
    (300, 64),
    (1000, 130),
    (57, 9, 3),
    (501, 3),
    (37, 1, 50),
    (1, 4, 1),
]
EPSILON = 1e-3


def data(shape, dtype, seed=0, offset=1.0):
    rng = np.random.default_rng(seed)
    channels = shape[1]
    scale = np.exp2(rng.integers(-6, 6, channels)).reshape(1, channels, *[1] * (len(shape) - 2))
    x = ((rng.standard_normal(shape) + offset) * scale).astype(dtype)
    dy = (rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, shape))).astype(dtype)
    wide = np.float32 if x.dtype.itemsize == 2 else dtype
    gamma, beta = rng.standard_normal((2, channels)).astype(wide)
    return x, dy, gamma, beta


def last(array):
    """Return an array with its channel axis last, contiguous."""
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))


def bits(*arrays):
    return [np.ascontiguousarray(each).view(np.uint8).tobytes() for each in arrays]


def taken_apart(terms, digits):
    """Return the top bin and the digits of exact terms, by the definition."""
    most = max((abs(term) for term in terms), default=Fraction(0))
    top = {3: -31, 4: -30}[digits]
    while not most < Fraction(2) ** (32 * top + 31):
        top += 1
    found = [0] * digits
    for term in terms:
        for k in range(digits):
            unit = Fraction(2) ** (32 * (top - k))
            # To the nearest, and to even between two.
            number = round(term / unit)
            found[k] += number
            term -= number * unit
    return [top, *found]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5, 3, 21), (9, 4), (40, 2, 2)])
def test_bins_equal_digits_by_definition(dtype, shape):
    x, dy, *_ = data(shape, dtype)
    digits = 4 if dtype is np.float64 else 3
    moments = backnorm.reduce_forward(x, reproducible=True)
    mean = x.astype(float).mean((0, *range(2, x.ndim))).astype(np.float32 if digits == 3 else float)
    sums = backnorm.reduce(x, dy, mean, reproducible=True)
    assert moments.bins.dtype == sums.bins.dtype == np.int64
    assert moments.count == sums.count == x.size // shape[1]
    for c in range(shape[1]):
        values = [Fraction(float(value)) for value in x[:, c].ravel()]
        gradients = [Fraction(float(value)) for value in dy[:, c].ravel()]
        centred = [Fraction(float(value) - float(mean[c])) for value in x[:, c].ravel()]

        def products(left, right):
            exact = [a * b for a, b in zip(left, right, strict=True)]
            rounded = [Fraction(float(value)) for value in exact]
            if digits == 3:
                return rounded
            # What float64 rounds a product by is a term of its own.
            return [*rounded, *(a - b for a, b in zip(exact, rounded, strict=True))]

        expected = taken_apart(values, digits) + taken_apart(products(values, values), digits)
        assert moments.bins[:, c].tolist() == expected
        expected = taken_apart(gradients, digits)
        expected += taken_apart(products(gradients, centred), digits)
        assert sums.bins[:, c].tolist() == expected


def results(x, dy, gamma, beta, **options):
    """Return all results of both passes of a whole batch."""
    y, mean, variance = backnorm.batch_norm_forward(
        x, gamma, beta, epsilon=EPSILON, reproducible=True, **options
    )
    gradients = backnorm.batch_norm_backward(
        x, dy, mean, variance, gamma, epsilon=EPSILON, reproducible=True, **options
    )
    return y, mean, variance, *gradients


def in_parts(x, dy, gamma, beta, cuts, order, **options):
    """Return the same of a batch in parts, which are added up in an order."""
    data_format = options.get("data_format", "NCX")
    where = {"data_format": data_format, "arithmetic": options.get("arithmetic")}
    parts = list(zip(np.split(x, cuts), np.split(dy, cuts), strict=True))
    moments = [backnorm.reduce_forward(part, reproducible=True, **where) for part, _ in parts]
    moments = sum((moments[k] for k in order[1:]), start=moments[order[0]])
    found = [
        backnorm.apply_forward(part, moments, gamma, beta, epsilon=EPSILON, **where)
        for part, _ in parts
    ]
    mean, variance = found[0][1:]
    sums = [backnorm.reduce(*part, mean, reproducible=True, **where) for part in parts]
    sums = sum((sums[k] for k in order[1:]), start=sums[order[0]])
    dx = [
        backnorm.apply(*part, mean, variance, gamma, sums, epsilon=EPSILON, **where)
        for part in parts
    ]
    rounded = sums.rounded()
    inverse = 1.0 / np.sqrt(variance.astype(float) + EPSILON)
    dgamma = (inverse * rounded.sum_dy_xmu).astype(mean.dtype)
    y = np.concatenate([one[0] for one in found])
    return y, mean, variance, np.concatenate(dx), dgamma, rounded.sum_dy.astype(mean.dtype)


@pytest.mark.covering(2)
@pytest.mark.parametrize("arithmetic", ["float64", "float32"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reproducible_results_have_same_bits_for_all_cuts_threads_and_layouts(
    shape, dtype, arithmetic
):
    if dtype is np.float64 and arithmetic == "float32":
        return
    x, dy, gamma, beta = data(shape, dtype)
    options = {"arithmetic": arithmetic}
    expected = results(x, dy, gamma, beta, **options)
    for number in (1, 3):
        with backnorm.num_threads(number):
            assert bits(*results(x, dy, gamma, beta, **options)) == bits(*expected), number
    size = shape[0]
    eighths = tuple(size * k // 8 for k in range(1, 8))
    cut = [((), [0]), ((size // 2,), [1, 0]), (eighths, [7, 2, 5, 0, 1, 6, 3, 4])]
    for cuts, order in [*cut, ((0, 1, size // 3, size), [3, 1, 4, 0, 2])]:
        found = in_parts(x, dy, gamma, beta, sorted(cuts), order, **options)
        assert bits(*found) == bits(*expected), cuts
    y, mean, variance, dx, dgamma, dbeta = results(
        last(x), last(dy), gamma, beta, data_format="NXC", **options
    )
    columns = y, mean, variance, dx, dgamma, dbeta
    rows = last(expected[0]), *expected[1:3], last(expected[3]), *expected[4:]
    assert bits(*columns) == bits(*rows)


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("dtype", TYPES)
def test_reproducible_results_have_same_bits_in_other_sample_order(dtype, data_format):
    x, dy, gamma, beta = data((64, 16, 49), dtype)
    order = np.random.default_rng(3).permutation(64)
    if data_format == "NXC":
        x, dy = last(x), last(dy)
    one = results(x, dy, gamma, beta, data_format=data_format)
    other = results(x[order], dy[order], gamma, beta, data_format=data_format)
    assert bits(one[0][order], *one[1:3], one[3][order], *one[4:]) == bits(*other)
    usual = backnorm.reduce(x, dy, one[1], data_format=data_format)
    moved = backnorm.reduce(x[order], dy[order], one[1], data_format=data_format)
    # Plain float32 sums do depend on the order. (Sums of the other types are compensated, or
    # exact for so few elements.)
    assert dtype is not np.float32 or bits(usual.sum_dy_xmu) != bits(moved.sum_dy_xmu)


@pytest.mark.parametrize("shape", [(40, 17, 49), (300, 64), (8, 6, 1100)], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_reproducible_relu_has_same_bits_in_both_layouts_and_for_masked_dy(dtype, shape):
    x, dy, gamma, beta = data(shape, dtype)
    residual = np.random.default_rng(9).standard_normal(shape).astype(dtype)
    options = {"epsilon": EPSILON}

    def both(x, dy, residual, data_format):
        y, mean, variance, mask = backnorm.batch_norm_forward(
            x, gamma, beta, **options, activation="relu", residual=residual, reproducible=True,
            data_format=data_format,
        )  # fmt: skip
        operands = x, dy, mean, variance, gamma
        found = backnorm.batch_norm_backward(
            *operands,
            **options,
            mask=mask,
            residual=True,
            reproducible=True,
            data_format=data_format,
        )
        return y, mean, variance, *found

    rows = both(x, dy, residual, "NCX")
    columns = both(last(x), last(dy), last(residual), "NXC")
    elements = {0, 3, 6}
    assert bits(*(last(v) if k in elements else v for k, v in enumerate(rows))) == bits(*columns)
    # The gradients equal those of a dy that is zero where y is not positive.
    masked = np.where(rows[0] > 0, dy, np.zeros_like(dy))
    plain = backnorm.batch_norm_backward(x, masked, *rows[1:3], gamma, **options, reproducible=True)
    assert bits(*plain) == bits(*rows[3:6])


@pytest.mark.parametrize("offset", [0.0, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, BFLOAT16])
def test_reproducible_results_keep_error_budget(dtype, data_format, offset):
    x, dy, gamma, beta = data((32, 7, 225), dtype, offset=offset)
    if data_format == "NXC":
        x, dy = last(x), last(dy)
    y, mean, variance, *gradients = results(x, dy, gamma, beta, data_format=data_format)
    options = {"epsilon": EPSILON, "data_format": data_format}
    verdicts = check_forward(x, gamma, beta, (y, mean, variance), **options)
    verdicts |= check_backward(x, dy, mean, variance, gamma, tuple(gradients), **options)
    for name, verdict in verdicts.items():
        assert verdict.passed, (name, verdict.detail)


def test_reproducible_frozen_backward_has_same_bits_in_reversed_sample_order():
    x, dy, gamma, _ = data((40, 17, 49), np.float32)
    mean, variance = np.ones((2, 17), np.float32)
    options = {"epsilon": EPSILON, "training": False, "reproducible": True}
    one = backnorm.batch_norm_backward(x, dy, mean, variance, gamma, **options)
    other = backnorm.batch_norm_backward(x[::-1], dy[::-1], mean, variance, gamma, **options)
    assert bits(one.dx[::-1], *one[1:]) == bits(*other)
    usual = backnorm.batch_norm_backward(
        x, dy, mean, variance, gamma, epsilon=EPSILON, training=False
    )
    assert bits(usual.dx) == bits(one.dx)
    np.testing.assert_allclose(usual.dgamma, one.dgamma, rtol=1e-6, atol=1e-4)


SPECIAL = [float("nan"), float("inf"), float("-inf"), 3e38, -1e-45, 0.0]


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("values", list(itertools.combinations(SPECIAL, 2)), ids=str)
def test_reproducible_sums_of_nonfinite_terms_match_plain_sums(values, data_format):
    x, dy, gamma, beta = data((30, 9, 20), np.float32)
    for k, value in enumerate(values):
        x[3 + 20 * k, 2, 5] = dy[4, 5 + k, 7] = value
    if data_format == "NXC":
        x, dy = last(x), last(dy)
    where = {"data_format": data_format}
    with np.errstate(all="ignore"):
        moments = backnorm.reduce_forward(x, reproducible=True, **where).rounded()
        usual = backnorm.reduce_forward(x, **where)
        mean = np.zeros(9, np.float32)
        sums = backnorm.reduce(x, dy, mean, reproducible=True, **where).rounded()
        expected = backnorm.reduce(x, dy, mean, **where)
    np.testing.assert_allclose(moments.mean, usual.mean, rtol=1e-9)
    np.testing.assert_allclose(sums.sum_dy, expected.sum_dy, rtol=1e-9)
    np.testing.assert_allclose(sums.sum_dy_xmu, expected.sum_dy_xmu, rtol=1e-9)
    one = results(x, dy, gamma, beta, **where)
    other = results(x[::-1], dy[::-1], gamma, beta, **where)
    assert bits(one[0][::-1], *one[1:3], *one[4:]) == bits(other[0], *other[1:3], *other[4:])


@pytest.mark.parametrize("value", [1e290, 1e-300, 2.0**991, -(2.0**1000), 5e-324])
def test_reproducible_sum_of_extreme_float64_is_accurate_or_infinite(value):
    dy = np.random.default_rng(0).standard_normal((40, 3, 30)) * min(1.0, abs(value))
    dy[7, 1, 4] = value
    x, mean = np.ones((40, 3, 30)), np.zeros(3)
    sums = backnorm.reduce(x, dy, mean, reproducible=True)
    found = sums.rounded().sum_dy
    for c in range(3):
        exact = float(sum(Fraction(float(each)) for each in dy[:, c].ravel()))
        if abs(value) >= 2.0**991 and c == 1:
            assert found[c] == np.copysign(np.inf, value)
        else:
            # Below 2^-1056 there are no bins.
            allowed = 1e-29 * np.abs(dy[:, c]).sum() + dy[:, c].size * 2.0**-1056
            assert abs(found[c] - exact) <= allowed
    again = backnorm.reduce(x, dy[::-1], mean, reproducible=True)
    assert bits(again.bins) == bits(sums.bins)


@given(
    terms=st.lists(st.floats(allow_subnormal=True, width=32), max_size=60),
    cut=st.integers(0, 60),
    seed=st.integers(0, 9),
)
def test_reproducible_sums_do_not_depend_on_order_of_terms(terms, cut, seed):
    dy = np.array(terms, np.float32).reshape(-1, 1, 1)
    x, mean = np.full_like(dy, 2.0), np.zeros(1, np.float32)
    with np.errstate(all="ignore"):
        whole = backnorm.reduce(x, dy, mean, reproducible=True)
        order = np.random.default_rng(seed).permutation(len(terms))
        parts = [
            backnorm.reduce(x[: len(part)], dy[part], mean, reproducible=True)
            for part in np.split(order, [min(cut, len(terms))])
        ]
        total = parts[1] + parts[0]
        assert bits(total.bins) == bits(whole.bins)
        found = whole.rounded()
    if np.isfinite(dy).all():
        exact = sum((Fraction(float(each)) for each in terms), start=Fraction(0))
        most = max((abs(each) for each in terms), default=0.0)
        allowed = abs(exact) * Fraction(2) ** -52
        allowed += len(terms) * Fraction(float(most)) * Fraction(2) ** -64
        assert abs(Fraction(float(found.sum_dy[0])) - exact) <= allowed
        assert found.sum_dy_xmu[0] == 2 * found.sum_dy[0]


def test_reproducible_sums_of_empty_batch_are_zero():
    x = np.empty((0, 4, 3), np.float32)
    moments = backnorm.reduce_forward(x, reproducible=True)
    assert moments.count == 0
    some = backnorm.reduce_forward(np.ones((2, 4, 3), np.float32), reproducible=True)
    assert bits((moments + some).bins) == bits(some.bins)
    rounded = moments.rounded()
    assert not rounded.mean.any()
    assert not rounded.variance.any()
    y, mean, variance = backnorm.batch_norm_forward(x, epsilon=EPSILON, reproducible=True)
    assert y.shape == x.shape
    assert not mean.any()
    assert not variance.any()
    empty = backnorm.reduce_forward(np.empty((3, 0, 2), np.float32), reproducible=True)
    assert empty.bins.shape == (8, 0)


class TestErrors:
    x, dy, gamma, beta = data((4, 3, 5), np.float32)

    def test_reproducible_of_other_type_than_bool_is_rejected(self):
        for call in (
            lambda: backnorm.batch_norm_forward(self.x, epsilon=EPSILON, reproducible="yes"),
            lambda: backnorm.reduce_forward(self.x, reproducible=1.5),
        ):
            with pytest.raises(ArgumentTypeError, match="reproducible"):
                call()

    def test_moments_plus_sums_of_other_kind_or_type_raise_error(self):
        moments = backnorm.reduce_forward(self.x, reproducible=True)
        with pytest.raises(TypeError):
            moments + backnorm.reduce_forward(self.x)
        sums = backnorm.reduce(self.x, self.dy, self.gamma, reproducible=True)
        with pytest.raises(TypeError):
            moments + sums
        wide = backnorm.reduce_forward(self.x.astype(float), reproducible=True)
        with pytest.raises(ArgumentValueError, match="one type"):
            moments + wide

    def test_moments_of_too_many_elements_are_rejected(self):
        bins = backnorm.reduce_forward(self.x, reproducible=True).bins
        with pytest.raises(ArgumentValueError, match="fewer than 2147483648"):
            ReproducibleMoments(bins, 2**30) + ReproducibleMoments(bins, 2**30)
        with pytest.raises(ArgumentValueError, match="fewer than 2147483648"):
            ReproducibleMoments(bins, 2**31).rounded()
        with pytest.raises(ArgumentValueError, match="fewer than 2147483648"):
            backnorm.apply_forward(self.x, ReproducibleMoments(bins, 2**31), epsilon=EPSILON)

    def test_apply_rejects_moments_in_place_of_sums(self):
        moments = backnorm.reduce_forward(self.x, reproducible=True)
        with pytest.raises(ArgumentTypeError, match="sums"):
            backnorm.apply(
                self.x, self.dy, self.gamma, self.gamma**2, None, moments, epsilon=EPSILON
            )
        assert isinstance(
            backnorm.reduce(self.x, self.dy, self.gamma, reproducible=True), ReproducibleSums
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_reproducible_sum_of_maximum_count_of_elements_is_accurate(dtype, sign):
    """2^31 - 1 equal elements, with digits near the largest: 2^31, and 1.49 * 2^31 of float64."""
    x, dy = 1.0, sign * 0.5
    if dtype == np.float64:
        # The product ends halfway between two numbers of the second bin, and its rounding error
        # adds to the digit of the third.
        x = float.fromhex("0x1.fb102d15909bep+0")
        dy = sign * float.fromhex("0x1.027e1075aaddcp+18")
    one = backnorm.reduce(
        np.full((1, 1, 1), x, dtype), np.full((1, 1, 1), dy, dtype), np.zeros(1, dtype),
        reproducible=True,
    )  # fmt: skip
    if dtype == np.float64:
        assert abs(int(one.bins[8, 0])) > 1.48 * 2**31
    total, power = one, one
    for _ in range(30):
        power = power + power
        total = total + power
    assert total.count == 2**31 - 1
    sums = total.rounded()
    for found, term in (
        (sums.sum_dy[0], Fraction(dy)),
        (sums.sum_dy_xmu[0], Fraction(x) * Fraction(dy)),
    ):
        exact = total.count * term
        assert abs(Fraction(float(found)) - exact) <= abs(exact) * Fraction(2) ** -52


def test_bins_of_small_and_large_terms_have_same_bits_in_both_orders():
    """A larger term moves all bins up, and drops the same digits if it is added first or last."""
    small, large = np.full((1, 1, 3), 2.0**-60, np.float32), np.full((1, 1, 3), 2.0**60, np.float32)
    one, two = (backnorm.reduce_forward(each, reproducible=True) for each in (small, large))
    total = one + two
    whole = backnorm.reduce_forward(np.concatenate((large, small)), reproducible=True)
    assert bits(total.bins) == bits((two + one).bins) == bits(whole.bins)
    assert tops_of(total.bins).tolist() == tops_of(two.bins).tolist()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_reproducible_forward_of_equal_elements_has_negligible_variance(dtype, data_format, rng):
    values = (rng.standard_normal(50) * np.exp2(rng.integers(-9, 9, 50))).astype(dtype)
    for count in (1, 3, 40):
        x = np.repeat(values[None], count, 0)[:, :, None].repeat(17, 2)
        x = last(x) if data_format == "NXC" else x
        options = {"epsilon": EPSILON, "data_format": data_format, "reproducible": True}
        _, mean, variance = backnorm.batch_norm_forward(x, **options)
        assert (variance <= np.square(values.astype(float)) * 2.0**-95).all()
        np.testing.assert_array_equal(mean.astype(dtype), values)


def test_explain_of_reproducible_call_returns_its_plan(rng):
    x, dy = rng.standard_normal((2, 8, 3, 40)).astype(np.float32)
    channel = np.ones(3, np.float32)
    options = {"epsilon": 1e-5, "reproducible": True}
    plan = backnorm.explain(x, dy, channel, channel, **options)
    assert plan.problem.reproducible
    forget()
    backnorm.batch_norm_backward(x, dy, channel, channel, **options)
    (executable,) = CALLS.values()
    assert executable.plan == plan
