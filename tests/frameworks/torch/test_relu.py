"""`batch_norm_relu` and `batch_norm_add_relu`: bits of the operator, memory, running statistics."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import backnorm
import backnorm.torch
from backnorm.activations import Activation

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def array(tensor):
    tensor = tensor.detach().clone()
    if tensor.dtype is torch.bfloat16:
        return tensor.float().numpy().astype(ml_dtypes.bfloat16)
    return tensor.numpy()


def call(x, residual, running, weight, bias, training=True, **how):
    if residual is None:
        return backnorm.torch.batch_norm_relu(x, *running, weight, bias, training, **how)
    return backnorm.torch.batch_norm_add_relu(x, residual, *running, weight, bias, training, **how)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("ceiling", [None, 0.8])
def test_has_the_bits_of_the_operator(dtype, has_residual, ceiling, layout, parameters, step):
    x, dy = (layout(torch.randn(6, 3, 4, 4).to(dtype)) for _ in range(2))
    residual = torch.randn(6, 3, 4, 4).to(dtype) if has_residual else None
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    weight, bias, mean, variance = parameters(3, wide)
    y, dx, dresidual, dweight, dbias = step(
        lambda x, residual, weight, bias: call(
            x, residual, (None, None), weight, bias, ceiling=ceiling
        ),
        x, residual, weight, bias, dy=dy,
    )  # fmt: skip

    side = array(residual) if has_residual else None
    w, b = array(weight), array(bias)
    activation = Activation("relu", ceiling)
    how = {"activation": activation, "residual": side, "epsilon": 1e-5}
    forward = backnorm.batch_norm_forward(array(x), w, b, **how)
    gradients = backnorm.batch_norm_backward(
        array(x), array(dy), forward.mean, forward.variance, w,
        mask=forward.mask, residual=has_residual, epsilon=1e-5,
    )  # fmt: skip
    np.testing.assert_array_equal(array(y), forward.y)
    results = zip((dx, dweight, dbias, dresidual)[: len(gradients)], gradients, strict=True)
    for one, expected in results:
        if expected is None:
            assert one is None
        else:
            np.testing.assert_array_equal(array(one), expected)
    assert y.stride() == dx.stride() == torch.empty_like(x).stride()

    with torch.no_grad():
        y = call(x, residual, (mean, variance), weight, bias, False, ceiling=ceiling)
    expected = backnorm.batch_norm_inference(array(x), array(mean), array(variance), w, b, **how)
    np.testing.assert_array_equal(array(y), expected)
    assert y.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("has_residual", [True, False])
def test_keeps_a_bit_an_element_beside_the_input(has_residual, parameters):
    x = torch.randn(16, 3, 20, 20, requires_grad=True)
    residual = torch.randn(16, 3, 20, 20, requires_grad=True) if has_residual else None
    weight, bias, *_ = parameters(3, torch.float32)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(x, residual, (None, None), weight, bias)
    own = [tensor for tensor in kept if tensor.data_ptr() != x.data_ptr()]
    assert len(own) < len(kept)
    size = sum(tensor.numel() * tensor.itemsize for tensor in own)
    assert x.numel() / 8 <= size <= x.numel() / 8 + 100
    assert y.grad_fn.next_functions[0][0].variable is x


@pytest.mark.parametrize("dtype", TYPES)
def test_moves_running_statistics_as_the_plain_function(dtype, parameters):
    weight, bias, mean, variance = parameters(3, dtype)
    x = torch.randn(5, 3, 4).to(dtype)
    moved = [(mean.clone(), variance.clone()) for _ in range(3)]
    backnorm.torch.batch_norm(x, *moved[0], weight, bias, True, 0.3)
    backnorm.torch.batch_norm_relu(x, *moved[1], weight, bias, True, 0.3)
    backnorm.torch.batch_norm_add_relu(x, x, *moved[2], weight, bias, True, 0.3)
    assert not torch.equal(moved[0][0], mean)
    for other in moved[1:]:
        assert all(map(torch.equal, moved[0], other))


@pytest.mark.parametrize("shape", [(0, 3, 4), (4, 3, 0), (4, 0, 3)])
@pytest.mark.parametrize("has_residual", [True, False])
def test_empty_tensors(shape, has_residual, step):
    x = torch.zeros(shape).double()
    y, dx, dresidual = step(
        lambda x, residual: call(x, residual, (None, None), None, None),
        x, x.clone() if has_residual else None, dy=x,
    )  # fmt: skip
    assert y.shape == dx.shape == shape
    assert (dresidual is None) is not has_residual


def test_no_element_and_no_channels():
    assert backnorm.torch.batch_norm_relu(torch.zeros(0), None, None, training=True).shape == (0,)


def test_only_the_gradients_that_are_wanted():
    x, residual, dy = (torch.randn(4, 3, 5).double() for _ in range(3))
    for wanted in range(1, 4):
        leaves = [
            tensor.clone().requires_grad_(bool(wanted >> place & 1))
            for place, tensor in enumerate((x, residual))
        ]
        call(*leaves, (None, None), None, None).backward(dy)
        assert [leaf.grad is not None for leaf in leaves] == [leaf.requires_grad for leaf in leaves]


def test_one_tensor_as_input_and_residual(close):
    x, dy = torch.randn(4, 3, 5).double().requires_grad_(), torch.randn(4, 3, 5).double()
    y = backnorm.torch.batch_norm_add_relu(x, x, None, None, training=True)
    expected = torch.relu(torch.nn.functional.batch_norm(x, None, None, training=True) + x)
    close(y, expected)
    close(torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy))
