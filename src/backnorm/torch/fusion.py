"""Which layers of a model are fused with the activation behind them, and how that is undone.

A model's structure shows a pair only in a `torch.nn.Sequential`. Elsewhere the caller names it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from torch.nn import Module, Sequential
from torch.nn.modules.lazy import LazyModuleMixin

from backnorm.errors import ArgumentTypeError, ArgumentValueError, described
from backnorm.torch.activations import Activation, activation_of
from backnorm.torch.modules import BatchNorm2d
from backnorm.torch.separable import FusedActivation, Separable, is_observed

__all__ = ["Outcome", "check_names", "fuse_pair", "fuse_sequences", "pairs_of", "unfuse"]

Names: TypeAlias = list[tuple[str, str]]

_ACCEPTED = "True, False, or pairs of names, such as [('norm1', 'relu1')]"


class Outcome(NamedTuple):
    """What became of a layer: what it was fused with, or why it was not fused."""

    fused: bool
    text: str


def check_names(fuse: object) -> Names:
    """Return `fuse` as pairs of names, or raise if it is another thing."""
    if isinstance(fuse, str) or not isinstance(fuse, Iterable):
        raise ArgumentTypeError(
            "fuse", "must be a boolean or pairs of names", came=described(fuse), accepted=_ACCEPTED
        )
    pairs: Names = []
    for pair in fuse:
        names = tuple(pair) if isinstance(pair, tuple | list) else ()
        if len(names) != 2 or not all(isinstance(name, str) for name in names):
            raise ArgumentTypeError(
                "fuse", "must have pairs of names", came=described(pair), accepted=_ACCEPTED
            )
        pairs.append(names)
    return pairs


def fuse_sequences(model: Module) -> dict[Module, Outcome]:
    """Fuse layers with the activation behind them in a `torch.nn.Sequential`.

    Returns what became of each layer of ours in one, but for those that were fused before.
    """
    places = _Places(model)
    outcomes: dict[Module, Outcome] = {}
    for sequence in model.modules():
        if not _calls_children_in_order(sequence):
            continue
        for layer, act in itertools.pairwise([*sequence._modules.values(), None]):
            # A layer that comes again is in two places, and not fused in either.
            if layer is None or layer in outcomes or not _takes_activation(type(layer)):
                continue
            if act is None or _activation(act) is None:
                outcome = Outcome(False, "no activation that can be fused follows it")
            elif (reason := places.why_not(layer, act)) is not None:
                outcome = Outcome(False, reason)
            else:
                outcome = fuse_pair(layer, act)
            if outcome.fused or layer.activation is None:
                outcomes[layer] = outcome
    return outcomes


def pairs_of(
    model: Module, pairs: Names, becomes: Callable[[Module], type[Module]]
) -> list[tuple[Module, Module]]:
    """Return the layers and activations that are named, or raise if a pair cannot be fused.

    `becomes` returns the class that a module has after the conversion.
    """
    places = _Places(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    found, seen = [], set[Module]()
    for names in pairs:
        for name in names:
            if name not in modules:
                raise _refusal(names, f"the model has no module {name!r}")
            if modules[name] in seen:
                raise _refusal(names, f"{name!r} is named twice")
            seen.add(modules[name])
        layer, act = (modules[name] for name in names)
        if not _takes_activation(becomes(layer)):
            raise _refusal(
                names, f"{names[0]!r} is a {type(layer).__name__}, not a BatchNorm layer"
            )
        reason = places.why_not(layer, act)
        if reason is not None:
            raise _refusal(names, reason)
        found.append((layer, act))
    return found


def fuse_pair(layer: Module, act: Module) -> Outcome:
    """Let a layer compute an activation, and the activation's module nothing."""
    activation = _activation(act)
    if isinstance(act, FusedActivation) and act.layer is not layer:
        act.separate()
        act.restore()
    if not isinstance(act, FusedActivation):
        FusedActivation.take_the_place_of(act, layer)
    layer.activation = activation
    return Outcome(True, str(activation))


def unfuse(model: Module) -> None:
    """Let all activations' modules of a model compute their activation."""
    for module in list(model.modules()):
        if isinstance(module, Separable):
            module.separate()
        if isinstance(module, FusedActivation):
            module.restore()


def _takes_activation(cls: type[Module]) -> bool:
    """Whether layers of a class apply their `activation`."""
    return getattr(cls, "forward", None) is BatchNorm2d.forward and cls.__call__ is Module.__call__


class _Places:
    """The places that a model has for its modules, and what was fused in it before."""

    def __init__(self, model: Module) -> None:
        self._counts = Counter(
            child
            for parent in model.modules()
            for child in parent._modules.values()
            if child is not None
        )
        self._fused = {
            module.layer: module
            for module in model.modules()
            if isinstance(module, FusedActivation)
        }

    def why_not(self, layer: Module, act: Module) -> str | None:
        """Return why a layer cannot compute an activation, or None."""
        if isinstance(layer, LazyModuleMixin):
            return "it is lazy; it can be fused after its first batch"
        if _activation(act) is None:
            return f"a {type(act).__name__} is not an activation that can be fused"
        if self._fused.get(layer, act) is not act:
            return "it is fused with another activation of the model"
        if isinstance(act, FusedActivation) and act.layer is not layer and self._counts[act.layer]:
            return "the activation behind it is fused with another layer"
        for module, name in ((layer, "it"), (act, "the activation behind it")):
            if self._counts[module] > 1:
                return f"{name} is in {self._counts[module]} places of the model"
            if is_observed(module):
                return f"{name} has hooks"
            if "forward" in module.__dict__ or module._compiled_call_impl is not None:
                return f"{name} has a forward of its own"
        if type(act).forward.__module__ != type(act).__module__:
            return "the activation behind it is of a class whose forward was replaced"
        return None


def _calls_children_in_order(module: Module) -> bool:
    cls = type(module)
    return (
        isinstance(module, Sequential)
        and cls.forward is Sequential.forward
        and cls.__iter__ is Sequential.__iter__
        and cls.__call__ is Module.__call__
        and "forward" not in module.__dict__
    )


def _activation(act: Module) -> Activation | None:
    """Return the activation that a module computes, or that its layer computes for it."""
    return activation_of(act, act.original if isinstance(act, FusedActivation) else None)


def _refusal(names: tuple[str, str], problem: str) -> ArgumentValueError:
    return ArgumentValueError(
        "fuse", f"has the pair {names}, which cannot be fused: {problem}", accepted=_ACCEPTED
    )
