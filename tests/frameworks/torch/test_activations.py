"""An activation behind a normalisation: ReLU, with a ceiling and a residual, SiLU and Hardswish.

Results are those of the operator on arrays, of the two steps, and of PyTorch.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import backnorm
import backnorm.torch
from backnorm.activations import ACTIVATIONS, RELU, Activation
from backnorm.torch import activations, convert

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CEILING = 1.25
# Activations and PyTorch's functions.
FUNCTIONS = {
    "relu": torch.relu,
    Activation("relu", CEILING): lambda y: functional.hardtanh(y, 0.0, CEILING),
    "silu": functional.silu,
    "hardswish": functional.hardswish,
}
RELUS, SMOOTH = list(FUNCTIONS)[:2], list(FUNCTIONS)[2:]

every_activation = pytest.mark.parametrize("activation", FUNCTIONS, ids=str)
in_both_modes = pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])


def ours(activation):
    def call(x, residual, weight, bias, running=(None, None), training=True, **options):
        return backnorm.torch.batch_norm(
            x, *running, weight, bias, training, activation=activation, residual=residual, **options
        )

    return call


def in_steps(activation, normalise=functional.batch_norm):
    """Return the same by a function that normalises, and PyTorch's activation."""

    def call(x, residual, weight, bias, running=(None, None), training=True, **options):
        y = normalise(x, *running, weight, bias, training, **options)
        return FUNCTIONS[activation](y if residual is None else y + residual)

    return call


def operands(activation, dtype=torch.float64, shape=(6, 3, 4, 4)):
    """Return x, residual, weight, bias and dy such that all parts of an activation are reached."""
    x, residual, dy = (torch.randn(shape).to(dtype) for _ in range(3))
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    weight, bias = (2 * torch.rand(shape[1]).to(wide) + 1.5 for _ in range(2))
    return x, residual if activation in RELUS else None, weight, bias - 2, dy


def test_activations_of_adapter_equal_those_of_kernels():
    assert {"relu", *activations._SMOOTH} == {each.name for each in ACTIVATIONS.values()}


@pytest.mark.parametrize("has_residual", [False, True])
def test_relu_results_have_memory_layout_of_input(has_residual, layout, parameters, step):
    x, dy = (layout(torch.randn(6, 3, 4, 4)) for _ in range(2))
    residual = torch.randn(6, 3, 4, 4) if has_residual else None
    weight, bias, *statistics = parameters(3, torch.float32)
    y, dx, *_ = step(ours("relu"), x, residual, weight, bias, dy=dy)
    frozen = ours("relu")(x, residual, weight, bias, statistics, False)
    assert y.stride() == dx.stride() == frozen.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("activation", "training"),
    [*((each, True) for each in RELUS), *((each, False) for each in FUNCTIONS)],
    ids=str,
)
def test_activation_has_bits_of_two_steps(activation, dtype, training, layouts, step):
    """Rounding y and a ReLU commute; with given statistics a call is two steps."""
    x, _, weight, bias, dy = operands(activation, dtype, (6, 3, 20, 20))
    running = (None, None) if training else (0.1 * weight, weight)
    for name in ("channels_last", "sliced"):
        found = []
        for function in (ours(activation), in_steps(activation, backnorm.torch.batch_norm)):

            def call(x, weight, bias, function=function):
                return function(x, None, weight, bias, running, training)

            found.append(step(call, layouts[name](x), weight, bias, dy=layouts[name](dy)))
        assert all(map(torch.equal, *found))
    if activation in RELUS:
        assert (found[0][0] == 0).any()
    if activation == RELUS[1]:
        assert (found[0][0] == CEILING).any()


@pytest.mark.parametrize("activation", SMOOTH)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_smooth_activation_in_training_is_near_float64(activation, dtype, layout, step):
    x, _, weight, bias, dy = operands(activation, dtype, (6, 3, 20, 20))
    eps = torch.finfo(dtype).eps
    if activation == "hardswish":
        # Its derivative jumps at -3 and 3, to one side of which a normalised value may be rounded.
        z = functional.batch_norm(*(t.double() for t in (x, weight, weight, weight, bias)), True)
        dy[(z.abs() - 3).abs() < 16 * eps] = 0
    found = []
    for function, kind in ((ours(activation), dtype), (in_steps(activation), torch.float64)):
        wide = weight.dtype if kind is dtype else kind
        weight, bias = weight.to(wide), bias.to(wide)
        running = (0.1 * weight, weight.clone())

        def call(x, weight, bias, function=function, running=running):
            return function(x, None, weight, bias, running)

        leaves = layout(x.to(kind)), weight, bias
        found.append((*step(call, *leaves, dy=layout(dy.to(kind))), *running))
    for result, expected in zip(*found, strict=True):
        atol = 64 * eps * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(result.double(), expected, rtol=0.0, atol=atol)


@pytest.mark.parametrize("activation", SMOOTH)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_smooth_activation_in_training_has_bits_of_its_steps(activation, dtype, layouts, step):
    x, _, weight, bias, dy = operands(activation, dtype, (6, 3, 20, 20))
    norm, eps = torch.ops.backnorm, 1e-5
    for of_x, of_dy in (("contiguous", "channels_last"), ("channels_last", "sliced")):
        x, dy = layouts[of_x](x), layouts[of_dy](dy)
        found = step(ours(activation), x, None, weight, bias, dy=dy)

        y, mean, variance = norm.batch_norm(x, weight, bias, eps)
        z = norm.batch_norm_inference(x, weight, bias, mean, variance, eps).requires_grad_()
        (dz,) = torch.autograd.grad(FUNCTIONS[activation](z), z, dy)
        gradients = norm.batch_norm_backward(x, dz, mean, variance, weight, eps, True)
        expected = FUNCTIONS[activation](y), *gradients
        found = [each for each in found if each is not None]
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def kept_by(function, *tensors):
    """Return y, and the tensors that are saved for the backward pass."""
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return function(*tensors), kept


@pytest.mark.parametrize("has_residual", [True, False])
def test_relu_saves_one_bit_per_element_besides_input(has_residual):
    x, residual, weight, bias, _ = operands("relu", torch.float32, (16, 3, 20, 20))
    x.requires_grad_(), residual.requires_grad_()
    y, kept = kept_by(ours("relu"), x, residual if has_residual else None, weight, bias)
    own = [tensor for tensor in kept if tensor.data_ptr() != x.data_ptr()]
    assert len(own) < len(kept)
    size = sum(tensor.numel() * tensor.itemsize for tensor in own)
    assert x.numel() / 8 <= size <= x.numel() / 8 + 100
    assert y.grad_fn.next_functions[0][0].variable is x


@pytest.mark.parametrize("activation", SMOOTH)
def test_smooth_activation_saves_no_elements_besides_the_input(activation):
    x, _, weight, bias, dy = operands(activation, torch.float32, (8, 4, 16, 16))
    inputs = [each.requires_grad_() for each in (x, weight, bias)]
    y, kept = kept_by(ours(activation), x, None, weight, bias)
    # Per channel: weight and bias, mean and variance.
    assert sum(each.numel() for each in kept) == x.numel() + 4 * weight.numel()
    expected = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    # So y is free to be changed.
    with torch.no_grad():
        y.zero_()
    assert all(map(torch.equal, torch.autograd.grad(y, inputs, dy), expected))


@every_activation
@in_both_modes
def test_activation_without_gradients_matches_pytorch(activation, training, close):
    x, residual, weight, bias, _ = operands(activation)
    found = []
    for function in (ours(activation), in_steps(activation)):
        running = (bias.clone(), weight.clone())
        with torch.no_grad():
            found.append((function(x, residual, weight, bias, running, training), running))
    close(*found, factor=16)


@every_activation
@in_both_modes
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_activation_under_transforms_matches_pytorch(activation, training, close):
    x, residual, weight, bias, dy = operands(activation, shape=(4, 3, 5))
    running = (None, None) if training else (bias.clone(), weight.clone())
    xs, dys = torch.stack([x, 2 * x]), torch.stack([dy, -dy])
    found = []
    for function in (ours(activation), in_steps(activation)):

        def loss(x, dy, function=function):
            return (function(x, residual, weight, bias, running, training) * dy).sum()

        gradient = torch.func.grad(loss)(x, dy)
        gradients = torch.func.vmap(torch.func.grad(loss))(xs, dys)
        tangent = torch.func.jvp(lambda x, loss=loss: loss(x, dy), (x,), (dy,))
        found.append((gradient, gradients, tangent))
    close(*found, factor=16)


@every_activation
@in_both_modes
def test_reproducible_activation_has_bits_of_two_steps(activation, training):
    x, _, weight, bias, dy = operands(activation)
    found = []
    for function in (ours(activation), in_steps(activation, backnorm.torch.batch_norm)):
        running = (None, None) if training else (bias.clone(), weight.clone())
        inputs = [each.clone().requires_grad_() for each in (x, weight, bias)]
        # The sum of a residual is rounded before the ReLU in two steps.
        y = function(inputs[0], None, *inputs[1:], running, training, reproducible=True)
        found.append((y, *torch.autograd.grad(y, inputs, dy)))
    assert all(map(torch.equal, *found))


def test_reproducible_relu_with_residual_matches_pytorch(close):
    x, residual, weight, bias, dy = operands(RELUS[1])
    found = []
    for function, options in ((ours(RELUS[1]), {"reproducible": True}), (in_steps(RELUS[1]), {})):
        inputs = [each.clone().requires_grad_() for each in (x, residual, weight, bias)]
        y = function(*inputs, **options)
        found.append((y, *torch.autograd.grad(y, inputs, dy)))
    close(*found, factor=16)


def test_relu_with_input_as_residual_matches_pytorch(close):
    x, dy = torch.randn(4, 3, 5).double().requires_grad_(), torch.randn(4, 3, 5).double()
    results = []
    for function in (ours("relu"), in_steps("relu")):
        y = function(x, x, None, None)
        results.append((y, torch.autograd.grad(y, x, dy)))
    close(*results)


def test_gradients_with_a_rounded_ceiling_are_zero_where_y_is_cut_off():
    """PyTorch compares with what was not rounded, and lets gradients pass where y is cut off."""
    x = torch.randn(8, 3, 9).bfloat16().requires_grad_()
    highest = torch.tensor(0.7).bfloat16()
    for training, running in ((True, (None, None)), (False, (torch.zeros(3), torch.ones(3)))):
        residual = torch.zeros_like(x, requires_grad=True)
        y = ours(Activation("relu", 0.7))(x, residual, None, None, running, training)
        assert y.max() == highest
        (gradient,) = torch.autograd.grad(y, residual, torch.ones_like(y))
        assert torch.equal(gradient == 1, (y > 0) & (y < highest))


@pytest.mark.parametrize("value", ["SiLU", "", nn.SiLU(), 6.0, ["relu"], Activation("silu", 6.0)])
@in_both_modes
def test_batch_norm_rejects_unknown_activation(value, training):
    with pytest.raises(backnorm.ArgumentValueError, match=r"^activation: "):
        ours(value)(torch.randn(4, 3, 5), None, None, None, training=training)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), 1e-60, True, "6", torch.ones(2)])
def test_ceiling_that_is_not_positive_number_raises(value):
    is_number = type(value) in (int, float)
    error = backnorm.ArgumentValueError if is_number else backnorm.ArgumentTypeError
    with pytest.raises(error, match=r"^ceiling: "):
        ours(Activation("relu", value))(torch.randn(4, 3, 5), None, None, None)
    if not is_number or value != 1e-60:
        # A layer does not know the type of its elements, which may round a ceiling to 0.
        with pytest.raises(error, match=r"^ceiling: "):
            backnorm.torch.BatchNormReLU1d(3, ceiling=value)


MODULES = {
    nn.ReLU(): RELU, nn.ReLU6(): Activation("relu", 6.0),
    nn.Hardtanh(0, 20): Activation("relu", 20.0), nn.Hardtanh(0.0, 0.75): Activation("relu", 0.75),
    nn.SiLU(): Activation("silu"), nn.Hardswish(inplace=True): Activation("hardswish"),
    nn.Hardtanh(): None, nn.Hardtanh(0, 0.1): None, nn.Hardtanh(0, 1e6): None,
    nn.Hardtanh(0, 1e-6): None, nn.Hardtanh(0, float("inf")): None, nn.LeakyReLU(): None,
    nn.GELU(): None, nn.Hardsigmoid(): None, nn.Identity(): None,
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=repr)
def test_activation_of_returns_activation_or_none(module):
    assert activations.activation_of(module) == MODULES[module]


@pytest.mark.filterwarnings("ignore:`torch.jit.script", "ignore:`torch._prims_common.check` is")
def test_compiled_model_has_gradients_of_pytorch(close):
    torch._dynamo.reset()
    behind = nn.ReLU6(inplace=True), nn.Hardtanh(0, 0.5), nn.SiLU(inplace=True), nn.Hardswish()
    norms = [(nn.BatchNorm2d(4), each) for each in behind]
    net = nn.Sequential(nn.Conv2d(3, 4, 1), *(each for pair in norms for each in pair)).double()
    x, dy = torch.randn(8, 3, 5, 6).double(), torch.randn(8, 4, 5, 6).double()

    def gradients(call):
        y = call(x)
        return y, torch.autograd.grad(y, list(net.parameters()), dy)

    expected = gradients(net)
    mine = convert(net, fuse=True)
    close(gradients(torch.compile(mine, backend="aot_eager", fullgraph=True)), expected, factor=256)


@pytest.mark.parametrize("activation", SMOOTH)
def test_synchronised_layer_in_one_process_fuses_its_activation(activation):
    module = {"silu": nn.SiLU, "hardswish": nn.Hardswish}[activation]()
    net = convert(nn.Sequential(nn.BatchNorm2d(3), module), fuse=True, sync=True)
    name = net(torch.randn(4, 3, 5, 5)).grad_fn.name()
    assert name == "BatchNormActivationBackward"
