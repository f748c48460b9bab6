"""Reproducible layers and functions in one process; `test_synchronised` tests several."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import backnorm
import backnorm.torch
from backnorm.reproducible_sums import bins_of
from backnorm.torch.functional import batch_norm

# Activations, and whether there is a residual.
KINDS = pytest.mark.parametrize(
    ("activation", "added"), [(None, False), ("relu", False), ("relu", True)]
)


def data(dtype, shape=(12, 6, 7, 9)):
    rng = np.random.default_rng(5)
    return [torch.from_numpy(rng.normal(size=shape) * 3 + 1).to(dtype) for _ in range(3)]


def step(x, residual, dy, **options):
    """Return y, running statistics and all gradients."""
    wide = torch.float32 if dy.dtype.itemsize == 2 else dy.dtype
    channels = dy.shape[1]
    weight, bias = torch.linspace(-1, 2, channels), torch.linspace(1, -2, channels)
    running = [torch.zeros(channels, dtype=wide), torch.ones(channels, dtype=wide)]
    leaves = [x, weight.to(wide), bias.to(wide), *([] if residual is None else [residual])]
    leaves = [each.detach().requires_grad_() for each in leaves]
    residual = None if residual is None else leaves[3]
    y = batch_norm(leaves[0], *running, *leaves[1:3], True, residual=residual, **options)
    y.backward(dy)
    return [y.detach(), *running, *(each.grad for each in leaves)]


def test_batch_norm_with_residual_of_shuffled_or_channels_last_batch_has_same_bits():
    tensors = data(torch.float32)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    last = [each.contiguous(memory_format=torch.channels_last) for each in tensors]
    shuffled = [each[order] for each in tensors]
    expected, other, moved = (
        step(x, residual, dy, activation="relu", reproducible=True)
        for x, dy, residual in (tensors, last, shuffled)
    )
    for first, second, third in zip(expected, other, moved, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first[order] if first.dim() == 4 else first, third)


@pytest.mark.parametrize("itemsize", [4, 8])
@pytest.mark.parametrize(
    "size",
    [1.0, 1e-300, 1.7 * 2.0**990, 2.0**1000, 1.6e308, np.finfo(float).max, np.nan, -np.inf],
)
def test_bins_of_tensors_equal_bins_of_arrays(size, itemsize, rng):
    terms, factors = rng.standard_normal((2, 5, 33))
    terms[1, 3], terms[4, 30], factors[2, 7] = size, -size, size
    factors[1], factors[4] = 0.0, 1.3 * 2.0**-60
    terms[3], factors[3] = 2.0**-100, size
    with np.errstate(all="ignore"):
        expected = bins_of(terms, factors, itemsize, np)
    found = bins_of(torch.from_numpy(terms), torch.from_numpy(factors), itemsize, torch)
    np.testing.assert_array_equal(found.numpy(), expected)


class TestLayers:
    def test_repr_contains_reproducible_for_reproducible_layer_only(self):
        assert "reproducible=True" in repr(backnorm.torch.BatchNorm2d(3, reproducible=True))
        assert "reproducible" not in repr(backnorm.torch.BatchNorm2d(3))

    def test_convert_sets_and_resets_reproducible_and_revert_removes_it(self):
        model = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
        backnorm.torch.convert(model, fuse=True, reproducible=True)
        x, results = torch.randn(6, 4, 8, 8), []
        for memory_format in (torch.contiguous_format, torch.channels_last):
            copied = copy.deepcopy(model)
            y = copied(x.contiguous(memory_format=memory_format))
            y.sin().sum().backward()
            results.append((y, copied[0].running_var, copied[0].weight.grad))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        backnorm.torch.convert(model, reproducible=False)
        assert not model[0].reproducible
        backnorm.torch.revert(model)
        assert "reproducible" not in vars(model[0])

    def test_reproducible_layer_in_eval_mode_matches_plain_layer(self):
        layers = [backnorm.torch.BatchNorm2d(6, reproducible=each) for each in (True, False)]
        x = data(torch.float32)[0]
        torch.testing.assert_close(*[(layer(x), layer.eval()(x))[1] for layer in layers])

    # Dynamo makes an object of a function of autograd, of which PyTorch warns.
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    def test_compiled_layer_in_one_graph_has_bits_of_eager_layer(self):
        layer = backnorm.torch.BatchNorm2d(6, reproducible=True)
        x, dy, _ = data(torch.float32)
        results = []
        compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
        for call in (layer, compiled):
            operand = x.clone().requires_grad_()
            y = call(operand)
            y.backward(dy)
            results.append((y, operand.grad))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))

    def test_checkpoint_with_changed_recomputed_values_matches_pytorch(self):
        layer = backnorm.torch.BatchNormReLU1d(3, reproducible=True)
        x, gradients = torch.randn(8, 3), []
        for function in (layer, nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())):
            factors = iter((1.0, 3.0))

            def scaled(operand, function=function, factors=factors):
                return function((operand * next(factors)).exp())

            operand = x.clone().requires_grad_()
            y = checkpoint(scaled, operand, use_reentrant=False)
            (y * torch.arange(3.0)).sum().backward()
            gradients.append(operand.grad)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


class TestGradients:
    @pytest.mark.parametrize("of", ["x", "weight", "bias"])
    @pytest.mark.parametrize("activation", [None, "relu"])
    @pytest.mark.parametrize("linear", [True, False])
    def test_second_derivative_raises_not_implemented_error(self, of, activation, linear):
        inputs = {"x": torch.randn(6, 3), "weight": torch.ones(3), "bias": torch.zeros(3)}
        scale = torch.ones(3, requires_grad=True)
        x, weight, bias = (each.requires_grad_() for each in inputs.values())
        y = batch_norm(
            x * scale, None, None, weight, bias, True, activation=activation, reproducible=True
        )
        loss = (y if linear else y.sin()) * torch.arange(3.0)
        (gradient,) = torch.autograd.grad(loss.sum(), inputs[of], create_graph=True)
        with pytest.raises(NotImplementedError, match="reproducible sums"):
            (gradient.square().sum() + scale.square().sum()).backward()

    # PyTorch compiles its decompositions when the first dual number is made, which takes seconds.
    @pytest.mark.long
    @pytest.mark.filterwarnings("ignore:`torch.jit.script")
    def test_forward_mode_and_vmap_raise(self):
        def function(x):
            return batch_norm(x, None, None, training=True, reproducible=True)

        x = torch.randn(6, 3)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            function(forward_ad.make_dual(x, x))
        with pytest.raises(RuntimeError, match="vmap"):
            torch.func.vmap(function)(x[None])

    def test_synchronised_gradient_with_wrong_sums_raises_type_error(self):
        x, moments = torch.randn(6, 3), torch.ones(7, dtype=torch.float64)
        for sums in (moments[1:], moments.float()):
            with pytest.raises(backnorm.ArgumentTypeError, match="sums"):
                torch.ops.backnorm.synchronised_gradient(x, x, None, moments, sums, 1e-5, None)

    @KINDS
    def test_batched_gradients_equal_single_gradients_and_reject_create_graph(
        self, activation, added
    ):
        x, _, residual = data(torch.float32, (6, 3, 4))
        weight, bias = torch.rand(3), torch.rand(3)
        inputs = [x, weight, bias, *([residual] if added else [])]
        inputs = [each.requires_grad_() for each in inputs]
        y = batch_norm(
            x, None, None, weight, bias, True, activation=activation,
            residual=residual if added else None, reproducible=True,
        )  # fmt: skip
        dy = torch.randn(3, *x.shape)
        found = torch.autograd.grad(y, inputs, dy, retain_graph=True, is_grads_batched=True)
        each = [torch.autograd.grad(y, inputs, one, retain_graph=True) for one in dy]
        for batch, expected in zip(found, zip(*each, strict=True), strict=True):
            assert torch.equal(batch, torch.stack(expected))
        with pytest.raises(NotImplementedError, match="reproducible sums"):
            torch.autograd.grad(y, x, dy, create_graph=True, is_grads_batched=True)

    def test_backward_without_gradient_of_y_returns_none(self):
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

    @pytest.mark.parametrize("layout", ["channels_last", "contiguous", "permuted", "sliced"])
    @pytest.mark.parametrize("added", [False, True])
    def test_backward_of_x_unpacked_in_another_layout_has_same_bits(self, layout, added, layouts):
        x, dy, residual = data(torch.float32, (4, 6, 5, 8))
        operands = layouts[layout](x), residual if added else None, dy
        options = {"activation": "relu", "reproducible": True}
        other = torch.channels_last if layout == "contiguous" else torch.contiguous_format
        expected = step(*operands, **options)

        def unpack(tensor):
            return tensor.contiguous(memory_format=other) if tensor.dim() == 4 else tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            found = step(*operands, **options)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
