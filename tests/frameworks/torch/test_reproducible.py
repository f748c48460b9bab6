"""Reproducible layers and functions in one process: `test_synchronised` has several."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import backnorm
import backnorm.torch
from backnorm.layout import mask_size
from backnorm.torch import binned_sums, kernels
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
    found, count = binned_sums.of_forward(x)
    expected, same = engine.reduce_forward_bins(x, "float64")
    assert count == same
    assert torch.equal(found, expected)
    found, _ = binned_sums.of_backward(x, dy, None, mean)
    expected, _ = engine.reduce_bins(x, dy, None, mean, "float64")
    assert torch.equal(found, expected)
    counts = torch.rand(x.shape) > 0.4
    bits = np.packbits(counts.numpy(), bitorder="little")
    mask = torch.from_numpy(np.pad(bits, (0, mask_size(counts.numel()) - bits.size)))
    mask = mask[: backnorm.layout.mask_size(x.numel())].contiguous()
    found, _ = binned_sums.of_backward(x, dy, counts, mean)
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

    @pytest.mark.parametrize("of", ["x", "weight", "bias"])
    @pytest.mark.parametrize("function", [batch_norm, batch_norm_relu])
    @pytest.mark.parametrize("linear", [True, False])
    def test_second_derivative_of_any_gradient_raises(self, of, function, linear):
        given = {"x": torch.randn(6, 3), "weight": torch.ones(3), "bias": torch.zeros(3)}
        other = torch.ones(3, requires_grad=True)
        inputs = {name: each.requires_grad_() for name, each in given.items()}
        y = function(
            inputs["x"] * other, None, None, inputs["weight"], inputs["bias"], True,
            reproducible=True,
        )  # fmt: skip
        loss = (y if linear else y.sin()) * torch.arange(3.0)
        (gradient,) = torch.autograd.grad(loss.sum(), inputs[of], create_graph=True)
        with pytest.raises(NotImplementedError, match="reproducible sums"):
            (gradient.square().sum() + other.square().sum()).backward()

    def test_batch_of_gradients_with_graph_raises(self):
        x = torch.randn(6, 3, requires_grad=True)
        y = batch_norm(x, None, None, training=True, reproducible=True)
        dy = torch.randn(2, 6, 3)
        with pytest.raises(NotImplementedError, match="reproducible sums"):
            torch.autograd.grad(y, x, dy, create_graph=True, is_grads_batched=True)

    @pytest.mark.parametrize("function", [batch_norm, batch_norm_relu, batch_norm_add_relu])
    def test_batch_of_gradients_is_that_of_each(self, function):
        x, _, residual = data(torch.float32, (6, 3, 4))
        others = [residual.requires_grad_()] if function is batch_norm_add_relu else []
        weight, bias = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
        inputs = [x.requires_grad_(), *others, weight, bias]
        y = function(x, *others, None, None, weight, bias, True, reproducible=True)
        every = torch.randn(3, *x.shape)
        at_once = torch.autograd.grad(y, inputs, every, retain_graph=True, is_grads_batched=True)
        each = [torch.autograd.grad(y, inputs, dy, retain_graph=True) for dy in every]
        for found, expected in zip(at_once, zip(*each, strict=True), strict=True):
            assert torch.equal(found, torch.stack(expected))

    def test_vectorised_jacobian_is_that_of_a_loop(self):
        def function(x):
            return batch_norm(x, None, None, training=True, reproducible=True)

        x = torch.randn(4, 3, dtype=torch.float64)
        found = torch.autograd.functional.jacobian(function, x, vectorize=True)
        assert torch.equal(found, torch.autograd.functional.jacobian(function, x))

    def test_absent_gradient_gives_none(self):
        class Without(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                return y.clone()

            @staticmethod
            def backward(ctx, dy):
                return None

        x, weight = torch.randn(6, 3, requires_grad=True), torch.ones(3, requires_grad=True)
        y = batch_norm(x, None, None, weight, training=True, reproducible=True)
        Without.apply(y).sin().sum().backward()
        assert x.grad is None
        assert weight.grad is None

    @pytest.mark.parametrize("kind", ["channels_last", "contiguous", "permuted", "strided"])
    @pytest.mark.parametrize("function", [batch_norm_relu, batch_norm_add_relu])
    def test_mask_has_its_order_when_saved_x_returns_in_another(self, kind, function):
        x, dy, residual = data(torch.float32, (4, 6, 5, 8))
        x, residual = (
            {
                "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
                "contiguous": lambda x: x,
                "permuted": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
                "strided": lambda x: x.repeat_interleave(2, 3)[..., ::2],
            }[kind](x),
            residual,
        )
        others = [residual] if function is batch_norm_add_relu else []

        def in_another_order(tensor):
            if tensor.dim() != 4:
                return tensor
            contiguous = kind != "contiguous"
            order = torch.contiguous_format if contiguous else torch.channels_last
            return tensor.contiguous(memory_format=order)

        expected = step(function, x, dy, *others, reproducible=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each, in_another_order):
            found = step(function, x, dy, *others, reproducible=True)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)

    def test_recomputing_checkpoint_mixes_no_passes(self):
        """Statistics come of the pass that x comes of, whatever is recomputed."""
        layer = backnorm.torch.BatchNormReLU1d(3, reproducible=True)
        theirs = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
        x, found = torch.randn(8, 3), []
        for function in (layer, theirs):
            passes = iter((1.0, 3.0))
            given = x.clone().requires_grad_()

            def scaled(given, function=function, passes=passes):
                return function((given * next(passes)).exp())

            y = checkpoint(scaled, given, use_reentrant=False)
            (y * torch.arange(3.0)).sum().backward()
            found.append(given.grad)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)

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
