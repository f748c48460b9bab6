"""Graphs and the profiler show the names of the functions that were called."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import backnorm.torch

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`")

CALLS = {
    "batch_norm": {}, "batch_norm_relu": {"activation": "relu"},
    "batch_norm_add_relu": {"activation": "relu"}, "batch_norm_activation": {"activation": "silu"},
}  # fmt: skip
NODES = {
    "batch_norm": "BatchNormBackward", "batch_norm_relu": "BatchNormReluBackward",
    "batch_norm_add_relu": "BatchNormAddReluBackward",
    "batch_norm_activation": "BatchNormActivationBackward",
}  # fmt: skip
FROZEN = "BatchNormInferenceBackward"


def called(name, *, gradient=True, training=True):
    """Return the result of a call that a profiler shows as `name`."""
    x, residual = torch.randn(2, 4, 3, 5, requires_grad=gradient).unbind()
    return backnorm.torch.batch_norm(
        x, torch.zeros(3), torch.ones(3), training=training, **CALLS[name],
        residual=residual if "add" in name else None,
    )  # fmt: skip


def events(call):
    """Return the names of what a profiler shows, our own and nodes of graphs."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return [
        event.name
        for event in found.events()
        if event.name.startswith("backnorm") or event.name in (*NODES.values(), FROZEN)
    ]


@pytest.mark.parametrize(("name", "node"), NODES.items())
def test_training_call_has_names_in_graph_and_profile(name, node):
    y = called(name)
    assert y.grad_fn.name() == node
    assert node in repr(y.grad_fn)
    assert events(lambda: called(name).backward(y.detach())) == [
        f"backnorm::{name}", node, "backnorm::batch_norm_backward",
    ]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradient", [True, False])
def test_call_without_gradient_has_name_in_profile(name, training, gradient):
    """Tensors do not require a gradient, or the call is under no_grad."""
    expected = f"backnorm::{name}" if training else f"backnorm::{name}_inference"
    with torch.set_grad_enabled(not gradient):
        assert events(lambda: called(name, gradient=gradient, training=training)) == [expected]


@pytest.mark.parametrize("name", CALLS)
def test_inference_call_has_names_in_graph_and_profile(name):
    """The addition and the activation are PyTorch's operators."""
    y = called(name, training=False)
    behind = {"batch_norm": FROZEN, "batch_norm_activation": "SiluBackward0"}
    assert y.grad_fn.name() == behind.get(name, "ReluBackward0")
    assert events(lambda: called(name, training=False).backward(y.detach())) == [
        "backnorm::batch_norm_inference", FROZEN, "backnorm::batch_norm_backward",
    ]  # fmt: skip


def test_second_order_has_names_in_graph_and_profile():
    x = torch.randn(4, 3, 5, requires_grad=True)
    y = backnorm.torch.batch_norm(x, None, None, training=True)
    (dx,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    assert dx.grad_fn.name() == "BatchNormBackwardBackward"
    found = events(lambda: dx.pow(2).sum().backward())
    assert found.count("backnorm::batch_norm_double_backward") == 1


@pytest.mark.parametrize(
    ("training", "node"), [(True, "BatchNormBackward"), (False, "BatchNormInferenceBackward")]
)
def test_graph_nodes_under_transform_and_forward_mode_have_names(training, node):
    names = []

    def loss(x):
        y = backnorm.torch.batch_norm(x, torch.zeros(3), torch.ones(3), training=training)
        names.append(y.grad_fn.name())
        return y.pow(3).sum()

    x = torch.randn(4, 3, 5)
    grad(loss)(x)
    with forward_ad.dual_level():
        loss(forward_ad.make_dual(x.requires_grad_(), x))
    assert names == [node.replace("Backward", "GeneratedBackward"), node]


def test_traces_and_graphs_name_operators():
    def call(x):
        y = backnorm.torch.batch_norm(x, None, None, training=True, activation="relu")
        return backnorm.torch.batch_norm(y, torch.zeros(3), torch.ones(3))

    x = torch.randn(4, 3, 5)
    names = [node.name for node in make_fx(call)(x).graph.nodes]
    assert "batch_norm" in names
    assert "batch_norm_inference" in names
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    x.requires_grad_()
    compiled(x)
    assert events(lambda: compiled(x).sin().sum().backward()) == [
        "backnorm::batch_norm", "backnorm::batch_norm_inference",
        "backnorm::batch_norm_backward", "backnorm::batch_norm_backward",
    ]  # fmt: skip
