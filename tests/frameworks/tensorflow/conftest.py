"""Fixtures of the tests with TensorFlow, which run in a process of their own."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest
import tensorflow as tf

from backnorm import BacknormError
from tests.support import internals

#: The errors of a derivative of too high an order: in an eager call, and of TensorFlow's runtime.
REJECTIONS = BacknormError, tf.errors.UnknownError

# Before TensorFlow makes its devices: a tensor can be on another one, and each of four replicas.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)


@pytest.fixture(autouse=True)
def poisoned_results(monkeypatch):
    """Poison the memory of results that are allocated here rather than by the engine."""
    internals.poison_new_memory(monkeypatch)


@pytest.fixture(params=["eager", "graph"])
def run(request):
    """Call a function on arrays, eagerly or as a tf.function that knows nothing but the ranks."""

    def call(function, *arrays):
        # A list stands for what TensorFlow would make of one.
        tensors = [None if array is None else tf.convert_to_tensor(array) for array in arrays]
        if request.param == "eager":
            return function(*tensors)
        operands = [tensor for tensor in tensors if tensor is not None]
        signature = [tf.TensorSpec([None] * t.shape.rank, t.dtype) for t in operands]

        def traced(*present):
            remaining = iter(present)
            return function(*(None if t is None else next(remaining) for t in tensors))

        return tf.function(traced, input_signature=signature)(*operands)

    return call


@pytest.fixture
def close():
    """Assert that tensors are equal to within some roundings of float64."""

    def check(ours, theirs, tolerance=1e-12):
        assert len(ours) == len(theirs)
        for i, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            assert own.dtype == other.dtype == tf.float64, i
            assert own.shape == other.shape, i
            largest = np.abs(other.numpy()).max()
            assert largest > 1e-6, f"result {i} is next to 0: it shows nothing"
            np.testing.assert_allclose(
                own.numpy(), other.numpy(), rtol=0, atol=tolerance * max(1.0, largest),
                err_msg=f"result {i}",
            )  # fmt: skip

    return check
