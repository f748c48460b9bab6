"""`torch.func.vmap`: every choice of what it maps over, against PyTorch's own layer."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap

import backnorm.torch

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

NAMES = ("x", "residual", "mean", "variance", "weight", "bias")
STATISTICS = ("mean", "variance")
SIZE = 2


def subsets(names):
    return itertools.chain.from_iterable(
        itertools.combinations(names, size) for size in range(len(names) + 1)
    )


def cases():
    """Yield whether it trains, and what there is beside x and statistics that are required."""
    for training, parameters in itertools.product((True, False), subsets(("weight", "bias"))):
        for statistics in ((), ("mean", "variance")) if training else (("mean", "variance"),):
            yield training, (*statistics, *parameters)


def function_of(kind, ours):
    """Return a function of the tensors in `NAMES`, ours or PyTorch's."""
    activation = "relu" if kind.endswith("relu") else None

    def call(x, residual, mean, variance, weight, bias, training):
        operands = x, mean, variance, weight, bias, training
        if ours:
            return backnorm.torch.batch_norm(*operands, activation=activation, residual=residual)
        y = torch.nn.functional.batch_norm(*operands)
        if residual is not None:
            y = y + residual
        return torch.relu(y) if activation else y

    return call


def tensors(axes):
    """Return tensors by name, with an axis of problems where `axes` says, None for none."""
    shapes = {"x": (5, 3, 2), "residual": (5, 3, 2)}
    found = {}
    for name, place in axes.items():
        shape = list(shapes.get(name, (3,)))
        if place is not None:
            shape.insert(place, SIZE)
        found[name] = torch.rand(shape).double() + 0.5
    return found


def outcome(call, operands, axes, training, differentiate, out_dim):
    """Return the results of vmap, and the statistics after it; or the error.

    `differentiate` is None, or whether gradients are taken inside or outside of vmap.
    """
    operands = {name: tensor.clone() for name, tensor in operands.items()}
    wanted = tuple(k for k, name in enumerate(NAMES) if name in operands and name not in STATISTICS)
    factor = torch.arange(30.0).view(5, 3, 2).double().cos()

    def inner(*arguments):
        return call(*arguments, training)

    def loss(function, *arguments):
        y = function(*arguments)
        return (y * factor).pow(3).sum() if y.dim() == 3 else (y.sin() * y).sum()

    function = inner
    if differentiate == "inside":
        function = grad(functools.partial(loss, inner), wanted)
    function = vmap(
        function, tuple(map(axes.get, NAMES)), out_dims=out_dim if differentiate is None else 0
    )
    if differentiate == "outside":
        function = grad(functools.partial(loss, function), wanted)
    try:
        result = function(*map(operands.get, NAMES))
    except (RuntimeError, ValueError) as error:
        return error
    return result, *map(operands.get, STATISTICS)


def compare(kind, axes, training, close, differentiate=None, out_dim=0):
    """Compare a choice with PyTorch's, and return whether PyTorch accepts it."""
    operands = tensors(axes)
    options = training, differentiate, out_dim
    mine = outcome(function_of(kind, True), operands, axes, *options)
    # PyTorch moves copies of statistics whose axes of problems are not the first.
    mapped = [name for name in STATISTICS if axes.get(name) is not None]
    first = {name: operands[name].movedim(axes[name], 0).contiguous() for name in mapped}
    leading = axes | dict.fromkeys(mapped, 0)
    theirs = outcome(function_of(kind, False), operands | first, leading, *options)
    if isinstance(theirs, Exception):
        assert isinstance(mine, RuntimeError), (axes, theirs)
        assert "must be mapped by vmap" in str(mine)
        return False
    assert not isinstance(mine, Exception), (axes, mine)
    result, *after = theirs
    after = [
        each.movedim(0, axes[name]) if name in mapped else each
        for name, each in zip(STATISTICS, after, strict=True)
    ]
    close(mine, (result, *after), factor=16)
    return True


@pytest.mark.long
@pytest.mark.parametrize("kind", ["alone", "relu", "add relu"])
@pytest.mark.parametrize(("training", "present"), [*cases()], ids=str)
def test_vmap_of_each_choice_of_arguments_matches_pytorch(kind, training, present, close):
    residual = ("residual",) if kind == "add relu" else ()
    inputs = ("x", *residual, *present)
    taken = 0
    choices = [choice for choice in subsets(inputs) if choice]
    for k, choice in enumerate(choices):
        # Every place of the axis comes up, in turns.
        axes = {
            name: k % (4 if name in ("x", "residual") else 2) if name in choice else None
            for name in inputs
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


@pytest.mark.parametrize("training", [True, False])
def test_vmap_over_no_instances_gives_empty_results(training):
    statistics = torch.zeros(0, 3), torch.ones(0, 3)

    def call(x, mean, variance):
        return backnorm.torch.batch_norm(x, mean, variance, training=training)

    for differentiated in (call, grad(lambda *inputs: call(*inputs).pow(3).sum())):
        y = vmap(differentiated)(torch.ones(0, 5, 3, 2), *statistics)
        assert y.shape == (0, 5, 3, 2)


@pytest.mark.parametrize("mapped", [True, False], ids=["own batch", "one batch"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_ensemble_by_stack_module_state_matches_pytorch(mapped, training, relu, close):
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
        inputs = x if mapped else x[0]
        y = vmap(call, (0, 0, place))(parameters, buffers, inputs)
        gradients = None
        if not training:
            # No transform lets a counter be counted that it did not make: PyTorch's neither.
            gradients = vmap(grad(loss), (0, 0, place))(parameters, buffers, inputs)
        outcomes.append((y, [buffers[name] for name in sorted(buffers)], gradients))
    close(*outcomes)
