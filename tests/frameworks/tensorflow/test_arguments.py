"""Arguments that are refused, eagerly and while tracing: type and text of the error."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import backnorm
from backnorm import ArgumentTypeError, ArgumentValueError, BacknormError
from backnorm import tensorflow as ours

X = np.arange(24.0).reshape(2, 3, 4)
ONES = np.ones(4)


@pytest.fixture(params=["eager", "traced"])
def refused(request):
    """Assert that a call raises, also from within a tf.function, the same error."""

    def check(kind, words, call):
        function = call if request.param == "eager" else tf.function(lambda: call())
        with pytest.raises(kind, match=words) as caught:
            function()
        assert isinstance(caught.value, BacknormError)

    return check


CASES = [  # (error, message, call)
    (
        ArgumentTypeError,
        "^x: unsupported element type; got int32.*tf.cast",
        lambda: ours.batch_norm(tf.ones((2, 3), tf.int32), epsilon=0.1),
    ),
    (
        ArgumentTypeError,
        "^x: unsupported element type; got string",
        lambda: ours.batch_norm(tf.constant([["a"]]), epsilon=0.1),
    ),
    (
        ArgumentTypeError,
        "^x: cannot be read as a tensor; got SparseTensor",
        lambda: ours.batch_norm(tf.sparse.from_dense(X), epsilon=0.1),
    ),
    (ArgumentValueError, "^x: must have rank 2", lambda: ours.batch_norm(ONES, epsilon=0.1)),
    (
        ArgumentTypeError,
        "^epsilon: must be a real number",
        lambda: ours.batch_norm(X, epsilon=tf.constant(0.1)),
    ),
]


@pytest.mark.parametrize(("kind", "words", "call"), CASES, ids=[words for _, words, _ in CASES])
def test_functions_with_bad_argument_raise_error_naming_it(refused, kind, words, call):
    refused(kind, words, call)


def test_batch_norm_rejects_ragged_tensor():
    with pytest.raises(ArgumentTypeError, match=r"^x: cannot be read as a tensor; got Ragged"):
        ours.batch_norm(tf.ragged.constant([[1.0, 2.0], [3.0]]), epsilon=0.1)


def test_inference_rejects_nonpositive_variance_plus_epsilon():
    with pytest.raises(ArgumentValueError, match=r"^variance: variance . epsilon must be positive"):
        ours.batch_norm_inference(X, ONES, -ONES, epsilon=0.1)
    # What only the values show is an error of TensorFlow's runtime, with the same text.
    traced = tf.function(lambda variance: ours.batch_norm_inference(X, ONES, variance, epsilon=0.1))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"must be positive in every channel"):
        traced(-ONES)


def test_traced_batch_norm_checks_unknown_shapes_when_it_runs():
    signature = [tf.TensorSpec([None, None, None], tf.float64), tf.TensorSpec(None, tf.float64)]
    traced = tf.function(
        lambda x, gamma: ours.batch_norm(x, gamma, epsilon=0.1).y, input_signature=signature
    )
    np.testing.assert_array_equal(traced(X, ONES), ours.batch_norm(X, ONES, epsilon=0.1).y)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"gamma: must hold one value"):
        traced(X, ONES[:3])


def test_backward_with_contradictory_shapes_is_rejected_while_tracing():
    signature = [tf.TensorSpec([None, 3, None], tf.float64), tf.TensorSpec([5, 2, 4], tf.float64)]
    traced = tf.function(
        lambda x, dy: ours.batch_norm_backward(x, dy, ONES, ONES, epsilon=0.1),
        input_signature=signature,
    )
    with pytest.raises(ArgumentValueError, match=r"dy: .*got shape \(5, 2, 4\).*\(5, 3, 4\)"):
        traced.get_concrete_function()


def test_signatures_equal_numpy_operators_without_array_options():
    # What tensors have no counterpart for here.
    arrays_alone = {"out", "blend", "activation", "residual", "mask", "weights"}
    for own, plain in (
        (ours.batch_norm, backnorm.batch_norm_forward),
        (ours.batch_norm_inference, backnorm.batch_norm_inference),
        (ours.batch_norm_backward, backnorm.batch_norm_backward),
    ):
        own_names = list(inspect.signature(own).parameters)
        names = [n for n in inspect.signature(plain).parameters if n not in arrays_alone]
        assert own_names == [n.replace("data_format", "axis") for n in names]
        assert own.__doc__


@pytest.mark.long
def test_import_raises_no_warning_and_leaves_keras_layer_out():
    script = """
import sys
import backnorm.tensorflow
assert "backnorm.keras" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
