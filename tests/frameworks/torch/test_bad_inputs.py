"""Inputs of all kinds, good and bad: what PyTorch takes we take, and raise what it raises.

An error is of the class of PyTorch's, and may be of others. Where PyTorch takes what we refuse, or
raises for what we take, `docs/pytorch.md` says so, and `intended` and `kinder` here.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
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


def good(batch=4, dtype=torch.float32, training=True):
    tensors = {name: (torch.rand(CHANNELS) + 0.5).to(dtype) for name in NAMES}
    return tensors | {"input": torch.randn(batch, CHANNELS, 5).to(dtype), "training": training}


def of_shapes():
    shapes = [(), (0,), (1,), (3,), (4, 3), (1, 3), (0, 3), (4, 0), (1, 0), (4, 3, 0), (1, 3, 1)]
    shapes += [(1, 3, 2), (1, 3, 1, 1), (4, 0, 5), (1, 0, 1), (2, 1, 5), (2, 3, 1, 1, 1, 1, 1)]
    for shape, running, affine in itertools.product(shapes, *[(True, False)] * 2):
        given = {name: torch.rand(shape[1] if len(shape) > 1 else 3) + 0.5 for name in NAMES}
        given["input"] = torch.randn(shape)
        absent = [] if running else ["running_mean", "running_var"]
        absent += [] if affine else ["weight", "bias"]
        yield f"{shape}, without {absent}", given | dict.fromkeys(absent)


def of_channels():
    shapes = [(), (0,), (1,), (2,), (4,), (1, 3), (3, 1), (3, 3)]
    for name, shape, batch in itertools.product(NAMES[1:], shapes, (4, 0)):
        yield f"{name} {shape} beside {batch}", good(batch) | {name: torch.ones(shape)}


def of_types():
    sets = [NAMES, *((name,) for name in NAMES), NAMES[1:3], NAMES[3:]]
    for batch, dtype, beside in itertools.product((4, 0), FLOATS + OTHERS, FLOATS):
        for names in sets:
            given = good(batch, beside)
            changed = {name: given[name].to(dtype) for name in names}
            yield f"{dtype} {names} beside {beside}, {batch}", given | changed


def of_other_tensors():
    ones = torch.ones(CHANNELS)
    kinds = {
        "None": None,
        "a list": [1.0] * 3,
        "an array": np.ones(3),
        "a number": 1.0,
        "meta": ones.to("meta"),
        "sparse": ones.to_sparse(),
        "with gaps": torch.ones(6)[::2],
        "expanded": torch.ones(1).expand(3),
        "with gradient": torch.ones(3, requires_grad=True),
        "nan": ones * torch.nan,
    }
    for batch, (name, kind) in itertools.product((4, 0), itertools.product(NAMES[1:], kinds)):
        yield f"{name} {kind} beside {batch}", good(batch) | {name: kinds[kind]}
    for batch, kind in itertools.product((4, 0), ("meta", "sparse")):
        x = good(batch)["input"]
        yield f"input {kind}", good() | {"input": x.to("meta") if kind == "meta" else x.to_sparse()}
    yield "all meta", {k: v.to("meta") if k in NAMES else v for k, v in good().items()}
    for pair in (NAMES[1:3], NAMES[3:]):
        for batch in (4, 0):
            yield f"{pair} meta {batch}", good(batch) | dict.fromkeys(pair, ones.to("meta"))
        yield f"{pair} absent", good() | dict.fromkeys(pair)
    for name in ("None", "a list", "an array", "a number"):
        yield f"input {name}", good() | {"input": kinds[name]}


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
    for name, value, batch in itertools.product(("momentum", "eps"), numbers, (4, 0)):
        yield f"{name} {value!r} {batch}", good(batch) | {name: value}
    for value in (None, 0, 1, "x", [], 2.5, torch.tensor(True)):
        yield f"training {value!r}", good() | {"training": value}


GROUPS = [of_shapes, of_channels, of_types, of_other_tensors, of_settings]


def outcome(function, given):
    """Return y and running statistics, or the error."""
    given = {
        name: value.clone().detach().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in given.items()
    }
    try:
        y = function(**given)
    except Exception as error:
        return error
    return [y, given["running_mean"], given["running_var"]]


def intended(error):
    """Whether it is documented that we refuse what PyTorch takes."""
    words = str(error)
    return (
        # A matrix of as many elements as there are channels.
        ("one value per channel" in words and error.came in ("shape (1, 3)", "shape (3, 1)"))
        or (error.argument == "eps" and error.came in ("nan", "inf", None))
        or "variance + epsilon must be positive" in words
    )


def kinder(given):
    """Whether it is documented that we take what PyTorch refuses."""
    x, *others = (given[name] for name in NAMES)
    if 0 in x.shape[1:2]:
        return True
    types = {each.dtype for each in others if each is not None}
    return x.dtype.itemsize == 2 and types <= {x.dtype, torch.float32}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("group", GROUPS)
def test_taken_and_refused_as_by_pytorch(group, training, grad, close):
    for name, case in group():
        given = (
            case if group is of_settings and "training" in name else case | {"training": training}
        )
        x = given["input"]
        if grad and isinstance(x, torch.Tensor) and x.is_floating_point():
            given["input"] = x.requires_grad_()
        theirs = outcome(functional.batch_norm, given)
        ours = outcome(backnorm.torch.batch_norm, given)
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
            assert kinder(given), (name, theirs)
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


@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
def test_gradients_of_an_empty_batch(relu):
    """As PyTorch has them, also where types and lengths do not fit."""
    for x, length in (
        (torch.zeros(0, 3, 5).double(), 3),
        (torch.zeros(0, 3), 7),
        (torch.zeros(0), 2),
    ):
        results = []
        for ours in (True, False):
            leaves = [x.clone(), torch.rand(length), torch.rand(length).bfloat16()]
            leaves = [leaf.requires_grad_() for leaf in leaves]
            if ours:
                function = backnorm.torch.batch_norm_relu if relu else backnorm.torch.batch_norm
                y = function(leaves[0], None, None, *leaves[1:])
            else:
                y = functional.batch_norm(leaves[0], None, None, *leaves[1:])
                y = torch.relu(y) if relu else y
            results.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
        for one, other in zip(*results, strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)


LAYERS = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_refuse_as_pytorchs(name, close):
    """Inputs of every rank, with every option of the layer."""
    options = itertools.product((True, False), (True, False), (0.1, None, 0, 1), (True, False))
    shapes = [
        (),
        (2,),
        (0,),
        (2, 3),
        (2, 4),
        (0, 3),
        (0, 4),
        (1, 3),
        (2, 3, 4),
        (0, 3, 4),
        (1, 3, 1),
    ]
    shapes += [
        (2, 3, 2, 2),
        (2, 4, 2, 2),
        (0, 3, 2, 2),
        (1, 3, 1, 1),
        (2, 3, 2, 2, 2),
        (0, 3, 2, 2, 2),
    ]
    count = 0
    for affine, tracked, momentum, training in options:
        for shape, dtype in itertools.product(shapes, (torch.float32, torch.float64, torch.int64)):
            x = torch.randn(shape).to(dtype)
            found = []
            for module in (nn, backnorm.torch):
                layer = getattr(module, name)(
                    3, momentum=momentum, affine=affine, track_running_stats=tracked
                ).train(training)
                try:
                    found.append([layer(x.clone()), *layer.buffers()])
                except Exception as error:
                    found.append(error)
            theirs, ours = found
            where = shape, dtype, affine, tracked, momentum, training
            if isinstance(theirs, Exception):
                missing = [
                    kind for kind in KINDS if isinstance(theirs, kind) > isinstance(ours, kind)
                ]
                assert not missing, (where, theirs, ours)
            else:
                close(ours, theirs)
            count += 1
    assert count == 32 * len(shapes) * 3
