"""Tensors saved for the backward pass come back changed: laid out anew, recomputed, not at all."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import backnorm.torch
from backnorm.activations import Activation

FORMATS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "sliced": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
}


def call_of(name):
    activation = Activation("relu", 0.5) if name == "relu6" else name.removeprefix("add ")

    def call(x, residual, weight, bias):
        return backnorm.torch.batch_norm(
            x, None, None, weight, bias, True, activation=activation,
            residual=residual if name.startswith("add ") else None,
        )  # fmt: skip

    return call


NAMES = "relu", "relu6", "add relu", "silu"
CALLS = [pytest.param(call_of(name), id=name) for name in NAMES]


def gradients(function, leaves, order=1):
    y = function(*leaves)
    factor = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    found = torch.autograd.grad(
        (y.pow(2) * factor).sum(), leaves, create_graph=order == 2, allow_unused=True
    )
    if order == 1:
        return found
    loss = sum(each.pow(2).sum() for each in found if each is not None)
    return torch.autograd.grad(loss, leaves, allow_unused=True)


@pytest.mark.parametrize("back", ["contiguous", "channels_last", "permuted"])
@pytest.mark.parametrize("forth", ["contiguous", "channels_last", "sliced"])
@pytest.mark.parametrize(
    ("function", "order"), [*((call_of(name), 1) for name in NAMES), (call_of("relu"), 2)]
)
def test_gradients_with_saved_input_in_another_layout_match_plain_call(
    function, forth, back, order, close
):
    x, residual = torch.randn(3, 4, 5, 6, dtype=torch.float64), torch.randn(3, 4, 5, 6).double()
    leaves = [FORMATS[forth](x), FORMATS[forth](residual), torch.rand(4).double() + 0.5]
    leaves = [leaf.detach().requires_grad_() for leaf in (*leaves, torch.randn(4).double())]
    expected = gradients(function, leaves, order)

    def lay_out(tensor):
        return FORMATS[back](tensor) if tensor.dim() == 4 else tensor

    with saved_tensors_hooks(lay_out, lambda tensor: tensor):
        found = gradients(function, leaves, order)
    close(found, expected, factor=16)


def test_gradients_with_saved_input_from_numpy_match_plain_call(close):
    layer = backnorm.torch.BatchNormReLU2d(4).double()
    x = FORMATS["channels_last"](torch.randn(3, 4, 5, 6).double()).requires_grad_()
    expected = gradients(layer, [x])
    with saved_tensors_hooks(
        lambda tensor: np.ascontiguousarray(tensor.detach().numpy()), torch.from_numpy
    ):
        close(gradients(layer, [x]), expected)


@pytest.mark.parametrize("function", CALLS)
def test_checkpoint_with_changed_values_has_gradients_of_second_pass(function, close):
    """A checkpoint whose second forward pass sees other values has the gradients of that pass."""
    x, residual = torch.randn(3, 4, 5).double().requires_grad_(), torch.randn(3, 4, 5).double()
    weight, bias = torch.rand(4).double() + 0.5, torch.randn(4).double()
    noise, dy = torch.randn(2, 3, 4, 5).double().unbind(0), torch.randn(3, 4, 5).double()
    passes = iter(noise)

    def forward(x, noise):
        return function((x + noise).exp(), residual, weight, bias)

    y = checkpoint(lambda x: forward(x, next(passes)), x, use_reentrant=False)
    (found,) = torch.autograd.grad(y, x, dy)
    (second,) = torch.autograd.grad(forward(x, noise[1]), x, dy)
    close(found, second)


class Stops(torch.autograd.Function):
    """A function that has no gradient for its first input."""

    @staticmethod
    def forward(ctx, a, b):
        return a * 0 + b

    @staticmethod
    def backward(ctx, dy):
        return None, dy


@pytest.mark.parametrize("function", CALLS)
def test_backward_without_gradient_of_y_returns_none(function):
    leaves = [torch.randn(3, 4, 5), torch.randn(3, 4, 5), torch.rand(4), torch.randn(4)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    other = torch.randn(3, 4, 5, requires_grad=True)
    Stops.apply(function(*leaves), other).square().sum().backward()
    assert [leaf.grad for leaf in leaves] == [None] * 4
    assert other.grad is not None


@pytest.mark.parametrize("act", [nn.Identity(), nn.ReLU(), nn.SiLU()])
def test_backward_of_frozen_layer_without_gradient_of_y_returns_none(act):
    model = backnorm.torch.convert(nn.Sequential(nn.BatchNorm1d(4), act), fuse=True).eval()
    x = torch.randn(3, 4, 5, requires_grad=True)
    Stops.apply(model(x), torch.randn(3, 4, 5, requires_grad=True)).square().sum().backward()
    assert [x.grad, *(each.grad for each in model.parameters())] == [None] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_running_statistics_sharing_memory_with_weights_are_updated(dtype, activation):
    flat = torch.rand(30).to(dtype) + 0.5
    means, variances, weights = flat.view(3, 2, 5).unbind(0)
    weights = [nn.Parameter(each) for each in weights]
    x = torch.randn(4, 5, 6).to(dtype)
    call = functools.partial(backnorm.torch.batch_norm, training=True, activation=activation)
    before = flat.clone()
    y = call(x, means[0], variances[0], weights[0])
    y = call(y, means[1], variances[1], weights[1])
    (y * torch.randn(4, 5, 6).to(dtype)).sum().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in weights)
    assert not torch.equal(flat[:20], before[:20])
    assert torch.equal(flat[20:], before[20:])


class Permuted(nn.Module):
    """Layers on permuted views of convolutions' results, whose layout a compiler may change."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.residual = nn.Conv2d(4, 8, 1)

    def forward(self, x):
        residual = self.residual(x).permute(0, 1, 3, 2)
        y = torch.relu(self.norm1(self.conv1(x).permute(0, 1, 3, 2)))
        return torch.relu(self.norm2(self.conv2(y)) + residual)


class FusedPermuted(Permuted):
    """The same with a ReLU in each layer."""

    def __init__(self):
        super().__init__()
        self.norm1 = backnorm.torch.BatchNormReLU2d(8)
        self.norm2 = backnorm.torch.BatchNormReLU2d(8)

    def forward(self, x):
        residual = self.residual(x).permute(0, 1, 3, 2)
        y = self.norm1(self.conv1(x).permute(0, 1, 3, 2))
        return self.norm2(self.conv2(y), residual)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, as it compiles
@pytest.mark.long
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_compiled_gradients_in_float64_match_eager(memory_format, close):
    torch._dynamo.reset()
    theirs, ours = Permuted().double(), FusedPermuted().double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 4, 5, 6).double().contiguous(memory_format=memory_format)
    found = []
    for model in (theirs, ours, torch.compile(ours)):
        leaves = [x.requires_grad_(), *model.parameters()]
        y = model(x)
        loss = (torch.cos(y) * torch.arange(5.0).double()).sum()
        found.append(torch.autograd.grad(loss, leaves))
    close(found[1], found[0], factor=64)
    close(found[2], found[0], factor=64)
