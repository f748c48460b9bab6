"""Fixtures of the tests with Keras, which run in a process for each of its backends.

KERAS_BACKEND says which: tensorflow (as Keras itself has it by default), torch or jax.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_TORCH_DEVICE", "cpu")

import keras
import numpy as np
import pytest

from .steps import STEPS

BACKEND = keras.backend.backend()

if BACKEND == "jax":
    import jax

    # Bits are those of kernels: what XLA compiles around them is used once.
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_configure(config):
    """Let warnings pass that Keras gives of itself, and know the marker of its tests."""
    config.addinivalue_line("markers", "requires_trainable_backend: a test of Keras's own")
    # With the JAX backend, wherever it makes an array of a variable.
    config.addinivalue_line(
        "filterwarnings", "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
    )


# Whole models, which take a minute: every time with TensorFlow, with the others in the sweep.
_WHOLE_MODELS = ("applications", "examples", "files", "models", "training", "types")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        # There may be other folders' tests in the same session.
        if BACKEND == "tensorflow" or item.path.parent != Path(__file__).parent:
            continue
        if item.path.stem.removeprefix("test_") in _WHOLE_MODELS:
            item.add_marker(pytest.mark.sweep)
        elif item.path.stem == "test_keras_tests":
            item.add_marker(pytest.mark.long)


def pytest_report_header():
    return f"Keras {keras.__version__} with the backend {BACKEND}"


@pytest.fixture
def backend():
    """The name of Keras's backend."""
    return BACKEND


@pytest.fixture
def set_policy():
    """Return a function that sets what layers compute in, which ends with the test."""

    def set_to(policy):
        # The first layer of a process fixes the policy, which then is not the type of floats.
        keras.config.set_floatx("float64" if policy == "float64" else "float32")
        keras.config.set_dtype_policy(policy)

    yield set_to
    set_to("float32")


@pytest.fixture
def step():
    """Return y and the gradients of a layer in training, for dy; by the backend's own means."""

    def call(layer, x, dy, **options):
        if not layer.built:
            layer.build(x.shape)
        results = STEPS[BACKEND](layer, x, dy, {"training": True} | options)
        wide = "float64" if x.dtype == np.float64 else "float32"
        return [keras.ops.convert_to_numpy(keras.ops.cast(r, wide)) for r in results]

    return call


@pytest.fixture
def filled(rng):
    """Give a layer's variables random values and return the layer."""

    def fill(layer, shape):
        if not layer.built:
            layer.build(shape)
        for variable in layer.variables:
            # Scales and variances are positive.
            variable.assign(rng.uniform(0.5, 2.0, variable.shape))
        return layer

    return fill


@pytest.fixture
def close():
    """Assert that arrays agree to within some roundings of their largest element."""

    def check(ours, theirs, tolerance):
        assert len(ours) == len(theirs)
        for i, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            largest = np.abs(other).max()
            assert largest > 1e-4, f"result {i} is next to 0: it shows nothing"
            np.testing.assert_allclose(
                own, other, rtol=0, atol=tolerance * largest, err_msg=f"result {i}"
            )

    return check
