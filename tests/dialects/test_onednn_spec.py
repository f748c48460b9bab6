from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from backnorm import batch_norm_backward, batch_norm_forward
from backnorm.dialects.onednn_spec import (
    BatchNormForwardTraining,
    BatchNormForwardTraining_2020_21,
    BatchNormForwardTraining_early,
    BatchNormTrainingBackprop,
    BatchNormTrainingBackprop_2020_21,
    BatchNormTrainingBackprop_early,
)

LATEST = ("x", "dy", "mean", "variance", "gamma")
EARLIER = ("x", "dy", "gamma", "beta", "mean", "variance")
F32_EPSILON = float(np.float32(1e-5))


def inputs(b, *names):
    return [b[name] for name in names]


@pytest.mark.parametrize(
    "older", [BatchNormTrainingBackprop_2020_21, BatchNormTrainingBackprop_early]
)
def test_backprop_of_older_revision_equals_latest_with_reordered_inputs(batch, same, older):
    b = batch()
    expected = BatchNormTrainingBackprop(*inputs(b, *LATEST), epsilon=1e-5)
    op = partial(older, epsilon=1e-5)
    same(op(*inputs(b, *EARLIER)), expected)
    by_name = {
        "input": b["x"], "output_delta": b["dy"], "mean": b["mean"],
        "variance": b["variance"], "gamma": b["gamma"],
    }  # fmt: skip
    same(op(**by_name), expected)


def test_backprop_of_early_revision_with_mixed_channel_types_rounds_once(batch, dtypes, same):
    b = batch(dtype="bf16", channel="bf16")
    b["mean"], b["variance"] = b["mean"].astype("f"), b["variance"].astype("f")
    op = partial(BatchNormTrainingBackprop_early, epsilon=1e-5)
    dx, dgamma, dbeta = op(*inputs(b, *EARLIER))
    wide = batch_norm_backward(
        b["x"], b["dy"], b["mean"], b["variance"], b["gamma"].astype("f"),
        epsilon=F32_EPSILON, data_format="NXC",
    )  # fmt: skip
    x, dy, mean, variance = (b[name].astype("d") for name in LATEST[:4])
    xhat = (x - mean) / np.sqrt(variance + F32_EPSILON)
    bf16 = dtypes["bf16"]
    exact = (dy * xhat).sum((0, 1, 2)), dy.sum((0, 1, 2))
    same((dx, dgamma, dbeta), (wide.dx, exact[0].astype(bf16), exact[1].astype(bf16)))
    with pytest.raises(TypeError, match="gamma"):
        BatchNormTrainingBackprop(*inputs(b, *LATEST), epsilon=1e-5)
    with pytest.raises(TypeError, match="gamma"):
        BatchNormTrainingBackprop_2020_21(*inputs(b, *EARLIER), epsilon=1e-5)


MIXES = list(itertools.product(["f16", "f32"], repeat=4))


@pytest.mark.parametrize(
    "types",
    [*MIXES, *(("", *mix) for mix in itertools.product(["f16", "f32"], repeat=3))],
    ids="-".join,
)
def test_backprop_of_early_revision_rounds_each_gradient_once_to_own_type(batch, dtypes, types):
    b = batch(dtype="f16", channel="f16")
    names = ("gamma", "beta", "mean", "variance")
    operands = [
        b[name].astype(dtypes[kind]) if kind else None
        for name, kind in zip(names, types, strict=True)
    ]
    exact = batch_norm_backward(
        *(b[name].astype("d") for name in ("x", "dy", "mean", "variance")),
        epsilon=F32_EPSILON, data_format="NXC",
    )  # fmt: skip
    op = partial(BatchNormTrainingBackprop_early, epsilon=1e-5)
    for _ in range(2):
        _, dgamma, dbeta = op(b["x"], b["dy"], *operands)
        for found, expected, kind in (
            (dgamma, exact.dgamma, types[0] or types[2]),
            (dbeta, exact.dbeta, types[1]),
        ):
            np.testing.assert_array_equal(found, expected.astype(dtypes[kind]), strict=True)


@pytest.mark.parametrize("types", MIXES, ids="-".join)
def test_forward_of_early_revision_rounds_each_statistic_once_to_own_type(batch, dtypes, types):
    b = batch(dtype="f16", channel="f16")
    names = ("gamma", "beta", "mean", "variance")
    operands = [b[name].astype(dtypes[kind]) for name, kind in zip(names, types, strict=True)]
    op = partial(BatchNormForwardTraining_early, epsilon=1e-5)
    wide = batch_norm_forward(b["x"].astype("d"), epsilon=F32_EPSILON, data_format="NXC")
    for _ in range(2):
        _, running_mean, running_variance, mean, variance = op(b["x"], *operands)
        for found, expected, kind in ((mean, wide.mean, 2), (variance, wide.variance, 3)):
            of_type = expected.astype(dtypes[types[kind]])
            np.testing.assert_array_equal(found, of_type, strict=True)
        assert [running_mean.dtype, running_variance.dtype] == [mean.dtype, variance.dtype]


def test_backprop_outputs_select_parameter_gradients_independently(batch, same):
    b = batch()
    op = partial(BatchNormTrainingBackprop, epsilon=1e-5)
    full = op(*inputs(b, *LATEST))
    same(op(*inputs(b, *LATEST), outputs=1), full[:1])
    same(op(*inputs(b, *LATEST), outputs=2), full[:2])
    same(op(*inputs(b, *LATEST), outputs=("input_delta", "beta_delta")), (full[0], full[2]))


def test_backprop_of_input_delta_alone_depends_on_gamma(batch):
    b = batch()
    op = partial(BatchNormTrainingBackprop, epsilon=1e-5)
    (with_gamma,) = op(*inputs(b, *LATEST), outputs=1)
    (without,) = op(*inputs(b, *LATEST[:4]), outputs=1)
    assert (with_gamma != without).any()


def test_backprop_with_wrong_number_or_names_of_inputs_raises_type_error(batch):
    b = batch()
    op = partial(BatchNormTrainingBackprop, epsilon=1e-5)
    with pytest.raises(TypeError, match=r"BatchNormTrainingBackprop\(\) too many positional"):
        op(*inputs(b, *LATEST), b["beta"])
    with pytest.raises(TypeError, match="multiple values for argument 'output_delta'"):
        op(b["x"], b["dy"], output_delta=b["dy"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        op(*inputs(b, *LATEST), beta=b["beta"])


@pytest.mark.parametrize(
    ("op", "order"),
    [
        (BatchNormForwardTraining, ("x", "mean", "variance", "gamma", "beta")),
        (BatchNormForwardTraining_2020_21, ("x", "gamma", "beta", "mean", "variance")),
        (BatchNormForwardTraining_early, ("x", "gamma", "beta", "mean", "variance")),
    ],
)
def test_forward_takes_inputs_in_order_of_revision(batch, same, op, order):
    b, old = batch(), batch(seed=1)
    operands = b | {name: old[name] for name in ("mean", "variance")}
    out = op(*inputs(operands, *order), epsilon=1e-5, momentum=0.25)
    expected = 0.25 * old["mean"].astype(np.float64) + 0.75 * out[3].astype(np.float64)
    same((out[1],), (expected.astype("f"),))


def test_momentum_defaults_to_tenth_in_early_revision_and_half_in_latest(batch, same):
    b = batch()
    b |= {"mean": b["mean"] + 1, "variance": b["variance"] + 1}
    latest = partial(BatchNormForwardTraining, *inputs(b, "x", "mean", "variance"), epsilon=1e-5)
    same(latest(), latest(momentum=0.5))
    operands = inputs(b, "x", "gamma", "beta", "mean", "variance")
    early = partial(BatchNormForwardTraining_early, *operands, epsilon=1e-5)
    same(early(), early(momentum=0.1))


def test_forward_without_beta_equals_beta_of_zeros(batch, same):
    b = batch()
    op = partial(BatchNormForwardTraining, epsilon=1e-5)
    zeros = np.zeros_like(b["gamma"])
    same(
        op(b["x"], b["mean"], b["variance"], b["gamma"]),
        op(b["x"], b["mean"], b["variance"], b["gamma"], zeros),
    )
