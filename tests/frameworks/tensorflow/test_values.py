"""Results of the functions, beside the exact ones and beside those of TensorFlow's operator."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from backnorm import tensorflow as ours
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_forward
from tests.support.dtypes import BFLOAT16, FLOAT16

EPSILON = 1e-3


def passed(verdicts):
    assert [v.detail for v in verdicts.values() if not v.passed] == []


def arrays(*tensors):
    return tuple(None if tensor is None else np.asarray(tensor) for tensor in tensors)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_batch_norm_of_16_bit_x_accepts_parameters_of_its_type(run, rng, dtype):
    data = realistic_data((6, 5, 4), dtype, data_format="NXC", rng=rng)
    parameters = data.gamma.astype(dtype), data.beta.astype(dtype)
    result = run(lambda *a: ours.batch_norm(*a, epsilon=EPSILON), data.x, *parameters)
    assert [t.dtype for t in result] == [dtype] * 3
    passed(check_forward(data.x, *parameters, arrays(*result), epsilon=EPSILON, data_format="NXC"))


@pytest.mark.parametrize(("axis", "data_format"), [(-1, "NHWC"), (1, "NCHW")])
def test_step_matches_fused_batch_norm_of_tensorflow(run, rng, axis, data_format):
    shape = (6, 5, 4, 8) if axis == -1 else (6, 8, 5, 4)
    x, dy = rng.normal(0.5, 2, (2, *shape)).astype("f")
    gamma, beta = rng.normal(size=(2, 8)).astype("f")

    def step(function):
        def call(x, dy, gamma, beta):
            with tf.GradientTape() as tape:
                tape.watch([x, gamma, beta])
                y, mean, variance = function(x, gamma, beta)
            return y, mean, variance, *tape.gradient(y, [x, gamma, beta], output_gradients=dy)

        return call

    own = run(step(lambda *a: ours.batch_norm(*a, epsilon=EPSILON, axis=axis)), x, dy, gamma, beta)
    theirs = run(
        step(
            lambda *a: tf.compat.v1.nn.fused_batch_norm(
                *a, epsilon=EPSILON, data_format=data_format
            )
        ),
        x, dy, gamma, beta,
    )  # fmt: skip
    names = ("y", "mean", "variance", "dx", "dgamma", "dbeta")
    for name, one, other in zip(names, arrays(*own), arrays(*theirs), strict=True):
        if name == "variance":  # theirs is divided by M - 1
            other = other * (119 / 120)
        np.testing.assert_allclose(
            one, other, rtol=2e-5, atol=2e-5 * np.abs(other).max(), err_msg=name
        )


def test_batch_norm_accepts_variables_and_python_lists():
    x, gamma = tf.Variable([[1.0, 2.0], [3.0, 5.0]]), tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = ours.batch_norm(x, gamma, [0.0, 1.0], epsilon=0.0).y
        loss = tf.reduce_sum(y * [[1.0, 2.0], [0.0, 0.0]])
    np.testing.assert_allclose(y, [[-1, -1], [1, 3]])
    of_x, of_gamma = tape.gradient(loss, [x, gamma])
    np.testing.assert_allclose(of_x, np.zeros((2, 2)), atol=1e-6)  # two values: always -1 and 1
    np.testing.assert_allclose(of_gamma, [-1, -2])
