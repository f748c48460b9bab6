"""What graphs and the profiler call us: by the names of the functions that were called."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import backnorm.torch

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`")

NAMES = "batch_norm", "batch_norm_relu", "batch_norm_add_relu"
NODES = "BatchNormBackward", "BatchNormReluBackward", "BatchNormAddReluBackward"


def called(name, *, gradient=True, training=True):
    """Return the result of a function of ours."""
    x, residual = torch.randn(2, 4, 3, 5, requires_grad=gradient).unbind()
    inputs = (x, residual) if "add" in name else (x,)
    statistics = torch.zeros(3), torch.ones(3)
    return getattr(backnorm.torch, name)(*inputs, *statistics, training=training)


def events(call):
    """Return the names of what a profiler shows, our own and nodes of graphs."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return [
        event.name
        for event in found.events()
        if event.name.startswith("backnorm") or event.name in (*NODES, "BatchNormInferenceBackward")
    ]


@pytest.mark.parametrize(("name", "node"), [*zip(NAMES, NODES, strict=True)])
def test_training(name, node):
    y = called(name)
    assert y.grad_fn.name() == node
    assert node in repr(y.grad_fn)
    assert events(lambda: called(name).backward(y.detach())) == [
        f"backnorm::{name}", node, "backnorm::batch_norm_backward",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradient", [True, False])
def test_without_a_gradient(name, training, gradient):
    """Where nothing wants one, and under no_grad."""
    expected = f"backnorm::{name}" if training else f"backnorm::{name}_inference"
    with torch.set_grad_enabled(not gradient):
        assert events(lambda: called(name, gradient=gradient, training=training)) == [expected]


@pytest.mark.parametrize("name", NAMES)
def test_given_statistics(name):
    """The ReLU is a step of its own, as in `torch.func`."""
    y = called(name, training=False)
    relu = ["backnorm::relu"] if "relu" in name else []
    assert y.grad_fn.name() == ("ReluBackward" if relu else "BatchNormInferenceBackward")
    assert events(lambda: called(name, training=False).backward(y.detach())) == [
        "backnorm::batch_norm_inference", *relu,
        "BatchNormInferenceBackward", "backnorm::batch_norm_backward",
    ]  # fmt: skip


def test_the_second_order():
    x = torch.randn(4, 3, 5, requires_grad=True)
    y = backnorm.torch.batch_norm(x, None, None, training=True)
    (dx,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    assert dx.grad_fn.name() == "BatchNormBackwardBackward"
    found = events(lambda: dx.pow(2).sum().backward())
    assert found.count("backnorm::batch_norm_double_backward") == 1


@pytest.mark.parametrize(
    ("training", "node"), [(True, "BatchNormBackward"), (False, "BatchNormInferenceBackward")]
)
def test_transforms_and_forward_mode(training, node):
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


def test_what_traces_and_compilers_call_them():
    def call(x):
        y = backnorm.torch.batch_norm_relu(x, None, None, training=True)
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
