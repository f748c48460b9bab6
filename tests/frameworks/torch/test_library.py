"""The registered operators: PyTorch's check of them, and what traces and modes make of calls."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import backnorm.torch
from backnorm.torch import library

EPS = 1e-3


def tensors(dtype, name, layouts, *, grad=True):
    x, dy = (layouts[name](torch.randn(4, 3, 2, 2).to(dtype)) for _ in range(2))
    narrow = torch.float32 if dtype.itemsize == 2 else dtype
    weight, bias = (torch.rand(3).to(narrow) + 0.5 for _ in range(2))
    mean, variance = torch.randn(3).to(narrow), torch.rand(3).to(narrow) + 0.5
    wanted = {"x": x, "dy": dy, "weight": weight, "bias": bias}
    for tensor in wanted.values():
        tensor.requires_grad_(grad)
    return {**wanted, "mean": mean, "variance": variance}


CALLS = {
    "forward": (library.batch_norm, ("x", "weight", "bias", EPS)),
    "plain": (library.batch_norm, ("x", None, None, EPS)),
    "inference": (
        library.batch_norm_inference,
        ("x", "weight", "bias", "mean", "variance", EPS),
    ),
    "plain inference": (
        library.batch_norm_inference,
        ("x", None, None, "mean", "variance", EPS),
    ),
    "backward": (
        library.batch_norm_backward,
        ("x", "dy", "mean", "variance", "weight", EPS, True),
    ),
    "frozen": (
        library.batch_norm_backward,
        ("x", "dy", "mean", "variance", None, EPS, False),
    ),
}
WITHOUT_GRADIENT = {
    "double backward": (
        library.batch_norm_double_backward,
        ("x", "dy", "mean", "variance", "weight", "dy", "weight", "bias", EPS, True),
    ),
}


OF_OPERATOR = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("case", [*CALLS, *WITHOUT_GRADIENT])
def test_operators_pass_opcheck(case, layouts):
    operator, names = {**CALLS, **WITHOUT_GRADIENT}[case]
    for dtype, name in (
        (torch.float64, "contiguous"), (torch.float32, "channels_last"), (torch.bfloat16, "sliced"),
    ):  # fmt: skip
        inputs = tensors(dtype, name, layouts, grad=case in CALLS)
        arguments = [inputs[one] if isinstance(one, str) else one for one in names]
        # The compiler's check takes most of the time, and is told no element type.
        of_compiler = ("test_aot_dispatch_dynamic",) if dtype is torch.float64 else ()
        outcome = opcheck(operator, arguments, test_utils=(*OF_OPERATOR, *of_compiler))
        assert set(outcome.values()) == {"SUCCESS"}


def test_operators_have_derivatives_of_two_orders(layouts):
    inputs = tensors(torch.float64, "channels_last", layouts)
    leaves = [inputs[name] for name in ("x", "weight", "bias")]
    statistics = inputs["mean"], inputs["variance"]
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *leaves: library.batch_norm(*leaves, EPS)[0], leaves)
        assert check(
            lambda *leaves: library.batch_norm_inference(*leaves, *statistics, EPS), leaves
        )


def test_vmap_of_operators_matches_loop(layouts, close):
    inputs = tensors(torch.float64, "channels_last", layouts, grad=False)
    x, dy, weight, bias = (inputs[name] for name in ("x", "dy", "weight", "bias"))
    xs = torch.stack([x, x * x], 1)

    def both(x, dy):
        y, mean, variance = library.batch_norm(x, weight, bias, EPS)
        return y, *library.batch_norm_backward(x, dy, mean, variance, weight, EPS, True)

    together = torch.func.vmap(both, (1, None))(xs, dy)
    apart = [both(x, dy) for x in xs.unbind(1)]
    close(together, tuple(torch.stack(results) for results in zip(*apart, strict=True)))


def call(x, weight, bias, mean, variance):
    operands = mean, variance, weight, bias
    y = backnorm.torch.batch_norm(x, *operands, True)
    y = backnorm.torch.batch_norm(y, *operands, True, activation="relu", residual=x)
    y = backnorm.torch.batch_norm(y, *operands)
    with torch.no_grad():
        return backnorm.torch.batch_norm(y, *operands, activation="relu6")


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_trace_has_operators_with_arithmetic(mode, parameters, close):
    x, arguments = torch.randn(5, 3, 4).double(), parameters(3)
    copies = [tensor.clone() for tensor in arguments]
    graph = make_fx(call, tracing_mode=mode)(x, *[tensor.clone() for tensor in arguments])
    # The last argument of an operator is the arithmetic.
    operators = [(str(node.target), node.args[-1]) for node in graph.graph.nodes if node.args]
    for name in ("batch_norm", "batch_norm_inference"):
        assert operators.count((f"backnorm.{name}.default", "float64")) == 2
    sizes = (5, 8) if mode == "symbolic" else (5,)
    for size in sizes:
        x = torch.randn(size, 3, 4).double()
        mine = [tensor.clone() for tensor in arguments]
        theirs = [tensor.clone() for tensor in copies]
        close(graph(x, *mine), call(x, *theirs))
        close(mine, theirs)


def test_dispatch_mode_receives_operators_and_keeps_result(parameters):
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


def test_batch_norm_of_fake_tensor_outside_its_mode_returns_fake_tensor(parameters):
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(5, 3, 4, requires_grad=True)
    y = backnorm.torch.batch_norm(x, None, None, training=True)
    assert type(y) is type(x)
    assert y.shape == x.shape


def test_double_backward_operator_raises_on_derivative():
    x = torch.randn(4, 3).requires_grad_()
    gx, *_ = torch.ops.backnorm.batch_norm_double_backward(
        x, x.detach(), torch.zeros(3), torch.ones(3), None, x.detach(), None, None, 1e-5, True
    )
    with pytest.raises(NotImplementedError, match=r"backnorm\.torch\.batch_norm has derivatives"):
        torch.autograd.grad(gx, x, torch.randn(4, 3))
