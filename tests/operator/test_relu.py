"""The operators with an addition and a ReLU: types, layouts, values, bits, arguments."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import backnorm
from backnorm import Activation, reference
from backnorm.activations import RELU
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_backward, check_forward, check_inference
from backnorm.layout import MARK_BYTES, mask_size
from tests.support.battery import facets_of
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32, FLOAT64, is_16_bit, statistics_types
from tests.support.relu_battery import examine_relu, relu_case, relu_cases

BATTERY = {
    f"{kind}{case.name}": case
    for kind, activation in (("", RELU), ("ceiling-", Activation("relu", 1.0)))
    for name in (None, "float32", "float64")
    for case in relu_cases(arithmetic=name, activation=activation)
}
TYPES = [(dtype, other) for dtype in ELEMENT_TYPES for other in statistics_types(dtype)]
# Tails that are no multiple of 8, segments shorter and longer than vectors and bytes, and enough
# elements for several threads (32768 and more).
LAYOUTS = [
    ("NCX", (2, 3, 1)), ("NCX", (3, 1, 7)), ("NCX", (2, 9, 8)), ("NCX", (1, 2, 65)),
    ("NCX", (5, 33, 4)), ("NCX", (3, 17, 7, 7)), ("NCX", (9, 5)), ("NCX", (2, 2, 1030)),
    ("NCX", (2, 3, 2, 3, 2, 3)), ("NCX", (7, 61, 7, 13)), ("NCX", (3, 5, 61, 67)),
    ("NCX", (2, 3, 19801)), ("NCX", (131, 257, 2)),
    ("NXC", (2, 1, 3)), ("NXC", (3, 7, 1)), ("NXC", (2, 8, 9)), ("NXC", (1, 65, 2)),
    ("NXC", (5, 4, 33)), ("NXC", (3, 7, 7, 17)), ("NXC", (70, 31, 8)), ("NXC", (7, 7, 13, 61)),
    ("NXC", (3, 61, 67, 5)), ("NXC", (130, 257)), ("NXC", (3, 7, 7, 513)),
]  # fmt: skip
LARGE = [("NCX", (7, 61, 7, 13)), ("NCX", (3, 5, 61, 67)), ("NXC", (7, 7, 13, 61))]


class Ours:
    """The operators in one arithmetic."""

    def __init__(self, arithmetic=None):
        self.forward = partial(backnorm.batch_norm_forward, arithmetic=arithmetic)
        self.inference = partial(backnorm.batch_norm_inference, arithmetic=arithmetic)
        self.backward = partial(backnorm.batch_norm_backward, arithmetic=arithmetic)


def assert_passed(verdicts):
    assert [f"{k}: {v.detail}" for k, v in verdicts.items() if not v.passed] == []


@pytest.fixture
def threads():
    before = backnorm.get_num_threads()
    yield
    backnorm.set_num_threads(before)


@pytest.mark.covering(2, facets={"name": facets_of})
@pytest.mark.parametrize("name", BATTERY)
def test_relu_operators_pass_battery(name):
    case = BATTERY[name]
    assert_passed(examine_relu(Ours(case.arithmetic), case))


@pytest.mark.covering(2)
@pytest.mark.parametrize("activation", [RELU, Activation("relu", 0.75)], ids=["relu", "ceiling"])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
def test_relu_operators_at_sizes_near_vectors_and_tiles_are_accurate(
    dtype, data_format, shape, with_residual, activation, rng
):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=3.0)
    options = {"with_residual": with_residual, "activation": activation}
    for training in (True, False):
        case = relu_case("", data, rng, training=training, **options)
        assert_passed(examine_relu(Ours(), case))


@pytest.mark.parametrize(("dtype", "statistics"), TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LARGE)
def test_relu_operators_with_mixed_types_are_accurate_and_keep_statistics_type(
    dtype, statistics, data_format, shape, rng
):
    layout = {"data_format": data_format, "rng": rng, "statistics_dtype": statistics}
    data = realistic_data(shape, dtype, **layout)
    assert_passed(examine_relu(Ours(), relu_case("", data, rng)))
    result = backnorm.batch_norm_forward(
        data.x, data.gamma, data.beta, **data.options, activation="relu"
    )
    assert result.mean.dtype == result.variance.dtype == statistics


@pytest.mark.long
@pytest.mark.parametrize("dtype", [FLOAT32, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_relu_operators_with_outputs_larger_than_caches_are_accurate(dtype, data_format, rng):
    """Written past the caches where that pays; a few channels are judged, the others compared."""
    shape = (50, 64, 56, 56) if data_format == "NCX" else (50, 56, 56, 64)
    axis = 1 if data_format == "NCX" else 3
    x, residual, dy = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(3))
    gamma, beta = rng.uniform(0.5, 1.5, (2, 64)).astype(np.float32)
    options = {"epsilon": 1e-5, "data_format": data_format}
    y, mean, variance, mask = backnorm.batch_norm_forward(
        x, gamma, beta, residual=residual, **options, activation="relu"
    )
    inferred = backnorm.batch_norm_inference(
        x, mean, variance, gamma, beta, residual=residual, **options, activation="relu"
    )
    gradients = backnorm.batch_norm_backward(
        x, dy, mean, variance, gamma, mask=mask, residual=True, **options
    )
    positive = reference.unpack_mask(mask, x)
    np.testing.assert_array_equal(positive, y > 0)
    np.testing.assert_array_equal(gradients.dresidual, np.where(positive, dy, dtype.type(0)))

    kept = [0, 31, 63]

    def some(values):
        return np.ascontiguousarray(np.take(values, kept, 0 if values.ndim == 1 else axis))

    part = some(x)
    part_mask = reference.pack_mask(some(positive), part)
    channels = [some(a) for a in (gamma, beta)]
    added = options | {"residual": some(residual), "activation": RELU}
    result = (some(y), some(mean), some(variance), part_mask)
    assert_passed(check_forward(part, *channels, result, **added))
    statistics = (some(mean), some(variance))
    assert_passed(check_inference(part, *statistics, *channels, some(inferred), **added))
    assert_passed(
        check_backward(
            part, some(dy), *statistics, channels[0], tuple(map(some, gradients)),
            mask=part_mask, residual=True, **options,
        )
    )  # fmt: skip
    plain = backnorm.batch_norm_backward(x, gradients.dresidual, mean, variance, gamma, **options)
    for actual, expected in zip(gradients, plain, strict=False):
        np.testing.assert_allclose(
            actual.astype(np.float32), expected.astype(np.float32), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0), (2, 0, 4), (0, 0), (0, 3)])
@pytest.mark.parametrize("with_residual", [True, False])
def test_relu_operators_on_empty_tensors_return_empty_arrays_and_zeros(dtype, shape, with_residual):
    other = np.float32 if is_16_bit(dtype) else dtype
    x, ones = np.zeros(shape, dtype), np.ones(shape[1], other)
    residual = x if with_residual else None
    result = backnorm.batch_norm_forward(
        x, ones, ones, residual=residual, epsilon=1e-5, activation="relu"
    )
    assert result.y.shape == shape
    assert result.mask.dtype == np.uint8
    for values in result[1:3]:
        np.testing.assert_array_equal(values, np.zeros(shape[1], other), strict=True)
    y = backnorm.batch_norm_inference(
        x, ones, ones, ones, ones, residual=residual, epsilon=1e-5, activation="relu"
    )
    assert y.shape == shape
    gradients = backnorm.batch_norm_backward(
        x, x, ones, ones, ones, mask=result.mask, residual=with_residual, epsilon=1e-5
    )
    assert gradients.dx.shape == shape
    assert hasattr(gradients, "dresidual") == with_residual
    for values in gradients[1:3]:
        np.testing.assert_array_equal(values, np.zeros(shape[1], other), strict=True)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("name", ["x", "gamma", "beta", "residual"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_relu_forward_and_inference_of_nonfinite_elements_follow_ieee_rules(
    dtype, name, value, rng
):
    data = realistic_data((4, 5, 9), dtype, rng=rng)
    arrays = {
        "x": data.x,
        "gamma": data.gamma,
        "beta": data.beta,
        "residual": rng.standard_normal(data.x.shape).astype(dtype),
    }
    arrays[name][(1, 2, 3) if arrays[name].ndim == 3 else 2] = value
    result = backnorm.batch_norm_forward(**arrays, **data.options, activation="relu")
    x, gamma, beta, residual = arrays.values()
    options = data.options | {"residual": residual}
    assert_passed(check_forward(x, gamma, beta, result, activation=RELU, **options))
    y = backnorm.batch_norm_inference(
        x, data.mean, data.variance, gamma, beta, **options, activation="relu"
    )
    statistics = data.mean, data.variance
    assert_passed(check_inference(x, *statistics, gamma, beta, y, activation=RELU, **options))


@pytest.mark.parametrize("bits", ["none", "all"])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_backward_with_clear_mask_returns_zeros_and_with_full_mask_keeps_dy(bits, dtype, rng):
    data = realistic_data((5, 9, 7, 7), dtype, rng=rng)
    data.dy[0, 0] = np.nan if bits == "none" else 1.0
    mask = np.full(mask_size(data.x.size), 0 if bits == "none" else 0xFF, np.uint8)
    mask[-MARK_BYTES:] = 0  # row-major order
    gradients = backnorm.batch_norm_backward(
        *data.backward_inputs, mask=mask, residual=True, **data.options
    )
    if bits == "none":
        for values in gradients:
            np.testing.assert_array_equal(values.astype(float), 0.0)
        return
    assert_passed(check_backward(*data.backward_inputs, gradients[:3], **data.options))
    np.testing.assert_array_equal(gradients.dresidual, data.dy)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LARGE)
def test_relu_forward_without_residual_equals_relu_of_plain_y(dtype, data_format, shape, rng):
    """Rounding and the ReLU commute, so y with a ReLU has the bits of the plain one."""
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng)
    affine = (data.gamma, data.beta)
    plain = backnorm.batch_norm_forward(data.x, *affine, **data.options)
    result = backnorm.batch_norm_forward(data.x, *affine, **data.options, activation="relu")
    expected = np.maximum(plain.y.astype(np.float64), 0)
    np.testing.assert_array_equal(result.y.astype(np.float64), expected)
    np.testing.assert_array_equal(result.mean, plain.mean)
    np.testing.assert_array_equal(result.variance, plain.variance)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), [*LARGE, ("NXC", (60001, 3))])
@pytest.mark.parametrize("with_residual", [True, False])
def test_number_of_threads_does_not_change_bits_of_relu_operators(
    dtype, data_format, shape, with_residual, rng, threads
):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng)
    case = relu_case("", data, rng, with_residual=with_residual)

    def results():
        result = backnorm.batch_norm_forward(
            data.x, data.gamma, data.beta, residual=case.residual, **data.options, activation="relu"
        )
        gradients = backnorm.batch_norm_backward(
            *data.backward_inputs, mask=case.mask, residual=with_residual, **data.options
        )
        positive = reference.unpack_mask(result.mask, data.x)
        arrays = (*result[:3], positive, *gradients)
        return [a.tobytes() for a in arrays if a is not None]

    backnorm.set_num_threads(1)
    alone = results()
    for count in (2, 3, 64):
        backnorm.set_num_threads(count)
        assert results() == alone


def test_relu_operators_in_float64_with_large_mean_are_accurate(rng):
    data = realistic_data((4, 5, 60), FLOAT64, rng=rng, ratio=1e6)
    assert_passed(examine_relu(Ours(), relu_case("", data, rng)))
