from __future__ import annotations

from functools import partial

import numpy as np

from backnorm import batch_norm_backward
from backnorm.dialects.onednn_graph import (
    BatchNormForwardTraining,
    BatchNormTrainingBackward,
)


def inputs(b, *names):
    return [b[name] for name in names]


BACKWARD = ("x", "dy", "mean", "variance", "gamma")
FORWARD = ("x", "mean", "variance", "gamma", "beta")


def test_backward_outputs_by_name_or_number_select_results(batch, same):
    b = batch()
    op = partial(BatchNormTrainingBackward, epsilon=1e-5)
    full = op(*inputs(b, *BACKWARD))
    same(op(*inputs(b, *BACKWARD), outputs=("diff_beta", "diff_src", "diff_gamma")), full)
    assert len(op(*inputs(b, *BACKWARD), outputs=1)) == 1


def test_backward_with_one_output_equals_training_gradient_without_gamma(batch, same):
    b = batch()
    (alone,) = BatchNormTrainingBackward(*inputs(b, *BACKWARD), epsilon=1e-5, outputs=1)
    expected = batch_norm_backward(
        *inputs(b, *BACKWARD[:4]), epsilon=float(np.float32(1e-5)), data_format="NXC"
    )
    same((alone,), (expected.dx,))


def test_single_output_onednn_equals_frozen_gradient_without_gamma(batch, same):
    b = batch()
    op = partial(BatchNormTrainingBackward, epsilon=1e-5, single_output="onednn")
    (alone,) = op(*inputs(b, *BACKWARD), outputs=1)
    epsilon = float(np.float32(1e-5))
    frozen = batch_norm_backward(
        *inputs(b, *BACKWARD[:4]), epsilon=epsilon, data_format="NXC", training=False
    )
    same((alone,), (frozen.dx,))
    s = 1 / np.sqrt(b["variance"].astype(np.float64) + epsilon)
    np.testing.assert_allclose(alone, b["dy"] * s, rtol=1e-6)
    # With all outputs it is the training formula.
    full = BatchNormTrainingBackward(*inputs(b, *BACKWARD), epsilon=1e-5)
    same(op(*inputs(b, *BACKWARD)), full)


def test_forward_without_momentum_weights_old_and_new_statistics_equally(batch, same):
    b = batch()
    # Otherwise old and new statistics are equal.
    operands = inputs(b | {"mean": b["mean"] + 1, "variance": b["variance"] + 1}, *FORWARD)
    op = partial(BatchNormForwardTraining, epsilon=1e-5)
    same(op(*operands), op(*operands, momentum=0.5))


def test_forward_of_empty_batch_keeps_running_statistics(batch, same):
    b = batch((0, 4, 3))
    out = BatchNormForwardTraining(*inputs(b, *FORWARD), epsilon=1e-5, momentum=0.5)
    same(out[1:3], (b["mean"], b["variance"]))
    same(out[3:], (np.zeros(3, "f"), np.zeros(3, "f")))
