"""`torch.compile`: whole graphs, changing shapes, transforms inside."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jvp, vmap

import backnorm.torch

from .conftest import PAIRS, Block

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def models(fuse, training):
    theirs = Block().double().train(training)
    options = {"fuse": PAIRS, "example": torch.randn(4, 3, 5, 6)} if fuse else {}
    return backnorm.torch.convert(copy.deepcopy(theirs), **options), theirs


def outcome(call, model, x, dy):
    """Return y and all gradients, and leave the running statistics in the model."""
    model.zero_grad()
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = call(x)
    y.backward(dy)
    return y.detach(), x.grad, [p.grad for p in model.parameters()], [*model.buffers()]


@pytest.mark.covering(0)
@pytest.mark.parametrize("fuse", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["contiguous", "channels_last"])
def test_compiled_model_reuses_graph_for_changing_shapes(fuse, training, name, layouts, close):
    ours, theirs = models(fuse, training)
    frames, first = [], 0

    def counting(graph, inputs):
        frames.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(ours, backend=counting, fullgraph=True, dynamic=True)
    for shape in ((4, 3, 5, 6), (7, 3, 8, 5), (2, 3, 9, 9)):
        x, dy = (layouts[name](torch.randn(shape).double()) for _ in range(2))
        result = outcome(compiled, ours, x, dy)
        close(result, outcome(theirs, theirs, x, dy), factor=16)
        assert result[0].is_contiguous(memory_format=torch.channels_last) == (
            name == "channels_last"
        )
        first = first or len(frames)
    assert len(frames) == first, "a new graph for a new shape"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a C++ compiler")
def test_inductor_matches_eager_call(close):
    weight = torch.rand(3).double().requires_grad_()

    def call(x, mean, variance):
        y = backnorm.torch.batch_norm(x, mean, variance, weight, None, True)
        return backnorm.torch.batch_norm(
            y, None, None, weight, None, True, activation="relu", residual=x
        )

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for shape in ((4, 3, 5), (7, 3, 8)):
        x, dy = torch.randn(shape).double().requires_grad_(), torch.randn(shape).double()
        results = []
        for function in (compiled, call):
            running = torch.zeros(3).double(), torch.ones(3).double()
            y = function(x, *running)
            results.append((y.detach(), torch.autograd.grad(y, (x, weight), dy), running))
        close(*results)


def test_compiled_bfloat16_model_without_gradients_equals_eager(close):
    ours, theirs = models(True, False)
    with torch.no_grad():
        compiled = torch.compile(ours.bfloat16(), backend="aot_eager", fullgraph=True)
        x = torch.randn(4, 3, 5, 5).bfloat16()
        assert torch.equal(compiled(x), ours(x))
        close(compiled(x), theirs.bfloat16()(x), factor=2)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_compiled_layer_with_and_without_momentum_matches_pytorch(momentum, close):
    ours, theirs = (
        cls(3, momentum=momentum) for cls in (backnorm.torch.BatchNorm1d, torch.nn.BatchNorm1d)
    )
    # With momentum None the share of a batch is read from the counter: no whole graph, in PyTorch
    # as here.
    compiled = torch.compile(ours, backend="eager", fullgraph=momentum is not None)
    for _ in range(3):
        x = torch.randn(5, 3)
        close(compiled(x), theirs(x))
    close([*ours.buffers()], [*theirs.buffers()])


def functions():
    x, factor = torch.randn(4, 3, 2).double(), torch.randn(4, 3, 2).double()
    weight = torch.rand(3).double()

    def f(x):
        y = backnorm.torch.batch_norm(x, None, None, weight, None, True)
        y = backnorm.torch.batch_norm(
            y, None, None, weight, None, True, activation="relu", residual=x
        )
        return (y * factor).pow(2).sum()

    return f, x


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(lambda f, x: grad(f)(x), marks=pytest.mark.long),
        pytest.param(lambda f, x: jvp(f, (x,), (x * x,)), marks=pytest.mark.long),
        lambda f, x: hessian(f)(x),
        pytest.param(lambda f, x: jacfwd(jacfwd(f))(x), marks=pytest.mark.long),
        pytest.param(lambda f, x: vmap(f)(torch.stack([x, x * x])), marks=pytest.mark.long),
        lambda f, x: vmap(grad(f))(torch.stack([x, x * x])),
    ],
    ids=["grad", "jvp", "hessian", "forward twice", "vmap", "vmap of grad"],
)
def test_compiled_transforms_match_eager(transform, close):
    f, x = functions()
    compiled = torch.compile(lambda x: transform(f, x), backend="aot_eager", fullgraph=True)
    close(compiled(x), transform(f, x))


@pytest.mark.parametrize(
    "mapped", [(0, 0, 0, None), (None, None, None, 0), (None, 0, 0, 0)], ids=str
)
def test_compiled_vmap_updates_running_statistics_as_eager(mapped, close):
    sizes = (4, 3, 2), (3,), (3,), (3,)

    def moved(call):
        torch.manual_seed(1)
        operands = [
            torch.rand(size if axis is None else (2, *size)).double() + 0.5
            for size, axis in zip(sizes, mapped, strict=True)
        ]
        return call(*operands), operands

    def mapped_over(x, mean, variance, weight):
        def call(x, mean, variance, weight):
            return backnorm.torch.batch_norm(
                x, mean, variance, weight, None, True, activation="relu"
            )

        return vmap(call, mapped)(x, mean, variance, weight)

    compiled = torch.compile(mapped_over, backend="aot_eager", fullgraph=True)
    close(moved(compiled), moved(mapped_over))


def test_compiled_forward_mode_matches_eager(close):
    from torch.autograd import forward_ad

    f, x = functions()

    def tangent(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x * x))).tangent

    compiled = torch.compile(tangent, backend="aot_eager", fullgraph=True)
    close(compiled(x), tangent(x))


def test_compiled_call_raises_error_of_argument():
    def call(x, weight):
        return backnorm.torch.batch_norm(x, None, None, weight, None, True)

    compiled = torch.compile(call, backend="eager")
    with pytest.raises(Exception, match="weight: must hold one value per channel"):
        compiled(torch.randn(4, 3), torch.ones(2))
