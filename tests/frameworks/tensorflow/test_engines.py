"""Without kernels, or within the block of another engine, calls on tensors raise."""

from __future__ import annotations

import pytest
import tensorflow as tf

import backnorm
import backnorm.tensorflow
from backnorm.errors import ArgumentValueError


def test_import_without_kernels_succeeds_and_calls_raise_one_line(without_kernels):
    code = """
import tensorflow as tf
import backnorm.tensorflow
from backnorm.errors import MachineCodeError
x, ones = tf.ones((4, 2, 3)), tf.ones(3)
def forward(x):
    return backnorm.tensorflow.batch_norm(x, ones, ones, epsilon=1e-5)[0]
def inference(x):
    return backnorm.tensorflow.batch_norm_inference(x, ones, ones, ones, ones, epsilon=1e-5)
for _ in range(2):
    for call in (forward, inference):
        try:
            call(x)
        except MachineCodeError as error:
            print(error)
"""
    done = without_kernels(code, TF_CPP_MIN_LOG_LEVEL="3")
    assert done.returncode == 0, done.stderr
    message = (
        "calls on tensors of TensorFlow on the CPU need the kernels: "
        "pip install ./kernels in a checkout of backnorm"
    )
    assert done.stdout.splitlines() == 4 * [message]


def test_graph_without_kernels_raises_error_of_tensorflow_with_the_line(without_kernels):
    # TensorFlow raises its own error for one that is raised while a graph runs.
    code = """
import tensorflow as tf
import backnorm.tensorflow
x, ones = tf.ones((4, 2, 3)), tf.ones(3)
call = tf.function(lambda x: backnorm.tensorflow.batch_norm(x, ones, ones, epsilon=1e-5)[0])
try:
    call(x)
except tf.errors.OpError as error:
    print(error.message)
"""
    done = without_kernels(code, TF_CPP_MIN_LOG_LEVEL="3")
    assert done.returncode == 0, done.stderr
    line = (
        "MachineCodeError: calls on tensors of TensorFlow on the CPU need the kernels: pip install"
    )
    assert line in done.stdout


def test_call_within_numpy_engine_raises_until_the_block_ends():
    x, ones = tf.ones((5, 2, 3)), tf.ones(3)
    for _ in range(2):
        with (
            pytest.raises(ArgumentValueError, match=r"^engine: calls on tensors of Tens") as caught,
            backnorm.engine("numpy"),
        ):
            backnorm.tensorflow.batch_norm(x, ones, ones, epsilon=1e-5)
        assert "got 'numpy'; expected 'kernels'" in str(caught.value)
        assert "\n" not in str(caught.value)
        backnorm.tensorflow.batch_norm(x, ones, ones, epsilon=1e-5)
