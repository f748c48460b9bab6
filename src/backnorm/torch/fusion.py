"""Fuse the layers of a model with the activations that follow them.

A fused layer gets the activation, and an `Identity` takes the place of the activation's module, as
with `torch.ao.quantization.fuse_modules`. Afterwards, nothing notices if the model calls the layer
or the `Identity` alone. So pairs are fused only if the structure of the model proves that the
activation follows the layer, or if `proof` has shown it on an example.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch.nn import Identity, Module, Sequential
from torch.nn.modules.lazy import LazyModuleMixin

from backnorm.errors import ArgumentTypeError, ArgumentValueError, described
from backnorm.torch.activations import activation_of
from backnorm.torch.modules import (
    Fused,
    _BatchNorm,
    alteration_of,
    applies_activation,
    has_another_forward,
)

PairNames: TypeAlias = tuple[str, str]

_ACCEPTED = "True, False, or pairs of names, such as [('norm1', 'relu1')]"


class Pair(NamedTuple):
    """A layer, the activation behind it, and the place of the activation: its parent, its name."""

    layer: Module
    act: Module
    parent: Module
    name: str


def check_fuse(fuse: object) -> bool | list[PairNames]:
    """Return the argument `fuse` of `convert` as a boolean or pairs of names, or raise."""
    if type(fuse) in (bool, np.bool_):
        return bool(fuse)
    pairs: Any = [fuse] if isinstance(fuse, str) or not isinstance(fuse, Iterable) else [*fuse]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or [*map(type, pair)] != [str, str]:
            problem = "must be a boolean or pairs of names"
            raise ArgumentTypeError("fuse", problem, came=described(pair), accepted=_ACCEPTED)
    return [(layer, act) for layer, act in pairs]


def neighbours(model: Module) -> tuple[list[PairNames], dict[Module, str]]:
    """Return the names of the layers that an activation follows in a `torch.nn.Sequential`, with
    the names of these activations.

    Also return a mapping. Its keys are the other layers in sequences; the value of a key is the
    reason why the layer cannot be fused, as text.
    """
    structure = _Structure(model)
    found: list[PairNames] = []
    obstacles: dict[Module, str] = {}
    names = {module: name for name, module in model.named_modules()}
    for sequence in filter(_calls_children_in_order, model.modules()):
        for layer, act in itertools.pairwise([*sequence._modules.values(), None]):
            if layer is None or not applies_activation(type(layer)):
                continue
            if act is None or activation_of(act) is None:
                obstacles.setdefault(layer, "no activation that can be fused follows it")
            elif obstacle := structure.obstacle(layer, act):
                obstacles.setdefault(layer, obstacle)
            else:
                found.append((names[layer], names[act]))
    return found, obstacles


def named_pairs(model: Module, pairs: Iterable[PairNames]) -> list[Pair]:
    """Return the named pairs of a converted model; raise if one cannot be fused."""
    structure = _Structure(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    accepted, seen = [], set[Module]()
    for names in pairs:
        for name in names:
            if name not in modules:
                raise refusal([names], f"the model has no module {name!r}")
            if modules[name] in seen:
                raise refusal([names], f"{name!r} is named twice")
            seen.add(modules[name])
        layer, act = (modules[name] for name in names)
        if not applies_activation(type(layer)):
            problem = f"{names[0]!r} is a {type(layer).__name__}, not a BatchNorm layer of PyTorch"
            raise refusal([names], problem)
        if obstacle := structure.obstacle(layer, act):
            raise refusal([names], obstacle)
        accepted.append(Pair(layer, act, *structure.places[act][0]))
    return accepted


def fuse_pair(pair: Pair) -> None:
    """Let the layer of a pair compute the activation; an `Identity` replaces the activation."""
    layer, act, parent, name = pair
    identity = Identity().train(act.training)
    layer.activation, layer.fused = activation_of(act), Fused(act, identity)
    setattr(parent, name, identity)


def separate(model: Module) -> None:
    """Undo all fusions of pairs; raise if a fused layer is in the model without its `Identity`."""
    places = _Structure(model).places
    separated = []
    for name, layer in model.named_modules():
        fused = layer.fused if isinstance(layer, _BatchNorm) else None
        if fused is None:
            continue
        if fused.identity not in places:
            raise ArgumentValueError(
                "model",
                f"has the layer {name!r}, but not the Identity that took the place of the "
                f"{type(fused.module).__name__} with which this layer is fused",
                accepted="a model with both modules, such as the whole model that was converted",
            )
        separated.append((layer, fused))
    for layer, (act, identity) in separated:
        act.train(identity.training)
        for parent, name in places[identity]:
            setattr(parent, name, act)
        del layer.activation, layer.fused


class _Structure:
    """The places of each module of a model: its parents, and its names there."""

    def __init__(self, model: Module) -> None:
        self.places = defaultdict[Module, list[tuple[Module, str]]](list)
        for parent in model.modules():
            for name, child in parent._modules.items():
                if child is not None:
                    self.places[child].append((parent, name))

    def obstacle(self, layer: Module, act: Module) -> str | None:
        """Return the reason why a layer cannot compute an activation, or None if it can."""
        if isinstance(layer, LazyModuleMixin):
            return "it is lazy; it can be fused after its first batch"
        if activation_of(act) is None:
            return f"{type(act).__name__} is not an activation that can be fused"
        if layer.activation is not None:
            return f"it already computes {layer.following()}"
        for module, subject in ((layer, "it"), (act, "the activation after it")):
            if len(self.places[module]) > 1:
                return f"{subject} is in {len(self.places[module])} places of the model"
            if alteration := alteration_of(module):
                return f"{subject} {alteration}"
        if has_another_forward(type(act)):
            return "the activation after it is of a class whose forward was replaced"
        return None


def _calls_children_in_order(module: Module) -> bool:
    called = ("forward", "__iter__", "__call__")
    own = all(getattr(type(module), name) is getattr(Sequential, name) for name in called)
    return own and "forward" not in module.__dict__


def refusal(pairs: list[PairNames], problem: str) -> ArgumentValueError:
    """Return the error for pairs that cannot be fused."""
    which = f"the pair {pairs[0]}" if len(pairs) == 1 else f"the pairs {pairs}"
    return ArgumentValueError(
        "fuse", f"has {which}, which cannot be fused: {problem}", accepted=_ACCEPTED
    )
