"""Arrays that are copied between TensorFlow and the kernels, and those that are not."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from backnorm import tensorflow as ours
from backnorm.allocation import aligned
from backnorm.tensorflow import calls, differentiable
from backnorm.tensorflow.nodes import as_tensor
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32

SHAPES = [(2, 3, 4), (64, 100, 100)]  # below and above what is allocated in huge pages


def address(array):
    return np.asarray(array).__array_interface__["data"][0]


@pytest.fixture
def seen(monkeypatch):
    """Record where the arrays lie that the operators get and return."""
    arrays = {"in": [], "out": []}

    def watched(call):
        def record(operands, options):
            results = call(operands, options)
            arrays["in"] += [address(a) for a in operands if isinstance(a, np.ndarray)]
            arrays["out"] += [address(a) for a in results]
            return results

        return record

    names = ("forward", "backward", "inference")
    watching = {name: watched(getattr(calls, name)) for name in names}
    for name, call in watching.items():
        monkeypatch.setattr(differentiable.calls, name, call)
    return arrays


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axis", [-1, 1])
def test_eager_step_does_not_copy_tensors(seen, rng, dtype, shape, axis):
    x, dy = (tf.cast(rng.normal(size=shape).astype("f"), dtype) for _ in range(2))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, mean, variance = ours.batch_norm(x, epsilon=1e-3, axis=axis)
    dx = tape.gradient(y, x, output_gradients=dy)
    assert seen["in"][:3] == [address(x), address(x), address(dy)]
    y_at, dx_at = seen["out"][0], seen["out"][3]
    assert [address(y), address(dx)] == [y_at, dx_at]
    again = ours.batch_norm_inference(x, mean, variance, epsilon=1e-3, axis=axis)
    assert address(again) == seen["out"][6]


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_traced_function_does_not_copy_tensors(seen, rng, dtype, shape):
    x = tf.cast(rng.normal(size=shape).astype("f"), dtype)
    y = tf.function(lambda x: ours.batch_norm(x, epsilon=1e-3).y)(x)
    assert seen["in"] == [address(x)]
    assert seen["out"][0] == address(y)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 7, 1000, 3 << 20])
def test_aligned_returns_arrays_that_become_tensors_without_copy(dtype, size):
    for _ in range(5):
        array = aligned((size,), dtype)
        assert array.shape == (size,)
        assert array.dtype == dtype
        assert array.flags.carray
        assert address(array) % 64 == 0 or not size
        array[...] = 1
        tensor = as_tensor(array)
        assert tensor.dtype == dtype
        assert address(tensor) == address(array) or not size
        np.testing.assert_array_equal(np.asarray(tensor), array)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_as_tensor_copies_unaligned_and_strided_arrays(dtype):
    # TensorFlow's operators would end the process: "Check failed: IsAligned()".
    array = aligned((1001,), dtype)[1:]
    array[...] = np.arange(1000) % 100
    tensor = as_tensor(array)
    assert address(tensor) % 64 == 0
    np.testing.assert_array_equal(np.asarray(tensor + tensor), array + array)
    strided = aligned((40, 30), dtype).T
    strided[...] = np.arange(1200).reshape(30, 40) % 100
    np.testing.assert_array_equal(np.asarray(as_tensor(strided)), strided)


def test_as_tensor_keeps_memory_of_array_until_tensor_is_deleted():
    array = aligned((1 << 20,), FLOAT32)
    array[...] = np.arange(1 << 20)
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    alive = weakref.ref(owner)
    tensor = as_tensor(array)
    del array, owner
    gc.collect()
    assert alive() is not None
    assert float(tensor[12345]) == 12345
    del tensor
    gc.collect()
    # TensorFlow may let go of it with its next operator.
    tf.constant(0.0)
    assert alive() is None


def test_functions_do_not_write_to_inputs(rng):
    x, dy = rng.normal(size=(2, 5, 6, 4)).astype("f")
    tensors = [tf.constant(a) for a in (x, dy, *np.ones((3, 4), "f"))]
    before = [t.numpy() for t in tensors]
    ours.batch_norm(tensors[0], *tensors[2:4], epsilon=1e-3)
    ours.batch_norm_backward(*tensors, epsilon=1e-3)
    for tensor, values in zip(tensors, before, strict=True):
        np.testing.assert_array_equal(tensor, values)


def test_gradient_of_variable_changed_after_forward_uses_old_value(rng):
    x = tf.Variable(rng.normal(size=(5, 4)))
    old, dy = tf.constant(x), tf.constant(rng.normal(size=(5, 4)))
    with tf.GradientTape() as tape:
        y, mean, variance = ours.batch_norm(x, epsilon=1e-3)
    kept = y.numpy()
    x.assign(tf.zeros_like(x))
    dx = tape.gradient(y, x, output_gradients=dy)
    np.testing.assert_array_equal(y, kept)
    expected = ours.batch_norm_backward(old, dy, mean, variance, epsilon=1e-3).dx
    np.testing.assert_array_equal(dx, expected)
