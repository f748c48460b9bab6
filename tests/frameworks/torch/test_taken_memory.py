"""Tensors whose storage was taken away, as those of parameters that are sharded.

Eager calls and operators raise. PyTorch's own operators do not look, and end the process.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import backnorm
import backnorm.torch

CHANNELS = 5
NAMES = ("input", "weight", "bias", "running_mean", "running_var")
refused = pytest.raises(backnorm.ArgumentError, match="its data is not allocated yet")
in_both_modes = pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])


def good():
    """Return good tensors by name."""
    operands = {name: torch.rand(CHANNELS) + 0.5 for name in NAMES}
    return operands | {"input": torch.rand(3, CHANNELS, 4) + 0.5}


def take(tensor):
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("name", "training"),
    # In training PyTorch's operators move the running statistics under a mode.
    [*((name, False) for name in NAMES), *((name, True) for name in NAMES[:3])],
)
def test_operator_raises_for_tensor_without_memory(name, training):
    for is_taken in (False, True, True):
        operands = good()
        if not is_taken:
            backnorm.torch.batch_norm(**operands, training=training)
            continue
        take(operands[name])
        before = operands["running_mean"].clone() if name != "running_mean" else None
        with FlopCounterMode(display=False), refused:
            backnorm.torch.batch_norm(**operands, training=training)
        assert before is None or torch.equal(operands["running_mean"], before)


@in_both_modes
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("name", ["input", "weight", "y", "dy"])
def test_backward_raises_for_operand_without_memory_but_not_for_y(name, activation, training):
    for is_taken in (False, False, True):
        operands = good()
        leaves = [operands[each].requires_grad_() for each in ("input", "weight", "bias")]
        y = backnorm.torch.batch_norm(**operands, training=training, activation=activation)
        tensors = operands | {"y": y, "dy": torch.rand(y.shape)}
        # PyTorch's activations read y and dy.
        if not is_taken or (name in ("y", "dy") and not training and activation):
            torch.autograd.grad(y, leaves, tensors["dy"])
            continue
        take(tensors[name])
        if name == "y":
            torch.autograd.grad(y, leaves, tensors["dy"])
        else:
            with refused:
                torch.autograd.grad(y, leaves, tensors["dy"])


@pytest.mark.parametrize("name", ["input", "weight", "dy", "ddx", "ddweight", "ddbias"])
def test_second_order_raises_for_tensor_without_memory(name):
    for is_taken in (False, True):
        operands = good()
        leaves = [operands[each].requires_grad_() for each in ("input", "weight", "bias")]
        y = backnorm.torch.batch_norm(**operands, training=True)
        dy = torch.rand(y.shape, requires_grad=True)
        gradients = torch.autograd.grad(y, leaves, dy, create_graph=True)
        cotangents = [torch.rand(gradient.shape) for gradient in gradients]
        named = dict(zip(("ddx", "ddweight", "ddbias"), cotangents, strict=True))
        if not is_taken:
            torch.autograd.grad(gradients, [*leaves[:2], dy], cotangents)
            continue
        take((operands | named | {"dy": dy})[name])
        with refused:
            torch.autograd.grad(gradients, [*leaves[:2], dy], cotangents)


def test_backward_with_replaced_saved_tensors_returns_same_dx_or_raises():
    """As by hooks that keep them elsewhere: in other classes, on other devices, without memory."""
    from torch.testing._internal.two_tensor import TwoTensor

    operands = good()
    x = operands["input"].requires_grad_()
    dy = torch.rand(x.shape) - 0.5

    def gradient(change):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), change):
            y = backnorm.torch.batch_norm(**operands, training=True)
        return torch.autograd.grad(y, x, dy)[0]

    wanted = gradient(lambda tensor: tensor)
    found = gradient(lambda tensor: TwoTensor(tensor, tensor))
    assert torch.equal(found.a if type(found) is TwoTensor else found, wanted)
    assert torch.equal(gradient(lambda tensor: torch._neg_view(-tensor)), wanted)

    def emptied(tensor):
        tensor = tensor.clone()
        take(tensor)
        return tensor

    with refused:
        gradient(emptied)
    with pytest.raises(backnorm.ArgumentError, match="input: has no elements in memory"):
        gradient(lambda tensor: tensor.to("meta"))
