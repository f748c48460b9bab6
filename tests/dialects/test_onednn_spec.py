from __future__ import annotations

import itertools

import numpy as np
import pytest

from backnorm import BacknormError, batch_norm_backward, batch_norm_forward
from backnorm.dialects.onednn_spec import (
    BatchNormForwardTraining,
    BatchNormInference,
    BatchNormTrainingBackprop,
)

ALLOWED = {
    "latest": {("f32", "f32"), ("bf16", "f32"), ("bf16", "bf16"), ("f16", "f32")},
    "2020-21": {("f32", "f32"), ("bf16", "f32"), ("f16", "f32")},
    "early": {("f32", "f32"), ("bf16", "f32"), ("bf16", "bf16"), ("f16", "f32"), ("f16", "f16")},
}
LATEST = ("x", "dy", "mean", "variance", "gamma")
EARLIER = ("x", "dy", "gamma", "beta", "mean", "variance")
F32_EPSILON = float(np.float32(1e-5))


def inputs(b, *names):
    return [b[name] for name in names]


@pytest.mark.parametrize("revision", ["2020-21", "early"])
def test_backprop_of_earlier_revision_equals_latest_with_reordered_inputs(batch, same, revision):
    b = batch()
    expected = BatchNormTrainingBackprop(1e-5)(*inputs(b, *LATEST))
    op = BatchNormTrainingBackprop(1e-5, revision=revision)
    same(op(*inputs(b, *EARLIER)), expected)
    by_name = {
        "input": b["x"], "output_delta": b["dy"], "mean": b["mean"],
        "variance": b["variance"], "gamma": b["gamma"],
    }  # fmt: skip
    same(op(**by_name), expected)


def test_backprop_of_early_revision_with_mixed_channel_types_rounds_once(batch, dtypes, same):
    b = batch(dtype="bf16", channel="bf16")
    b["mean"], b["variance"] = b["mean"].astype("f"), b["variance"].astype("f")
    op = BatchNormTrainingBackprop(1e-5, revision="early")
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
    for revision, names in (("latest", LATEST), ("2020-21", EARLIER)):
        with pytest.raises(TypeError, match=r"mean|gamma"):
            BatchNormTrainingBackprop(1e-5, revision=revision)(*inputs(b, *names))


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
    op = BatchNormTrainingBackprop(1e-5, revision="early")
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
    op = BatchNormForwardTraining(1e-5, revision="early")
    wide = batch_norm_forward(b["x"].astype("d"), epsilon=F32_EPSILON, data_format="NXC")
    for _ in range(2):
        _, running_mean, running_variance, mean, variance = op(b["x"], *operands)
        for found, expected, kind in ((mean, wide.mean, 2), (variance, wide.variance, 3)):
            of_type = expected.astype(dtypes[types[kind]])
            np.testing.assert_array_equal(found, of_type, strict=True)
        assert [running_mean.dtype, running_variance.dtype] == [mean.dtype, variance.dtype]


@pytest.mark.parametrize("revision", ["2019", "", "LATEST"])
@pytest.mark.parametrize(
    "cls", [BatchNormTrainingBackprop, BatchNormForwardTraining, BatchNormInference]
)
def test_revision_of_unknown_value_or_wrong_type_is_rejected(cls, revision):
    with pytest.raises(ValueError, match=r"revision.*'latest' or '2020-21' or 'early'"):
        cls(1e-5, revision=revision)
    with pytest.raises(TypeError, match="revision: must be a string"):
        cls(1e-5, revision=3)


def test_operator_has_schema_of_its_revision():
    op = BatchNormTrainingBackprop(1e-5, revision="early")
    assert op.schema.revision == "early"
    assert [t.name for t in op.schema.inputs][:4] == ["input", "output_delta", "gamma", "beta"]
    assert BatchNormTrainingBackprop.schema.revision == "latest"


def test_backprop_outputs_select_parameter_gradients_independently(batch, same):
    b = batch()
    op = BatchNormTrainingBackprop(1e-5)
    full = op(*inputs(b, *LATEST))
    same(op(*inputs(b, *LATEST), outputs=1), full[:1])
    same(op(*inputs(b, *LATEST), outputs=2), full[:2])
    same(op(*inputs(b, *LATEST), outputs=("input_delta", "beta_delta")), (full[0], full[2]))


def test_backprop_of_input_delta_alone_depends_on_gamma(batch):
    b = batch()
    op = BatchNormTrainingBackprop(1e-5)
    (with_gamma,) = op(*inputs(b, *LATEST), outputs=1)
    (without,) = op(*inputs(b, *LATEST[:4]), outputs=1)
    assert (with_gamma != without).any()


def test_backprop_with_wrong_number_or_names_of_inputs_raises_type_error(batch):
    b = batch()
    op = BatchNormTrainingBackprop(1e-5)
    with pytest.raises(TypeError, match="too many inputs"):
        op(*inputs(b, *LATEST), b["beta"])
    with pytest.raises(TypeError, match="output_delta: given twice"):
        op(b["x"], b["dy"], output_delta=b["dy"])
    with pytest.raises(TypeError, match="beta: BatchNormTrainingBackprop has no such input"):
        op(*inputs(b, *LATEST), beta=b["beta"])
    for count in range(4):
        with pytest.raises(TypeError, match="is a required input") as error:
            op(*inputs(b, *LATEST)[:count])
        assert isinstance(error.value, BacknormError)


@pytest.mark.parametrize("revision", ALLOWED)
def test_forward_takes_inputs_in_order_of_revision(batch, same, revision):
    b, old = batch(), batch(seed=1)
    args = {
        "latest": (b["x"], old["mean"], old["variance"], b["gamma"], b["beta"]),
    }.get(revision, (b["x"], b["gamma"], b["beta"], old["mean"], old["variance"]))
    out = BatchNormForwardTraining(1e-5, 0.25, revision=revision)(*args)
    expected = 0.25 * old["mean"].astype(np.float64) + 0.75 * out[3].astype(np.float64)
    same((out[1],), (expected.astype("f"),))


def test_momentum_defaults_to_tenth_in_early_and_none_in_latest_revision():
    assert BatchNormForwardTraining(1e-5).attributes["momentum"] is None
    early = BatchNormForwardTraining(1e-5, revision="early")
    assert early.attributes["momentum"] == np.float32(0.1)


def test_forward_without_beta_equals_beta_of_zeros(batch, same):
    b = batch()
    op = BatchNormForwardTraining(1e-5)
    zeros = np.zeros_like(b["gamma"])
    same(
        op(b["x"], b["mean"], b["variance"], b["gamma"]),
        op(b["x"], b["mean"], b["variance"], b["gamma"], zeros),
    )
