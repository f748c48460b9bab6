"""What we return is on memory of PyTorch's: as ordinary as what its own layers return."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import backnorm.torch
from backnorm.allocation import LARGE
from backnorm.torch.aten import use_for_aten
from backnorm.torch.memory import empty_like

SHAPES = [(3, 4, 5, 6), (9, 32, 71, 73)]  # below and above LARGE in all types
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FORMATS = (torch.contiguous_format, torch.channels_last)


def check(tensors):
    """Check that tensors are no views, and can grow."""
    for tensor in tensors:
        assert not tensor._is_view()
        assert tensor.untyped_storage().resizable()
        tensor = tensor.detach()
        elements = tensor.clone().as_strided((tensor.numel(),), (1,))
        tensor.resize_(2 * tensor.numel() + 1)
        assert torch.equal(tensor[: len(elements)], elements)
        tensor.untyped_storage().resize_(0)


@pytest.fixture(params=SHAPES, ids=str)
def inputs(request):
    """Make x, dy and a residual."""

    def make(dtype=torch.float32, memory_format=torch.contiguous_format):
        tensors = (torch.randn(request.param) for _ in range(3))
        return [t.to(dtype).contiguous(memory_format=memory_format) for t in tensors]

    return make


def test_one_shape_is_small_and_one_large():
    small, large = (torch.empty(shape) for shape in SHAPES)
    assert small.double().nbytes < LARGE < large.half().nbytes


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_can_be_resized(inputs, parameters, dtype, memory_format, training):
    x, dy, residual = inputs(dtype, memory_format)
    weight, bias, mean, variance = parameters(x.shape[1], dtype)
    for function in (
        backnorm.torch.batch_norm,
        backnorm.torch.batch_norm_relu,
        backnorm.torch.batch_norm_add_relu,
    ):
        tensors = [x, residual] if function is backnorm.torch.batch_norm_add_relu else [x]
        tensors = [tensor.detach().requires_grad_() for tensor in tensors]
        tensors += [weight.requires_grad_(), bias.requires_grad_()]
        y = function(*tensors[:-2], mean, variance, weight, bias, training)
        results = torch.autograd.grad(y, tensors, dy)
        check([y, *results])


def test_what_we_are_given_can_still_be_resized(inputs, parameters):
    x, dy, residual = inputs()
    weight, bias, mean, variance = parameters(x.shape[1], x.dtype)
    given = x, residual, dy, weight, bias, mean, variance
    leaves = [tensor.requires_grad_() for tensor in (x, residual, weight, bias)]
    y = backnorm.torch.batch_norm_add_relu(*leaves[:2], mean, variance, *leaves[2:], True)
    dx = torch.autograd.grad(y, x, dy, create_graph=True)
    torch.autograd.grad(dx, x, residual.detach())
    for tensor in given:
        assert tensor.untyped_storage().resizable()


@pytest.mark.parametrize("layer", ["BatchNorm2d", "BatchNormReLU2d"])
@pytest.mark.parametrize("training", [True, False])
def test_those_of_layers_too(inputs, layer, training):
    x, dy, _ = inputs()
    module = getattr(backnorm.torch, layer)(x.shape[1]).train(training)
    y = module(x.requires_grad_())
    y.backward(dy)
    results = [y, x.grad, module.weight.grad, module.bias.grad]
    with torch.no_grad():
        check([module(x), *results])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("memory_format", FORMATS)
def test_those_of_the_second_order_too(inputs, parameters, dtype, memory_format):
    x, dy, _ = (tensor.requires_grad_() for tensor in inputs(dtype, memory_format))
    weight = parameters(x.shape[1], dtype)[0].requires_grad_()
    y = backnorm.torch.batch_norm(x, None, None, weight, None, True)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy, create_graph=True)
    cotangents = torch.randn_like(dx), torch.randn_like(dweight)
    check(torch.autograd.grad((dx, dweight), (x, dy, weight), cotangents))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("memory_format", FORMATS)
def test_those_of_pytorchs_operator_too(inputs, dtype, memory_format):
    x, dy, _ = inputs(dtype, memory_format)
    weight = torch.rand(x.shape[1], dtype=dtype)
    _, mean, invstd = torch.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)
    with use_for_aten():
        results = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, None, None, mean, invstd, True, 1e-5, [True, True, True]
        )
    assert results[0].stride() == x.stride()
    check(results)


@pytest.mark.skipif(sys.platform != "linux", reason="advice for huge pages is Linux's")
def test_large_ones_are_in_huge_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no huge pages")
    y = empty_like(torch.empty(16 << 20))
    at = y.data_ptr() + y.nbytes // 2
    advised = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
        elif words[0] == "VmFlags:" and begin <= at < end:
            advised = "hg" in words
    assert advised
