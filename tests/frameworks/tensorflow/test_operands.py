"""A repeated call, then one with an operand or option absent, of another kind or swapped."""

from __future__ import annotations

import functools
from types import MappingProxyType

import numpy as np
import pytest
import tensorflow as tf

import backnorm.tensorflow as ours

from ...support.kinds import Kind
from ..operands import CANONICAL, OperandContract, failures


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


class TestOperands(OperandContract):
    module = ours
    kinds = MappingProxyType({"tensors": tf.convert_to_tensor, "variables": tf.Variable})
    own_kinds = staticmethod(of_tensorflow)
    options = MappingProxyType({"of_lists": np.float32})


@pytest.mark.sweep
@pytest.mark.parametrize("name", CANONICAL)
def test_traced_function_accepts_or_names_each_kind_of_operand(name):
    plain = getattr(ours, name)

    @functools.wraps(plain)
    def function(**arguments):
        return tf.function(lambda: plain(**arguments))()

    # TensorFlow's own.
    theirs = dict.fromkeys(["symbolic", "a list of symbols"], "out of scope")
    wrong, count = failures(
        function, tf.convert_to_tensor, more=of_tensorflow, theirs=theirs, of_lists=np.float32
    )
    assert not wrong, f"{len(wrong)} kinds in {count} calls:\n" + "\n".join(wrong)
    assert count > 1200
