"""Values at the edge: infinity and NaN, zero and negative variance, epsilon."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_backward, check_forward, check_inference
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32, FLOAT64

NAMES = ("x", "dy", "mean", "variance", "gamma")
SPECIAL = [np.inf, -np.inf, np.nan]
LAYOUTS = [("NCX", (3, 4, 11)), ("NXC", (3, 11, 4))]


def placed(data, name, value):
    """Return the inputs with `value` in one element of channel 1."""
    arrays = dict(zip(NAMES, data.backward_inputs, strict=True))
    array = arrays[name]
    if array.ndim == 1:
        array[1] = value
    elif data.data_format == "NCX":
        array[1, 1, 7] = value
    else:
        array[1, 7, 1] = value
    return tuple(arrays.values())


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("training", [True, False])
def test_backward_propagates_by_ieee_rules(dtype, data_format, shape, name, value, training, rng):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng)
    inputs = placed(data, name, value)
    gradients = backnorm.batch_norm_backward(*inputs, training=training, **data.options)
    verdicts = check_backward(*inputs, gradients, training=training, **data.options)
    assert [v.detail for v in verdicts.values() if not v.passed] == []
    others = np.delete(gradients.dx.astype(float), 1, axis=1 if data_format == "NCX" else -1)
    assert np.isfinite(others).all()


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
@pytest.mark.parametrize("value", SPECIAL)
def test_forward_propagates_by_ieee_rules(dtype, data_format, shape, value, rng):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng)
    x, *_ = placed(data, "x", value)
    normalized = backnorm.batch_norm_forward(x, data.gamma, data.beta, **data.options)
    verdicts = check_forward(x, data.gamma, data.beta, normalized, **data.options)
    assert [v.detail for v in verdicts.values() if not v.passed] == []


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("name", ["x", "mean", "variance", "gamma"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_inference_propagates_by_ieee_rules(dtype, name, value, rng):
    data = realistic_data((3, 4, 11), dtype, rng=rng)
    x, _, mean, variance, gamma = placed(data, name, value)
    y = backnorm.batch_norm_inference(x, mean, variance, gamma, data.beta, **data.options)
    verdicts = check_inference(x, mean, variance, gamma, data.beta, y, **data.options)
    assert [v.detail for v in verdicts.values() if not v.passed] == []


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_backward_that_overflows_is_accurate_without_warning(dtype, rng):
    data = realistic_data((3, 4, 11), dtype, rng=rng, scale=0.25)
    largest = {2: 6e4, 4: 3e38, 8: 1e305}[dtype.itemsize]
    if dtype.itemsize == 2 and dtype.kind != "f":
        largest = 3e38
    dy = (np.sign(data.dy.astype(float)) * largest).astype(dtype)
    inputs = (data.x, dy, *data.backward_inputs[2:])
    gradients = backnorm.batch_norm_backward(*inputs, training=False, **data.options)
    if dtype != FLOAT64:
        assert np.isinf(gradients.dx.astype(float)).any()
    verdicts = check_backward(*inputs, gradients, training=False, **data.options)
    assert [v.detail for v in verdicts.values() if not v.passed] == []


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(
    ("variance", "epsilon"), [(0.0, 0.0), (-0.5, 0.0), (-0.5, 0.5), (-1.0, 0.25)]
)
@pytest.mark.parametrize("training", [True, False])
def test_variance_plus_epsilon_not_above_zero_is_rejected(dtype, variance, epsilon, training, rng):
    data = realistic_data((3, 4, 5), dtype, rng=rng, epsilon=epsilon)
    data.variance[2] = variance
    before = data.dy.copy()
    with pytest.raises(backnorm.ArgumentValueError, match=r"variance.*channel 2") as raised:
        backnorm.batch_norm_backward(
            *data.backward_inputs, training=training, **data.options, out=data.dy
        )
    assert isinstance(raised.value, ValueError)
    assert str(variance) in str(raised.value)
    np.testing.assert_array_equal(data.dy, before)
    with pytest.raises(backnorm.ArgumentValueError, match=r"variance.*channel 2"):
        backnorm.batch_norm_inference(data.x, data.mean, data.variance, **data.options)
    sums = backnorm.reduce(data.x, data.dy, data.mean)
    with pytest.raises(backnorm.ArgumentValueError, match=r"variance.*channel 2"):
        backnorm.apply(*data.backward_inputs, sums, **data.options)


@pytest.mark.parametrize(("data_format", "axis"), [("NCX", 1), ("NXC", -1)])
def test_forward_error_names_constant_channel_and_not_one_with_nan(data_format, axis, rng):
    x = rng.standard_normal((4, 8, 5)).astype(np.float32)
    x[0, 2, 1], x[:, 5] = np.nan, 1.0
    x = np.ascontiguousarray(np.moveaxis(x, 1, axis))
    with pytest.raises(backnorm.ArgumentValueError, match=r"channel 5; got variance 0\.0"):
        backnorm.batch_norm_forward(x, epsilon=0.0, data_format=data_format)


def test_backward_with_negative_variance_and_larger_epsilon_is_accurate(rng):
    data = realistic_data((3, 4, 5), FLOAT32, rng=rng, epsilon=0.5)
    data.variance[2] = -0.25
    gradients = backnorm.batch_norm_backward(*data.backward_inputs, **data.options)
    verdicts = check_backward(*data.backward_inputs, gradients, **data.options)
    assert all(verdict.passed for verdict in verdicts.values())


@pytest.mark.parametrize("epsilon", [0.0, 0, 1e-300, 1e-5, np.float32(1e-3), 1.0, 1e30])
def test_backward_with_finite_nonnegative_epsilon_is_accurate(epsilon, rng):
    data = realistic_data((3, 4, 5), FLOAT64, rng=rng)
    gradients = backnorm.batch_norm_backward(*data.backward_inputs, epsilon=epsilon)
    verdicts = check_backward(*data.backward_inputs, gradients, epsilon=float(epsilon))
    assert all(verdict.passed for verdict in verdicts.values())


@pytest.mark.parametrize("epsilon", [-1e-12, -0.5, np.inf, -np.inf, np.nan])
def test_epsilon_negative_or_nonfinite_is_rejected(epsilon, rng):
    data = realistic_data((3, 4, 5), FLOAT32, rng=rng)
    with pytest.raises(backnorm.ArgumentValueError, match="epsilon"):
        backnorm.batch_norm_backward(*data.backward_inputs, epsilon=epsilon)


@pytest.mark.parametrize("epsilon", [None, "1e-5", True, 1j, [1e-5]])
def test_epsilon_of_wrong_type_is_rejected(epsilon, rng):
    data = realistic_data((3, 4, 5), FLOAT32, rng=rng)
    with pytest.raises(backnorm.ArgumentTypeError, match="epsilon"):
        backnorm.batch_norm_backward(*data.backward_inputs, epsilon=epsilon)
