"""A backward pass writes to new memory: every tensor that others can read keeps its values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import backnorm.torch

SHAPE = (4, 6, 8, 8)


def _frozen(x):
    mean, variance = torch.linspace(-1, 1, 6), torch.linspace(0.5, 2, 6)
    return backnorm.torch.batch_norm(x, mean, variance)


# Every function with a backward pass of its own, of x alone.
FUNCTIONS = {
    "training": lambda x: backnorm.torch.batch_norm(x, None, None, training=True),
    **{
        activation: lambda x, activation=activation: backnorm.torch.batch_norm(
            x, None, None, training=True, activation=activation
        )
        for activation in ("relu", "silu")
    },
    "add relu": lambda x: backnorm.torch.batch_norm(
        x, None, None, training=True, activation="relu", residual=x
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
def test_backward_keeps_values_of_dy_in_numpy_memory(function):
    array = aligned_array(SHAPE)
    array[...] = np.random.default_rng(0).standard_normal(SHAPE)
    expected = array.copy()
    y = FUNCTIONS[function](new_input())
    Replaced.apply(y, lambda _: torch.from_numpy(array)).square().sum().backward()
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_backward_keeps_values_of_input_saved_by_another_node(function):
    leaf = torch.randn(SHAPE, requires_grad=True)
    results = []
    for run in (FUNCTIONS[function], lambda x: FUNCTIONS[function](x.clone())):
        x = leaf.exp()
        loss = (run(x).square() * torch.linspace(-1, 1, 8)).sum()
        del x
        results += torch.autograd.grad(loss, leaf)
    assert torch.equal(*results)
