"""A ReLU with a ceiling beside PyTorch's ReLU6 and hardtanh, however it is called."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import backnorm.torch
from backnorm.torch import convert
from backnorm.torch.activations import RELU, Activation, activation_of

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CEILING = 1.25


def ours(x, residual, weight, bias, running=(None, None), training=True, ceiling=CEILING):
    given = *running, weight, bias, training
    if residual is None:
        return backnorm.torch.batch_norm_relu(x, *given, ceiling=ceiling)
    return backnorm.torch.batch_norm_add_relu(x, residual, *given, ceiling=ceiling)


def in_steps(normalise):
    """Return the same by a function that normalises, and PyTorch's hardtanh."""

    def call(x, residual, weight, bias, running=(None, None), training=True):
        y = normalise(x, *running, weight, bias, training)
        return functional.hardtanh(y if residual is None else y + residual, 0.0, CEILING)

    return call


theirs = in_steps(functional.batch_norm)


def operands(dtype=torch.float64, shape=(6, 3, 4, 4)):
    x, residual, dy = (torch.randn(shape).to(dtype) for _ in range(3))
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    weight, bias = (torch.rand(shape[1]).to(wide) + 0.5 for _ in range(2))
    return x, residual, weight, bias, dy


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_gradients_are_where_those_of_hardtanh_are(dtype, training, layout, step):
    """To the bit: rounding y and cutting it off commute."""
    x, _, weight, bias, dy = operands(dtype, (6, 3, 20, 20))
    x, dy = layout(x), layout(dy)
    running = (None, None) if training else (0.1 * weight, weight)

    def run(function):
        def call(x, weight, bias):
            return function(x, None, weight, bias, running, training)

        return step(call, x, weight, bias, dy=dy)

    mine, expected = run(ours), run(in_steps(backnorm.torch.batch_norm))
    assert all(map(torch.equal, mine, expected))
    assert (mine[0] == CEILING).any()
    assert (mine[0] == 0).any()


@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
@pytest.mark.parametrize("has_residual", [True, False])
def test_first_and_second_order(training, has_residual, close):
    x, residual, weight, bias, dy = operands()
    running = (None, None) if training else (bias.clone(), weight.clone())
    leaves = [x, *([residual] if has_residual else []), weight, bias]
    found = []
    for function in (ours, theirs):
        inputs = [each.clone().requires_grad_() for each in leaves]
        given = inputs if has_residual else [inputs[0], None, *inputs[1:]]
        y = function(*given, running, training)
        first = torch.autograd.grad(y, inputs, dy, create_graph=True)
        loss = (first[0] * torch.cos(dy)).sum()
        found.append((y, first, torch.autograd.grad(loss, inputs, materialize_grads=True)))
    close(*found, factor=64)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_transforms(training, close):
    x, residual, weight, bias, dy = operands(shape=(4, 3, 5))
    running = (None, None) if training else (bias.clone(), weight.clone())
    xs, dys = torch.stack([x, 2 * x]), torch.stack([dy, -dy])
    found = []
    for function in (ours, theirs):

        def loss(x, dy, function=function):
            return (function(x, residual, weight, bias, running, training) * dy).sum()

        one = torch.func.grad(loss)(x, dy)
        many = torch.func.vmap(torch.func.grad(loss))(xs, dys)
        tangent = torch.func.jvp(lambda x, loss=loss: loss(x, dy), (x,), (dy,))
        found.append((one, many, tangent))
    close(*found, factor=16)


def test_vmap_of_operators(close):
    x, residual, weight, bias, _ = operands(shape=(4, 3, 5))
    xs = torch.stack([x, 2 * x])
    operator = torch.ops.backnorm.batch_norm

    def call(x):
        return operator(x, residual, weight, bias, 1e-5, True, None, CEILING)[0]

    close(torch.vmap(call)(xs), torch.stack([theirs(x, residual, weight, bias) for x in xs]))


@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_operators_check_themselves(training):
    x, residual, weight, bias, _ = operands()
    tensors = [each.requires_grad_() for each in (x, residual, weight, bias)]
    if training:
        operator, statistics = torch.ops.backnorm.batch_norm.default, ()
    else:
        operator = torch.ops.backnorm.batch_norm_inference.default
        statistics = torch.zeros(3).double(), torch.ones(3).double()
    arguments = *tensors, *statistics, 1e-5, True, None, CEILING
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_exported_programs_have_the_ceiling(training, close):
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Hardtanh(0, CEILING))
    net[0].running_var.fill_(0.3)
    net.train(training)
    mine = convert(copy.deepcopy(net), fuse=True)
    x = torch.randn(4, 3, 5, 6)
    program = torch.export.export(mine, (x,))
    kept = io.BytesIO()
    torch.export.save(program, kept)
    kept.seek(0)
    loaded = torch.export.load(kept).module()
    close(loaded(x), net(x))
    calls = [node for node in program.graph.nodes if "backnorm.batch_norm" in str(node.target)]
    # In evaluation the program has PyTorch's operators.
    assert [CEILING in node.args for node in calls] == [True] * training


@pytest.mark.filterwarnings("ignore:`torch.jit.script", "ignore:`torch._prims_common.check` is")
def test_a_compiled_model(close):
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU6(inplace=True), nn.BatchNorm2d(4),
        nn.Hardtanh(0, 0.5),
    )  # fmt: skip
    mine = convert(copy.deepcopy(net), fuse=True)
    torch._dynamo.reset()
    run = torch.compile(mine, backend="aot_eager", fullgraph=True)
    x, dy = torch.randn(8, 3, 5, 6), torch.randn(8, 4, 5, 6)
    found = []
    for model, call in ((mine, run), (net, net)):
        y = call(x)
        y.backward(dy)
        found.append((y, [each.grad for each in model.parameters()][2:]))
    close(*found, factor=16)


def test_modules(close):
    layer = backnorm.torch.BatchNormReLU2d(3, ceiling=0.75).double()
    assert repr(layer).endswith("track_running_stats=True, ceiling=0.75)")
    x = torch.randn(4, 3, 5, 6).double()
    close(
        layer(x), functional.hardtanh(functional.batch_norm(x, None, None, training=True), 0, 0.75)
    )
    assert layer(x, x).max() == copy.deepcopy(layer)(x, x).max() == 0.75
    plain = backnorm.torch.BatchNormReLU2d(3).double()
    assert "ceiling" not in repr(plain)
    assert plain(x).max() > 1.5
    with pytest.raises(backnorm.ArgumentValueError, match=r"^ceiling: "):
        backnorm.torch.BatchNormReLU2d(3, ceiling=0)


@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_reproducible(training, close):
    x, residual, weight, bias, _ = operands()
    running = (bias.clone(), weight.clone())
    y = backnorm.torch.batch_norm_add_relu(
        x, residual, *(each.clone() for each in running), weight, bias, training,
        ceiling=CEILING, reproducible=True,
    )  # fmt: skip
    close(y, theirs(x, residual, weight, bias, running, training))


def test_empty_tensors():
    x = torch.zeros(0, 3, 4)
    assert backnorm.torch.batch_norm_relu(x, None, None, training=True, ceiling=6).shape == x.shape
    # What only PyTorch takes: a weight of another length.
    y = backnorm.torch.batch_norm_relu(x, None, None, torch.ones(5), training=True, ceiling=6.0)
    assert y.shape == x.shape


def test_a_type_that_rounds_the_ceiling():
    """PyTorch compares with what was not rounded, and lets gradients pass where y is cut off."""
    x = torch.randn(8, 3, 9).bfloat16().requires_grad_()
    for training, running in ((True, (None, None)), (False, (torch.zeros(3), torch.ones(3)))):
        y = ours(x, None, None, None, running, training, ceiling=0.7)
        highest = torch.tensor(0.7).bfloat16()
        assert y.max() == highest
        assert float(highest) < 0.7
        residual = torch.zeros_like(x, requires_grad=True)
        y = ours(x, residual, None, None, running, training, ceiling=0.7)
        (gradient,) = torch.autograd.grad(y, residual, torch.ones_like(y))
        assert torch.equal(gradient == 1, (y > 0) & (y < highest))


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), 1e-60])
def test_a_ceiling_that_is_not_more_than_0_is_refused(value):
    with pytest.raises(backnorm.ArgumentValueError, match=r"^ceiling: "):
        ours(torch.randn(4, 3, 5), None, None, None, ceiling=value)


@pytest.mark.parametrize("value", [True, "6", torch.ones(2)])
def test_a_ceiling_that_is_no_number_is_refused(value):
    with pytest.raises(backnorm.ArgumentTypeError, match=r"^ceiling: "):
        ours(torch.randn(4, 3, 5), None, None, None, ceiling=value)


def test_an_infinite_ceiling_is_none():
    x = torch.randn(4, 3, 5)
    assert torch.equal(
        ours(x, x, None, None, ceiling=float("inf")), ours(x, x, None, None, ceiling=None)
    )


MODULES = {
    nn.ReLU(): RELU, nn.ReLU6(): Activation("relu", 6.0),
    nn.Hardtanh(0, 6): Activation("relu", 6.0), nn.Hardtanh(0, 20): Activation("relu", 20.0),
    nn.Hardtanh(0.0, 0.75): Activation("relu", 0.75),
    nn.Hardtanh(): None, nn.Hardtanh(0, 0.1): None, nn.Hardtanh(0, 1e6): None,
    nn.Hardtanh(0, 1e-6): None, nn.Hardtanh(0, float("inf")): None, nn.LeakyReLU(): None,
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=repr)
def test_which_modules_are_a_relu(module):
    assert activation_of(module) == MODULES[module]


def test_a_module_whose_bounds_change_is_called(close):
    net = convert(nn.Sequential(nn.BatchNorm1d(3), nn.Hardtanh(0, 2)), fuse=True).double()
    x = torch.randn(9, 3).double()
    for bounds in ((0, 2), (0, 0.5), (-0.5, 0.5)):
        net[1].min_val, net[1].max_val = bounds
        expected = functional.hardtanh(functional.batch_norm(x, None, None, training=True), *bounds)
        close(net(x), expected)


def test_reports():
    reports = []
    net = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU6(), nn.BatchNorm1d(3), nn.Hardtanh())
    convert(net, fuse=True, report=reports.append)
    assert [each.fused for each in reports] == [True, False]
    assert "fused with a ReLU with the ceiling 6.0" in str(reports[0])


def test_mobilenet_v2():
    """Every layer before a ReLU6 is fused, but for one whose ReLU6 somebody looks at."""
    from benchmarks.models import libraries

    net = libraries.torchvision().models.mobilenet_v2(num_classes=7)
    reports = []
    convert(net, fuse=True, report=reports.append)
    assert [sum(each.fused for each in reports), len(reports)] == [35, 52]
    x = torch.randn(2, 3, 64, 64)

    def names():
        with warnings.catch_warnings(), torch.profiler.profile() as profile:
            warnings.simplefilter("ignore")
            net(x)
        found = [each.key for each in profile.events()]
        return [found.count(f"backnorm::batch_norm{kind}") for kind in ("", "_relu")]

    assert names() == [17, 35]
    seen = []
    net.features[1].conv[0][2].register_forward_hook(lambda m, i, y: seen.append(y.max()))
    assert names() == [18, 34]
    assert len(seen) == 1
