"""Derivatives of every order, forward and reverse, batched."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import backnorm.torch

# PyTorch imports its own forward-mode rules by it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

CASES = [
    pytest.param(training, affine, name, id=f"{mode}-{affine}-{name}")
    for training, mode in ((True, "training"), (False, "frozen"))
    for affine in ("both", "neither", "weight", "bias")
    for name in ("contiguous", "channels_last", "sliced")
    if affine == "both" or name == "contiguous"
]


def prepared(function, training, affine, lay_out, residual=False):
    """Return a function of the tensors that want a gradient, and these tensors."""
    x = lay_out(torch.randn(3, 2, 2, 2).double())
    given = {"x": x}
    if residual:
        given["residual"] = torch.randn(3, 2, 2, 2).double()
    if affine in ("both", "weight"):
        given["weight"] = torch.rand(2).double() + 0.5
    if affine in ("both", "bias"):
        given["bias"] = torch.randn(2).double()
    mean, variance = torch.randn(2).double(), torch.rand(2).double() + 0.5

    def call(*tensors):
        named = dict(zip(given, tensors, strict=True))
        inputs = [named.pop("x")] + ([named.pop("residual")] if residual else [])
        running = (None, None) if training else (mean, variance)
        return function(*inputs, *running, **named, training=training, eps=1e-2)

    return call, [tensor.requires_grad_() for tensor in given.values()]


@pytest.mark.parametrize(("training", "affine", "name"), CASES)
def test_first_order(training, affine, name, layouts):
    call, tensors = prepared(backnorm.torch.batch_norm, training, affine, layouts[name])
    assert gradcheck(
        call, tensors, check_forward_ad=True, check_batched_grad=True,
        check_batched_forward_grad=True,
    )  # fmt: skip


@pytest.mark.parametrize(("training", "affine", "name"), CASES)
def test_second_order(training, affine, name, layouts):
    call, tensors = prepared(backnorm.torch.batch_norm, training, affine, layouts[name])
    assert gradgradcheck(
        call, tensors, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", ["both", "neither"])
@pytest.mark.parametrize("name", ["contiguous", "channels_last", "permuted"])
@pytest.mark.parametrize("residual", [True, False])
def test_with_relu(training, affine, name, residual, layouts):
    function = backnorm.torch.batch_norm_relu
    if residual:
        function = backnorm.torch.batch_norm_add_relu
    call, tensors = prepared(function, training, affine, layouts[name], residual)
    assert gradcheck(call, tensors, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, tensors, check_fwd_over_rev=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", ["both", "neither"])
def test_second_derivatives_have_right_derivatives(training, affine, layouts):
    function = backnorm.torch.batch_norm
    call, tensors = prepared(function, training, affine, layouts["channels_last"])

    def slopes(*tensors):
        value = call(*tensors)
        factor = torch.linspace(1, 2, value.numel()).double().view(value.shape)
        return torch.autograd.grad((value.pow(3) * factor).sum(), tensors, create_graph=True)

    assert gradgradcheck(slopes, tensors)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", ["both", "neither"])
def test_batched_gradients_with_graph_match_single_ones(training, affine, relu, layouts, close):
    function = backnorm.torch.batch_norm_relu if relu else backnorm.torch.batch_norm
    call, tensors = prepared(function, training, affine, layouts["permuted"])
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


def test_a_gradient_penalty_trains_as_the_formula_does(close):
    """What second order is for: the norm of the gradient of x is part of the loss."""

    def formula(x, weight, bias):
        mean, variance = x.mean((0, 2), keepdim=True), x.var((0, 2), keepdim=True, unbiased=False)
        normal = (x - mean) * (variance + 1e-5).rsqrt()
        return normal * weight[:, None] + bias[:, None]

    def ours(x, weight, bias):
        return backnorm.torch.batch_norm(x, None, None, weight, bias, True)

    x, factor = torch.randn(5, 3, 4).double(), torch.randn(5, 3, 4).double()
    results = []
    for function in (ours, formula):
        leaves = [x, torch.tensor([0.5, 1.0, 2.0]).double(), torch.ones(3).double()]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        output = (function(*leaves).pow(2) * factor).sum()
        slope, = torch.autograd.grad(output, leaves[0], create_graph=True)  # fmt: skip
        (slope.norm() - 1).pow(2).backward()
        results.append([leaf.grad for leaf in leaves])
    close(*results)


def test_a_gradient_of_another_layout_and_an_expanded_one(layout, close):
    x, weight = torch.randn(4, 3, 5, 5).double(), torch.rand(3).double()
    dy = layout(torch.randn(4, 3, 5, 5).double())
    leaf = x.requires_grad_()
    y = backnorm.torch.batch_norm(leaf, None, None, weight, None, True)
    theirs = torch.nn.functional.batch_norm(leaf, None, None, weight, None, True)
    close(torch.autograd.grad(y, leaf, dy), torch.autograd.grad(theirs, leaf, dy.contiguous()))


@pytest.mark.parametrize("function", ["batch_norm", "batch_norm_relu"])
def test_jacobians_of_batched_gradients(function, close):
    call = getattr(backnorm.torch, function)
    x = torch.randn(4, 2).double()

    def ours(x):
        return call(x, None, None, training=True)

    def theirs(x):
        y = torch.nn.functional.batch_norm(x, None, None, training=True)
        return torch.relu(y) if function == "batch_norm_relu" else y

    jacobian = torch.autograd.functional.jacobian
    close(jacobian(ours, x, vectorize=True), jacobian(theirs, x))
    close(
        jacobian(ours, x, vectorize=True, strategy="forward-mode"),
        jacobian(theirs, x),
    )
