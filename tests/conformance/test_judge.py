"""Ulps and budgets at powers of two, overflow, NaN and cancellation."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm import reference
from backnorm.conformance.data import realistic_data
from backnorm.conformance.formula import BACKWARD
from backnorm.conformance.judge import budget, check_backward, judge, ulp_error
from backnorm.conformance.ladder import GradientLadder, rungs
from backnorm.reference import Exact
from tests.support.dtypes import BFLOAT16, ELEMENT_TYPES, FLOAT16, FLOAT32, FLOAT64

from ..mutants.single import SINGLE

NARROW = (FLOAT16, BFLOAT16)
LEAST_NORMAL = {FLOAT16: 2.0**-14, BFLOAT16: 2.0**-126}


def exact(*pairs):
    hi, lo = zip(*pairs, strict=True)
    return Exact(hi, lo)


def every_finite(dtype):
    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    with np.errstate(invalid="ignore"):
        values = bits.view(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_ulp_error_between_neighbours_is_one_or_half_below_power_of_two(dtype):
    values = every_finite(dtype)
    positive = values[values >= 0]
    below, above = positive[:-1], positive[1:]
    np.testing.assert_array_equal(ulp_error(above, Exact.of(below), dtype), 1.0)
    # Seen from a power of two the gap below it is half an ulp, but not at the least normal one.
    power_of_two = np.frexp(above)[0] == 0.5
    expected = np.where(power_of_two & (above > LEAST_NORMAL[dtype]), 0.5, 1.0)
    np.testing.assert_array_equal(ulp_error(below, Exact.of(above), dtype), expected)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_ulp_error_of_middle_between_neighbours_is_one_half(dtype):
    values = every_finite(dtype)
    positive = values[values >= 0]
    middle = (positive[:-1] + positive[1:]) / 2
    for end in (positive[:-1], positive[1:]):
        np.testing.assert_array_equal(ulp_error(end, Exact.of(middle), dtype), 0.5)
        np.testing.assert_array_equal(ulp_error(-end, Exact.of(-middle), dtype), 0.5)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**-14, 2.0**-24, 2.0**-130, 2.0**-149, 6e4, 3e38])
def test_ulp_error_of_nearest_value_is_at_most_one_half(dtype, scale, rng):
    values = scale * rng.uniform(-4, 4, 2000)
    with np.errstate(over="ignore", under="ignore"):
        rounded = values.astype(dtype)
    assert ulp_error(rounded, Exact.of(values), dtype).max() <= 0.5


def test_ulp_error_just_below_power_of_two_uses_lower_binade():
    value = exact((1.0, -(2.0**-60)))
    assert ulp_error(np.array([1.0 - 2.0**-24]), value, FLOAT32) == pytest.approx(1.0)
    assert ulp_error(np.array([1.0 - 2.0**-24]), exact((1.0, 2.0**-60)), FLOAT32) == (
        pytest.approx(0.5)
    )


def test_ulp_error_in_float64_includes_low_part_of_exact_value():
    assert ulp_error(np.array([1.0]), exact((1.0, 2.0**-54)), FLOAT64) == 0.25
    assert ulp_error(np.array([-1.0]), exact((-1.0, 2.0**-55)), FLOAT64) == 0.25


@pytest.mark.parametrize(
    ("dtype", "largest", "threshold"),
    [
        (FLOAT16, 65504.0, 65520.0),
        (FLOAT32, 2.0**128 - 2.0**104, 2.0**128 - 2.0**103),
        (BFLOAT16, 2.0**128 - 2.0**120, 2.0**128 - 2.0**119),
    ],
    ids=str,
)
def test_ulp_error_of_infinity_is_small_only_beyond_overflow_threshold(dtype, largest, threshold):
    infinity = np.array([np.inf])
    for beyond in (threshold, 1.5 * largest, 1e60):
        assert ulp_error(infinity, Exact.of([beyond]), dtype) <= 0.5
        assert ulp_error(-infinity, Exact.of([-beyond]), dtype) <= 0.5
    assert ulp_error(infinity, Exact.of([np.nextafter(threshold, 0)]), dtype) > 0.5
    assert ulp_error(np.array([largest]), Exact.of([1e60]), dtype) == 1.0
    assert ulp_error(-infinity, Exact.of([1e60]), dtype) > 1.0


def test_ulp_error_of_non_finite_values_is_zero_only_for_the_same_kind():
    actual = np.array([np.nan, np.inf, -np.inf, np.nan, np.inf, 1.0, 1.0])
    value = Exact.of([np.nan, np.inf, -np.inf, 1.0, -np.inf, np.nan, np.inf])
    errors = ulp_error(actual, value, FLOAT32)
    np.testing.assert_array_equal(errors, [0, 0, 0, np.inf, np.inf, np.inf, np.inf])


def test_ulp_error_of_float64_infinity_for_finite_value_is_infinite():
    assert ulp_error(np.array([np.inf]), Exact.of([1e308]), FLOAT64) == np.inf


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_judge_of_dx_off_by_one_ulp_fails_at_its_index(dtype):
    right = np.linspace(1.1, 1.9, 7).astype(dtype)
    value = Exact.of(right.astype(float))
    grade = judge("dx", right, value, np.abs(value.hi), dtype)
    assert grade.passed
    assert grade.worst_ulp == 0.0
    wrong = right.copy()
    wrong[3] = np.nextafter(wrong[3], dtype.type(2))
    terms = np.zeros(7) if dtype == FLOAT64 else np.abs(value.hi)
    grade = judge("dx", wrong, value, terms, dtype)
    assert not grade.passed
    assert grade.where == (3,)
    assert grade.worst_ulp == 1.0
    assert "dx[3]" in grade.detail


def test_judge_budget_of_cancelling_element_grows_with_its_terms():
    value = Exact.of([2.0**-30])
    actual = np.array([2.0**-30 + 2.0**-42], np.float32)
    assert judge("dx", actual, value, np.array([1.0]), FLOAT32).passed
    assert not judge("dx", actual, value, np.array([0.1]), FLOAT32).passed


@pytest.mark.parametrize(
    ("quantity", "output", "data", "ulps", "terms"),
    [
        ("dx", FLOAT32, FLOAT32, 0.5, -40),
        ("dgamma", FLOAT32, FLOAT32, 0.5, -45),
        ("dbeta", FLOAT32, FLOAT32, 0.5, -45),
        ("dx", FLOAT64, FLOAT64, 0.5, -49),
        ("dgamma", FLOAT64, FLOAT64, 0.5, -48),
        ("dx", FLOAT16, FLOAT16, 0.5, -20),
        ("dx", BFLOAT16, BFLOAT16, 0.5, -20),
        ("dgamma", FLOAT32, BFLOAT16, 0.5, -22),
        ("dbeta", FLOAT16, FLOAT16, 0.5, -20),
        ("mean", FLOAT32, FLOAT32, 1.0, -45),
        ("y", FLOAT32, FLOAT32, 0.5, -40),
    ],
)
def test_budget_returns_promised_ulps_and_terms(quantity, output, data, ulps, terms):
    allowed = budget(quantity, output, data)
    assert (allowed.ulps, allowed.terms) == (ulps, 2.0**terms)


def test_budget_of_unknown_quantity_or_type_raises():
    with pytest.raises(ValueError, match="quantity"):
        budget("gradient", FLOAT32, FLOAT32)
    with pytest.raises(TypeError, match="int32"):
        budget("dx", np.dtype(np.int32), FLOAT32)


def test_check_backward_with_wrong_shape_or_type_fails_that_output(rng):
    x = rng.standard_normal((3, 2)).astype(np.float32)
    ones = np.ones(2, np.float32)
    good = (x, ones, ones)
    for position, wrong in [
        (0, x[:2]),
        (0, x.astype(float)),
        (1, ones.astype(float)),
        (2, ones[:1]),
    ]:
        outputs = list(good)
        outputs[position] = wrong
        grades = check_backward(x, x, ones, ones, ones, tuple(outputs), epsilon=0.0)
        assert not list(grades.values())[position].passed


def test_judge_of_empty_output_passes():
    assert judge(
        "dx", np.zeros((0, 3), np.float32), Exact.of(np.zeros((0, 3))), np.zeros((0, 3)), FLOAT32
    ).passed


@pytest.mark.parametrize("data", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("quantity", ["dx", "dgamma", "dbeta", "y", "mean", "variance"])
def test_budget_of_float32_arithmetic_has_larger_terms_than_float64(quantity, data):
    output = data if quantity in ("dx", "y") else FLOAT32
    narrow, wide = (budget(quantity, output, data, name) for name in ("float32", "float64"))
    assert narrow.ulps == wide.ulps
    # Sixteen roundings of an element, four of a term of a sum.
    assert narrow.terms == (16 if quantity in ("dx", "y") else 4) * 2.0**-24
    assert wide.terms <= 2.0**-40
    assert budget(quantity, output, data) == (wide if data == FLOAT32 else narrow)


def test_budget_of_float64_data_in_float32_arithmetic_raises():
    assert budget("dx", FLOAT64, FLOAT64, "float64") == budget("dx", FLOAT64, FLOAT64)
    with pytest.raises(ValueError, match=r"^arithmetic: float64 elements are computed in float64"):
        budget("dx", FLOAT64, FLOAT64, "float32")
    with pytest.raises(ValueError, match=r"^arithmetic: unknown; got 'half'"):
        budget("dx", FLOAT32, FLOAT32, "half")


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("data", [FLOAT32, FLOAT16], ids=str)
def test_budget_of_second_order_ignores_arithmetic(name, data):
    for quantity in ("second_x", "second_dy", "second_gamma"):
        assert budget(quantity, data, data, name) == budget(quantity, data, data)


def test_budget_ignores_arithmetic_context():
    with backnorm.arithmetic("float32"):
        assert budget("dx", FLOAT32, FLOAT32).terms == 2.0**-40


def test_check_backward_of_float32_arithmetic_passes_only_its_budget(rng):
    data = realistic_data((8, 4, 6, 6), FLOAT32, rng=rng)
    gradients = SINGLE(*data.backward_inputs, training=True, **data.options)
    for name, passed in (("float32", True), ("float64", False), (None, False)):
        found = check_backward(*data.backward_inputs, gradients, arithmetic=name, **data.options)
        assert found["dx"].passed == passed


@pytest.mark.parametrize("kernel", [BACKWARD, SINGLE], ids=["float64", "float32"])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_check_backward_passes_if_guaranteed_grade_is_at_least_arithmetic(dtype, kernel, rng):
    data = realistic_data((8, 4, 30), dtype, rng=rng)
    inputs, options = data.backward_inputs, {"training": True, **data.options}
    gradients, ladder = kernel(*inputs, **options), GradientLadder.of(*inputs, **options)
    for rung in {"float32", "float64"} & {*rungs(dtype)}:
        found = check_backward(*inputs, gradients, arithmetic=rung, **options)
        for (name, grade), actual in zip(found.items(), gradients, strict=True):
            guaranteed = ladder.grade(name, actual, kind="guaranteed")
            assert grade.passed == guaranteed.at_least(rung)
            if rung in guaranteed.share:
                assert grade.worst_excess == guaranteed.share[rung]


def test_judge_of_wrong_shape_has_infinite_excess_and_says_why():
    grade = judge("dx", np.zeros(2, np.float32), Exact.of(np.zeros(3)), np.zeros(3), FLOAT32)
    assert (grade.status, grade.worst_excess, grade.passed) == ("wrong", np.inf, False)
    assert grade.detail == "dx has shape (2,), not (3,)"


@pytest.mark.parametrize("word", ["ignored", "inverted"])
def test_check_backward_of_other_mask_says_so(word, rng):
    data = realistic_data((3, 4, 5, 5), FLOAT32, rng=rng)
    inputs = x, dy, *rest = data.backward_inputs
    keeps = rng.integers(2, size=x.shape) > 0
    wrong = dy if word == "ignored" else np.where(keeps, 0, dy)
    gradients = backnorm.batch_norm_backward(x, wrong.astype(dy.dtype), *rest, **data.options)
    mask = reference.pack_mask(keeps, x)
    found = check_backward(*inputs, (*gradients, None), mask=mask, **data.options)
    assert not found["dx"].passed
    assert found["dx"].detail.startswith(f"the mask is {word}; dx[")
