"""What we return is on memory of PyTorch's: as ordinary as what its own layers return."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import backnorm
import backnorm.torch
from backnorm.allocation import LARGE
from backnorm.torch import reuse
from backnorm.torch.aten import use_for_aten
from backnorm.torch.reuse import empty_like

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


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted", "sliced"])
def test_what_we_are_given_can_still_be_resized(parameters, layouts, layout, dtype, training, relu):
    """After calls of both orders, the first and repeated ones, also under autocast."""
    x, dy, residual, ddx = (layouts[layout](torch.randn(3, 4, 5, 6).to(dtype)) for _ in range(4))
    weight, bias, mean, variance = parameters(4, dtype)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias, dy)]
    function = backnorm.torch.batch_norm_relu if relu else backnorm.torch.batch_norm
    given = [x, dy, ddx, weight, bias, mean, variance]
    for _ in range(2):
        for cast in (False, True):
            with torch.autocast("cpu", enabled=cast):
                y = function(x, mean, variance, weight, bias, training)
                first = torch.autograd.grad(y, leaves[:3], dy, create_graph=True)
                given += [*first, *torch.autograd.grad(first[0], [dy, weight], ddx)]
                y = backnorm.torch.batch_norm_add_relu(
                    x, residual, mean, variance, weight, bias, training
                )
                given += [y, *torch.autograd.grad(y, leaves[:3], dy)]
    with torch.no_grad():
        function(x, mean, variance, weight, bias, training)
    with use_for_aten():
        functional.batch_norm(x, mean, variance, weight, bias, training).backward(dy.detach())
    for tensor in (*given, residual, x.grad):
        storage = tensor.untyped_storage()
        assert storage.resizable()
        storage.resize_(0)


def test_calls_with_what_was_resized_between_them(close):
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


def test_a_refused_call_leaves_memory_as_it_was():
    x, mean, variance = torch.randn(4, 3), torch.zeros(3), -torch.ones(3)
    with pytest.raises(backnorm.ArgumentError, match="channel 0"):
        backnorm.torch.batch_norm(x, mean, variance)
    for tensor in (x, mean, variance):
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


@pytest.fixture
def nothing_kept():
    reuse._kept.clear()
    yield
    reuse._kept.clear()


def _like(megabytes):
    return torch.empty(megabytes << 18)


def test_memory_of_an_output_that_is_gone_is_used_again(nothing_kept):
    x = _like(8)
    first = empty_like(x)
    place = first.data_ptr()
    del first
    again = empty_like(x.view(2, -1).t())
    assert again.data_ptr() == place
    assert again.shape == (x.numel() // 2, 2)
    assert again.stride() == (1, x.numel() // 2)
    assert not again._is_view()


HOLDERS = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor.view(-1)[5:9],
    "storage": lambda tensor: tensor.untyped_storage(),
    "typed storage": lambda tensor: torch.TypedStorage(
        wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True
    ),
    "array": lambda tensor: tensor.numpy(),
    "capsule": torch.utils.dlpack.to_dlpack,
    "graph": lambda tensor: torch.ones(8 << 18, requires_grad=True).mul(tensor).grad_fn,
    "parameter": torch.nn.Parameter,
    "data": lambda tensor: tensor.data,
    "set": lambda tensor: torch.empty(0).set_(tensor),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_somebody_has_is_not_given_away(nothing_kept, holder):
    x = _like(8)
    tensor = empty_like(x).fill_(3)
    place = tensor.data_ptr()
    held = HOLDERS[holder](tensor)
    del tensor
    others = [empty_like(x) for _ in range(20)]
    assert place not in {other.data_ptr() for other in others}
    assert len({other.data_ptr() for other in others}) == 20
    del held, others
    # Afterwards it is.
    assert place in {other.data_ptr() for other in _many(x, 30)}


def _many(x, count):
    return [empty_like(x) for _ in range(count)]


def test_what_its_holder_gave_back_or_shared_is_not_used_again(nothing_kept):
    x = _like(8)
    given_back = empty_like(x)
    given_back.untyped_storage().resize_(0)
    shared = empty_like(x).share_memory_()
    shared_place = shared.data_ptr()
    grown = empty_like(x).resize_(2 * x.numel())
    del given_back, shared, grown
    for tensor in _many(x, 5):
        assert tensor.untyped_storage().nbytes() == x.nbytes
        assert tensor.data_ptr() != shared_place
        tensor.fill_(1)


def test_no_more_is_kept_than_is_said(nothing_kept):
    def total():
        return sum(size * len(shelf) for size, shelf in reuse._kept.items())

    live = [empty_like(_like(size)) for size in (100, 200, 300, 400, 500)]
    assert total() == 600 << 20
    del live
    # Those that nobody has make room.
    other = empty_like(_like(700))
    assert total() <= reuse._MOST_BYTES
    assert (700 << 20) in reuse._kept
    assert other.nbytes == 700 << 20
    del other
    assert empty_like(_like(900)).nbytes == 900 << 20
    assert total() <= reuse._MOST_BYTES


def test_threads_do_not_get_the_same_memory(nothing_kept):
    x, wrong = _like(2), []

    def work(number):
        for k in range(300):
            tensor = empty_like(x).fill_(1000 * number + k)
            time.sleep(0)
            if not torch.all(tensor == 1000 * number + k):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_a_count_of_holders_memory_is_new(nothing_kept, monkeypatch):
    monkeypatch.setattr(reuse, "_holders", None)
    empty_like(_like(8))
    assert not reuse._kept
