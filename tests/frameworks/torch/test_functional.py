"""`batch_norm` against PyTorch's, and against the operator on arrays."""

from __future__ import annotations

import inspect
import tracemalloc

import pytest
import torch
from torch.nn import functional

import backnorm
import backnorm.torch

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (6, 5, 7), (4, 3, 5, 5), (2, 3, 4, 3, 2), (1, 2, 3)])
@pytest.mark.parametrize("affine", ["both", "weight", "bias", "neither"])
def test_batch_norm_matches_pytorch(training, shape, affine, parameters, close, step):
    weight, bias, mean, variance = parameters(shape[1])
    weight = weight if affine in ("both", "weight") else None
    bias = bias if affine in ("both", "bias") else None
    x, dy = torch.randn(shape).double() + 1, torch.randn(shape).double()
    results = []
    for function in (backnorm.torch.batch_norm, functional.batch_norm):
        running = mean.clone(), variance.clone()

        def call(x, weight, bias, function=function, running=running):
            return function(x, *running, weight, bias, training, 0.3, 1e-3)

        results.append((step(call, x, weight, bias, dy=dy), running))
    close(*results)
    moved = not torch.equal(results[0][1][0], mean)
    assert moved == training


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rank", [4, 5])
def test_batch_norm_results_have_memory_layout_of_input(dtype, rank, layout, parameters, step):
    x = layout(torch.randn((4, 3, 5, 2, 3)[:rank]).to(dtype))
    weight, bias, *_ = parameters(3, dtype)
    y, dx, *_ = step(
        lambda x, weight, bias: backnorm.torch.batch_norm(x, None, None, weight, bias, True),
        x, weight, bias, dy=torch.randn(x.shape).to(dtype),
    )  # fmt: skip
    assert y.stride() == dx.stride() == torch.empty_like(x).stride()
    assert backnorm.torch.batch_norm(x, weight, bias.abs()).stride() == y.stride()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_output_of_one_element_planes_keeps_memory_format(memory_format):
    x = torch.empty((4, 3, 1, 1), memory_format=memory_format).copy_(torch.randn(4, 3, 1, 1))
    y = backnorm.torch.batch_norm(x, None, None, training=True)
    assert y.stride() == x.stride()


@pytest.fixture
def copied(monkeypatch):
    """Return a function that counts the elements that a call copies, as tensors and as arrays."""
    sizes = []
    for name in ("clone", "contiguous", "copy_", "to", "float"):
        original = getattr(torch.Tensor, name)

        def spy(tensor, *args, original=original, **kwargs):
            result = original(tensor, *args, **kwargs)
            if result.data_ptr() != tensor.data_ptr():
                sizes.append(tensor.numel())
            return result

        monkeypatch.setattr(torch.Tensor, name, spy)

    def count(function):
        sizes.clear()
        tracemalloc.start()
        try:
            function()
            return sum(sizes), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return count


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["contiguous", "channels_last", "permuted", "sliced"])
def test_batch_norm_does_not_copy_dense_tensors(dtype, name, layouts, parameters, copied):
    x, dy = (layouts[name](torch.randn(16, 8, 16, 64).to(dtype)) for _ in range(2))
    weight, *_ = parameters(8, dtype)
    x.requires_grad_()

    def forward():
        return backnorm.torch.batch_norm(x, None, None, weight, None, True)

    y = forward()
    torch.autograd.grad(y, x, dy, retain_graph=True)
    for function in (forward, lambda: torch.autograd.grad(y, x, dy, retain_graph=True)):
        elements, array_bytes = copied(function)
        whole = elements >= x.numel() or array_bytes >= x.numel() * x.itemsize
        assert whole == (name == "sliced"), (elements, array_bytes)


def test_batch_norm_does_not_modify_inputs(layout, parameters, step):
    x, dy = layout(torch.randn(4, 3, 5, 5)), layout(torch.randn(4, 3, 5, 5))
    weight, bias, *_ = parameters(3, torch.float32)
    before = [tensor.clone() for tensor in (x, dy, weight, bias)]
    step(
        lambda x, weight, bias: backnorm.torch.batch_norm(x, None, None, weight, bias, True),
        x, weight, bias, dy=dy,
    )  # fmt: skip
    assert all(map(torch.equal, (x, dy, weight, bias), before))


@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0, -1.2])
@pytest.mark.parametrize("dtype", TYPES)
def test_running_statistics_match_pytorch(momentum, dtype, parameters, close):
    x = torch.randn(5, 3, 4).to(dtype) * 2 + 3
    *_, mean, variance = parameters(3, dtype)
    ours, theirs = [(mean.clone(), variance.clone()) for _ in range(2)]
    for _ in range(3):
        backnorm.torch.batch_norm(x, *ours, training=True, momentum=momentum)
        functional.batch_norm(x, *theirs, training=True, momentum=momentum)
    close(ours, theirs)


def test_frozen_gradients_keep_the_statistics_of_their_forward(parameters, close):
    weight, bias, mean, variance = parameters(3)
    x, dy = torch.randn(4, 3, 5).double().requires_grad_(), torch.randn(4, 3, 5).double()
    expected = torch.autograd.grad(functional.batch_norm(x, mean, variance, weight, bias), x, dy)
    y = backnorm.torch.batch_norm(x, mean, variance, weight, bias)
    backnorm.torch.batch_norm(x + 5, mean, variance, weight, bias, training=True)
    close(torch.autograd.grad(y, x, dy), expected)


@pytest.mark.parametrize("training", [True, False])
def test_backward_computes_required_gradients_alone(training, parameters):
    weight, bias, *statistics = parameters(3)
    running = (None, None) if training else statistics
    x, residual, dy = (torch.randn(4, 3, 5).double() for _ in range(3))

    def call(leaves):
        x, weight, bias, residual = leaves
        y = backnorm.torch.batch_norm(
            x, *running, weight, bias, training, activation="relu", residual=residual
        )
        y.backward(dy)
        return leaves

    tensors = x, weight, bias, residual
    every = call([tensor.clone().requires_grad_() for tensor in tensors])
    for wanted in range(1, 16):
        some = call([
            tensor.clone().requires_grad_(bool(wanted >> position & 1))
            for position, tensor in enumerate(tensors)
        ])  # fmt: skip
        for one, whole in zip(some, every, strict=True):
            assert (one.grad is None) is not one.requires_grad
            assert one.grad is None or torch.equal(one.grad, whole.grad)


def test_batch_norm_without_grad_mode_records_no_graph(parameters):
    weight, bias, *_ = parameters(3)
    x = torch.randn(4, 3, 5).double().requires_grad_()
    with torch.no_grad():
        assert backnorm.torch.batch_norm(x, None, None, weight, bias, True).grad_fn is None
    with torch.inference_mode():
        y = backnorm.torch.batch_norm(x, None, None, weight, bias, True)
    assert y.is_inference()


def test_torch_function_of_tensor_subclass_receives_passed_options():
    calls = []

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            calls.append((function, kwargs))
            return super().__torch_function__(function, types, args, kwargs or {})

    x = torch.randn(4, 3)
    for options in (
        {}, {"activation": "silu", "arithmetic": "float64"},
        {"activation": "relu", "residual": x, "reproducible": True},
    ):  # fmt: skip
        calls.clear()
        y = backnorm.torch.batch_norm(x.as_subclass(Loud), None, None, training=True, **options)
        function, passed = calls[0]
        assert function is backnorm.torch.batch_norm
        assert passed == {"training": True, "momentum": 0.1, "eps": 1e-5, **options}
        assert isinstance(y, Loud)
        expected = backnorm.torch.batch_norm(x, None, None, training=True, **options)
        assert torch.equal(y.as_subclass(torch.Tensor), expected)


def test_signature_is_that_of_pytorch_and_six_keywords():
    ours, theirs = map(inspect.signature, (backnorm.torch.batch_norm, functional.batch_norm))
    parameters, count = list(ours.parameters.values()), len(theirs.parameters)
    assert [(each.name, each.default) for each in parameters[:count]] == [
        (each.name, each.default) for each in theirs.parameters.values()
    ]
    assert {each.name: each.default for each in parameters[count:]} == {
        "activation": None, "residual": None, "arithmetic": None, "reproducible": False,
        "mask": None, "lengths": None,
    }  # fmt: skip
    assert {each.kind for each in parameters[count:]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_empty_integers_has_shape_and_type_of_pytorch(training):
    x, ones = torch.ones(0, 3, dtype=torch.int32), torch.ones(3)
    operands = x, torch.zeros(3), ones, ones, ones, training
    expected = functional.batch_norm(*operands)
    y = backnorm.torch.batch_norm(*operands, activation="relu")
    assert y.shape == expected.shape
    assert y.dtype is expected.dtype
