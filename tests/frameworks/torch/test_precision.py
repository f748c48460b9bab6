"""Autocast and deterministic algorithms: as with PyTorch's layers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

import backnorm
import backnorm.torch

TYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16
# The type that autocast casts to, and whether the function is compiled, which takes seconds.
CASTS = pytest.mark.parametrize(
    ("cast", "compiled"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.float16, True)],
    ids=["bfloat16", "float16", "compiled"],
)


def call(function, cast, dtypes, training, residual):
    """Return y, running statistics and the gradients, under autocast to the type `cast`."""
    torch.manual_seed(0)
    x_type, weight_type, running_type = dtypes
    x, other = torch.randn(2, 4, 3, 5).to(x_type).unbind()
    weight, bias = (torch.rand(2, 3) + 0.5).to(weight_type).unbind()
    mean, variance = (torch.rand(2, 3) + 0.5).to(running_type).unbind()
    wanted = [x, weight, bias, *([other] if residual else [])]
    for tensor in wanted:
        tensor.requires_grad_()
    with torch.autocast("cpu", cast):
        y = function(x, other if residual else None, mean, variance, weight, bias, training)
    dy = torch.randn(y.shape).to(y.dtype)
    return y.detach(), mean, variance, *torch.autograd.grad(y, wanted, dy)


def theirs(x, residual, *arguments):
    y = functional.batch_norm(x, *arguments)
    return y if residual is None else torch.relu(y + residual)


def ours(x, residual, *arguments):
    activation = None if residual is None else "relu"
    return backnorm.torch.batch_norm(x, *arguments, activation=activation, residual=residual)


@pytest.mark.covering(0)
@pytest.mark.parametrize("residual", [False, True], ids=["", "add_relu"])
@CASTS
def test_batch_norm_under_autocast_matches_types_and_values_of_pytorch(
    compiled, cast, residual, close
):
    combinations = list(itertools.product(TYPES, repeat=3))
    if compiled:
        combinations = [(dtype, torch.float32, torch.float32) for dtype in TYPES[1:3]]
    taken = 0
    for dtypes, training in itertools.product(combinations, (True, False)):
        functions = theirs, ours
        if compiled:
            torch._dynamo.reset()
            functions = (torch.compile(f, backend="aot_eager", fullgraph=True) for f in functions)
        arguments = cast, dtypes, training, residual
        results = []
        for function in functions:
            try:
                results.append(call(function, *arguments))
            except RuntimeError as error:
                results.append(error)
        expected, found = results
        if isinstance(expected, RuntimeError):
            # backnorm takes some mixtures of float32 and a 16-bit type that PyTorch does not.
            mixed = dtypes[0].itemsize == 2 and not isinstance(found, RuntimeError)
            assert mixed or isinstance(found, backnorm.ArgumentError), dtypes
            continue
        taken += 1
        assert [each.dtype for each in found] == [each.dtype for each in expected], dtypes
        # Where 16-bit sums round to 0 or not, both sides of the ReLU are right.
        count = 3 if residual and dtypes[0].itemsize == 2 else None
        close(found[:count], expected[:count], factor=4)
    assert taken == (4 if compiled else 12)


@pytest.fixture
def deterministic():
    """Deterministic algorithms, which fill memory that is new with NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(4, 5, 3), (9, 32, 71, 73)], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_with_deterministic_algorithms_keeps_bits(shape, dtype, training, request):
    """The same bits as otherwise, each time, of both orders."""
    x, dy, ddx, residual = (torch.randn(shape).to(dtype) for _ in range(4))
    weight, bias, mean, variance = (torch.rand(shape[1]).to(dtype) + 0.5 for _ in range(4))
    wanted = [tensor.requires_grad_() for tensor in (x, residual, weight, bias)]

    def results():
        running = mean.clone(), variance.clone()
        y = backnorm.torch.batch_norm(
            x, *running, weight, bias, training, activation="relu", residual=residual
        )
        first = torch.autograd.grad(y, wanted, dy, create_graph=True)
        second = torch.autograd.grad(first[0], [weight], ddx)
        return [y.detach(), *running, *first, *second]

    expected = results()
    request.getfixturevalue("deterministic")
    for _ in range(3):
        for one, other in zip(results(), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("deterministic")
def test_compiled_layer_with_deterministic_algorithms_has_bits_of_eager_layer():
    torch._dynamo.reset()
    layer = backnorm.torch.BatchNormReLU2d(3)
    x = torch.randn(4, 3, 5, 6, requires_grad=True)
    dy = torch.randn(4, 3, 5, 6)
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        y = run(x)
        results.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
