"""Fuse the layers of a model with the activations that follow them.

In a `torch.nn.Sequential` the order of modules shows which activation follows a layer. In other
modules the order shows nothing, so the caller of `convert` names each pair of a layer and an
activation.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from torch.nn import Module, Sequential
from torch.nn.modules.lazy import LazyModuleMixin

from backnorm.activations import Activation
from backnorm.errors import ArgumentTypeError, ArgumentValueError, described
from backnorm.torch.activations import activation_of
from backnorm.torch.modules import (
    FusedActivation,
    alteration_of,
    applies_activation,
    described_activation,
    has_another_forward,
)

PairNames: TypeAlias = tuple[str, str]

_ACCEPTED = "True, False, or pairs of names, such as [('norm1', 'relu1')]"


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


def check_partners(model: Module) -> None:
    """Raise if an activation of the model is fused with a layer that is not in the model.

    Such an activation does nothing in this model: two models share it, or the layer was replaced.
    """
    modules = dict(model.named_modules())
    layers = set(modules.values())
    for name, act in modules.items():
        if not isinstance(act, FusedActivation) or act.fused_layer in layers:
            continue
        if getattr(act.fused_layer, "activation", None) is not None:
            raise ArgumentValueError(
                "model",
                f"has the activation {name!r}, which is fused with the layer {act.names[0]!r} that "
                "was converted before and is not in the model",
                accepted="a model whose activations are not shared with another converted model",
                hint="call backnorm.torch.revert(model) first, which separates the pair",
            )


def named_pairs(
    model: Module, pairs: Iterable[PairNames], classes: Mapping[Module, type[Module] | None]
) -> list[tuple[Module, Module, PairNames]]:
    """Return each pair's layer, activation and names; raise if a pair cannot be fused.

    `classes` maps each layer to the class that `convert` gives it before the fusion, or to None if
    the layer keeps its class.
    """
    structure = _Structure(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    accepted, seen = [], set[Module]()
    for names in pairs:
        for name in names:
            if name not in modules:
                raise _refusal(names, f"the model has no module {name!r}")
            if modules[name] in seen:
                raise _refusal(names, f"{name!r} is named twice")
            seen.add(modules[name])
        layer, act = (modules[name] for name in names)
        if not applies_activation(classes.get(layer) or type(layer)):
            cls = type(layer).__name__
            raise _refusal(
                names, f"{names[0]!r} is a {cls}, not a BatchNorm layer of PyTorch's own"
            )
        if obstacle := structure.obstacle(layer, act):
            raise _refusal(names, obstacle)
        accepted.append((layer, act, names))
    return accepted


def fuse_sequences(model: Module) -> dict[Module, str]:
    """Fuse each layer in a `torch.nn.Sequential` with the activation that follows it.

    Return a mapping whose keys are the layers in sequences that could not be fused. The value of a
    key is the reason, as text.
    """
    structure = _Structure(model)
    obstacles: dict[Module, str] = {}
    names = {module: name for name, module in model.named_modules()}
    for sequence in filter(_calls_children_in_order, model.modules()):
        for layer, act in itertools.pairwise([*sequence._modules.values(), None]):
            if layer is None or not applies_activation(type(layer)):
                continue
            if act is None or _activation(act) is None:
                obstacles.setdefault(layer, "no activation that can be fused follows it")
            elif obstacle := structure.obstacle(layer, act):
                obstacles.setdefault(layer, obstacle)
            else:
                fuse_pair(layer, act, (names[layer], names[act]))
    return obstacles


def fuse_pair(layer: Module, act: Module, names: PairNames) -> None:
    """Let a layer compute the activation, and make the activation's module return its input.

    Each eager call of the activation's module checks that its input is the layer's output, because
    a model can also call the modules of a sequence one by one.
    """
    if isinstance(act, FusedActivation):
        act.restore()
    layer.activation = activation_of(act)
    FusedActivation.replace(act, layer, names)


class _Structure:
    """How often each module occurs in a model, and which modules are fused already.

    `_partners` maps a layer to the activation that an earlier conversion has fused with it, and
    this activation to the layer.
    """

    def __init__(self, model: Module) -> None:
        modules = dict.fromkeys(model.modules())
        self._places = Counter(child for parent in modules for child in parent._modules.values())
        self._partners = dict[Module, Module]()
        for act in modules:
            if isinstance(act, FusedActivation) and act.fused_layer in modules:
                self._partners |= {act: act.fused_layer, act.fused_layer: act}

    def obstacle(self, layer: Module, act: Module) -> str | None:
        """Return the reason why a layer cannot compute an activation, or None if it can."""
        if isinstance(layer, LazyModuleMixin):
            return "it is lazy; it can be fused after its first batch"
        if _activation(act) is None:
            return f"{type(act).__name__} is not an activation that can be fused"
        if getattr(layer, "owns_activation", False):
            return f"it computes {described_activation(layer.activation)} of its own"
        if self._partners.get(layer, act) is not act:
            return "it is fused with another activation"
        if self._partners.get(act, layer) is not layer:
            return "the activation after it is fused with another layer"
        for module, subject in ((layer, "it"), (act, "the activation after it")):
            if self._places[module] > 1:
                return f"{subject} is in {self._places[module]} places of the model"
            if alteration := alteration_of(module):
                return f"{subject} {alteration}"
        if has_another_forward(type(act)):
            return "the activation after it is of a class whose forward was replaced"
        return None


def _calls_children_in_order(module: Module) -> bool:
    called = ("forward", "__iter__", "__call__")
    own = all(getattr(type(module), name) is getattr(Sequential, name) for name in called)
    return own and "forward" not in module.__dict__


def _activation(act: Module) -> Activation | None:
    """Return the activation that a module computes, or that its layer computes for it."""
    return activation_of(act, act.original_class if isinstance(act, FusedActivation) else None)


def _refusal(names: PairNames, problem: str) -> ArgumentValueError:
    return ArgumentValueError(
        "fuse", f"has the pair {names}, which cannot be fused: {problem}", accepted=_ACCEPTED
    )
