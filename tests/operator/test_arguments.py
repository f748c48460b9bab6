"""Bad arguments of the canonical operator: each error names the argument and what came."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest

import backnorm
from backnorm.conformance.data import realistic_data
from tests.support.dtypes import FLOAT32

NAMES = ("x", "dy", "mean", "variance", "gamma")


def call(rng, dtype=FLOAT32, **changes):
    data = realistic_data((3, 4, 5), dtype, rng=rng)
    arguments = dict(zip(NAMES, data.backward_inputs, strict=True)) | data.options | changes
    return backnorm.batch_norm_backward(**arguments)


def test_backward_of_nested_lists_equals_backward_of_arrays(rng):
    data = realistic_data((2, 3, 2), np.dtype(np.float64), rng=rng)
    lists = [array.tolist() for array in data.backward_inputs]
    plain = backnorm.batch_norm_backward(*data.backward_inputs, **data.options)
    gradients = backnorm.batch_norm_backward(*lists, **data.options)
    np.testing.assert_array_equal(gradients.dx, plain.dx)


@pytest.mark.parametrize("epsilon", [10**400, Fraction(10**400), 10**5000], ids=type)
def test_epsilon_beyond_float_range_raises_value_error(epsilon, rng):
    with pytest.raises(backnorm.ArgumentValueError, match=r"^epsilon: must be finite") as raised:
        call(rng, epsilon=epsilon)
    assert len(str(raised.value)) < 400


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
