"""The PyTorch adapter on the GPU's kernels."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import backnorm.torch
from backnorm.errors import ArgumentError
from backnorm.gpu.launch import Kernel
from backnorm.torch import engines, gpu
from backnorm.torch.checks import Operands
from backnorm.torch.options import Options

from .. import interpreter


@pytest.fixture(autouse=True)
def everywhere():
    with interpreter.for_every_tensor():
        yield


@pytest.fixture
def launched(monkeypatch):
    """Return a list of what was launched."""
    seen = []
    for name in ("ForwardLaunch", "BackwardLaunch"):
        original = getattr(gpu, name)

        def made(plan, new, original=original):
            seen.append(plan.problem.operation)
            return original(plan, new)

        monkeypatch.setattr(gpu, name, made)
    return seen


def gradients(layer, x, residual=None):
    """Return the output of a layer, and gradients of a loss whose dy is not constant."""
    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    inputs = [leaves[0]]
    if residual is not None:
        leaves.append(residual.clone().requires_grad_())
        inputs.append(leaves[-1])
    y = layer(*inputs)
    dy = torch.randn(y.shape, generator=torch.Generator(y.device).manual_seed(3), dtype=y.dtype)
    return y.detach(), torch.autograd.grad(y, leaves, dy)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(8, 5, 6, 7), (4, 3, 9), (12, 6)], ids=str)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}], ids=str)
def test_converted_layer_matches_pytorch_in_training_and_eval(shape, options, launched):
    dimensions = len(shape) - 2 or 1
    theirs = getattr(nn, f"BatchNorm{dimensions}d")(shape[1], **options)
    ours = backnorm.torch.convert(copy.deepcopy(theirs))
    for _ in range(2):
        x = torch.randn(shape) * 2 + 1
        (y, wanted), (expected, others) = gradients(ours, x), gradients(theirs, x)
        close(y, expected)
        for one, other in zip(wanted, others, strict=True):
            close(one, other)
    close(ours.running_mean, theirs.running_mean)
    close(ours.running_var, theirs.running_var)
    close(ours.eval()(x), theirs.eval()(x))
    assert launched == ["forward", "backward", "inference"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(8, 5, 6, 7), (4, 3, 16)], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_batch_norm_with_relu_matches_pytorch(shape, has_residual):
    weight, bias = torch.rand(shape[1]) + 0.5, torch.randn(shape[1])
    x, residual, dy = torch.randn(shape), torch.randn(shape), torch.randn(shape)
    results = []
    for ours in (True, False):
        leaves = [value.clone().requires_grad_() for value in (x, weight, bias, residual)]
        a, w, b, r = leaves
        if ours:
            y = backnorm.torch.batch_norm(
                a, None, None, w, b, training=True, activation="relu",
                residual=r if has_residual else None,
            )  # fmt: skip
        else:
            y = nn.functional.batch_norm(a, None, None, w, b, training=True)
            y = torch.relu(y + r if has_residual else y)
        results.append((y, *torch.autograd.grad(y, leaves[: 3 + has_residual], dy)))
    for one, other in zip(*results, strict=True):
        close(one, other)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_batch_norm_of_other_dtype_matches_pytorch_in_float64(dtype, training):
    parameters = (torch.rand(3) + 0.5).to(dtype), torch.randn(3).to(dtype)
    running = torch.randn(3), torch.rand(3) + 0.5
    if dtype is torch.float64:
        running = running[0].double(), running[1].double()
    x = torch.randn(6, 3, 5).to(dtype).requires_grad_()
    parameters = [parameter.requires_grad_() for parameter in parameters]
    y = backnorm.torch.batch_norm(x, *running, *parameters, training=training)
    dy = torch.randn(y.shape).to(dtype)
    ours = (y, *torch.autograd.grad(y, [x, *parameters], dy))
    wide = [value.detach().double().requires_grad_() for value in (x, *parameters)]
    running = [value.double() for value in running]
    y = nn.functional.batch_norm(wide[0], *running, *wide[1:], training=training)
    theirs = (y, *torch.autograd.grad(y, wide, dy.double()))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype is dtype
        # In float64 it is PyTorch's own error that counts.
        bound = torch.finfo(dtype).eps * (8 + other.abs().max())
        assert (one.double() - other).abs().max() <= bound


@pytest.mark.long
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_passes_gradcheck_and_gradgradcheck(training):
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    running = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)

    def layer(x, weight, bias):
        return backnorm.torch.batch_norm(
            x, *(None, None) if training else running, weight, bias, training=training
        )

    assert torch.autograd.gradcheck(layer, (x, weight, bias))
    assert torch.autograd.gradgradcheck(layer, (x, weight, bias))


LAYOUTS = {
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "mixed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("of_dy", LAYOUTS)
@pytest.mark.parametrize("of_x", LAYOUTS)
def test_batch_norm_with_other_memory_layouts_matches_pytorch(of_x, of_dy):
    x, dy = (LAYOUTS[kind](torch.randn(4, 3, 5, 2)) for kind in (of_x, of_dy))
    leaf = x.detach().requires_grad_()
    y = backnorm.torch.batch_norm(leaf, None, None, training=True)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    leaf = x.detach().requires_grad_()
    expected = nn.functional.batch_norm(leaf, None, None, training=True)
    close(y, expected)
    close(dx, torch.autograd.grad(expected, leaf, dy)[0])
    assert y.stride() == torch.empty_like(x).stride()


def test_running_statistics_in_strided_views_match_pytorch():
    x = torch.randn(6, 3, 4)
    apart = torch.zeros(3, 2), torch.ones(3, 2)
    backnorm.torch.batch_norm(x, apart[0][:, 0], apart[1][:, 0], training=True)
    plain = torch.zeros(3), torch.ones(3)
    nn.functional.batch_norm(x, *plain, training=True)
    close(apart[0][:, 0], plain[0])
    close(apart[1][:, 0], plain[1])
    assert (apart[0][:, 1] == 0).all()


def test_kernels_receive_copies_of_tensors_that_are_not_aligned(monkeypatch):
    def apart(*values):
        """Return a tensor that begins four bytes after a multiple of 16."""
        return torch.tensor([0.0, *values])[1:]

    call, received = Kernel.__call__, []

    def record(kernel, *arrays):
        received.extend(
            each for one in arrays for each in (one if isinstance(one, tuple) else [one])
        )
        call(kernel, *arrays)

    monkeypatch.setattr(Kernel, "__call__", record)
    x, weight, bias = torch.randn(6, 3, 4), apart(0.5, 1.0, 2.0), apart(1.0, 2.0, 3.0)
    running, plain = (apart(0.0, 0.0, 0.0), apart(1.0, 1.0, 1.0)), (torch.zeros(3), torch.ones(3))
    y = backnorm.torch.batch_norm(x, *running, weight, bias, training=True)
    expected = nn.functional.batch_norm(x, *plain, weight, bias, training=True)
    close([y, *running], [expected, *plain])
    tensors = [each for each in received if isinstance(each, torch.Tensor)]
    assert len(tensors) >= 7
    assert all(each.data_ptr() % 16 == 0 for each in tensors)


def test_batch_norm_of_empty_batch_returns_zero_dweight():
    x = torch.empty(0, 3, 4, requires_grad=True)
    weight = torch.ones(3, requires_grad=True)
    y = backnorm.torch.batch_norm(x, None, None, weight, training=True)
    dx, dweight = torch.autograd.grad(y, [x, weight], torch.empty_like(y))
    assert dx.shape == x.shape
    assert (dweight == 0).all()


def test_backward_operator_passes_opcheck():
    x, dy, weight = torch.randn(5, 3, 4), torch.randn(5, 3, 4), torch.rand(3) + 0.5
    _, mean, variance = torch.ops.backnorm.batch_norm(x, weight, None, 1e-5)
    arguments = (x, dy, mean, variance, weight, 1e-5, True)
    torch.library.opcheck(
        torch.ops.backnorm.batch_norm_backward.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )


def test_batch_norm_with_negative_variance_returns_nan():
    # It would take waiting for the GPU to know.
    y = backnorm.torch.batch_norm(torch.randn(4, 2), torch.zeros(2), torch.tensor([-1.0, 1.0]))
    assert y[:, 0].isnan().all()
    assert y[:, 1].isfinite().all()


@pytest.mark.parametrize(
    "arguments",
    [
        {"weight": torch.ones(4)},
        {"weight": torch.ones(3).half()},
        {"bias": torch.ones(3).double()},
        {"running_mean": torch.ones(4), "running_var": torch.ones(4)},
        {"weight": torch.ones(3, device="meta")},
    ],
    ids=["shape", "narrower", "wider", "running", "device"],
)
def test_batch_norm_with_invalid_operand_raises_argument_error(arguments):
    operands = {"running_mean": None, "running_var": None, "training": True, **arguments}
    with pytest.raises(ArgumentError):
        backnorm.torch.batch_norm(torch.randn(5, 3, 4), **operands)


def plain_step(x, dy):
    """Return y, and the gradients of x, weight and bias, without autograd."""
    options = Options(1e-5, arithmetic="float64")
    y, mean, variance, _ = engines.forward(Operands(x), options)(Operands(x), 0.0)
    operands = x, dy, None, mean, variance, None
    *gradients, _ = engines.backward(operands, options, has_residual=False)(operands, None)
    return y, *gradients


def test_repeated_calls_are_planned_once(launched):
    x, dy = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    for _ in range(3):
        plain_step(x, dy)
    assert launched == ["forward", "backward"]


@pytest.fixture
def computed(monkeypatch):
    """Return a list of what was planned, and the arithmetic."""
    return interpreter.arithmetics_planned(monkeypatch, gpu)


TRAINED = ["forward", "backward"]
#: Elements, what is asked for, what an H200 computes in.
CHOICES = [
    (torch.float32, None, "float64"),
    (torch.float32, "float64", "float64"),
    (torch.float32, "float32", "float32"),
    (torch.bfloat16, None, "float32"),
    (torch.bfloat16, "float32", "float32"),
    (torch.float16, "float64", "float64"),
    (torch.float64, None, "compensated"),
]


@pytest.mark.parametrize(("dtype", "requested", "expected"), CHOICES, ids=str)
class TestArithmetic:
    def test_call_and_its_backward_pass_use_the_arithmetic(
        self, dtype, requested, expected, computed
    ):
        x = torch.randn(5, 3, 4).to(dtype).requires_grad_()
        y = backnorm.torch.batch_norm(x, None, None, training=True, arithmetic=requested)
        torch.autograd.grad(y, x, torch.randn(y.shape).to(dtype))
        assert computed == [(operation, expected) for operation in TRAINED]

    @pytest.mark.covering(0)
    def test_backward_pass_keeps_the_arithmetic_of_an_ended_block(
        self, dtype, requested, expected, computed
    ):
        x = torch.randn(5, 3, 4).to(dtype).requires_grad_()
        with nullcontext() if requested is None else backnorm.arithmetic(requested):
            y = backnorm.torch.batch_norm(x, None, None, training=True, activation="relu")
        torch.autograd.grad(y, x, torch.randn(y.shape).to(dtype))
        assert computed == [(operation, expected) for operation in TRAINED]

    @pytest.mark.covering(0)
    def test_layers_use_their_arithmetic(self, dtype, requested, expected, computed):
        layer = nn.Sequential(nn.BatchNorm1d(3, dtype=dtype))
        layer = backnorm.torch.convert(layer, arithmetic=requested)
        x = torch.randn(5, 3, 4).to(dtype).requires_grad_()
        layer(x).backward(torch.randn(5, 3, 4).to(dtype))
        layer.eval()(x)
        assert computed == [(operation, expected) for operation in [*TRAINED, "inference"]]


def test_batch_norm_of_float64_in_float32_raises_argument_error():
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    with pytest.raises(ArgumentError, match=r"^arithmetic: float64 elements are computed in"):
        backnorm.torch.batch_norm(x, None, None, training=True, arithmetic="float32")


def test_training_step_is_deterministic():
    x, dy = torch.randn(40, 3, 50), torch.randn(40, 3, 50)
    for one, other in zip(plain_step(x, dy), plain_step(x, dy), strict=True):
        assert torch.equal(one, other)


@pytest.mark.covering(1)
@pytest.mark.parametrize("activation", [nn.SiLU, nn.Hardswish])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_fused_activation_matches_pytorch(activation, training, launched):
    torch.manual_seed(1)
    theirs = nn.Sequential(nn.BatchNorm2d(5), activation()).train(training)
    nn.init.uniform_(theirs[0].weight)
    ours = copy.deepcopy(theirs)
    backnorm.torch.convert(ours, fuse=True)
    x = torch.randn(8, 5, 6, 7) + 1
    close(gradients(ours, x), gradients(theirs, x))
    assert launched.count("backward") == 1
    close(list(ours.buffers()), list(theirs.buffers()))
    with torch.no_grad():
        close(ours(x), theirs(x))


@pytest.mark.parametrize("activation", ["silu", "hardswish"])
def test_activation_with_dy_of_another_layout_matches_contiguous_dy(activation):
    x, dy = torch.randn(4, 3, 5, 6).requires_grad_(), torch.randn(4, 3, 5, 6)
    y = backnorm.torch.batch_norm(x, None, None, training=True, activation=activation)
    found = [
        torch.autograd.grad(y, x, dy.contiguous(memory_format=layout), retain_graph=True)[0]
        for layout in (torch.channels_last, torch.contiguous_format)
    ]
    close(*found)
