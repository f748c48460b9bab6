"""The ladder of the forward pass: right kernels are on their rung, wrong algorithms on none."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest

import backnorm
from backnorm import reference
from backnorm.conformance.data import LayerData, realistic_data
from backnorm.conformance.judge import FORWARD_RESULTS
from backnorm.conformance.ladder import ForwardLadder, grade_forward, rungs
from tests.support.dtypes import BFLOAT16, ELEMENT_TYPES, FLOAT16, FLOAT32, FLOAT64

from .right_forward import RIGHT_FORWARD, RightForward, Shifted, TwoPass, wide
from .right_kernels import ADVERSARIAL, adversarial, check_rung, pairs, serial, worst

EPSILON = 1e-5
MANY = [pytest.param(count, marks=pytest.mark.long) for count in (25_088, 200_704, 10**6)]


class Rows(NamedTuple):
    """Channels as rows, parameters as columns."""

    x: np.ndarray
    gamma: np.ndarray
    beta: np.ndarray


def rows(count, rng, *, ratio=1.0, channels=8, dtype=FLOAT32, statistics=None):
    """Return data in random order whose mean is `ratio` deviations from 0."""
    deviation = 2.0 ** rng.uniform(-1, 1, (channels, 1))
    signs = rng.choice([-1.0, 1.0], (2, channels, 1))
    x = ratio * deviation * signs[0] + deviation * rng.standard_normal((channels, count))
    gamma, beta = rng.uniform(0.5, 1.5, (channels, 1)) * signs[1], rng.uniform(-1, 1, (channels, 1))
    kept = statistics or dtype
    return Rows(x.astype(dtype), gamma.astype(kept), beta.astype(kept))


class Oracle:
    """The exact results of rows, and the grades of kernels by them."""

    def __init__(self, data, epsilon=EPSILON):
        self.data, self.epsilon = data, epsilon
        operands = np.ascontiguousarray(data.x.T), data.gamma[:, 0], data.beta[:, 0]
        self.ladder = ForwardLadder.of(*operands, epsilon=epsilon, data_format="NXC")

    def grades(self, kernel, kind="expected"):
        with np.errstate(all="ignore"):
            y, mean, variance = kernel(*self.data, self.epsilon)
        outputs = zip(FORWARD_RESULTS, (np.ascontiguousarray(y.T), mean, variance), strict=True)
        return {name: self.ladder.grade(name, a, kind=kind) for name, a in outputs}


def kernels_for(count, ratio):
    return [
        kernel for kernel in RIGHT_FORWARD
        if kernel.is_right(count, ratio) and not (kernel.loops and count > 10**4)
    ]  # fmt: skip


def check(oracle, kernel, rung, kind="expected"):
    check_rung(oracle.grades(kernel, kind), rung, kernel.name)


# --- right kernels --------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 100, 700, *MANY])
@pytest.mark.parametrize("ratio", [0.0, 1.0, 1e2, 1e4])
def test_right_forward_is_within_the_expected_bounds_of_its_rung(count, ratio, rng):
    oracle = Oracle(rows(count, rng, ratio=ratio, channels=8 if count < 10**5 else 2))
    for kernel in kernels_for(count, ratio):
        check(oracle, kernel, kernel.rung_of(ratio))


@pytest.mark.parametrize("ratio", [0.0, 1.0, 1e2, 1e4])
@pytest.mark.parametrize(
    "count", [3000, *(pytest.param(10**n, marks=pytest.mark.long) for n in (5, 6))]
)
def test_forward_with_updated_mean_is_within_expected_bounds_of_its_rung(count, ratio, rng):
    oracle = Oracle(rows(count, rng, ratio=ratio, channels=4))
    for kernel in RIGHT_FORWARD:
        if kernel.loops:
            check(oracle, kernel, kernel.rung)


@pytest.mark.parametrize("count", [2, 700])
@pytest.mark.parametrize("statistics", [FLOAT32, None], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_right_forward_on_16_bits_is_within_expected_bounds_of_rung(dtype, statistics, count, rng):
    oracle = Oracle(rows(count, rng, dtype=dtype, statistics=statistics))
    for kernel in kernels_for(count, 1.0):
        check(oracle, kernel, kernel.rung_of(1.0))


@pytest.mark.parametrize("count", [1, 2, 16, 700])
@pytest.mark.parametrize("ratio", [0.0, 1.0, 1e6])
def test_right_forward_on_float64_is_within_the_bounds_of_its_rung(count, ratio, rng):
    oracle = Oracle(rows(count, rng, ratio=ratio, dtype=FLOAT64))
    own = {"pairs": "pairwise", "blocks of 256": "blocked", "serial": "serial", "Welford": "serial"}
    for kernel in RIGHT_FORWARD:
        if kernel.name in own:
            wider = RightForward(kernel.name, "", kernel.statistics, np.float64)
            check(oracle, wider, own[kernel.name])


def test_grade_forward_of_backnorm_is_at_least_its_arithmetic(rng):
    for dtype in ELEMENT_TYPES:
        data = realistic_data((6, 5, 30), dtype, rng=rng)
        operands = data.x, data.gamma, data.beta
        found = grade_forward(
            *operands, backnorm.batch_norm_forward(*operands, **data.options), **data.options
        )
        assert list(found) == list(FORWARD_RESULTS)
        # Data of 16 bits is computed in float32.
        assert all(
            g.at_least("float64" if dtype.itemsize > 2 else "float32") for g in found.values()
        )


# --- parted rungs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (8000, ["float64 sums", "Kahan", "pairs", "NumPy's sum", "serial", "atomics"]),
        pytest.param(128_000, ["blocks of 128", "blocks of 256"], marks=pytest.mark.long),
    ],
)
def test_forward_kernel_with_many_elements_is_on_its_own_rung(count, names, rng):
    kernels = [kernel for kernel in RIGHT_FORWARD if kernel.name in names]
    for _ in range(3):
        oracle = Oracle(rows(count, rng, channels=16))
        for kernel in kernels:
            assert worst(oracle.grades(kernel)) == kernel.rung, kernel.name


# --- wrong algorithms -----------------------------------------------------------------------------


@pytest.mark.parametrize("sums", [serial, pairs], ids=["serial", "pairs"])
@pytest.mark.parametrize("count", [16, 700, 5000, *MANY])
def test_one_pass_in_float32_with_large_mean_is_wrong_or_nonfinite(count, sums, rng):
    # In a single channel of 200,000 elements, a result can be right by accident.
    oracle = Oracle(rows(count, rng, ratio=1e4))
    grades = oracle.grades(RightForward("", "", Shifted(sums, shift=False)))
    assert grades["variance"].status in ("wrong", "nonfinite")
    assert grades["y"].status in ("wrong", "nonfinite")


def test_one_pass_variance_of_float32_squares_with_large_mean_is_wrong(rng):
    oracle = Oracle(rows(700, rng, ratio=1e4))
    grades = oracle.grades(RightForward("", "", Shifted(wide, shift=False)))
    assert grades["variance"].status == "wrong"


@pytest.mark.parametrize("factor", [1 + 1e-3, 1 - 1e-3])
@pytest.mark.parametrize("name", FORWARD_RESULTS)
def test_forward_grade_of_result_off_by_a_thousandth_is_wrong(name, factor, rng):
    oracle = Oracle(rows(5000, rng))
    actual = (oracle.ladder.value(name).hi * factor).astype(np.float32)
    assert oracle.ladder.grade(name, actual).status == "wrong"


# --- adversarial data -----------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("count", [2, 17, 600, 5000, *MANY[1:]])
def test_guaranteed_forward_bound_holds_for_adversarial_data(name, count, rng):
    one = np.ones((2, 1), np.float32)
    oracle = Oracle(Rows(adversarial(name, count, rng), one, one))
    for kernel in RIGHT_FORWARD:
        if kernel.most == np.inf and not (kernel.loops and count > 10**4):
            check(oracle, kernel, kernel.rung, "guaranteed")


@pytest.mark.parametrize("count", [1, 2, 100, 5000])
@pytest.mark.parametrize("ratio", [0.0, 1e4])
def test_guaranteed_forward_bound_holds_for_random_data(count, ratio, rng):
    oracle = Oracle(rows(count, rng, ratio=ratio))
    for kernel in RIGHT_FORWARD:
        if kernel.most == np.inf:
            check(oracle, kernel, kernel.rung, "guaranteed")


def test_serial_mean_of_equal_terms_exceeds_a_fifth_of_its_guarantee():
    x, one = np.full((1, 5000), 1.6369617, np.float32), np.ones((1, 1), np.float32)
    oracle = Oracle(Rows(x, one, one))
    kernel = RightForward("", "serial", TwoPass(serial))
    assert 0.2 < oracle.grades(kernel, "guaranteed")["mean"].share["serial"] <= 1


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("name", FORWARD_RESULTS)
@pytest.mark.parametrize("kind", ["expected", "guaranteed"])
def test_forward_allowances_do_not_decrease_from_rung_to_rung(name, dtype, kind, rng):
    data = rows(600, rng, dtype=dtype)
    allowed = list(Oracle(data).ladder.allowances(name, dtype, kind=kind).values())
    assert len(allowed) == len(rungs(dtype))
    for better, worse in itertools.pairwise(allowed):
        assert (better <= worse).all()


# --- grades ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", FORWARD_RESULTS)
def test_forward_grade_of_non_finite_value_is_nonfinite_at_its_index(name, value, rng):
    oracle = Oracle(rows(50, rng))
    actual = oracle.ladder.value(name).hi.astype(np.float32)
    actual.flat[3] = value
    found = oracle.ladder.grade(name, actual)
    assert found.status == "nonfinite"
    assert np.ravel_multi_index(found.where, actual.shape) == 3


def test_forward_grade_with_infinite_x_judges_finite_channels(rng):
    data = rows(50, rng)
    data.x[0, 7] = np.inf
    oracle = Oracle(data)
    exact = oracle.ladder.value("y").hi.astype(np.float32)
    assert oracle.ladder.grade("y", exact).status == "exact"
    exact[:, 1] += 1
    assert oracle.ladder.grade("y", exact).status == "wrong"


def test_grade_forward_of_empty_batch_is_exact():
    x = np.zeros((0, 3), np.float32)
    statistics = np.full(3, np.nan, np.float32)
    found = grade_forward(x, None, None, (x, statistics, statistics), epsilon=EPSILON)
    assert {g.status for g in found.values()} == {"exact"}


def test_grade_forward_with_invalid_argument_raises_error_naming_it(rng):
    data = realistic_data((4, 3, 5), FLOAT32, rng=rng)
    operands = data.x, data.gamma, data.beta
    mean, variance = data.mean, data.variance
    with pytest.raises(TypeError, match=r"^y: has the wrong element type; got float64"):
        grade_forward(*operands, (data.x.astype("d"), mean, variance), **data.options)
    with pytest.raises(ValueError, match=r"^mean: has the wrong shape"):
        grade_forward(*operands, (data.x, mean[:2], variance), **data.options)
    with pytest.raises(TypeError, match=r"^variance: has an unsupported element type"):
        grade_forward(*operands, (data.x, mean, variance.astype("i4")), **data.options)
    with pytest.raises(ValueError, match=r"^normalized: must have 3 results; got 2 results"):
        grade_forward(*operands, (data.x, mean), **data.options)
    with pytest.raises(ValueError, match=r"^gamma: must hold one value per channel of x"):
        grade_forward(data.x, mean[:2], None, (data.x, mean, variance), **data.options)
    with pytest.raises(ValueError, match=r"^name: unknown"):
        ForwardLadder.of(*operands, **data.options).grade("dx", data.x)
    with pytest.raises(ValueError, match=r"^kind: unknown"):
        ForwardLadder.of(*operands, **data.options).grade("y", data.x, kind="usual")


def test_forward_ladder_values_and_terms_equal_reference(rng):
    data = realistic_data((4, 3, 5), FLOAT32, rng=rng)
    ladder = ForwardLadder.of(data.x, data.gamma, data.beta, **data.options)
    exact = reference.forward(data.x, data.gamma, data.beta, **data.options)
    for name in FORWARD_RESULTS:
        np.testing.assert_array_equal(ladder.value(name).hi, getattr(exact, name).hi)
        np.testing.assert_array_equal(ladder.terms(name), getattr(exact, f"{name}_terms"))


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kernel", [k for k in RIGHT_FORWARD if not k.loops], ids=lambda k: k.name)
def test_running_statistics_and_inverse_deviation_are_on_rung_of_kernel(kernel, unbiased):
    data, old = rows(300, np.random.default_rng(3)), np.linspace(-1, 2, 8, dtype=FLOAT32)
    if not kernel.is_right(300, 1.0):
        pytest.skip("the kernel is not right for these data")
    x = np.ascontiguousarray(data.x.T)
    layer = LayerData(
        x, x, old, old + 2, data.gamma[:, 0], data.beta[:, 0], EPSILON, "NXC",
        momentum=0.1, unbiased=unbiased,
    )  # fmt: skip
    _, mean, variance = kernel(*data, EPSILON)
    e, factor = np.float32, np.float32(300 / 299 if unbiased else 1)
    results = {
        "inverse_deviation": e(1) / np.sqrt(variance + e(EPSILON)),
        "running_mean": e(0.1) * mean + (e(1) - e(0.1)) * layer.mean,
        "running_variance": e(0.1) * (variance * factor) + (e(1) - e(0.1)) * layer.variance,
    }
    ladder = ForwardLadder.of_layer(layer)
    for name, actual in results.items():
        rung = "float32" if kernel.rung == "float64" else kernel.rung_of(1.0)
        assert ladder.grade(name, actual).at_least(rung), name
        far = actual * e(1 + 1e-4)
        assert not ladder.grade(name, far).passed, name
