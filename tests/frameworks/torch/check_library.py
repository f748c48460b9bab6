"""The registered operators: PyTorch's check of them, and what traces and modes make of calls."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import backnorm.torch
from backnorm.torch import library, library_fused

EPS = 1e-3


def tensors(dtype, name, layouts, *, grad=True):
    x, dy, residual = (layouts[name](torch.randn(4, 3, 2, 2).to(dtype)) for _ in range(3))
    narrow = torch.float32 if dtype.itemsize == 2 else dtype
    weight, bias = (torch.rand(3).to(narrow) + 0.5 for _ in range(2))
    mean, variance = torch.randn(3).to(narrow), torch.rand(3).to(narrow) + 0.5
    _, _, _, mask = library_fused.batch_norm_relu(x, residual, weight, bias, EPS)
    wanted = {"x": x, "dy": dy, "residual": residual, "weight": weight, "bias": bias}
    for tensor in wanted.values():
        tensor.requires_grad_(grad)
    return {**wanted, "mean": mean, "variance": variance, "mask": mask}


CALLS = {
    "forward": (library.batch_norm, ("x", "weight", "bias", EPS)),
    "plain": (library.batch_norm, ("x", None, None, EPS)),
    "inference": (
        library.batch_norm_inference, ("x", "mean", "variance", "weight", "bias", EPS),
    ),
    "backward": (
        library.batch_norm_backward, ("x", "dy", "mean", "variance", "weight", EPS, True),
    ),
    "frozen": (
        library.batch_norm_backward, ("x", "dy", "mean", "variance", None, EPS, False),
    ),
    "rectified": (library_fused.batch_norm_relu, ("x", "residual", "weight", "bias", EPS)),
    "rectified alone": (library_fused.batch_norm_relu, ("x", None, None, None, EPS)),
    "rectified backward": (
        library_fused.batch_norm_relu_backward,
        ("x", "dy", "mask", "mean", "variance", "weight", EPS, True),
    ),
    "rectified backward alone": (
        library_fused.batch_norm_relu_backward,
        ("x", "dy", "mask", "mean", "variance", None, EPS, False),
    ),
}  # fmt: skip
WITHOUT_GRADIENT = {
    "double backward": (
        library.batch_norm_double_backward,
        ("x", "dy", "mean", "variance", "weight", "dy", "weight", "bias", EPS, True),
    ),
    "rectified inference": (
        library_fused.batch_norm_relu_inference,
        ("x", "residual", "mean", "variance", "weight", "bias", EPS),
    ),
    "mask": (library_fused.unpack_mask, ("mask", "x")),
}


@pytest.mark.parametrize("case", [*CALLS, *WITHOUT_GRADIENT])
def test_pytorchs_check_of_operators(case, layouts):
    operator, names = {**CALLS, **WITHOUT_GRADIENT}[case]
    for dtype, name in (
        (torch.float64, "contiguous"), (torch.float32, "channels_last"), (torch.bfloat16, "sliced"),
    ):  # fmt: skip
        given = tensors(dtype, name, layouts, grad=case in CALLS)
        arguments = [given[one] if isinstance(one, str) else one for one in names]
        outcome = opcheck(operator, arguments)
        assert set(outcome.values()) == {"SUCCESS"}


def test_second_order_of_the_operators(layouts):
    given = tensors(torch.float64, "channels_last", layouts)
    leaves = [given[name] for name in ("x", "residual", "weight", "bias")]
    assert torch.autograd.gradgradcheck(
        lambda x, residual, weight, bias: library_fused.batch_norm_relu(
            x, residual, weight, bias, EPS
        )[0],
        leaves,
    )
    x, _, weight, bias = leaves
    assert torch.autograd.gradgradcheck(
        lambda x, weight, bias: library.batch_norm(x, weight, bias, EPS)[0], (x, weight, bias)
    )


def test_the_third_order_is_refused():
    x = torch.randn(4, 3).double().requires_grad_()
    value = library.batch_norm(x, None, None, EPS)[0].pow(3).sum()
    for _ in range(2):
        value = torch.autograd.grad(value, x, create_graph=True)[0].pow(2).sum()
    with pytest.raises(backnorm.torch.ThirdOrderError, match="twice"):
        torch.autograd.grad(value, x)


def call(x, weight, bias, mean, variance):
    y = backnorm.torch.batch_norm(x, mean, variance, weight, bias, True)
    y = backnorm.torch.batch_norm_add_relu(y, x, mean, variance, weight, bias, True)
    y = backnorm.torch.batch_norm(y, mean, variance, weight, bias)
    with torch.no_grad():
        return backnorm.torch.batch_norm_relu(y, mean, variance, weight, bias)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_trace_is_made_of_operators(mode, parameters, close):
    x, arguments = torch.randn(5, 3, 4).double(), parameters(3)
    copies = [tensor.clone() for tensor in arguments]
    graph = make_fx(call, tracing_mode=mode)(x, *[tensor.clone() for tensor in arguments])
    targets = {str(node.target) for node in graph.graph.nodes}
    names = "batch_norm", "batch_norm_inference", "batch_norm_relu", "batch_norm_relu_inference"
    assert {f"backnorm.{name}.default" for name in names} <= targets
    sizes = (5, 8) if mode == "symbolic" else (5,)
    for size in sizes:
        x = torch.randn(size, 3, 4).double()
        mine = [tensor.clone() for tensor in arguments]
        theirs = [tensor.clone() for tensor in copies]
        close(graph(x, *mine), call(x, *theirs))
        close(mine, theirs)


def test_modes_see_the_operators(parameters):
    x, (weight, bias, *_) = torch.randn(5, 3, 4).double(), parameters(3)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        y = backnorm.torch.batch_norm(x, None, None, weight, bias, True)
    assert "backnorm.batch_norm.default" in seen
    assert torch.equal(y, backnorm.torch.batch_norm(x, None, None, weight, bias, True))
    with FlopCounterMode(display=False):
        assert torch.equal(y, backnorm.torch.batch_norm(x, None, None, weight, bias, True))


def test_fake_tensors_without_their_mode(parameters):
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(5, 3, 4, requires_grad=True)
    y = backnorm.torch.batch_norm(x, None, None, training=True)
    assert type(y) is type(x)
    assert y.shape == x.shape


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_torch_jit_trace(close):
    modules = [backnorm.torch.BatchNorm1d(3).double(), torch.nn.BatchNorm1d(3).double()]
    traced = torch.jit.trace(modules[0], torch.randn(5, 3, 4).double(), check_trace=False)
    modules[1].load_state_dict(modules[0].state_dict())
    x = torch.randn(7, 3, 4).double()
    close(traced(x), modules[1](x))
    close(list(traced.state_dict().values()), list(modules[1].state_dict().values()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_torch_jit_script_is_refused():
    with pytest.raises(backnorm.BacknormError, match=r"revert\(model\)"):
        torch.jit.script(torch.nn.Sequential(backnorm.torch.BatchNorm1d(3)))
