"""Derivatives of every order, forward and reverse, batched."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import backnorm.torch
from backnorm.activations import Activation

# PyTorch imports its own forward-mode rules by it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

CASES = [
    pytest.param(training, affine, name, id=f"{mode}-{affine}-{name}")
    for training, mode in ((True, "training"), (False, "frozen"))
    for affine in ("both", "neither", "weight", "bias")
    for name in ("contiguous", "channels_last", "sliced")
    if affine == "both" or name == "contiguous"
]


def prepared(training, affine, lay_out, activation=None, residual=False):
    """Return a function of the tensors that want a gradient, and these tensors."""
    tensors = {"input": lay_out(torch.randn(3, 2, 2, 2).double())}
    if residual:
        tensors["residual"] = torch.randn(3, 2, 2, 2).double()
    if affine in ("both", "weight"):
        tensors["weight"] = torch.rand(2).double() + 0.5
    if affine in ("both", "bias"):
        tensors["bias"] = torch.randn(2).double()
    mean, variance = torch.randn(2).double(), torch.rand(2).double() + 0.5

    def call(*leaves):
        names = "running_mean", "running_var"
        running = dict(zip(names, (None, None) if training else (mean, variance), strict=True))
        operands = dict(zip(tensors, leaves, strict=True)) | running
        return backnorm.torch.batch_norm(
            **operands, training=training, eps=1e-2, activation=activation
        )

    return call, [tensor.requires_grad_() for tensor in tensors.values()]


@pytest.mark.parametrize(("training", "affine", "name"), CASES)
def test_batch_norm_passes_gradcheck(training, affine, name, layouts):
    call, tensors = prepared(training, affine, layouts[name])
    assert gradcheck(
        call, tensors, check_forward_ad=True, check_batched_grad=True,
        check_batched_forward_grad=True,
    )  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize(("training", "affine", "name"), CASES)
def test_batch_norm_passes_gradgradcheck(training, affine, name, layouts):
    call, tensors = prepared(training, affine, layouts[name])
    assert gradgradcheck(
        call, tensors, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", ["both", "neither"])
@pytest.mark.parametrize("name", ["contiguous", "channels_last", "permuted"])
@pytest.mark.parametrize(
    ("activation", "residual"),
    [("relu", True), ("relu", False), (Activation("relu", 1.5), True), ("silu", False),
     ("hardswish", False)],
    ids=str,
)  # fmt: skip
def test_batch_norm_with_activation_passes_gradcheck_and_gradgradcheck(
    training, affine, name, activation, residual, layouts
):
    call, tensors = prepared(training, affine, layouts[name], activation, residual)
    assert gradcheck(call, tensors, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, tensors, check_fwd_over_rev=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", ["both", "neither"])
def test_third_derivatives_pass_gradgradcheck(training, affine, layouts):
    call, tensors = prepared(training, affine, layouts["channels_last"])

    def slopes(*tensors):
        value = call(*tensors)
        factor = torch.linspace(1, 2, value.numel()).double().view(value.shape)
        return torch.autograd.grad((value.pow(3) * factor).sum(), tensors, create_graph=True)

    assert gradgradcheck(slopes, tensors)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", ["both", "neither"])
def test_batched_gradients_with_graph_match_single_ones(
    training, affine, activation, layouts, close
):
    call, tensors = prepared(training, affine, layouts["permuted"], activation)
    y = call(*tensors)
    cotangents = torch.randn(3, *y.shape).double()
    batched = torch.autograd.grad(y, tensors, cotangents, create_graph=True, is_grads_batched=True)
    single = [torch.autograd.grad(y, tensors, each, create_graph=True) for each in cotangents]
    single = [torch.stack(each) for each in zip(*single, strict=True)]
    close(batched, single)
    factors = [torch.randn_like(each) for each in batched]

    def second(gradients):
        # The cubes: a frozen layer without parameters has second derivatives of 0.
        loss = sum(tensor.pow(3).sum() for tensor in tensors)
        for gradient, factor in zip(gradients, factors, strict=True):
            loss = loss + (gradient.pow(2) * factor).sum()
        return torch.autograd.grad(loss, tensors, retain_graph=True)

    close(second(batched), second(single), factor=16)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_second_derivative_of_batched_gradients_calls_hook_before_layer_as_in_pytorch(
    training, affine
):
    calls = []
    for library in (torch.nn, backnorm.torch):
        layer = library.BatchNorm1d(3, affine=affine).double().train(training)
        before = torch.nn.Tanh()
        before.register_full_backward_hook(lambda *_, each=library: calls.append(each))
        x = torch.randn(4, 3, 5).double().requires_grad_()
        y = layer(before(x))
        dy = torch.randn(2, *y.shape).double()
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True, is_grads_batched=True)
        dx.sin().sum().backward()
    assert calls == [torch.nn] * 2 + [backnorm.torch] * 2
