"""All dialects give the canonical operator's results, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm import batch_norm_backward, batch_norm_forward, batch_norm_inference
from backnorm.dialects import ngraph, onednn_graph, onednn_spec, tensorflow

EPSILON = 1e-3
F32_EPSILON = float(np.float32(EPSILON))
NXC = {2: (7, 3), 3: (3, 5, 4), 4: (2, 3, 5, 4), 5: (2, 3, 2, 4, 3), 6: (2, 2, 3, 2, 2, 3)}
NCX = {2: (7, 3), 3: (3, 4, 5), 4: (2, 4, 3, 5), 5: (2, 3, 3, 2, 4), 6: (2, 3, 2, 3, 2, 2)}
SHAPES = [("NXC", shape) for shape in NXC.values()] + [("NCX", shape) for shape in NCX.values()]
ONEDNN_TYPES = [("f32", "f32"), ("bf16", "f32"), ("bf16", "bf16"), ("f16", "f32")]
TF_FORMATS = {(4, "NXC"): "NHWC", (4, "NCX"): "NCHW", (5, "NXC"): "NDHWC", (5, "NCX"): "NCDHW"}
TF_SHAPES = [case for case in SHAPES if len(case[1]) in (4, 5)]


def backward(b, layout, *, epsilon=F32_EPSILON, gamma=True, training=True):
    return batch_norm_backward(
        b["x"], b["dy"], b["mean"], b["variance"], b["gamma"] if gamma else None,
        epsilon=epsilon, data_format=layout, training=training,
    )  # fmt: skip


@pytest.mark.parametrize("types", ONEDNN_TYPES)
@pytest.mark.parametrize(("layout", "shape"), SHAPES)
@pytest.mark.parametrize("gamma", [True, False])
def test_onednn_backward_equals_canonical_backward(batch, same, layout, shape, types, gamma):
    b = batch(shape, layout, *types)
    scale = b["gamma"] if gamma else None
    graph = onednn_graph.BatchNormTrainingBackward(EPSILON, layout)
    spec = onednn_spec.BatchNormTrainingBackprop(EPSILON, layout)
    expected = backward(b, layout, gamma=gamma)
    same(graph(b["x"], b["dy"], b["mean"], b["variance"], scale), expected)
    same(spec(b["x"], b["dy"], b["mean"], b["variance"], scale), expected)


@pytest.mark.parametrize("types", ONEDNN_TYPES)
@pytest.mark.parametrize(("layout", "shape"), SHAPES)
def test_onednn_forward_and_inference_equal_canonical_operators(batch, same, layout, shape, types):
    b = batch(shape, layout, *types)
    old = batch(shape, layout, *types, seed=1)
    forward = batch_norm_forward(
        b["x"], b["gamma"], b["beta"], epsilon=F32_EPSILON, data_format=layout
    )
    y = batch_norm_inference(
        b["x"], b["mean"], b["variance"], b["gamma"], b["beta"],
        epsilon=F32_EPSILON, data_format=layout,
    )  # fmt: skip
    for module in (onednn_graph, onednn_spec):
        train = module.BatchNormForwardTraining(EPSILON, 0.75, layout)
        out = train(b["x"], old["mean"], old["variance"], b["gamma"], b["beta"])
        same((out[0], out[3], out[4]), forward)
        infer = module.BatchNormInference(EPSILON, layout)
        same(infer(b["x"], b["gamma"], b["beta"], b["mean"], b["variance"]), (y,))


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", NCX.values())
def test_ngraph_equals_canonical_operators(batch, same, shape, dtype):
    b = batch(shape, "NCX", dtype)
    x, gamma, beta = b["x"], b["gamma"], b["beta"]
    out = ngraph.BatchNormTrainingBackprop(
        x, gamma, beta, b["mean"], b["variance"], b["dy"], EPSILON
    )
    same(out, backward(b, "NCX", epsilon=EPSILON))
    same(
        ngraph.BatchNormTraining(x, gamma, beta, EPSILON),
        batch_norm_forward(x, gamma, beta, epsilon=EPSILON),
    )
    y = batch_norm_inference(x, b["mean"], b["variance"], gamma, beta, epsilon=EPSILON)
    same((ngraph.BatchNormInference(x, gamma, beta, b["mean"], b["variance"], EPSILON),), (y,))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("layout", "shape"), TF_SHAPES)
@pytest.mark.parametrize("is_training", [True, False])
def test_tensorflow_equals_canonical_operators(batch, same, layout, shape, dtype, is_training):
    b = batch(shape, layout, dtype, "f32")
    options = {
        "epsilon": EPSILON,
        "data_format": TF_FORMATS[len(shape), layout],
        "is_training": is_training,
    }
    out = tensorflow.FusedBatchNormGradV3(
        y_backprop=b["dy"], x=b["x"], scale=b["gamma"], reserve_space_1=b["mean"],
        reserve_space_2=b["variance"], reserve_space_3=np.empty(0, "f"), **options,
    )  # fmt: skip
    same(out[:3], backward(b, layout, training=is_training))

    out = tensorflow.FusedBatchNormV3(
        x=b["x"], scale=b["gamma"], offset=b["beta"], mean=b["mean"], variance=b["variance"],
        **options,
    )  # fmt: skip
    if is_training:
        same(
            (out.y, out.reserve_space_1, out.reserve_space_2),
            batch_norm_forward(
                b["x"], b["gamma"], b["beta"], epsilon=F32_EPSILON, data_format=layout
            ),
        )
    else:
        y = batch_norm_inference(
            b["x"], b["mean"], b["variance"], b["gamma"], b["beta"],
            epsilon=F32_EPSILON, data_format=layout,
        )  # fmt: skip
        same((out.y,), (y,))


def test_gradients_of_four_dialects_have_the_same_bits(batch, same):
    b = batch((3, 4, 5, 6), "NCX")
    x, dy, mean, variance, gamma, beta = b.values()
    graph = onednn_graph.BatchNormTrainingBackward(EPSILON, "NCX")(x, dy, mean, variance, gamma)
    spec = onednn_spec.BatchNormTrainingBackprop(EPSILON, "NCX")(x, dy, mean, variance, gamma)
    # nGraph's epsilon is a double: the same value only if it is given rounded.
    node = ngraph.BatchNormTrainingBackprop(x, gamma, beta, mean, variance, dy, F32_EPSILON)
    raw = tensorflow.FusedBatchNormGradV3(
        y_backprop=dy, x=x, scale=gamma, reserve_space_1=mean, reserve_space_2=variance,
        reserve_space_3=[], epsilon=EPSILON, data_format="NCHW",
    )  # fmt: skip
    for other in (spec, node, raw[:3]):
        same(other, graph)


def test_ngraph_epsilon_is_not_rounded_to_float32(batch):
    b = batch((64, 2), "NCX", "f64")
    out = ngraph.BatchNormTrainingBackprop(
        b["x"], b["gamma"], b["beta"], b["mean"], b["variance"], b["dy"], 0.1
    )
    rounded = backward(b, "NCX", epsilon=float(np.float32(0.1)))
    exact = backward(b, "NCX", epsilon=0.1)
    assert (out[0] == exact.dx).all()
    assert (out[0] != rounded.dx).any()
