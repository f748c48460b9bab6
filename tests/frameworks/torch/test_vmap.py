"""`torch.func.vmap`: every choice of what it maps over, against PyTorch's own layer."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap

import backnorm.torch

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

NAMES = ("x", "residual", "mean", "variance", "weight", "bias")
SIZES = (4, 2)


def subsets(names):
    return itertools.chain.from_iterable(
        itertools.combinations(names, size) for size in range(len(names) + 1)
    )


def cases():
    """Yield whether it trains, and what there is beside x and statistics that are required."""
    for training, parameters in itertools.product((True, False), subsets(("weight", "bias"))):
        for statistics in ((), ("mean", "variance")) if training else (("mean", "variance"),):
            yield training, (*statistics, *parameters)


def function_of(kind, functions):
    """Return a function of the tensors in `NAMES`, of a module that has PyTorch's functions."""

    def call(x, residual, mean, variance, weight, bias, training):
        if functions is backnorm.torch and kind == "relu":
            return functions.batch_norm_relu(x, mean, variance, weight, bias, training)
        if functions is backnorm.torch and kind == "add relu":
            return functions.batch_norm_add_relu(
                x, residual, mean, variance, weight, bias, training
            )
        y = functions.batch_norm(x, mean, variance, weight, bias, training)
        if kind == "add relu":
            y = y + residual
        return torch.relu(y) if kind.endswith("relu") else y

    return call


def tensors(axes):
    """Return what is given by name, with axes of problems where `axes` has them, outermost first.

    Each axis is where the number says; of an axis there are as many as `SIZES` says.
    """
    shapes = {"x": (5, 3, 2), "residual": (5, 3, 2)}
    found = {}
    for name, places in axes.items():
        shape = list(shapes.get(name, (3,)))
        # The innermost first: it lies in what the axes outside of it leave.
        for level in reversed(range(len(places))):
            if places[level] is not None:
                shape.insert(places[level], SIZES[level])
        found[name] = torch.rand(shape).double() + 0.5
    return found


def first(tensor, places, *, back=False):
    """Return a tensor with the axes of problems before all others; or, `back`, as it was."""
    moves, count = [], 0
    for place in places:
        if place is not None:
            moves.append((place + count, count))
            count += 1
    for source, target in reversed(moves) if back else moves:
        tensor = tensor.movedim(target, source) if back else tensor.movedim(source, target)
    return tensor


def outcome(call, given, axes, training, differentiate, out_dim):
    """Return what a nest of vmap gives, and the statistics after it; or the error.

    `differentiate` is None, or whether gradients are taken inside or outside of vmap.
    """
    given = {name: tensor.clone() for name, tensor in given.items()}
    wanted = tuple(
        k for k, name in enumerate(NAMES) if name in given and name not in ("mean", "variance")
    )
    factor = torch.arange(30.0).view(5, 3, 2).double().cos()

    def inner(*arguments):
        return call(*arguments, training)

    def loss(function, *arguments):
        y = function(*arguments)
        return (y * factor).pow(3).sum() if y.dim() == 3 else (y.sin() * y).sum()

    function = inner
    if differentiate == "inside":
        function = grad(functools.partial(loss, inner), wanted)
    for level in reversed(range(len(SIZES))):
        dims = tuple(axes[name][level] if name in axes else None for name in NAMES)
        if any(place is not None for place in dims):
            out = out_dim if differentiate is None else 0
            function = vmap(function, dims, out_dims=out)
    if differentiate == "outside":
        function = grad(functools.partial(loss, function), wanted)
    try:
        result = function(*(given.get(name) for name in NAMES))
    except (RuntimeError, ValueError) as error:
        return error
    return result, given.get("mean"), given.get("variance")


def compare(kind, axes, training, close, differentiate=None, out_dim=0):
    """Compare a choice with PyTorch's, and return whether PyTorch takes it."""
    given = tensors(axes)
    how = training, differentiate, out_dim
    mine = outcome(function_of(kind, backnorm.torch), given, axes, *how)
    # PyTorch moves copies of statistics whose axes of problems are not the first.
    statistics = [name for name in ("mean", "variance") if name in axes]
    moved = given | {name: first(given[name], axes[name]).contiguous() for name in statistics}
    leading = axes | {
        name: tuple(None if place is None else 0 for place in axes[name]) for name in statistics
    }
    theirs = outcome(function_of(kind, torch.nn.functional), moved, leading, *how)
    if isinstance(theirs, Exception):
        assert isinstance(mine, RuntimeError), (axes, theirs)
        assert "would be moved by every element of vmap" in str(mine)
        return False
    assert not isinstance(mine, Exception), (axes, mine)
    result, *after = theirs
    after = [
        None if each is None else first(each, axes[name], back=True)
        for name, each in zip(("mean", "variance"), after, strict=True)
    ]
    close(mine, (result, *after), factor=16)
    return True


@pytest.mark.long
@pytest.mark.parametrize("kind", ["alone", "relu", "add relu"])
@pytest.mark.parametrize(("training", "present"), [*cases()], ids=str)
def test_every_choice_of_mapped_arguments(kind, training, present, close):
    residual = ("residual",) if kind == "add relu" else ()
    given = ("x", *residual, *present)
    taken = 0
    choices = [choice for choice in subsets(given) if choice]
    for k, choice in enumerate(choices):
        # Every place of the axis comes up, in turns.
        axes = {
            name: (None, k % (4 if name in ("x", "residual") else 2) if name in choice else None)
            for name in given
        }
        for differentiate in (None, "inside", "outside"):
            # What is mapped over nothing, as y is here, PyTorch can put nowhere but first.
            place = 0 if training and {*choice} <= {"mean", "variance"} else k % 4
            taken += compare(kind, axes, training, close, differentiate, place)
    refused = [
        choice for choice in choices
        if training and "x" in choice and present[:1] == ("mean",)
        and not {"mean", "variance"} <= {*choice}
    ]  # fmt: skip
    assert taken == 3 * (len(choices) - len(refused))


def nested(count, seed):
    """Return choices of axes for two levels, at least one axis at each."""
    draw = random.Random(seed)
    found = []
    while len(found) < count:
        training = draw.random() < 0.7
        present = ["x", *draw.choice([p for t, p in cases() if t == training])]
        axes = {}
        for name in present:
            rank = 3 if name == "x" else 1
            inside = draw.choice([None, draw.randint(0, rank)])
            outside = draw.choice([None, draw.randint(0, rank)])
            axes[name] = outside, inside
        if all(any(places[level] is not None for places in axes.values()) for level in (0, 1)):
            found.append((training, axes))
    return found


def check_nested(count, seed, close):
    taken = sum(
        compare("alone", axes, training, close, differentiate)
        for training, axes in nested(count, seed)
        for differentiate in (None, "inside")
    )
    assert taken > count // 2


@pytest.mark.long
def test_vmap_in_vmap(close):
    check_nested(150, 0, close)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 21))
def test_many_of_vmap_in_vmap(seed, close):
    check_nested(1000, seed, close)


@pytest.mark.parametrize("training", [True, False])
def test_no_problems_at_all(training):
    statistics = torch.zeros(0, 3), torch.ones(0, 3)

    def call(x, mean, variance):
        return backnorm.torch.batch_norm(x, mean, variance, training=training)

    for differentiated in (call, grad(lambda *given: call(*given).pow(3).sum())):
        y = vmap(differentiated)(torch.ones(0, 5, 3, 2), *statistics)
        assert y.shape == (0, 5, 3, 2)


@pytest.mark.parametrize("mapped", [True, False], ids=["own batch", "one batch"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_an_ensemble_of_models(mapped, training, relu, close):
    """`stack_module_state` of models, as they are: counters of batches too."""
    ours = backnorm.torch.BatchNormReLU1d if relu else backnorm.torch.BatchNorm1d
    makers = ours, torch.nn.BatchNorm1d
    x, factor = torch.randn(2, 4, 3).double(), torch.randn(4, 3).double()
    outcomes = []
    for k, make in enumerate(makers):
        models = [make(3).double().train(training) for _ in range(2)]
        for model in models:
            torch.nn.init.constant_(model.weight, 0.5)
        parameters, buffers = stack_module_state(models)

        def call(parameters, buffers, x, model=models[0], k=k):
            y = functional_call(model, (parameters, buffers), (x,))
            return torch.relu(y) if k and relu else y

        def loss(parameters, buffers, x, call=call):
            return (call(parameters, buffers, x) * factor).pow(3).sum()

        place = 0 if mapped else None
        given = x if mapped else x[0]
        y = vmap(call, (0, 0, place))(parameters, buffers, given)
        gradients = None
        if not training:
            # No transform lets a counter be counted that it did not make: PyTorch's neither.
            gradients = vmap(grad(loss), (0, 0, place))(parameters, buffers, given)
        outcomes.append((y, [buffers[name] for name in sorted(buffers)], gradients))
    close(*outcomes)
