"""Wrong kernels are named by the mistake that they make."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from backnorm.conformance.data import LayerData
from backnorm.conformance.diagnosis import diagnose, diagnostic_data, forward_diagnostic_data
from backnorm.conformance.formula import BACKWARD, MISTAKES, WRONG, Channels
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.verify.cases import Selection, selected
from tests.support.dtypes import BFLOAT16, ELEMENT_TYPES, FLOAT16, FLOAT32, FLOAT64, rounded

from . import right_subjects
from . import wrong_kernels as kernels
from .wrong_kernels import PAIRS, WRONG_KERNELS

BY_NAME = {mistake.name: BACKWARD.wrong(mistake) for mistake in WRONG}
OF_PRECISION = ["folded-mean", "float32-sums", "sum-before-mean"]
LAYOUTS = ["NCX", pytest.param("NXC", marks=pytest.mark.long)]


def outputs_of(kernel, data, *, training=True):
    return kernel(*data.backward_inputs, **data.options, training=training)


@pytest.mark.covering(1)
@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("kernel", "name"), WRONG_KERNELS.items(), ids=str)
def test_diagnose_with_formula_mistake_returns_its_name(kernel, name, dtype, data_format):
    data = diagnostic_data(dtype, data_format=data_format)
    found = diagnose(data, outputs_of(kernel(), data))
    assert (found.kind, found.names) == ("formula", (name,))
    says = next(mistake.says for mistake in MISTAKES if mistake.name == name)
    # In bfloat16 two constants of epsilon cannot be distinguished.
    assert found.says == says or (dtype == BFLOAT16 and found.says.startswith(f"{says}, or eps"))


@pytest.mark.covering(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("name", ["right", *OF_PRECISION])
def test_diagnose_of_right_kernel_returns_right(name, dtype, training):
    data = diagnostic_data(dtype)
    outputs = outputs_of(BY_NAME.get(name, kernels.Kernel()), data, training=training)
    kind = "precision" if (name, dtype) == ("float32-sums", FLOAT64) else "right"
    assert diagnose(data, outputs, training=training).kind == kind


@pytest.mark.parametrize("training", [True, False])
def test_diagnose_of_float64_outputs_computed_in_float32_returns_few_bits(training):
    data = diagnostic_data(FLOAT64)
    narrow = (a.astype(np.float32) for a in data.backward_inputs)
    outputs = kernels.Kernel()(*narrow, **data.options, training=training)
    found = diagnose(data, tuple(a.astype(float) for a in outputs), training=training)
    assert (found.kind, found.names) == ("precision", ("few-bits",))
    assert re.match("dx, dgamma and dbeta are right to 2[0-6] bits, as if", found.says)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_diagnose_of_truncated_dx_says_so(dtype, training):
    data = diagnostic_data(dtype)
    found = diagnose(
        data, outputs_of(BY_NAME["truncated"], data, training=training), training=training
    )
    assert (found.kind, found.names) == ("precision", ("truncated",))
    assert found.says == "dx is rounded toward zero, not to the nearest number"


@pytest.mark.parametrize("narrow", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32], ids=str)
def test_diagnose_of_rounded_dx_returns_its_bits(dtype, narrow):
    data = diagnostic_data(dtype)
    dx, dgamma, dbeta = outputs_of(kernels.Kernel(), data)
    found = diagnose(data, (dx.astype(narrow).astype(dtype), dgamma, dbeta))
    bits = 8 if narrow == BFLOAT16 else 11
    assert (
        found.says == f"dx is right to {bits} bits, as if rounded, or summed up, in a narrow type"
    )


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, FLOAT16], ids=str)
def test_diagnose_of_noisy_dx_returns_its_bits(dtype):
    data = diagnostic_data(dtype)
    dx, dgamma, dbeta = outputs_of(kernels.Kernel(), data)
    noise = 2.0**-7 * np.random.default_rng(0).uniform(-1, 1, dx.shape)
    found = diagnose(data, ((dx.astype(float) * (1.0 + noise)).astype(dtype), dgamma, dbeta))
    assert found.says == "dx is right to 7 bits, as if rounded, or summed up, in a narrow type"


class SumsInSteps(kernels.Kernel):
    """Leaves out the rest of a division of each channel, or of each image, by a step."""

    step, images = 8, 1

    def sums(self, x, dy, c, mean):
        size = dy.shape[1] // self.images
        kept = np.arange(dy.shape[1]) % size < size // self.step * self.step
        d = (dy * kept).astype(kernels.Wide)
        return d.sum(1, keepdims=True), (d * c).sum(1, keepdims=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(
    ("step", "images", "says"),
    [
        (2, 1, "the sums lack the last element of a channel"),
        (32, 1, "the sums lack the last 17 of the 273 elements of a channel"),
        (8, 1, "the sums lack the last element of a channel"),
        (64, 1, "the sums lack the last 17 of the 273 elements of a channel"),
        (8, 7, "the sums lack the last 7 of the 39 elements of each image"),
    ],
)
def test_diagnose_of_sums_without_tail_reports_tail(step, images, says, dtype, data_format):
    data = diagnostic_data(dtype, data_format=data_format)
    kernel = type("Steps", (SumsInSteps,), {"step": step, "images": images})()
    found = diagnose(data, outputs_of(kernel, data))
    assert (found.kind, found.says) == ("formula", says)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_diagnose_of_sums_in_float16_returns_few_bits(dtype, training):
    data = diagnostic_data(dtype)
    outputs = outputs_of(BY_NAME["float16-sums"], data, training=training)
    found = diagnose(data, outputs, training=training)
    assert (found.kind, found.names) == ("precision", ("few-bits",))
    assert re.search(
        r"\bdgamma and dbeta are right to \d+ bits, as if rounded, or summed up, in a", found.says
    )


def test_diagnose_of_wrong_signs_reports_their_channels():
    data = diagnostic_data(FLOAT32)
    dx, dgamma, dbeta = outputs_of(kernels.Kernel(), data)
    dbeta[1::2] *= -1
    found = diagnose(data, (dx, dgamma, dbeta))
    channels = "1, 3, 5, 7, 9, 11"
    assert found.says == f"dbeta has the wrong sign in channels {channels}"


def _dx_changed(change):
    def outputs(dx, dgamma, dbeta):
        change(dx)
        return dx, dgamma, dbeta

    return outputs


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (_dx_changed(lambda dx: dx.reshape(-1)[-3:].fill(0)),
         "the last 3 of the 3549 elements of dx in memory are 0; the rest is right"),
        (_dx_changed(lambda dx: dx.reshape(-1)[-1:].fill(100)),
         "the last element of dx in memory is wrong; the rest is right"),
        (_dx_changed(lambda dx: dx[:, 12].fill(0)),
         "dx is 0 in channel 12; the rest is right"),
        (_dx_changed(lambda dx: dx[:, 3:5].fill(0)),
         "dx is 0 in channels 3 to 4; the rest is right"),
        (_dx_changed(lambda dx: dx[2, 7].fill(100)),
         "1.1% of the elements of dx are wrong, in channel 7; the first is element 78 of "
         "channel 7; the rest is right"),
        (lambda dx, dgamma, dbeta: (dx, np.where(np.arange(13) != 11, dgamma, 0), dbeta),
         "dgamma is wrong in channel 11; the rest is right"),
        (lambda dx, *two: (dx, *(np.where(np.arange(13) < 8, each, 0) for each in two)),
         "dgamma and dbeta are 0 in channels 8 to 12"),
    ],
)  # fmt: skip
def test_diagnose_of_partly_wrong_outputs_reports_places(changed, says, dtype):
    data = diagnostic_data(dtype)
    outputs = changed(*(each.copy() for each in outputs_of(kernels.Kernel(), data)))
    outputs = tuple(
        each.astype(data.like(n).dtype) for n, each in zip(GRADIENTS, outputs, strict=True)
    )
    assert diagnose(data, outputs).says == says


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_diagnose_of_dx_without_tail_reports_end_of_memory(dtype, data_format, seed):
    data = diagnostic_data(dtype, data_format=data_format, seed=seed)
    dx, dgamma, dbeta = outputs_of(kernels.Kernel(), data)
    parameters = dgamma.astype(data.mean.dtype), dbeta.astype(data.mean.dtype)
    for width in (2, 5, 8, 16, 32):
        for rest in (0, data.dy.reshape(-1)[-(dx.size % width) :]):
            changed = dx.astype(dtype, order="C")
            changed.reshape(-1)[-(changed.size % width) :] = rest
            found = diagnose(data, (changed, *parameters))
            assert re.match("the last (element|[0-9]+ of the 3549 elements) ", found.says)
            assert found.says.endswith("; the rest is right")


def test_diagnostic_data_has_odd_size_and_channel_count():
    for data in (diagnostic_data(FLOAT32), forward_diagnostic_data(FLOAT32)):
        assert data.x.size % 2 == data.x.shape[1] % 2 == 1


def test_diagnose_when_frozen_omits_evidence_of_zero_terms():
    data = diagnostic_data(FLOAT32)
    outputs = outputs_of(kernels.ForgetsGamma(), data, training=False)
    evidence = diagnose(data, outputs, training=False).evidence
    assert set(evidence) == {"gain", "dgamma", "dbeta", "residual"}


@pytest.mark.covering(1)
@pytest.mark.parametrize("scale", [1e-25, 1e-16, 1e14, 1e25])
@pytest.mark.parametrize(("kernel", "name"), WRONG_KERNELS.items(), ids=str)
def test_diagnose_with_large_or_small_dy_returns_name_of_mistake(kernel, name, scale):
    data = diagnostic_data(FLOAT32)
    data = replace(data, dy=(data.dy * scale).astype(FLOAT32))
    found = diagnose(data, outputs_of(kernel(), data))
    assert (found.kind, found.names) == ("formula", (name,))


@pytest.mark.covering(0)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(k.__name__ for k in pair))
def test_diagnose_of_two_mistakes_returns_both_names(pair):
    both = type("Both", pair, {})
    data = diagnostic_data(FLOAT32)
    found = diagnose(data, outputs_of(both(), data))
    assert set(found.names) == {WRONG_KERNELS[kernel] for kernel in pair}


@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_diagnose_of_unknown_factor_reports_its_value(dtype):
    data = diagnostic_data(dtype)
    dx, dgamma, dbeta = outputs_of(kernels.Kernel(), data)
    dgamma = (0.7 * dgamma.astype(np.float64)).astype(dgamma.dtype)
    found = diagnose(data, (dx, dgamma, dbeta))
    assert found.kind == "described"
    assert found.says == "dgamma is 0.7 times what it should be in every channel"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_diagnose_of_swapped_dgamma_and_dbeta_reports_swap(dtype, training):
    data = diagnostic_data(dtype)
    dx, dgamma, dbeta = outputs_of(kernels.Kernel(), data, training=training)
    found = diagnose(data, (dx, dbeta, dgamma), training=training)
    assert (found.kind, found.names) == ("formula", ("dgamma-dbeta-swapped",))
    assert found.says == "dgamma and dbeta are swapped"


def rolled(dx, data):
    return np.roll(dx, 1, axis=1)


def permuted(dx, data):
    return dx[:, :, ::-1, :]


def tail_missing(dx, data):
    dx = dx.copy()
    dx.reshape(*dx.shape[:2], -1)[:, :, -3:] = 0
    return dx


def not_written(dx, data):
    return np.full_like(dx, np.nan)


def partly_written(dx, data):
    dx = dx.copy()
    dx[-1, -1, -1, -1] = np.nan
    return dx


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(
    ("fault", "kind", "name"),
    [
        (rolled, "indexing", "channels-shifted"),
        (permuted, "indexing", "elements-permuted"),
        (tail_missing, "indexing", "partly-wrong"),
        (not_written, "memory", "not-written"),
        (partly_written, "memory", "partly-written"),
    ],
)
def test_diagnose_of_misplaced_or_unwritten_dx_returns_indexing_or_memory(fault, kind, name, dtype):
    data = diagnostic_data(dtype)
    dx, dgamma, dbeta = outputs_of(kernels.Kernel(), data)
    found = diagnose(data, (fault(dx, data), dgamma, dbeta))
    assert (found.kind, found.names) == (kind, (name,))


def test_diagnose_with_missing_output_skips_it():
    data = diagnostic_data(FLOAT32)
    dx, dgamma, dbeta = outputs_of(kernels.DgammaWithGamma(), data)
    assert diagnose(data, (dx, None, dbeta)).kind == "right"
    assert diagnose(data, (None, dgamma, dbeta)).names == ("dgamma-gamma",)


def values_of(data, *mistakes, training=True):
    """Return the numbers of the formula with these mistakes."""
    channels = Channels.of(data, training=training)
    return channels, BACKWARD.wrong(*mistakes).numbers(channels)


def outputs_from(data, channels, numbers):
    """Return the outputs of a formula that gives these numbers."""
    functions = BACKWARD.functions(channels)
    rows = sum(numbers[name][:, None] * each for name, each in functions.items())
    shape = np.moveaxis(data.x, data.channel_axis, 0).shape
    dx = np.moveaxis(rows.reshape(shape), 0, data.channel_axis)
    parameters = (rounded(numbers[name], data.mean.dtype) for name in ("dgamma", "dbeta"))
    return rounded(dx, data.x.dtype), *parameters


# In frozen mode both mistakes give sum(dy*x) for sum(dy*(x - mean)).
ALIKE = {"mean-ignored", "not-centred"}


@pytest.mark.covering(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_diagnose_of_each_mistake_returns_its_name_or_right(mistake, dtype, training):
    data = diagnostic_data(dtype)
    channels, numbers = values_of(data, mistake, training=training)
    _, right = values_of(data, training=training)
    found = diagnose(data, outputs_from(data, channels, numbers), training=training)
    if all(np.array_equal(*pair) for pair in zip(numbers.values(), right.values(), strict=True)):
        assert found.kind == "right"
    elif not training and mistake.name in ALIKE:
        assert found.names == ("mean-ignored-or-not-centred",)
        assert ", or the sum is of dy*x" in found.says
    else:
        assert (found.kind, found.names, found.says) == ("formula", (mistake.name,), mistake.says)


@pytest.mark.covering(0)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("result", ["gain", "offset", "slope", "dgamma", "dbeta"])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_diagnose_of_mistake_in_one_result_names_no_two_mistakes(mistake, result, dtype, training):
    data = diagnostic_data(dtype)
    channels, wrong = values_of(data, mistake, training=training)
    _, right = values_of(data, training=training)
    numbers = right | {result: wrong[result]}
    outputs = outputs_from(data, channels, numbers)
    found = diagnose(data, outputs, training=training)
    if found.kind == "formula" and found.names != ("mean-ignored-or-not-centred",):
        # If a mistake is named, it alone gives these outputs.
        known = [*MISTAKES, *BACKWARD.partial_mistakes(channels)]
        (named,) = (each for each in known if (each.name,) == found.names)
        again = outputs_from(data, *values_of(data, named, training=training))
        for own, other in zip(outputs, again, strict=True):
            np.testing.assert_allclose(own.astype(float), other.astype(float), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("result", ["gain", "slope"])
def test_diagnose_of_term_divided_by_m_in_narrow_sums_does_not_say_that_it_is_left_out(result):
    data = diagnostic_data(FLOAT32)
    channels, right = values_of(data)
    offset = right["offset"].astype(BFLOAT16).astype(float)
    numbers = right | {"offset": offset, result: right[result] / channels.count}
    found = diagnose(data, outputs_from(data, channels, numbers))
    says = {
        "gain": "the factor of dy in dx is 0.00366 times what it should be in every channel, and "
        "the term sum(dy)/M of dx is right to 8 bits, as if rounded, or summed up, in a narrow "
        "type",
        "slope": "the sum along x - mean is divided by M twice",
    }
    assert found.says == says[result]


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_diagnose_of_bessel_correction_in_slope_alone_does_not_name_other_mistakes(dtype):
    data = diagnostic_data(dtype)
    (bessel,) = (mistake for mistake in MISTAKES if mistake.name == "bessel")
    channels, wrong = values_of(data, bessel)
    numbers = values_of(data)[1] | {"slope": wrong["slope"]}
    found = diagnose(data, outputs_from(data, channels, numbers))
    assert found.names == ()
    assert found.says.startswith(
        "dx is wrong" if dtype == BFLOAT16 else "the term along x - mean of dx is 0.99"
    )


FITTED = {
    "epsilon-other": (
        {"inverse_deviation": lambda w, e, _: 1.0 / np.sqrt(w + 0.014)},
        "epsilon is 0.014, not 0.25, which was passed",
    ),
    "count-other": ({"count": lambda _: 12}, "12 is used for M, which is 273"),
    "mean-other": (
        {"statistics": lambda b: (b.mean + np.linspace(0.1, 1, 13), b.variance)},
        "another mean is used than the one that was passed",
    ),
    "variance-other": (
        {"statistics": lambda b: (b.mean, b.variance * np.linspace(0.5, 0.9, 13))},
        "another variance is used than the one that was passed",
    ),
    "statistics-other": (
        {"statistics": lambda b: (b.mean + 0.5, b.variance * np.linspace(0.5, 0.9, 13))},
        "another mean and another variance are used than those that were passed",
    ),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("name", "mistake"), FITTED.items(), ids=list(FITTED))
def test_diagnose_of_other_number_than_passed_names_it(name, mistake, dtype):
    steps, says = mistake
    data = diagnostic_data(dtype)
    found = diagnose(data, outputs_of(replace(BACKWARD, **steps), data))
    assert (found.kind, found.names) == ("formula", (name,))
    assert found.says == says or (dtype == BFLOAT16 and name == "epsilon-other")


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_diagnose_of_another_factor_in_each_channel_names_no_statistics(dtype):
    data = diagnostic_data(dtype)
    kernel = replace(BACKWARD, gain=lambda k: k.gain * np.linspace(1, 2, 13))
    assert diagnose(data, outputs_of(kernel, data)).names == ()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_diagnose_of_overlapping_vectors_reports_elements_counted_twice(dtype):
    data = diagnostic_data(dtype)

    def sums(channels, mean, c):
        counts = np.ones(39)
        counts[31:32] = 2
        counts = np.tile(counts, 7)
        return (channels.dy * counts).sum(1), (channels.dy * c * counts).sum(1)

    found = diagnose(data, outputs_of(replace(BACKWARD, sums=sums), data))
    assert found.says == "the sums count element 31 of each image twice"


def test_diagnose_of_mistakes_that_data_cannot_distinguish_names_all_or_none():
    data = diagnostic_data(FLOAT32)
    data = replace(data, gamma=np.full_like(data.gamma, 2.0))
    (mistake,) = (each for each in MISTAKES if each.name == "no-gamma")
    found = diagnose(data, outputs_from(data, *values_of(data, mistake)))
    assert found.names == ("no-gamma",)
    (mistake,) = (each for each in MISTAKES if each.name == "dgamma-zero")
    ones = replace(data, gamma=np.ones_like(data.gamma), dy=data.x, x=data.x)
    found = diagnose(ones, outputs_from(ones, *values_of(ones, mistake)))
    assert found.names == ("dgamma-zero",)


NOT_LINEAR = {
    "dy clipped": lambda data, right: right(np.clip(data.dy, -1, 1)),
    "ReLU of dy": lambda data, right: right(np.maximum(data.dy, 0)),
    "cubes of dy": lambda data, right: right(data.dy**3),
    "dx clipped": lambda data, right: np.clip(right(data.dy), -1, 1),
    "tanh of dx": lambda data, right: np.tanh(right(data.dy)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("function", NOT_LINEAR)
def test_diagnose_of_dx_not_linear_in_dy_does_not_claim_wrong_places(function, dtype, training):
    data = diagnostic_data(dtype)

    def right(dy):
        outputs = outputs_of(kernels.Kernel(), replace(data, dy=dy), training=training)
        return outputs[0].astype(float)

    dx = rounded(NOT_LINEAR[function](data, right), dtype)
    _, *parameters = outputs_of(kernels.Kernel(), data, training=training)
    found = diagnose(data, (dx, *parameters), training=training)
    is_clipped = function == "dx clipped" or (
        not training and function in ("dy clipped", "ReLU of dy")
    )
    assert (found.kind, found.names) == ("described", ())
    assert found.says.startswith(
        "dx is clipped:" if is_clipped else "dx is not a sum of multiples of dy, 1 and x - mean"
    )


def test_diagnose_of_elements_at_wrong_places_in_memory_says_so():
    data = diagnostic_data(FLOAT32)
    dx, dgamma, dbeta = outputs_of(kernels.Kernel(), data)
    places = np.random.default_rng(0).permutation(dx.size)
    found = diagnose(data, (dx.reshape(-1)[places].reshape(dx.shape), dgamma, dbeta))
    assert found.says == "the elements of dx are right, at wrong places"


def random_data(rng, dtype):
    """Return data as a user may have them: nothing helps to distinguish mistakes."""
    shape = tuple(rng.integers(1, 9, rng.integers(2, 6)).tolist())
    data_format = str(rng.choice(["NCX", "NXC"]))
    axis = 1 if data_format == "NCX" else len(shape) - 1
    others = tuple(k for k in range(len(shape)) if k != axis)
    x, dy = rng.standard_normal((2, *shape)) * 10.0 ** rng.uniform(-2, 2, (2, *[1] * len(shape)))
    x += rng.choice([0.0, 1.0, 30.0]) * x.std()
    if rng.random() < 0.2:
        dy = x.copy()
    x, dy = x.astype(dtype), dy.astype(dtype)
    statistics = FLOAT32 if dtype in (BFLOAT16, FLOAT16) else dtype
    mean, variance = (each(x.astype(float), others) for each in (np.mean, np.var))
    if rng.random() < 0.3:
        mean, variance = mean + rng.standard_normal(shape[axis]), variance * 2.0
    gamma = rng.choice([0.0, 1.0]) + rng.choice([0.0, 1.0]) * rng.standard_normal(shape[axis])
    parameters = (a.astype(statistics) for a in (mean, variance, gamma, gamma))
    epsilon = float(rng.choice([1e-5, 1e-3, 0.5]))
    return LayerData(x, dy, *parameters, epsilon, data_format)


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_diagnose_of_right_results_on_random_data_returns_right(dtype, seed):
    rng = np.random.default_rng(seed)
    data = random_data(rng, dtype)
    training, scaled = rng.random() < 0.7, rng.random() < 0.7
    operands = *data.backward_inputs[:4], data.gamma if scaled else None
    for kernel in (right_subjects.float64, right_subjects.kahan, right_subjects.serial):
        outputs = kernel(*operands, **data.options, training=training)
        found = diagnose(data, outputs, training=training, scaled=scaled)
        assert (found.kind, found.names) == ("right", ()), found


@pytest.mark.filterwarnings("error")
@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_diagnose_of_mistake_on_random_data_names_no_other_mistake_alone(dtype, seed):
    rng = np.random.default_rng(seed)
    data, training = random_data(rng, dtype), bool(rng.random() < 0.7)
    for mistake in rng.permuted(MISTAKES)[:3]:
        outputs = outputs_from(data, *values_of(data, mistake, training=training))
        found = diagnose(data, outputs, training=training)
        assert found.kind not in ("indexing", "precision") or found.names == ("few-bits",)
        if found.kind == "formula":
            assert mistake.name in found.names[0].split("-or-")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kernel", WRONG_KERNELS)
def test_diagnose_of_one_element_per_channel_returns_description(kernel):
    (case,) = selected(Selection(only=("one-element-float32-float32-NCX",)))
    outputs = kernel()(*case.operands, **case.options)
    assert diagnose(case.data, outputs).says


def test_fitted_mistakes_of_many_channels_take_little_memory():
    data = diagnostic_data(FLOAT32, shape=(2, 6000, 2))
    channels = BACKWARD.inputs(data, training=True, scaled=True)
    tracemalloc.start()
    list(BACKWARD.fitted_mistakes(channels, BACKWARD.numbers(channels)))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Some numbers for each channel, not for each pair of channels.
    assert most < 1000 * 6000
