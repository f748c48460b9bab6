"""Bad arguments of the canonical operator: each error names the argument and what came."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest

import backnorm
from backnorm.conformance.data import realistic_data
from tests.support.dtypes import BFLOAT16, FLOAT16, FLOAT32

NAMES = ("x", "dy", "mean", "variance", "gamma")


def call(rng, dtype=FLOAT32, **changes):
    data = realistic_data((3, 4, 5), dtype, rng=rng)
    arguments = dict(zip(NAMES, data.backward_inputs, strict=True)) | data.options | changes
    return backnorm.batch_norm_backward(**arguments)


def f32(*shape):
    return np.ones(shape, np.float32)


SHAPES = {
    "a gradient with fewer elements": ("dy", f32(3, 4, 4)),
    "a gradient with more elements": ("dy", f32(4, 4, 5)),
    "a gradient that would broadcast": ("dy", f32(1, 4, 5)),
    "a gradient of another rank": ("dy", f32(3, 4)),
    "an x of rank 1": ("x", f32(4)),
    "an x of rank 0": ("x", f32()),
    "a short mean": ("mean", f32(3)),
    "a long mean": ("mean", f32(5)),
    "an empty mean": ("mean", f32(0)),
    "a scalar mean": ("mean", f32()),
    "a mean of rank 2": ("mean", f32(4, 1)),
    "a short variance": ("variance", f32(1)),
    "a long variance": ("variance", f32(60)),
    "a short gamma": ("gamma", f32(1)),
    "an empty gamma": ("gamma", f32(0)),
    "a gamma of rank 2": ("gamma", f32(1, 4)),
}


@pytest.mark.parametrize(("name", "array"), SHAPES.values(), ids=SHAPES)
def test_backward_with_wrong_shape_raises_error_of_operand(name, array, rng):
    with pytest.raises(backnorm.ArgumentValueError, match=f"^{name}: ") as raised:
        call(rng, **{name: array})
    assert str(array.shape) in str(raised.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, np.longdouble, object, "U3"])
def test_backward_with_unsupported_type_raises_error_of_operand(name, dtype, rng):
    shape = (3, 4, 5) if name in ("x", "dy") else (4,)
    with pytest.raises(backnorm.ArgumentTypeError, match=f"^{name}: "):
        call(rng, **{name: np.ones(shape, dtype)})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float64, FLOAT16, BFLOAT16])
def test_backward_with_one_operand_of_another_type_raises_type_error(name, dtype, rng):
    shape = (3, 4, 5) if name in ("x", "dy") else (4,)
    with pytest.raises(backnorm.ArgumentTypeError):
        call(rng, **{name: np.ones(shape, dtype)})


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_backward_with_gamma_of_other_type_than_statistics_raises_type_error(dtype, rng):
    with pytest.raises(backnorm.ArgumentTypeError, match="gamma"):
        call(rng, dtype, gamma=np.ones(4, dtype))


@pytest.mark.parametrize("name", NAMES[:4])
def test_backward_without_required_operand_raises_error_of_operand(name, rng):
    with pytest.raises(backnorm.ArgumentTypeError, match=f"^{name}: "):
        call(rng, **{name: None})


@pytest.mark.parametrize("name", NAMES)
def test_backward_of_masked_array_raises_error_of_operand(name, rng):
    shape = (3, 4, 5) if name in ("x", "dy") else (4,)
    with pytest.raises(backnorm.ArgumentTypeError, match=f"^{name}: .*mask"):
        call(rng, **{name: np.ma.masked_equal(np.ones(shape, np.float32), 2)})


@pytest.mark.parametrize("data_format", ["NHWC", "nxc", "", None, 1, ["NCX"]])
def test_data_format_with_unknown_value_raises_argument_error(data_format, rng):
    with pytest.raises(backnorm.ArgumentError, match=r"^data_format: .*NCX.*NXC"):
        call(rng, data_format=data_format)


@pytest.mark.parametrize("training", [None, 1, "yes"])
def test_training_of_wrong_type_raises_type_error(training, rng):
    with pytest.raises(backnorm.ArgumentTypeError, match=r"^training: "):
        call(rng, training=training)


def test_backward_of_nested_lists_equals_backward_of_arrays(rng):
    data = realistic_data((2, 3, 2), np.dtype(np.float64), rng=rng)
    lists = [array.tolist() for array in data.backward_inputs]
    plain = backnorm.batch_norm_backward(*data.backward_inputs, **data.options)
    gradients = backnorm.batch_norm_backward(*lists, **data.options)
    np.testing.assert_array_equal(gradients.dx, plain.dx)


def test_backward_of_ragged_list_raises_error_of_operand(rng):
    with pytest.raises(backnorm.ArgumentTypeError, match=r"^mean: "):
        call(rng, mean=[[1.0], [1.0, 2.0]])


@pytest.mark.parametrize("epsilon", [10**400, Fraction(10**400), 10**5000], ids=type)
def test_epsilon_beyond_float_range_raises_value_error(epsilon, rng):
    with pytest.raises(backnorm.ArgumentValueError, match=r"^epsilon: must be finite") as raised:
        call(rng, epsilon=epsilon)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("data_format", [np.array(["NCX", "NXC"]), np.array("NCX"), np.arange(3)])
def test_data_format_that_is_an_array_raises_value_error(data_format, rng):
    with pytest.raises(backnorm.ArgumentValueError, match=r"^data_format: unknown"):
        call(rng, data_format=data_format)


def test_pickled_error_keeps_type_message_and_argument(rng):
    for name, value in (("epsilon", "x"), ("x", np.ones((3, 4), int)), ("mean", None)):
        with pytest.raises(backnorm.ArgumentError) as raised:
            call(rng, **{name: value})
        found = pickle.loads(pickle.dumps(raised.value))
        assert type(found) is type(raised.value)
        assert str(found) == str(raised.value)
        assert found.argument == name
        assert str(found.in_words({name: "it"})).startswith("it: ")


def test_error_class_called_with_message_returns_error_with_that_message():
    with pytest.raises(backnorm.ArgumentError, match=r"^n: ") as raised:
        backnorm.set_num_threads(0)
    again = type(raised.value)(f"while testing: {raised.value}")
    assert str(again) == f"while testing: {raised.value}"
