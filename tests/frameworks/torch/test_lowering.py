"""Code that Inductor compiles in the place of backnorm's operators, judged like kernels."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

import backnorm.torch
from backnorm.activations import Activation
from backnorm.conformance import judge
from backnorm.reference import counting, pack_mask
from backnorm.torch.memory import array_of
from benchmarks.studies import errors
from tests.support import internals

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated"),
]

EPS, SHAPE = 1e-3, (3, 5, 4, 6)
TYPES = torch.float32, torch.float16, torch.bfloat16
inductor = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor wants a C++ compiler")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def normalise(x, running, weight, bias, training, relu, arithmetic, ceiling=None):
    return backnorm.torch.batch_norm(
        x, *running, weight, bias, training, 0.1, EPS, arithmetic=arithmetic,
        activation=Activation("relu", ceiling) if relu else None
    )  # fmt: skip


def compiled(backend, graphs=None):
    """Return `normalise` compiled; `graphs` gets what the backend was given, forward first."""
    if graphs is None:
        return torch.compile(normalise, backend=backend, fullgraph=True)

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def seen(graph, inputs):
        # Not before: what is registered is registered when a graph is traced.
        known = aot_autograd(fw_compiler=keep, decompositions=select_decomp_table())
        return known(graph, inputs)

    return torch.compile(normalise, backend=seen, fullgraph=True)


def operands(dtype, layout, ratio=3.0):
    x, dy = (torch.randn(SHAPE) for _ in range(2))
    weight, bias = torch.rand(SHAPE[1]) + 0.5, torch.randn(SHAPE[1])
    return layout((x + ratio).to(dtype)), layout(dy.to(dtype)), weight, bias


def assert_passed(verdicts):
    for name, verdict in verdicts.items():
        assert verdict.passed, f"{name}: {verdict.detail}"


def judged(function, dtype, layout, *, training, kind, arithmetic, ratio=3.0):
    """Judge y, its gradients and the statistics that moved."""
    # PyTorch converts float64 to 16 bits by way of float32, and Inductor compares with a ceiling
    # before it rounds: some seeds have an element that tells.
    torch.manual_seed(1)
    x, dy, weight, bias = operands(dtype, layout, ratio)
    relu, ceiling = kind != "", 1.0 if kind == "relu6" else None
    wanted = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    running = torch.randn(SHAPE[1]), torch.rand(SHAPE[1]) + 0.5
    statistics = [array_of(each.clone()) for each in running]
    y = function(x, running, weight, bias, training, relu, arithmetic, ceiling)
    gradients = torch.autograd.grad(y, wanted, dy)
    x, dy, weight, bias, y = (array_of(each.detach()) for each in (x, dy, weight, bias, y))
    dx, dgamma, dbeta = (array_of(each) for each in gradients)
    if training:
        exact = backnorm.batch_norm_forward(x, weight, bias, epsilon=EPS)
        statistics = [exact.mean, exact.variance]
    options = {"epsilon": EPS, "arithmetic": arithmetic}
    added = {"activation": Activation("relu", ceiling)} if relu else {}
    if training:
        assert_passed(judge.check_forward(x, weight, bias, (y, *statistics), **added, **options))
    else:
        assert_passed(judge.check_inference(x, *statistics, weight, bias, y, **added, **options))
    mask = pack_mask(counting(y, ceiling), x) if relu else None
    arguments, gradients = (x, dy, *statistics, weight), (dx, dgamma, dbeta)
    assert_passed(
        judge.check_backward(*arguments, gradients, mask=mask, training=training, **options)
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("arithmetic", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["", "relu", "relu6"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_formulas_are_within_the_budgets_of_kernels(dtype, training, kind, arithmetic):
    graphs = []
    for name in ("contiguous", "channels_last"):
        layout = {"contiguous": torch.clone}.get(
            name, lambda x: x.contiguous(memory_format=torch.channels_last)
        )
        torch._dynamo.reset()
        options = {"training": training, "kind": kind, "arithmetic": arithmetic}
        judged(compiled(None, graphs), dtype, layout, **options)
    called = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    ours = {name for name in called if name.startswith("backnorm.")}
    forward = "forward" if training else "inference"
    assert ours == {
        f"backnorm.{forward}_coefficients.default", "backnorm.backward_coefficients.default"
    }  # fmt: skip


@pytest.mark.parametrize("ratio", [1e2, 1e4])
@pytest.mark.parametrize("arithmetic", ["float32", "float64"])
def test_compiled_program_keeps_digits_with_large_mean(arithmetic, ratio):
    options = {"training": True, "kind": "", "arithmetic": arithmetic, "ratio": ratio}
    judged(compiled(None, []), torch.float32, torch.clone, **options)


def test_compiled_float64_call_keeps_operators():
    graphs = []
    x = torch.randn(SHAPE).double().requires_grad_()
    y = compiled(None, graphs)(x, (None, None), None, None, True, True, None)
    assert torch.equal(y, normalise(x, (None, None), None, None, True, True, None))
    y.backward(torch.randn_like(y))
    called = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    ours = {name for name in called if name.startswith("backnorm.")}
    assert ours == {
        "backnorm.batch_norm.default",
        "backnorm.batch_norm_backward.default",
    }


@pytest.mark.long
@inductor
@pytest.mark.parametrize("arithmetic", ["float32", "float64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_inductor_code_passes_checks_of_judge(training, dtype, arithmetic):
    for kind, memory_format in (
        ("", torch.contiguous_format),
        ("relu", torch.channels_last),
        ("relu6", torch.channels_last),
    ):
        torch._dynamo.reset()
        options = {"training": training, "kind": kind, "arithmetic": arithmetic}

        def layout(x, memory_format=memory_format):
            return x.contiguous(memory_format=memory_format)

        judged(compiled("inductor"), dtype, layout, **options)


@pytest.mark.long
@inductor
def test_inductor_code_in_channels_last_has_no_clone():
    """A convolution, a layer with a ReLU and another: Inductor runs them in one order."""
    from torch._inductor.utils import run_and_get_code

    model = torch.nn.Sequential(
        torch.nn.Conv2d(8, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
    )  # fmt: skip
    backnorm.torch.convert(model)
    x = torch.randn(4, 8, 12, 12).contiguous(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)
    y, code = run_and_get_code(torch.compile(model), x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert code[0].count("torch.ops.backnorm.forward_coefficients.default(") == 2
    assert "torch.ops.backnorm.batch_norm." not in code[0]
    assert "clone" not in code[0]


@pytest.mark.long
@inductor
def test_compiled_dy_has_strides_of_x_where_inductor_changes_layout(monkeypatch):
    """In a model of contiguous tensors x becomes channels_last, and dy is to follow it."""
    strides = internals.strides_of_compiled_gradients(monkeypatch)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(8, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.Hardswish(),
        torch.nn.Conv2d(16, 16, 3, groups=16), torch.nn.BatchNorm2d(16), torch.nn.ReLU6(),
        torch.nn.Conv2d(16, 32, 1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
    )  # fmt: skip
    backnorm.torch.convert(model)
    # What is cached was compiled elsewhere.
    uncached = torch._inductor.config.patch(fx_graph_cache=False)
    with uncached, torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(model)(torch.randn(4, 8, 20, 20)).square().sum().backward()
    assert len(strides) == 3
    assert all(x == dy for x, dy in strides)
    assert any(x[1] == 1 for x, _ in strides)


@pytest.mark.long
@inductor
def test_inductor_errors_are_smaller_than_those_of_pytorch_formulas():
    found = errors.compiled(planes=(7, 28), ratios=(1.0, 1e4))
    for layout in ("contiguous", "channels_last"):
        ours, theirs = found[f"{layout}, backnorm"], found[f"{layout}, PyTorch"]
        assert len(ours) == 4
        for cell, errors_of_cell in ours.items():
            assert len(errors_of_cell) == 5
            for quantity, (_, root_mean_square) in errors_of_cell.items():
                assert root_mean_square < theirs[cell][quantity][1], (layout, cell, quantity)


@pytest.mark.long
@inductor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_freezing_folds_layer_into_convolution(dtype, close):
    """Mean, gain and offset become part of the convolution's weight and bias."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    net(torch.randn(8, 3, 6, 6) * 2 + 1)
    x = torch.randn(2, 3, 6, 6).to(dtype)
    mine = backnorm.torch.convert(net.eval().to(dtype))
    counters["inductor"].clear()
    with torch.no_grad(), torch._inductor.config.patch(freezing=True, fx_graph_cache=False):
        y = torch.compile(mine)(x)
    assert counters["inductor"]["binary_folding"] == 3
    close(y, backnorm.torch.revert(net)(x))
