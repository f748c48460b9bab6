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
def test_wrong_shapes_are_refused(name, array, rng):
    with pytest.raises(backnorm.ArgumentValueError, match=f"^{name}: ") as raised:
        call(rng, **{name: array})
    assert str(array.shape) in str(raised.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, np.longdouble, object, "U3"])
def test_types_that_are_not_supported_are_refused(name, dtype, rng):
    shape = (3, 4, 5) if name in ("x", "dy") else (4,)
    with pytest.raises(backnorm.ArgumentTypeError, match=f"^{name}: "):
        call(rng, **{name: np.ones(shape, dtype)})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float64, FLOAT16, BFLOAT16])
def test_types_that_do_not_go_together_are_refused(name, dtype, rng):
    shape = (3, 4, 5) if name in ("x", "dy") else (4,)
    with pytest.raises(backnorm.ArgumentTypeError):
        call(rng, **{name: np.ones(shape, dtype)})


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_statistics_of_two_types_are_refused(dtype, rng):
    with pytest.raises(backnorm.ArgumentTypeError, match="gamma"):
        call(rng, dtype, gamma=np.ones(4, dtype))


@pytest.mark.parametrize("name", NAMES[:4])
def test_missing_operand_is_named(name, rng):
    with pytest.raises(backnorm.ArgumentTypeError, match=f"^{name}: "):
        call(rng, **{name: None})


@pytest.mark.parametrize("name", NAMES)
def test_masked_arrays_are_refused(name, rng):
    shape = (3, 4, 5) if name in ("x", "dy") else (4,)
    with pytest.raises(backnorm.ArgumentTypeError, match=f"^{name}: .*mask"):
        call(rng, **{name: np.ma.masked_equal(np.ones(shape, np.float32), 2)})


@pytest.mark.parametrize("data_format", ["NHWC", "nxc", "", None, 1, ["NCX"]])
def test_other_data_formats_are_refused(data_format, rng):
    with pytest.raises(backnorm.ArgumentError, match=r"^data_format: .*NCX.*NXC"):
        call(rng, data_format=data_format)


@pytest.mark.parametrize("training", [None, 1, "yes"])
def test_training_must_be_a_boolean(training, rng):
    with pytest.raises(backnorm.ArgumentTypeError, match=r"^training: "):
        call(rng, training=training)


def test_operand_that_converts_to_an_array_is_accepted(rng):
    data = realistic_data((2, 3, 2), np.dtype(np.float64), rng=rng)
    lists = [array.tolist() for array in data.backward_inputs]
    plain = backnorm.batch_norm_backward(*data.backward_inputs, **data.options)
    gradients = backnorm.batch_norm_backward(*lists, **data.options)
    np.testing.assert_array_equal(gradients.dx, plain.dx)


def test_operand_that_does_not_convert_to_an_array_is_refused(rng):
    with pytest.raises(backnorm.ArgumentTypeError, match=r"^mean: "):
        call(rng, mean=[[1.0], [1.0, 2.0]])


@pytest.mark.parametrize("epsilon", [10**400, Fraction(10**400), 10**5000], ids=type)
def test_an_epsilon_beyond_all_floats_is_refused(epsilon, rng):
    with pytest.raises(backnorm.ArgumentValueError, match=r"^epsilon: must be finite") as raised:
        call(rng, epsilon=epsilon)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("data_format", [np.array(["NCX", "NXC"]), np.array("NCX"), np.arange(3)])
def test_an_array_is_no_data_format(data_format, rng):
    with pytest.raises(backnorm.ArgumentValueError, match=r"^data_format: unknown"):
        call(rng, data_format=data_format)


def test_errors_are_the_same_in_another_process(rng):
    for name, value in (("epsilon", "x"), ("x", np.ones((3, 4), int)), ("mean", None)):
        with pytest.raises(backnorm.ArgumentError) as raised:
            call(rng, **{name: value})
        found = pickle.loads(pickle.dumps(raised.value))
        assert type(found) is type(raised.value)
        assert str(found) == str(raised.value)
        assert found.argument == name
        assert str(found.in_words({name: "it"})).startswith("it: ")


def test_an_error_can_be_made_anew_with_its_message():
    with pytest.raises(backnorm.ArgumentError, match=r"^n: ") as raised:
        backnorm.set_num_threads(0)
    again = type(raised.value)(f"while testing: {raised.value}")
    assert str(again) == f"while testing: {raised.value}"
