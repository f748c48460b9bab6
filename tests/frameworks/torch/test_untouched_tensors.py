"""A backward pass writes to new memory: every tensor that others can read keeps its values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import backnorm.torch

SHAPE = (4, 6, 8, 8)


def _frozen(x):
    mean, variance = torch.linspace(-1, 1, 6), torch.linspace(0.5, 2, 6)
    return backnorm.torch.batch_norm(x, mean, variance)


# Every function with a backward pass of its own, of x alone.
FUNCTIONS = {
    "training": lambda x: backnorm.torch.batch_norm(x, None, None, training=True),
    "relu": lambda x: backnorm.torch.batch_norm_relu(x, None, None, training=True),
    "add_relu": lambda x: backnorm.torch.batch_norm_add_relu(x, x, None, None, training=True),
    "silu": lambda x: backnorm.torch.batch_norm_activation(
        x, None, None, training=True, activation="silu"
    ),
    "frozen": _frozen,
}


class Replaced(torch.autograd.Function):
    """An identity whose backward pass returns a gradient from elsewhere."""

    @staticmethod
    def forward(ctx, y, gradient):
        ctx.gradient = gradient
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.gradient(dy), None


def aligned_array(shape, align=64):
    """Return a float32 array at a multiple of `align` bytes, as JAX's and mapped arrays are."""
    count = int(np.prod(shape))
    memory = np.empty(count + align, np.float32)
    start = -memory.ctypes.data % align // 4
    return memory[start : start + count].reshape(shape)


def new_input():
    """Return an input that is no leaf, and that nothing but the graph refers to."""
    return torch.randn(SHAPE, requires_grad=True) * 1.0


@pytest.mark.parametrize("function", FUNCTIONS)
def test_backward_leaves_gradient_of_foreign_memory_as_it_was(function):
    array = aligned_array(SHAPE)
    array[...] = np.random.default_rng(0).standard_normal(SHAPE)
    expected = array.copy()
    y = FUNCTIONS[function](new_input())
    Replaced.apply(y, lambda _: torch.from_numpy(array)).square().sum().backward()
    np.testing.assert_array_equal(array, expected)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_backward_reads_read_only_gradient(function, tmp_path):
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    values.tofile(tmp_path / "dy")
    mapped = np.memmap(tmp_path / "dy", np.float32, "r", shape=SHAPE)
    dy = torch.from_numpy(mapped)
    x = torch.randn(SHAPE, requires_grad=True)
    gradients = []
    for gradient in (dy, torch.from_numpy(values)):
        y = FUNCTIONS[function](x)
        gradients += torch.autograd.grad(Replaced.apply(y, lambda _, g=gradient: g).sum(), x)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_backward_leaves_gradient_of_direct_node_call_as_it_was(function):
    y = FUNCTIONS[function](new_input())
    dy = torch.randn(SHAPE)
    expected = dy.clone()
    with torch.no_grad():
        y.grad_fn.apply(dy)
    assert torch.equal(dy, expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_backward_leaves_gradients_that_hooks_keep_as_they_were(function):
    kept, copies = [], []

    def keep(gradient):
        kept.append(gradient)
        copies.append(gradient.clone())

    y = new_input()
    for _ in range(3):
        y = FUNCTIONS[function](y)
        y.register_hook(keep)
    (y * torch.randn(SHAPE)).sum().backward()
    assert len(kept) == 3
    for gradient, copied in zip(kept, copies, strict=True):
        assert torch.equal(gradient, copied)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_backward_leaves_input_that_another_node_saved_as_it_was(function):
    leaf = torch.randn(SHAPE, requires_grad=True)
    results = []
    for run in (FUNCTIONS[function], lambda x: FUNCTIONS[function](x.clone())):
        x = leaf.exp()
        loss = (run(x).square() * torch.linspace(-1, 1, 8)).sum()
        del x
        results += torch.autograd.grad(loss, leaf)
    assert torch.equal(*results)


def test_layer_counts_batches_as_pytorch_does():
    layers = [kind(3) for kind in (backnorm.torch.BatchNorm1d, nn.BatchNorm1d)]
    x = torch.randn(4, 3)
    for _ in range(3):
        assert len({int(layer.num_batches_tracked) for layer in layers}) == 1
        for layer in layers:
            layer(x)
    for layer in layers:
        layer.num_batches_tracked = None
        layer(x)
        del layer.num_batches_tracked
        layer.num_batches_tracked = torch.tensor(8)
        layer(x)
        assert layer.num_batches_tracked == 9
