"""The ladder: right kernels are on the rung that describes them, wrong ones on none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from backnorm import reference
from backnorm.conformance.battery import cases
from backnorm.conformance.formula import BACKWARD, WRONG
from backnorm.conformance.ladder import (
    RUNGS,
    GradientLadder,
    bound,
    grade_backward,
    is_at_least,
    rungs,
)
from backnorm.reference import Exact, ExactGradients, GradientScales, Scale
from tests.support.dtypes import BFLOAT16, ELEMENT_TYPES, FLOAT16, FLOAT32, FLOAT64

from ..mutants.single import SINGLE, SINGLE_MISTAKES
from .right_kernels import (
    ADVERSARIAL,
    RIGHT,
    STATUSES,
    RightKernel,
    U,
    adversarial,
    bfloat16_sum,
    check_rung,
    pairs,
    serial,
    worst,
)

QUANTITIES = "dx", "dgamma", "dbeta"
UNRANKED = "wrong", "nonfinite"
EPSILON = 1e-5
# Valid arguments of `grade_backward`, which tests make invalid one at a time.
X = np.arange(6, dtype=np.float32).reshape(2, 3)
ROW = np.ones(3, np.float32)


class Rows(NamedTuple):
    """Data of channels as rows, and parameters as columns."""

    x: np.ndarray
    dy: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    gamma: np.ndarray

    @property
    def tensors(self):
        x, dy = (np.ascontiguousarray(rows.T) for rows in self[:2])
        return x, dy, *(column[:, 0] for column in self[2:])


def rows(count, rng, *, ratio=1.0, offset=0.5, channels=8, dtype=FLOAT32, statistics=None):
    """Return data in random order with statistics that are not quite those of x.

    offset: mean of dy, and its slope along x; 0: sums of terms of random sign.
    """
    normal = rng.standard_normal((channels, count))
    deviation = 2.0 ** rng.uniform(-1, 1, (channels, 1))
    signs = rng.choice([-1.0, 1.0], (2, channels, 1))
    x = (ratio * deviation * signs[0] + deviation * normal).astype(dtype)
    dy = rng.standard_normal((channels, count)) + offset * (signs[1] + normal)
    gamma = rng.uniform(0.5, 1.5, (channels, 1)) * rng.choice([-1.0, 1.0], (channels, 1))
    wide_x = x.astype(np.float64)
    mean = wide_x.mean(1, keepdims=True) + 0.25 * deviation
    variance = 1.3 * wide_x.var(1, keepdims=True) + 0.01
    parameters = (values.astype(statistics or dtype) for values in (mean, variance, gamma))
    return Rows(x, dy.astype(dtype), *parameters)


class Oracle:
    """The exact gradients, and the grades of kernels."""

    options = {"epsilon": EPSILON, "data_format": "NXC", "training": True}  # noqa: RUF012

    def __init__(self, data):
        self.data, self.ladder = data, GradientLadder.of(*data.tensors, **self.options)

    def grades(self, kernel, kind="expected", quantities=QUANTITIES):
        dx, *channels = kernel(*self.data, EPSILON)
        outputs = dict(zip(QUANTITIES, (np.ascontiguousarray(dx.T), *channels), strict=True))
        return {name: self.ladder.grade(name, outputs[name], kind=kind) for name in quantities}


def no_worse(status, rung):
    return STATUSES.index(status) <= STATUSES.index(rung)


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 16, 17, 128, 196, 512, 513, 3136, 25088, 10**6])
def test_guaranteed_bounds_do_not_decrease_from_rung_to_rung(quantity, dtype, count):
    output = dtype if quantity == "dx" or dtype == FLOAT64 else FLOAT32
    bounds = [
        bound(rung, quantity, output, dtype, count, kind="guaranteed") for rung in rungs(dtype)
    ]
    terms = [limit.terms for limit in bounds]
    assert terms == sorted(terms)
    assert {limit.ulps for limit in bounds} == {0.5}


def test_serial_bound_grows_with_count_or_with_its_square_root():
    limit = bound("serial", "dbeta", FLOAT32, FLOAT32, 1001, kind="guaranteed")
    assert limit.terms == pytest.approx(7 * U + 1000 * U / (1 - 1000 * U))
    limit = bound("serial", "dbeta", FLOAT32, FLOAT32, 20001)
    assert limit.terms == pytest.approx(5 * math.sqrt(20_000) * U + (20_000 * U) ** 2)


@pytest.mark.parametrize(
    ("accumulator", "count"), [(FLOAT32, 2**24 + 1), (BFLOAT16, 257), (FLOAT16, 2049)], ids=str
)
@pytest.mark.parametrize("kind", ["guaranteed", "expected"])
def test_bound_of_too_many_additions_is_infinite(accumulator, count, kind):
    known = "serial", "dbeta", FLOAT32, FLOAT32
    assert bound(*known, count, kind=kind, accumulator=accumulator).terms == math.inf
    assert bound(*known, count - 1, kind=kind, accumulator=accumulator).terms < math.inf


def test_float64_data_has_no_float32_rung():
    assert "float32" not in rungs(FLOAT64)
    with pytest.raises(ValueError, match="float64 elements are computed in float64"):
        bound("float32", "dx", FLOAT64, FLOAT64, 100)


@pytest.mark.parametrize(
    ("arguments", "options", "argument"),
    [
        (("best", "dx", FLOAT32, FLOAT32, 1), {}, "rung"),
        (("serial", "y", FLOAT32, FLOAT32, 1), {}, "quantity"),
        (("serial", "dx", FLOAT32, FLOAT32, -1), {}, "count"),
        (("serial", "dx", FLOAT32, FLOAT32, 1), {"kind": "usual"}, "kind"),
        (("serial", "dx", np.dtype("i4"), FLOAT32, 1), {}, "output"),
        (("serial", "dx", FLOAT32, FLOAT32, 1), {"accumulator": np.dtype("i4")}, "accumulator"),
    ],
)
def test_bound_with_invalid_argument_raises_error_naming_it(arguments, options, argument):
    with pytest.raises((TypeError, ValueError), match=f"^{argument}: "):
        bound(*arguments, **options)


# --- magnitudes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("training", [True, False])
def test_gradient_scales_match_formulas(data_format, training, rng):
    data = rows(30, rng, channels=4, dtype=np.float64)
    x, dy, mean, variance, gamma = data
    s = 1 / np.sqrt(variance + EPSILON)
    c, gain = x - mean, np.abs(gamma * s)
    sums = [np.abs(t.sum(1, keepdims=True)) for t in (dy, dy * c)]
    roots = [np.sqrt(np.square(t).sum(1, keepdims=True)) for t in (dy, dy * c)]

    def combined(first, second):
        return training * gain * (first + np.abs(c) * s * s * second) / 30

    expected = combined(*sums), combined(*roots)
    if data_format == "NXC":
        tensors = data.tensors
        turned = [values.T for values in (gain * np.abs(dy) + expected[0], *expected)]
    else:
        shape = 2, 4, 3, 5
        tensors = [np.moveaxis(v.reshape(4, 2, 3, 5), 0, 1) for v in (x, dy)]
        tensors += [column[:, 0] for column in data[2:]]
        turned = [
            np.moveaxis(v.reshape(4, 2, 3, 5), 0, 1)
            for v in (gain * np.abs(dy) + expected[0], *expected)
        ]
        assert tensors[0].shape == shape
    found = reference.gradient_scales(
        *tensors, epsilon=EPSILON, data_format=data_format, training=training
    )
    for got, right in zip((found.dx.value, found.dx.sums, found.dx.root), turned, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-12)
    np.testing.assert_allclose(found.dbeta.sums, sums[0][:, 0], rtol=1e-12)
    np.testing.assert_allclose(found.dbeta.root, roots[0][:, 0], rtol=1e-12)
    np.testing.assert_allclose(found.dgamma.value, (s * sums[1])[:, 0], rtol=1e-12)
    np.testing.assert_allclose(found.dgamma.root, (s * roots[1])[:, 0], rtol=1e-12)


@pytest.mark.parametrize("magnitude", [1e-200, 1e200])
def test_gradient_scales_of_extreme_dy_are_proportional_to_dy(magnitude, rng):
    data = rows(50, rng, dtype=np.float64)
    small = reference.gradient_scales(*data.tensors, **Oracle.options)
    scaled = data._replace(dy=data.dy * magnitude)
    large = reference.gradient_scales(*scaled.tensors, **Oracle.options)
    for name in QUANTITIES:
        before, after = (getattr(scales, name).root for scales in (small, large))
        np.testing.assert_allclose(after / magnitude, before, rtol=1e-10)


# --- grades ---------------------------------------------------------------------------------------


def grade_of_dbeta(actual, exact, terms, scale, count=100):
    """Grade dbeta of float32 data whose exact value is known."""
    values = ExactGradients(*[Exact.of(exact)] * 3, *[np.array(terms)] * 3)
    scales = GradientScales(*[Scale(*[np.array(scale)] * 3)] * 3)
    ladder = GradientLadder(values, FLOAT32, count, scales, FLOAT32)
    return ladder.grade("dbeta", np.array(actual, np.float32))


def single_element(error, terms=1.0, count=100):
    """Grade dbeta = 1 that is off by so much, a sum of terms of magnitude `terms` in all."""
    return grade_of_dbeta([1.0 + error], [1.0], [terms], [1.0], count)


def test_grade_of_one_element_reports_status_shares_and_condition():
    assert single_element(0.0).status == "exact"
    far = single_element(1e-3)
    assert far.status == "wrong"
    assert far.share["serial"] > 1
    assert list(far.share) == list(RUNGS)
    shares = list(far.share.values())
    assert shares == sorted(shares, reverse=True)
    assert (far.where, far.exact, far.condition) == ((0,), 1.0, 1.0)
    assert far.got == pytest.approx(1.001)
    assert single_element(0.0, terms=7.0).condition == 7.0


def test_grade_describes_element_of_largest_share_not_of_most_ulps():
    terms, actual = [1.0, 1024.0], [1.0 + 2.0**-10, 2.0**-20 + 2.0**-13]
    found = grade_of_dbeta(actual, [1.0, 2.0**-20], terms, terms)
    assert (found.where, found.exact, found.condition) == ((0,), 1.0, 1.0)
    assert found.ulp == 2.0**13
    assert found.worst_ulp == 2.0**30


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_grade_of_non_finite_value_is_nonfinite(value):
    found = single_element(value)
    assert found.status == "nonfinite"
    assert found.where == (0,)
    assert not found.at_least("serial")


def test_grade_omits_rung_with_infinite_bound():
    far = single_element(0.5, count=2**24 + 1)
    assert far.status == "wrong"
    assert list(far.share) == ["exact", "float64", "float32", "pairwise", "blocked"]
    assert not far.at_least("serial")


def test_at_least_compares_rungs():
    found = single_element(0.0)
    assert all(found.at_least(rung) for rung in RUNGS)
    assert not single_element(1e-3).at_least("serial")


def test_grade_of_an_empty_output_is_exact():
    none = np.zeros((0, 3))
    found = grade_of_dbeta(none, none, none, none, 0)
    assert (found.status, found.where) == ("exact", ())


def test_grade_of_a_wrong_shape_or_type_raises(rng):
    oracle = Oracle(rows(6, rng))
    with pytest.raises(ValueError, match=r"^dx: must have the shape"):
        oracle.ladder.grade("dx", np.zeros((2, 2), np.float32))
    with pytest.raises(TypeError, match=r"^dx: has an unsupported element type; got int32"):
        oracle.ladder.grade("dx", np.zeros((6, 8), np.int32))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gradients": (X.astype("d"), ROW, ROW)}, TypeError, "dx: has the wrong element type"),
        (
            {"gradients": (X, ROW[:2], ROW)},
            ValueError,
            r"dgamma: has the wrong shape; got .*\(2,\)",
        ),
        ({"gradients": (X, ROW)}, ValueError, "gradients: must have 3 results; got 2 results"),
        ({"gradients": (X, ROW, None)}, TypeError, "dbeta: is required; got None"),
        ({"gradients": {"dx": X}}, TypeError, "dgamma: is required; got None"),
        ({"gradients": X}, TypeError, "gradients: must be a tuple; got ndarray"),
        ({"mean": ROW[:2]}, ValueError, "mean: must hold one value per channel of x"),
        ({"dy": X[:1]}, ValueError, "dy: must have the shape of x"),
        ({"epsilon": "1e-5"}, TypeError, "epsilon: must be a real number"),
        ({"kind": "usual"}, ValueError, "kind: unknown; got 'usual'"),
    ],
)
def test_grade_backward_with_invalid_argument_raises_error_naming_it(changes, error, message):
    arguments = {
        "x": X,
        "dy": X,
        "mean": ROW,
        "variance": ROW,
        "gamma": None,
        "gradients": (X, ROW, ROW),
        "epsilon": EPSILON,
    }
    grade_backward(**arguments)
    with pytest.raises(error, match=f"^{message}"):
        grade_backward(**{**arguments, **changes})


def test_is_at_least_compares_rungs_and_rejects_unknown_ones():
    assert is_at_least("exact", "float32")
    assert not is_at_least("serial", "float32")
    assert not is_at_least("wrong", "serial")
    assert not is_at_least("nonfinite", "serial")
    with pytest.raises(ValueError, match=r"^rung: unknown; got 'float23'"):
        is_at_least("exact", "float23")


def test_grade_backward_of_lists_equals_that_of_arrays():
    arrays = X, X, ROW, ROW, None
    lists = [None if a is None else a.astype("d").tolist() for a in arrays]
    wide = [None if a is None else a.astype("d") for a in arrays]
    gradients = X.astype("d"), ROW.astype("d"), ROW.astype("d")
    in_lists = tuple(g.tolist() for g in gradients)
    found = grade_backward(*lists, in_lists, epsilon=EPSILON)
    assert found == grade_backward(*wide, gradients, epsilon=EPSILON)
    by_name = dict(zip(("dx", "dgamma", "dbeta"), gradients, strict=True))
    assert found == grade_backward(*wide, by_name, epsilon=EPSILON)


# --- right kernels --------------------------------------------------------------------------------


def check_right_kernels(data, ratio, kernels=RIGHT):
    """Fail unless every kernel is within the expected bounds of its rung.

    An expected bound is never more than the guaranteed one.
    """
    oracle = Oracle(data)
    for kernel in kernels:
        if not kernel.folded or kernel.centred or ratio <= 1:
            check_rung(oracle.grades(kernel), kernel.rung, kernel.name)


@pytest.mark.covering(2)
@pytest.mark.parametrize("count", [1, 2, 5, 16, 100, 700])
@pytest.mark.parametrize("ratio", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("offset", [0.5, 0.0])
def test_right_kernel_is_within_the_bounds_of_its_rung(count, ratio, offset, rng):
    check_right_kernels(rows(count, rng, ratio=ratio, offset=offset), ratio)


@pytest.mark.parametrize("count", [2, 700])
@pytest.mark.parametrize("statistics", [FLOAT32, None], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_right_kernel_on_16_bits_is_within_the_bounds_of_its_rung(dtype, statistics, count, rng):
    check_right_kernels(rows(count, rng, dtype=dtype, statistics=statistics), 1.0)


@pytest.mark.parametrize("count", [1, 2, 16, 700])
@pytest.mark.parametrize("ratio", [1.0, 1e6])
@pytest.mark.parametrize("offset", [0.5, 0.0])
def test_right_kernel_on_float64_is_within_the_bounds_of_its_rung(count, ratio, offset, rng):
    wide = [
        replace(kernel, rung=kernel.rung.replace("float32", "float64"), elements=np.float64)
        for kernel in RIGHT
        if kernel.name in ("Kahan", "pairs", "blocks of 128", "serial", "atomics")
    ]
    kernels = [replace(kernel, deviation=np.float64) for kernel in wide]
    check_right_kernels(rows(count, rng, ratio=ratio, offset=offset, dtype=FLOAT64), ratio, kernels)


@pytest.mark.long
@pytest.mark.parametrize("count", [3136, 25088, 200704, 10**6])
@pytest.mark.parametrize("ratio", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("offset", [0.5, 0.0])
def test_right_kernel_with_many_elements_is_within_the_bounds_of_its_rung(
    count, ratio, offset, rng
):
    channels = 8 if count < 10**5 else 2
    check_right_kernels(rows(count, rng, ratio=ratio, offset=offset, channels=channels), ratio)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize("count", [300, 20_000, 2**18, 2**20])
def test_serial_sum_of_sorted_terms_is_within_the_expected_bound(count, offset, dtype, rng):
    channels = max(2, 2**18 // count)
    terms = 1000 * (rng.standard_normal((channels, count)) + offset)
    ascending = np.sort(terms.astype(dtype).astype(np.float32), axis=1)
    exact = np.array([math.fsum(row) for row in ascending.astype(float)])
    sizes = np.abs(ascending.astype(float)).sum(1)
    limit = bound("serial", "dbeta", FLOAT32, dtype, count)
    allowed = 0.5 * np.spacing(np.abs(exact).astype(np.float32)) + limit.terms * sizes
    for ordered in (ascending, ascending[:, ::-1]):
        assert (np.abs(serial(ordered)[:, 0] - exact) <= allowed).all()


@pytest.mark.parametrize("sums", [serial, pairs])
def test_float64_kernel_on_float64_data_has_the_rung_of_its_sums(sums, rng):
    oracle = Oracle(rows(10_000, rng, channels=16, dtype=FLOAT64))
    kernel = RightKernel("", sums.__name__, sums, np.float64, np.float64)
    rung = {"serial": "serial", "pairs": "pairwise"}[sums.__name__]
    assert worst(oracle.grades(kernel)) == rung


@pytest.mark.parametrize("count", [2, 16, 64, 256])
def test_sum_in_bfloat16_is_within_the_serial_bound_of_that_accumulator(count, rng):
    oracle = Oracle(rows(count, rng, dtype=BFLOAT16, statistics=FLOAT32, channels=50))
    dbeta = bfloat16_sum(oracle.data.dy.astype("f"))[:, 0]
    error = np.abs(dbeta - oracle.ladder.value("dbeta").hi)
    ulp = np.zeros(dbeta.shape)
    for kind in ("expected", "guaranteed"):
        limit = bound("serial", "dbeta", FLOAT32, BFLOAT16, count, kind=kind, accumulator=BFLOAT16)
        allowed = limit.allowance(ulp, oracle.ladder.terms("dbeta"), oracle.ladder.scales.dbeta)
        assert (error <= allowed).all()
    assert oracle.ladder.grade("dbeta", dbeta).status == "wrong"


# --- parted rungs ---------------------------------------------------------------------------------


def shares_on_own_rung(names, count, offset, repeats, rng):
    """Return how often each kernel is on its own rung, of so many sets of data of 16 channels."""
    kernels = [kernel for kernel in RIGHT if kernel.name in names]
    own = dict.fromkeys(names, 0.0)
    for _ in range(repeats):
        oracle = Oracle(rows(count, rng, offset=offset, channels=16))
        for kernel in kernels:
            own[kernel.name] += (worst(oracle.grades(kernel)) == kernel.rung) / repeats
    return own


def test_kernel_of_each_kind_of_sum_is_on_its_own_rung(rng):
    names = ["float64 sums", "pairs", "serial"]
    assert set(shares_on_own_rung(names, 4000, 0.5, 3, rng).values()) == {1.0}


FLOAT32_SUMS = ["float64 sums", "normalised, float64 sums", "rounded inverse deviation"]
SERIAL = ["serial", "serial, reversed", "serial, strided", "normalised, serial", "atomics"]
BLOCKS = ["blocks of 128", "blocks of 256", "blocks of 512"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "offset", "repeats", "names"),
    [
        (4000, 0.5, 20, [*FLOAT32_SUMS, "Kahan", "pairs", "NumPy's sum", *SERIAL]),
        (128_000, 0.5, 5, BLOCKS),
        (8000, 0.0, 20, [*FLOAT32_SUMS, "Kahan"]),
        (32_000, 0.0, 10, SERIAL),
    ],
)
def test_kernel_with_many_elements_is_mostly_on_its_own_rung(count, offset, repeats, names, rng):
    own = shares_on_own_rung(names, count, offset, repeats, rng)
    assert {name: share for name, share in own.items() if share < 0.95} == {}


# --- adversarial data -----------------------------------------------------------------------------


def adversarial_rows(name, count, rng):
    """Return data whose dy, and products with x - mean, are adversarial terms."""
    dy, one = adversarial(name, count, rng), np.ones((2, 1), np.float32)
    return Rows(np.full_like(dy, 4.0), dy, 3 * one, one, one)


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize(
    "count", [2, 17, 600, 5000, *(pytest.param(n, marks=pytest.mark.long) for n in (10**5, 10**6))]
)
def test_guaranteed_bound_holds_for_adversarial_data(name, count, rng):
    oracle = Oracle(adversarial_rows(name, count, rng))
    # dx of a million elements takes minutes, and adds what elements lose.
    quantities = QUANTITIES if count <= 10**5 else QUANTITIES[1:]
    for kernel in RIGHT:
        check_rung(oracle.grades(kernel, "guaranteed", quantities), kernel.rung, kernel.name)


def test_serial_guarantee_is_tight(rng):
    oracle = Oracle(adversarial_rows("rounded up each time", 5000, rng))
    kernel = next(kernel for kernel in RIGHT if kernel.name == "serial")
    share = oracle.grades(kernel, "guaranteed")["dbeta"].share["serial"]
    assert 0.99 < share <= 1
    # Such data is what expected bounds exclude.
    assert oracle.grades(kernel)["dbeta"].status == "wrong"


# --- wrong kernels --------------------------------------------------------------------------------


class Prepared:
    """A case of the battery with its exact gradients."""

    def __init__(self, case):
        self.name, self.operands, self.options = case.name, case.operands, case.options
        self.ladder = GradientLadder.of(*self.operands, **self.options)

    def statuses(self, kernel):
        """Yield the status of each gradient of a kernel."""
        for name, actual in zip(QUANTITIES, kernel(*self.operands, **self.options), strict=True):
            yield self.ladder.grade(name, actual).status

    def worst(self, kernel):
        return max(self.statuses(kernel), key=STATUSES.index)


@pytest.fixture(scope="module")
def float32_battery():
    return [Prepared(case) for case in cases() if case.data.x.dtype == FLOAT32]


#: Mistakes of precision, with the worst rung that float32 data shows.
PRECISION = {
    "folded-mean": "float64",
    "sum-before-mean": "float64",
    "float32-sums": "serial",
    "float32-deviation": "float32",
    "truncated": "float32",
}


@pytest.mark.parametrize("mistake", WRONG, ids=lambda mistake: mistake.name)
def test_grade_of_mistake_is_wrong_unless_it_is_of_precision(mistake, float32_battery):
    kernel = BACKWARD.wrong(mistake)
    if mistake.name in PRECISION:
        statuses = [case.worst(kernel) for case in float32_battery]
        assert no_worse(max(statuses, key=STATUSES.index), PRECISION[mistake.name])
    else:
        assert any(s in UNRANKED for case in float32_battery for s in case.statuses(kernel))


@pytest.mark.parametrize(
    ("kernel", "rung"),
    [(BACKWARD, "float64"), (SINGLE, "float32"), (SINGLE.wrong(SINGLE_MISTAKES[0]), "serial")],
    ids=["float64", "float32", "float32 sums"],
)
def test_right_kernel_in_battery_is_on_its_rung_or_better(kernel, rung, float32_battery):
    statuses = {case.worst(kernel) for case in float32_battery}
    assert no_worse(max(statuses, key=STATUSES.index), rung)


def test_grade_backward_grades_every_gradient(rng):
    data = rows(40, rng)
    tensors = data.tensors
    gradients = BACKWARD(*tensors, **Oracle.options)
    found = grade_backward(*tensors, gradients, **Oracle.options)
    assert list(found) == list(QUANTITIES)
    assert all(g.at_least("float64") for g in found.values())
