"""Reproducible layers and functions in one process: `test_synchronised` has several."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import backnorm
import backnorm.torch
from backnorm.torch import bins, kernels
from backnorm.torch.functional import batch_norm, batch_norm_add_relu, batch_norm_relu

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def data(dtype, shape=(12, 6, 7, 9)):
    rng = np.random.default_rng(5)
    return [torch.from_numpy(rng.normal(size=shape) * 3 + 1).to(dtype) for _ in range(3)]


def step(function, x, dy, *others, **how):
    """Return y, running statistics and all gradients."""
    x = x.detach().requires_grad_()
    wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    channels = x.shape[1]
    weight = torch.linspace(-1, 2, channels, dtype=wide).requires_grad_()
    bias = torch.linspace(1, -2, channels, dtype=wide).requires_grad_()
    running = [torch.zeros(channels, dtype=wide), torch.ones(channels, dtype=wide)]
    y = function(x, *others, *running, weight, bias, True, 0.1, 1e-5, **how)
    y.backward(dy)
    return y.detach(), *running, x.grad, weight.grad, bias.grad


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("function", [batch_norm, batch_norm_relu, batch_norm_add_relu])
def test_the_same_bits_in_any_layout_and_order(function, dtype):
    x, dy, residual = data(dtype)
    others = [residual] if function is batch_norm_add_relu else []
    one = step(function, x, dy, *others, reproducible=True)
    last = [each.contiguous(memory_format=torch.channels_last) for each in (x, dy, *others)]
    other = step(function, *last, reproducible=True)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    moved = step(function, *[each[order] for each in (x, dy, *others)], reproducible=True)
    for k, (first, second, third) in enumerate(zip(one, other, moved, strict=True)):
        assert torch.equal(first, second), k
        assert torch.equal(first[order] if first.dim() == 4 else first, third), k
    usual = step(function, x, dy, *others)
    for first, second in zip(one, usual, strict=True):
        torch.testing.assert_close(first, second, rtol=2e-2, atol=2e-2)


def test_the_same_bits_as_of_arrays():
    x, dy, _ = data(torch.float32)
    y, _, _, dx, dweight, dbias = step(batch_norm, x, dy, arithmetic="float64", reproducible=True)
    gamma, beta = np.linspace(-1, 2, 6, dtype=np.float32), np.linspace(1, -2, 6, dtype=np.float32)
    gamma, beta = torch.linspace(-1, 2, 6).numpy(), torch.linspace(1, -2, 6).numpy()
    how = {"epsilon": 1e-5, "reproducible": True, "arithmetic": "float64"}
    expected, mean, variance = backnorm.batch_norm_forward(x.numpy(), gamma, beta, **how)
    gradients = backnorm.batch_norm_backward(x.numpy(), dy.numpy(), mean, variance, gamma, **how)
    for tensor, array in zip((y, dx, dweight, dbias), (expected, *gradients), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("special", [None, float("nan"), float("inf"), -float("inf"), 0.0])
def test_operators_of_pytorch_write_the_same_bins(dtype, special):
    """Those that compute on devices whose kernels have no bins."""
    x, dy, _ = data(dtype, (9, 4, 31))
    x = x * torch.logspace(-4, 4, 4, dtype=torch.float64)[:, None].to(dtype)
    if special is not None:
        x[3, 1, 7] = dy[5, 2, 1] = special
        dy[:, 3] = special
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    mean = torch.linspace(-3, 3, 4, dtype=wide)
    engine = kernels.engine_of(x)
    found, count = bins.of_forward(x)
    expected, same = engine.reduce_forward_bins(x, "float64")
    assert count == same
    assert torch.equal(found, expected)
    found, _ = bins.of_backward(x, dy, None, mean)
    expected, _ = engine.reduce_bins(x, dy, None, mean, "float64")
    assert torch.equal(found, expected)
    counts = torch.rand(x.shape) > 0.4
    mask = torch.from_numpy(np.pad(np.packbits(counts.numpy(), bitorder="little"), (0, 8)))
    mask = mask[: backnorm.layout.mask_size(x.numel())].contiguous()
    found, _ = bins.of_backward(x, dy, counts, mean)
    expected, _ = engine.reduce_bins(x, dy, mask, mean, "float64")
    assert torch.equal(found, expected)


class TestLayers:
    def test_a_layer_says_that_it_is(self):
        layer = backnorm.torch.BatchNorm2d(3, reproducible=True)
        assert "reproducible=True" in repr(layer)
        assert "reproducible" not in repr(backnorm.torch.BatchNorm2d(3))
        with pytest.raises(backnorm.ArgumentTypeError, match="reproducible"):
            backnorm.torch.BatchNorm2d(3, reproducible="no")
        with pytest.raises(backnorm.ArgumentTypeError, match="reproducible"):
            batch_norm(torch.ones(2, 3), None, None, training=True, reproducible="no")

    def test_a_model_is_converted(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        backnorm.torch.convert(model, fuse=True, reproducible=True)
        assert model[1].reproducible
        copied = copy.deepcopy(model)
        x = torch.randn(6, 3, 8, 8)
        results = []
        for one, given in ((model, x), (copied, x.to(memory_format=torch.channels_last))):
            h = one[0](x)
            y = one[1:](h.contiguous(memory_format=torch.channels_last) if given is not x else h)
            y.sin().sum().backward()
            results.append((y.detach(), one[1].running_var, one[1].weight.grad, one[0].bias.grad))
        for first, second in zip(*results, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
        for first, second in list(zip(*results, strict=True))[:3]:
            assert torch.equal(first, second)
        backnorm.torch.convert(model, reproducible=False)
        assert not model[1].reproducible
        backnorm.torch.revert(model)
        assert "reproducible" not in vars(model[1])

    def test_evaluation_is_as_ever(self):
        layer = backnorm.torch.BatchNorm2d(6, reproducible=True)
        plain = backnorm.torch.BatchNorm2d(6)
        x = data(torch.float32)[0]
        layer(x), plain(x)
        layer.eval(), plain.eval()
        torch.testing.assert_close(layer(x), plain(x))

    def test_a_second_derivative_is_refused(self):
        x = torch.randn(4, 3, requires_grad=True)
        y = batch_norm(x, None, None, training=True, reproducible=True)
        (dx,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="reproducible sums"):
            dx.square().sum().backward()

    # Dynamo makes an object of a function of autograd, of which PyTorch warns.
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    def test_in_one_graph(self):
        layer = backnorm.torch.BatchNorm2d(6, reproducible=True)
        compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
        x, dy, _ = data(torch.float32)
        found = []
        for one in (layer, compiled):
            given = x.clone().requires_grad_()
            y = one(given)
            y.backward(dy)
            found.append((y, given.grad))
        for first, second in zip(*found, strict=True):
            assert torch.equal(first, second)
