"""Results lie in memory of PyTorch's, like the results of its own layers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import backnorm
import backnorm.torch
from backnorm.allocation import LARGE
from tests.support.memory_maps import mapped_memory

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


def test_shapes_of_memory_tests_are_below_and_above_large():
    small, large = (torch.empty(shape) for shape in SHAPES)
    assert small.double().nbytes < LARGE < large.half().nbytes


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_can_be_resized(inputs, parameters, dtype, memory_format, training):
    x, dy, residual = inputs(dtype, memory_format)
    weight, bias, mean, variance = parameters(x.shape[1], dtype)
    for activation, is_added in ((None, False), ("relu", False), ("relu", True), ("silu", False)):
        leaves = [each.detach().requires_grad_() for each in (x, weight, bias, residual)]
        leaves = leaves if is_added else leaves[:3]
        y = backnorm.torch.batch_norm(
            leaves[0], mean, variance, *leaves[1:3], training,
            activation=activation, residual=leaves[3] if is_added else None,
        )  # fmt: skip
        check([y, *torch.autograd.grad(y, leaves, dy)])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*((name, torch.float32) for name in ("contiguous", "channels_last", "permuted", "sliced")),
     ("channels_last", torch.bfloat16)],
)  # fmt: skip
def test_operands_can_still_be_resized(parameters, layouts, layout, dtype, training):
    """Operands of first and repeated calls of both orders, also under autocast."""
    x, dy, residual, ddx = (layouts[layout](torch.randn(3, 4, 5, 6).to(dtype)) for _ in range(4))
    weight, bias, mean, variance = parameters(4, dtype)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias, dy)]
    operands = x, mean, variance, weight, bias, training
    used = [x, dy, ddx, weight, bias, mean, variance, residual]
    for cast in (False, False, True):
        with torch.autocast("cpu", enabled=cast):
            y = backnorm.torch.batch_norm(*operands)
            first = torch.autograd.grad(y, leaves[:3], dy, create_graph=True)
            used += [*first, *torch.autograd.grad(first[0], [dy, weight], ddx)]
            y = backnorm.torch.batch_norm(*operands, activation="relu", residual=residual)
            used += [y, *torch.autograd.grad(y, leaves[:3], dy)]
    with torch.no_grad():
        backnorm.torch.batch_norm(*operands)
    for tensor in used:
        storage = tensor.untyped_storage()
        assert storage.resizable()
        storage.resize_(0)


def test_layer_with_tensors_resized_between_calls_matches_pytorch(close):
    layer, expected = backnorm.torch.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    x = torch.empty(0)
    for count in (4, 8, 2, 8):
        torch.randn(count, 3, 5, out=x)
        y = layer(x)
        close(y, expected(x), factor=4)
        # As by those who give back the memory of what they have used.
        y.detach().resize_(0)
        x.resize_(0)
        weight = layer.weight.detach().clone()
        layer.weight.untyped_storage().resize_(0)
        layer.weight.untyped_storage().resize_(weight.nbytes)
        layer.weight.data.copy_(weight)


def test_rejected_call_leaves_storages_resizable():
    x, mean, variance = torch.randn(4, 3), torch.zeros(3), -torch.ones(3)
    with pytest.raises(backnorm.ArgumentError, match="channel 0"):
        backnorm.torch.batch_norm(x, mean, variance)
    for tensor in (x, mean, variance):
        assert tensor.untyped_storage().resizable()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("memory_format", FORMATS)
def test_second_order_gradients_can_be_resized(inputs, parameters, dtype, memory_format):
    x, dy, _ = (tensor.requires_grad_() for tensor in inputs(dtype, memory_format))
    weight = parameters(x.shape[1], dtype)[0].requires_grad_()
    y = backnorm.torch.batch_norm(x, None, None, weight, None, True)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy, create_graph=True)
    cotangents = torch.randn_like(dx), torch.randn_like(dweight)
    check(torch.autograd.grad((dx, dweight), (x, dy, weight), cotangents))


@pytest.mark.skipif(sys.platform != "linux", reason="advice for huge pages is Linux's")
def test_large_results_of_layer_are_in_huge_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no huge pages")
    x, residual = (torch.randn(2, 4, 1024, 1024, requires_grad=True) for _ in range(2))
    y = backnorm.torch.BatchNorm2d(4, activation="relu")(x, residual=residual)
    assert _is_advised(y)
    dx, dresidual = torch.autograd.grad(y, (x, residual), torch.randn_like(y))
    assert _is_advised(dx)
    assert _is_advised(dresidual)
    assert not _is_advised(residual)


def _is_advised(tensor):
    """Whether huge pages were requested for the memory in the middle of a tensor."""
    at = tensor.data_ptr() + tensor.nbytes // 2
    [found] = [is_advised for begin, end, is_advised in mapped_memory() if begin <= at < end]
    return found
