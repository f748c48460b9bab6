"""Inputs of all kinds, good and bad: what PyTorch takes we take, and raise what it raises.

An error is of the class of PyTorch's, and may be of others. Where PyTorch takes what we refuse, or
raises for what we take, `docs/pytorch.md` says so, and `intended` and `kinder` here.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional

import backnorm
import backnorm.torch

CHANNELS = 3
NAMES = "input", "running_mean", "running_var", "weight", "bias"
KINDS = ValueError, TypeError, RuntimeError, NotImplementedError
FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16
OTHERS = (
    torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e5m2, torch.float8_e4m3fn,
)  # fmt: skip


def good(dtype=torch.float32):
    tensors = {name: (torch.rand(CHANNELS) + 0.5).to(dtype) for name in NAMES}
    return tensors | {"input": torch.randn(4, CHANNELS, 5).to(dtype), "training": True}


def of_shapes():
    shapes = [(), (1,), (3,), (4, 3), (1, 3), (0, 3), (4, 0), (1, 0), (4, 3, 0), (1, 3, 1)]
    shapes += [(1, 3, 2), (1, 3, 1, 1), (4, 0, 5), (1, 0, 1), (2, 1, 5), (2, 3, 1, 1, 1, 1, 1)]
    for shape, running, affine in itertools.product(shapes, *[(True, False)] * 2):
        operands = {name: torch.rand(shape[1] if len(shape) > 1 else 3) + 0.5 for name in NAMES}
        # Neighbours differ by about 1: the variance of two nearly equal elements, which PyTorch
        # computes in float32, may be far off.
        steps = torch.arange(float(np.prod(shape, dtype=int))).remainder(7).reshape(shape)
        operands["input"] = steps + torch.rand(shape) / 8
        absent = [] if running else ["running_mean", "running_var"]
        absent += [] if affine else ["weight", "bias"]
        yield f"{shape}, without {absent}", operands | dict.fromkeys(absent)


def of_types():
    sets = [NAMES, *((name,) for name in NAMES), NAMES[1:3], NAMES[3:]]
    for dtype, beside, names in itertools.product(FLOATS + OTHERS, FLOATS, sets):
        operands = good(dtype=beside)
        changed = {name: operands[name].to(dtype) for name in names}
        yield f"{dtype} {names} beside {beside}", operands | changed


def of_settings():
    numbers = [-1.0, -0.1, 0.0, -0.0, 1.0, 2.0, 1, 0, True, None, "x", 1j, torch.nan, torch.inf]
    numbers += [torch.tensor(0.1), torch.tensor(1), torch.tensor(True), torch.tensor([0.1])]
    numbers += [
        torch.tensor(0.1, requires_grad=True),
        np.float64(0.1),
        np.float32(0.1),
        np.int64(1),
    ]
    numbers += [np.array([0.1]), [0.1], 1e-300]
    for name, value in itertools.product(("momentum", "eps"), numbers):
        yield f"{name} {value!r}", good() | {name: value}
    for value in (None, 0, 1, "x", [], 2.5, torch.tensor(True)):
        yield f"training {value!r}", good() | {"training": value}


GROUPS = [of_shapes, of_types, of_settings]


def outcome(function, operands):
    """Return y and running statistics, or the error."""
    operands = {
        name: value.clone().detach().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in operands.items()
    }
    try:
        y = function(**operands)
    except Exception as error:
        return error
    return [y, operands["running_mean"], operands["running_var"]]


def intended(error):
    """Whether it is documented that we refuse what PyTorch takes."""
    words = str(error)
    return (
        # A matrix of as many elements as there are channels.
        ("one value per channel" in words and error.came in ("shape (1, 3)", "shape (3, 1)"))
        # An empty batch in evaluation.
        or "is required with training=False" in words
        or (error.argument == "eps" and error.came in ("nan", "inf", None))
        or "variance + epsilon must be positive" in words
    )


def kinder(operands):
    """Whether it is documented that we take what PyTorch refuses."""
    x, *others = (operands[name] for name in NAMES)
    if 0 in x.shape[1:2]:
        return True
    types = {each.dtype for each in others if each is not None}
    return x.dtype.itemsize == 2 and types <= {x.dtype, torch.float32}


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("group", GROUPS)
def test_batch_norm_accepts_and_rejects_inputs_as_pytorch(group, training, grad, close):
    for name, case in group():
        operands = (
            case if group is of_settings and "training" in name else case | {"training": training}
        )
        x = operands["input"]
        if grad and isinstance(x, torch.Tensor) and x.is_floating_point():
            operands["input"] = x.requires_grad_()
        theirs = outcome(functional.batch_norm, operands)
        ours = outcome(backnorm.torch.batch_norm, operands)
        if isinstance(ours, Exception):
            assert isinstance(ours, backnorm.ArgumentError), (name, ours)
            if not isinstance(theirs, Exception):
                assert intended(ours), (name, ours)
            # What PyTorch finds by accident, looking for an element or an attribute, is no measure.
            elif not isinstance(theirs, IndexError | AttributeError):
                missing = [
                    kind for kind in KINDS if isinstance(theirs, kind) > isinstance(ours, kind)
                ]
                assert not missing, (name, theirs, ours)
        elif isinstance(theirs, Exception):
            assert kinder(operands), (name, theirs)
        else:
            for one, other in zip(compared(ours), compared(theirs), strict=True):
                assert one.requires_grad == other.requires_grad, name
                assert (one.shape, one.dtype) == (other.shape, other.dtype), name
                if one.dtype not in FLOATS:
                    one, other = one.to(torch.complex128), other.to(torch.complex128)
                    assert torch.equal(one, other), name
                    continue
                assert torch.equal(one.isnan(), other.isnan()), name
                close(one.nan_to_num(), other.nan_to_num())


def compared(results):
    return [r for r in results if r is not None and r.layout is torch.strided and not r.is_meta]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_gradients_of_an_empty_batch_are_zero(activation, training):
    for shape in ((0, 3, 5), (4, 3, 0), (4, 0, 3)):
        x = torch.zeros(shape).double()
        leaves = [x, torch.rand(shape[1]).double(), torch.rand(shape[1]).double()]
        leaves += [x.clone()] if activation == "relu" else []
        leaves = [leaf.requires_grad_() for leaf in leaves]
        statistics = torch.zeros(shape[1]).double(), torch.ones(shape[1]).double()
        y = backnorm.torch.batch_norm(
            x, *statistics, *leaves[1:3], training, activation=activation,
            residual=leaves[3] if activation == "relu" else None,
        )  # fmt: skip
        assert y.shape == x.shape
        for leaf, gradient in zip(leaves, torch.autograd.grad(y, leaves, x), strict=True):
            assert torch.equal(gradient, torch.zeros_like(leaf))
        assert torch.equal(statistics[0], torch.zeros(shape[1]).double())
