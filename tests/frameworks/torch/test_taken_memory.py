"""Tensors whose storage was taken away or shortened, where PyTorch's operators read them for us.

Those do not look, and end the process. `check_operands` has the calls of our own kernels.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import backnorm
import backnorm.torch

from .operand_kinds import with_less_memory, without_memory

# PyTorch's forward mode uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")

CHANNELS = 5
NAMES = ("input", "weight", "bias", "running_mean", "running_var")
TEXT = r"its data is not allocated yet|are out of bounds"
TAKEN = {"all": without_memory, "a part": with_less_memory}


@pytest.fixture(params=TAKEN)
def taken(request):
    """A function that copies a tensor and takes memory from the copy."""
    return TAKEN[request.param]


def good():
    """Return good tensors by name."""
    given = {name: torch.rand(CHANNELS) + 0.5 for name in NAMES}
    return given | {"input": torch.rand(3, CHANNELS, 4) + 0.5}


def called(given, training, relu=False):
    """Return y."""
    function = backnorm.torch.batch_norm_relu if relu else backnorm.torch.batch_norm
    return function(**given, training=training)


def in_a_mode(given, training, relu):
    with FlopCounterMode(display=False):
        return called(given, training, relu)


def with_forward_mode(given, training, relu):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given["input"], torch.ones(given["input"].shape))
        return called(given | {"input": dual}, training, relu)


def with_gradients(given, training, relu):
    def loss(weight):
        return called(given | {"weight": weight}, training, relu).sum()

    return torch.func.grad(loss)(given["weight"])


def mapped(name):
    """Return how vmap maps over one of the tensors (and over running statistics, which it must)."""

    def call(given, training, relu):
        over = {name} | ({"running_mean", "running_var"} if training else set())
        stacked = {each: _stacked(given[each]) for each in over}

        def one(values):
            return called(given | values, training, relu)

        return torch.func.vmap(one)(stacked)

    return call


def _stacked(tensor):
    """Return two problems' tensors in one, with as much of its memory as `tensor` has."""
    two = torch.ones(2, *tensor.shape)
    has, needs = tensor.untyped_storage().nbytes(), tensor.nbytes
    if has < needs:
        two.untyped_storage().resize_(has and two.nbytes - tensor.itemsize)
    return two


WAYS = {
    "mode": in_a_mode,
    "forward mode": with_forward_mode,
    "func.grad": with_gradients,
    **{f"vmap over {name}": mapped(name) for name in NAMES},
}


@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_under_what_watches_or_transforms(way, name, training, relu, taken):
    call = WAYS[way]
    call(good(), training, relu)
    # There PyTorch looks itself, before we are called.
    is_theirs = way == "forward mode" and name == "input"
    for _ in range(2):
        given = good()
        given[name] = taken(given[name])
        before = given["running_mean"].clone() if name != "running_mean" else None
        with pytest.raises(RuntimeError if is_theirs else backnorm.ArgumentError, match=TEXT):
            call(given, training, relu)
        assert before is None or torch.equal(given["running_mean"], before)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("wants_gradients", [False, True], ids=["", "gradients"])
def test_of_the_residual(training, wants_gradients, taken):
    given = good()
    given["weight"].requires_grad_(wants_gradients)
    residual = torch.rand(given["input"].shape)
    backnorm.torch.batch_norm_add_relu(residual=residual, **given, training=training)
    call = backnorm.torch.batch_norm_add_relu
    for way in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        with way, pytest.raises(backnorm.ArgumentError, match=rf"^residual: .*({TEXT})"):
            call(residual=taken(residual), **given, training=training)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_of_batched_gradients(training, taken):
    given = good()
    x = given["input"].requires_grad_()
    y = called(given, training)
    dy = torch.rand(2, *y.shape)
    torch.autograd.grad(y, x, dy, is_grads_batched=True, retain_graph=True)
    # PyTorch's own words: it looks at the storage where it takes the batch apart.
    with pytest.raises(RuntimeError, match=TEXT):
        torch.autograd.grad(y, x, taken(dy), is_grads_batched=True)


@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("name", ["input", "weight", "dy", "ddx", "ddweight", "ddbias"])
def test_of_the_second_order(name, relu, taken):
    for is_taken in (False, True):
        given = good()
        leaves = given["input"], given["weight"], given["bias"]
        y = called({k: v.requires_grad_(not k.startswith("running")) for k, v in given.items()},
                   True, relu)  # fmt: skip
        dy = torch.rand(y.shape, requires_grad=True)
        gradients = torch.autograd.grad(y, leaves, dy, create_graph=True)
        cotangents = {
            f"dd{name}": torch.rand(gradient.shape)
            for name, gradient in zip(("x", "weight", "bias"), gradients, strict=True)
        }
        tensors = given | cotangents | {"dy": dy}
        wanted = given["input"], given["weight"], dy
        if not is_taken:
            torch.autograd.grad(gradients, wanted, list(cotangents.values()))
            continue
        storage = tensors[name].untyped_storage()
        storage.resize_(taken(torch.ones(storage.nbytes() // 4)).untyped_storage().nbytes())
        # Before a ReLU the graph keeps the masked dy, which is a copy.
        is_copied = relu and name == "dy"
        refused = pytest.raises(backnorm.ArgumentError, match=TEXT)
        with contextlib.nullcontext() if is_copied else refused:
            torch.autograd.grad(gradients, wanted, list(cotangents.values()))


def test_saved_tensors_that_are_unpacked_as_something_else():
    """As by hooks that keep them elsewhere: in other classes, places, or without memory."""
    from torch.testing._internal.two_tensor import TwoTensor

    given = good()
    x = given["input"].requires_grad_()
    dy = torch.rand(x.shape) - 0.5
    (wanted,) = torch.autograd.grad(called(given, True), x, dy)

    def unpacked(change):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), change):
            return called(given, True)

    wrapped = unpacked(lambda tensor: TwoTensor(tensor, tensor))
    (found,) = torch.autograd.grad(wrapped, x, dy)
    assert torch.equal(found.a if type(found) is TwoTensor else found, wanted)
    negated = unpacked(lambda tensor: torch._neg_view(-tensor))
    assert torch.equal(torch.autograd.grad(negated, x, dy)[0], wanted)
    for change in TAKEN.values():
        with pytest.raises(backnorm.ArgumentError, match=TEXT):
            torch.autograd.grad(unpacked(change), x, dy)
    with pytest.raises(backnorm.ArgumentError, match="must be where"):
        torch.autograd.grad(unpacked(lambda tensor: tensor.to("meta")), x, dy)


def test_our_relu_is_pytorchs():
    """The one behind given statistics, also in the second order."""
    given = good()
    x = (given["input"] - 1).requires_grad_()
    dy = (torch.rand(x.shape) - 0.5).requires_grad_()
    results = []
    for function in (
        lambda x: backnorm.torch.batch_norm_relu(**given | {"input": x}),
        lambda x: torch.relu(functional.batch_norm(**given | {"input": x})),
    ):
        (dx,) = torch.autograd.grad(function(x), x, dy, create_graph=True)
        (ddy,) = torch.autograd.grad(dx, dy, torch.ones_like(dx))
        results.append((dx, ddy))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
