"""A repeated call, then one with an operand or option absent, of another kind or swapped."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import backnorm
import backnorm.tensorflow as ours

from ...support.kinds import Kind
from .. import operands

FUNCTIONS = [name for name in operands.CANONICAL if hasattr(ours, name)]
KINDS = {"tensors": tf.convert_to_tensor, "variables": tf.Variable}


def of_tensorflow(array):
    """Yield what only TensorFlow has, a Kind each."""
    tensor = tf.convert_to_tensor(array)
    with tf.device("CPU:1"):
        elsewhere = tf.identity(tensor)
    assert elsewhere.device.endswith("CPU:1")
    yield Kind("on another device", elsewhere, array)
    yield Kind("slices", tf.IndexedSlices(tensor, tf.range(len(array)), tensor.shape), array)
    yield Kind("a list of tensors", [*tensor], array)
    yield Kind("of one number", tf.broadcast_to(tensor[:1], array.shape), _expanded(array))
    with tf.Graph().as_default():
        symbol = tf.compat.v1.placeholder(tf.float32, array.shape)
    refused = {
        "symbolic": symbol,
        "ragged": tf.RaggedTensor.from_tensor(tf.reshape(tensor, [1, -1])),
        "sparse": tf.sparse.from_dense(tensor),
        "of strings of TensorFlow's": tf.strings.as_string(tensor),
        "of float8 of TensorFlow's": tf.cast(tensor, tf.dtypes.experimental.float8_e4m3fn),
        "quantised": tf.quantization.quantize(tensor, 0.0, 2.0, tf.quint8)[0],
        "a handle": tf.Variable(tensor).handle,
        "a variant": tf.raw_ops.TensorListFromTensor(tensor=tensor, element_shape=tf.constant(-1)),
        "a specification": tf.TensorSpec(array.shape),
        "a list of symbols": [symbol],
        "a data set": tf.data.Dataset.from_tensors(tensor),
        "a variable of integers": tf.Variable(tf.cast(tensor, tf.int32)),
    }
    for label, value in refused.items():
        yield Kind(label, value, None, refused=True)


def _expanded(array):
    return np.broadcast_to(array[:1], array.shape)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sample_of_hostile_calls_gives_documented_error_or_right_result(name):
    wrong, count = operands.failures(
        getattr(ours, name),
        tf.convert_to_tensor,
        more=of_tensorflow,
        of_lists=np.float32,
        share=operands.SHARE,
    )
    assert not wrong, f"{len(wrong)} kinds in {count} calls:\n" + "\n".join(wrong)
    assert count > 60


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_accepts_or_names_each_kind_of_operand(name, kind):
    more = of_tensorflow if kind == "tensors" else None
    function = getattr(ours, name)
    wrong, count = operands.failures(function, KINDS[kind], more=more, of_lists=np.float32)
    assert not wrong, f"{len(wrong)} kinds in {count} calls:\n" + "\n".join(wrong)
    assert count > 1200


def test_tensorflow_module_has_each_canonical_function():
    assert set(FUNCTIONS) == set(operands.CANONICAL)


@pytest.mark.sweep
@pytest.mark.parametrize("name", FUNCTIONS)
def test_traced_function_accepts_or_names_each_kind_of_operand(name):
    plain = getattr(ours, name)

    @functools.wraps(plain)
    def function(**arguments):
        return tf.function(lambda: plain(**arguments))()

    # TensorFlow's own.
    theirs = dict.fromkeys(["symbolic", "a list of symbols"], "out of scope")
    wrong, count = operands.failures(
        function, tf.convert_to_tensor, more=of_tensorflow, theirs=theirs, of_lists=np.float32
    )
    assert not wrong, f"{len(wrong)} kinds in {count} calls:\n" + "\n".join(wrong)
    assert count > 1200


def test_numpy_backward_accepts_tensorflow_tensors_and_names_bad_operands():
    arguments, canonical = operands.good(ours.batch_norm_backward)
    wanted = canonical(**arguments, epsilon=1e-3, data_format="NXC")
    for name, array in arguments.items():
        for value in (tf.constant(array), tf.Variable(array)):
            found = canonical(**arguments | {name: value}, epsilon=1e-3, data_format="NXC")
            assert operands.differences(found, wanted) is None
        for kind in of_tensorflow(array):
            if kind.refused:
                with pytest.raises(backnorm.ArgumentError, match=f"^{name}: "):
                    canonical(**arguments | {name: kind.value}, epsilon=1e-3, data_format="NXC")
