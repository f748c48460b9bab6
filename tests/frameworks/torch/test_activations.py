"""SiLU and Hardswish behind a normalisation, beside the two steps that they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import backnorm.torch
from backnorm.activations import MASKLESS
from backnorm.torch import activations, convert

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FUNCTIONS = {"silu": functional.silu, "hardswish": functional.hardswish}
MODULES = {"silu": nn.SiLU, "hardswish": nn.Hardswish}

every_activation = pytest.mark.parametrize("name", FUNCTIONS)


def test_kernels_and_pytorchs_operators_are_of_the_same_activations():
    assert set(activations._KINDS) == set(MASKLESS)


def ours(name):
    def call(x, weight, bias, running=(None, None), training=True, **how):
        given = x, *running, weight, bias, training
        return backnorm.torch.batch_norm_activation(*given, activation=name, **how)

    return call


def in_steps(name, normalise=functional.batch_norm):
    def call(x, weight, bias, running=(None, None), training=True, **how):
        return FUNCTIONS[name](normalise(x, *running, weight, bias, training, **how))

    return call


def operands(dtype=torch.float64, shape=(6, 3, 4, 4)):
    """Return x, weight, bias and dy such that all parts of a Hardswish are reached."""
    x, dy = (torch.randn(shape).to(dtype) for _ in range(2))
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    weight, bias = (2 * torch.rand(shape[1]).to(wide) + 1.5 for _ in range(2))
    return x, weight, bias - 2, dy


@every_activation
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_training_is_near_what_float64_gives(name, dtype, layout, step):
    given = operands(dtype, (6, 3, 20, 20))
    wide = [each.double() for each in given]
    found = []
    for function, (x, weight, bias, dy) in ((ours(name), given), (in_steps(name), wide)):
        running = (0.1 * weight, weight.clone())

        def call(x, weight, bias, function=function, running=running):
            return function(x, weight, bias, running)

        found.append((*step(call, layout(x), weight, bias, dy=layout(dy)), *running))
    eps = torch.finfo(dtype).eps
    for mine, expected in zip(*found, strict=True):
        atol = 64 * eps * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(mine.double(), expected, rtol=0.0, atol=atol)


@every_activation
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_with_given_statistics_it_is_two_steps(name, dtype, layout, step):
    x, weight, bias, dy = operands(dtype, (6, 3, 20, 20))
    x, dy = layout(x), layout(dy)
    found = []
    running = (0.1 * weight, weight.clone())
    for function in (ours(name), in_steps(name, backnorm.torch.batch_norm)):

        def call(x, weight, bias, function=function):
            return function(x, weight, bias, running, training=False)

        found.append(step(call, x, weight, bias, dy=dy))
    assert all(map(torch.equal, *found))


@every_activation
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_first_and_second_order(name, training, close):
    x, weight, bias, dy = operands()
    running = (None, None) if training else (bias.clone(), weight.clone())
    found = []
    for function in (ours(name), in_steps(name)):
        inputs = [each.clone().requires_grad_() for each in (x, weight, bias)]
        y = function(*inputs, running, training)
        first = torch.autograd.grad(y, inputs, dy, create_graph=True)
        loss = (first[0] * torch.cos(dy)).sum()
        found.append((y, first, torch.autograd.grad(loss, inputs)))
    close(*found, factor=64)


@every_activation
def test_numerical_derivatives(name):
    x, weight, bias, _ = operands(shape=(3, 2, 5))
    inputs = [each.requires_grad_() for each in (x, weight, bias)]
    assert torch.autograd.gradcheck(ours(name), inputs)
    assert torch.autograd.gradgradcheck(ours(name), inputs)


@every_activation
@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_one_gradient_alone(name, wanted, close):
    x, weight, bias, dy = operands()
    found = []
    for function in (ours(name), in_steps(name)):
        given = {"x": x.clone(), "weight": weight.clone(), "bias": bias.clone()}
        given[wanted].requires_grad_()
        found.append(torch.autograd.grad(function(**given), given[wanted], dy))
    close(*found, factor=16)


@every_activation
def test_no_elements_are_kept_but_those_of_x(name):
    x, weight, bias, dy = operands(torch.float32, (8, 4, 16, 16))
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    inputs = [each.requires_grad_() for each in (x, weight, bias)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = ours(name)(*inputs)
    # Per channel: weight and bias, mean and variance.
    assert sum(each.numel() for each in kept) == x.numel() + 4 * weight.numel()
    expected = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    # So y is free to be changed.
    with torch.no_grad():
        y.zero_()
    assert all(map(torch.equal, torch.autograd.grad(y, inputs, dy), expected))


@every_activation
def test_saved_tensors_that_are_unpacked_as_others(name, close):
    x, weight, bias, dy = operands()
    found = []
    for function in (ours(name), in_steps(name)):
        inputs = [each.clone().requires_grad_() for each in (x, weight, bias)]
        with torch.autograd.graph.save_on_cpu():
            y = function(*inputs)
        found.append(torch.autograd.grad(y, inputs, dy))
    close(*found, factor=16)


@every_activation
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_without_gradients(name, training, close):
    x, weight, bias, _ = operands()
    before, found = x.clone(), []
    for function in (ours(name), in_steps(name)):
        running = (bias.clone(), weight.clone())
        with torch.no_grad():
            found.append((function(x, weight, bias, running, training), running))
    close(*found, factor=16)
    assert torch.equal(x, before)


@every_activation
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_transforms(name, close):
    x, weight, bias, dy = operands(shape=(4, 3, 5))
    xs, dys = torch.stack([x, 2 * x]), torch.stack([dy, -dy])
    found = []
    for function in (ours(name), in_steps(name)):

        def loss(x, dy, function=function):
            return (function(x, weight, bias) * dy).sum()

        one = torch.func.grad(loss)(x, dy)
        many = torch.func.vmap(torch.func.grad(loss))(xs, dys)
        tangent = torch.func.jvp(lambda x, loss=loss: loss(x, dy), (x,), (dy,))
        found.append((one, many, tangent))
    close(*found, factor=16)


@every_activation
def test_many_gradients_at_once(name, close):
    x, weight, bias, dy = operands()
    dys = torch.stack([dy, torch.cos(dy)])
    found = []
    for function in (ours(name), in_steps(name)):
        inputs = [each.clone().requires_grad_() for each in (x, weight, bias)]
        y = function(*inputs)
        found.append(torch.autograd.grad(y, inputs, dys, is_grads_batched=True))
    close(*found, factor=16)


@every_activation
def test_reproducible(name, close):
    x, weight, bias, dy = operands()
    found = []
    for function in (ours(name), in_steps(name, backnorm.torch.batch_norm)):
        inputs = [each.clone().requires_grad_() for each in (x, weight, bias)]
        y = function(*inputs, reproducible=True)
        found.append((y, *torch.autograd.grad(y, inputs, dy)))
    assert all(map(torch.equal, *found))


@every_activation
def test_empty_and_wrong_tensors(name):
    call = ours(name)
    x = torch.zeros(0, 3, 4, requires_grad=True)
    assert call(x, None, None).shape == x.shape
    with pytest.raises(backnorm.torch.TensorValueError, match=r"^weight: "):
        call(torch.randn(4, 3, 5, requires_grad=True), torch.ones(5), None)
    with pytest.raises(backnorm.torch.TensorTypeError, match=r"^input: "):
        call([1.0], None, None)
    with pytest.raises(backnorm.ArgumentValueError, match=r"^eps: "):
        call(torch.randn(4, 3, 5, requires_grad=True), None, None, (None, None), True, eps=-1.0)
    with pytest.raises(backnorm.ArgumentValueError, match="arithmetic"):
        call(torch.randn(4, 3, 5, requires_grad=True), None, None, arithmetic="float16")


@pytest.mark.parametrize("value", ["relu", "SiLU", "", None, nn.SiLU(), 6.0])
def test_other_activations_are_refused(value):
    with pytest.raises(backnorm.ArgumentValueError, match=r"^activation: .*'silu', 'hardswish'"):
        ours(value)(torch.randn(4, 3, 5), None, None)


def test_a_class_of_tensors_is_asked():
    class Told(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function, kwargs

    x = torch.randn(4, 3, 5).as_subclass(Told)
    function, options = ours("silu")(x, None, None)
    assert function is backnorm.torch.batch_norm_activation
    assert options["activation"] == "silu"


def test_which_modules_are_an_activation():
    known = {
        nn.SiLU(): ("silu", None), nn.Hardswish(inplace=True): ("hardswish", None),
        nn.ReLU6(): ("relu", 6.0), nn.GELU(): None, nn.Hardsigmoid(): None, nn.Identity(): None,
    }  # fmt: skip
    assert [activations.activation_of(module) for module in known] == list(known.values())


def net_of(name):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), MODULES[name](inplace=True))


def computed(net, *inputs):
    """Return what a step gives: y, the gradients of parameters, buffers; and names of nodes."""
    y = net(*inputs)
    node = y.grad_fn.name()
    y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape))
    gradients = [each.grad for each in net.parameters()]
    return (y.detach(), gradients, list(net.buffers())), node


@every_activation
def test_convert_fuses_them(name, close):
    net = net_of(name).double()
    reports = []
    mine = convert(copy.deepcopy(net), fuse=True, report=reports.append)
    assert [str(each).endswith(f"a {MODULES[name].__name__}") for each in reports] == [True]
    x = torch.randn(4, 3, 9, 9).double()
    expected, _ = computed(net, x)
    for model in (mine, copy.deepcopy(mine)):
        found, node = computed(model, x)
        assert node == "BatchNormActivationBackward"
        close(found, expected, factor=64)
    net.eval(), mine.eval()
    close(mine(x), net(x), factor=16)


def test_hooks_see_what_is_between(close):
    net = nn.Sequential(nn.BatchNorm2d(3), nn.SiLU())
    mine, seen = convert(net, fuse=True), []
    mine[0].register_forward_hook(lambda module, inputs, z: seen.append(z.clone()))
    y = mine(torch.randn(4, 3, 9, 9))
    close(functional.silu(seen[0]), y)


@every_activation
def test_a_compiled_model(name, close):
    net = net_of(name).double()
    mine = convert(copy.deepcopy(net), fuse=True)
    torch._dynamo.reset()
    run = torch.compile(mine, backend="aot_eager", fullgraph=True)
    x, found = torch.randn(4, 3, 9, 9).double(), []
    for model, call in ((mine, run), (net, net)):
        y = call(x)
        y.backward(torch.cos(y.detach()))
        found.append((y, [each.grad for each in model.parameters()]))
    close(*found, factor=64)


@every_activation
def test_layers_of_timm(name, close):
    from benchmarks.models import libraries

    layer = libraries.timm().layers.BatchNormAct2d(3, act_layer=MODULES[name]).double()
    reports = []
    mine = convert(copy.deepcopy(layer), fuse=True, report=reports.append)
    assert "its own activation" in str(reports[0])
    x = torch.randn(4, 3, 9, 9).double().requires_grad_()
    found, node = computed(mine, x)
    assert node == "BatchNormActivationBackward"
    close(found, computed(layer, x)[0], factor=64)
    synchronised = convert(nn.Sequential(nn.BatchNorm2d(3), MODULES[name]()), fuse=True, sync=True)
    assert computed(synchronised.double(), x)[1] == "BatchNormActivationBackward"
