"""Normalisation followed by an activation, or by an addition and a ReLU, found in a graph."""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional

from backnorm.torch import steps
from backnorm.torch.activations import FUNCTIONS, Activation, activation_of, in_words
from backnorm.torch.effects import Effects
from backnorm.torch.modules import LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d
from backnorm.torch.rectifiers import is_exact
from backnorm.torch.steps import NORMS

__all__ = ["FUSABLE", "Outcome", "fuse", "last_norm"]

#: Layers that are looked for. A lazy one becomes one of the others with its first batch.
FUSABLE = (*NORMS, LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d)

_RELU_FUNCTIONS = (functional.relu, functional.relu_, torch.relu, torch.relu_)
_HARDTANH = (functional.hardtanh, functional.hardtanh_)
_RELU_IN_PLACE = (functional.relu_, torch.relu_, functional.hardtanh_, "relu_")
_ADD_FUNCTIONS = (operator.add, operator.iadd, torch.add)
_ADD_IN_PLACE = (operator.iadd, "add_")


class Outcome(NamedTuple):
    """What became of a layer in a graph: what it was fused with, or why it was not fused."""

    fused: bool
    text: str


class _Match(NamedTuple):
    """Nodes that can be one: a layer, the addition of a residual if there is one, the activation.

    The layer may be followed by modules that do nothing.
    """

    passed: tuple[fx.Node, ...]
    residual: fx.Node | None
    source: fx.Node
    act: fx.Node
    activation: Activation

    @property
    def norm(self) -> fx.Node:
        return self.passed[0]


def fuse(graph: fx.Graph, root: torch.nn.Module, *, lists: bool) -> dict[str, Outcome]:
    """Replace what can be fused in `graph`, whose modules are those of `root`.

    Its inputs are tensors, or `lists` of tensors.

    Returns what became of each layer that the graph calls, by name.
    """
    outcomes = {
        str(node.target): Outcome(False, "no activation that can be fused follows it")
        for node in graph.nodes
        if _is_norm(node, root)
    }
    effects = Effects(graph, root, lists=lists)
    found = []
    for act in graph.nodes:
        activation = _activation(act, root)
        if activation is None:
            continue
        for match in _candidates(act, activation, root):
            name, reason = str(match.norm.target), _refusal(match, effects)
            if reason is None:
                found.append(match)
                added = "" if match.residual is None else "an addition and "
                outcomes[name] = Outcome(True, added + in_words(activation))
                break
            if not outcomes[name].fused:
                outcomes[name] = Outcome(False, reason)
    for match in found:
        _replace(graph, match, effects)
    return outcomes


def last_norm(sequence: torch.nn.Sequential) -> torch.nn.Module | None:
    """Return the layer that a sequence ends in, which may be fused with what follows it."""
    held = reversed(sequence._modules.values())
    last = next((each for each in held if type(each) is not torch.nn.Identity), None)
    if isinstance(last, torch.nn.Sequential):
        return last_norm(last)
    return last if type(last) in FUSABLE else None


def _candidates(act: fx.Node, activation: Activation, root: torch.nn.Module) -> list[_Match]:
    source = act.args[0]
    assert isinstance(source, fx.Node)
    pairs = []
    # Only a ReLU may come after an addition.
    sources = [(source, None)] if isinstance(activation, str) else _normalised(source)
    for value, residual in sources:
        passed = _passed(value, root)
        if _is_norm(passed[0], root):
            pairs.append(_Match(passed, residual, source, act, activation))
    # Where both operands are normalised, the later one has its residual when it is called.
    return sorted(pairs, key=lambda match: -list(match.norm.graph.nodes).index(match.norm))


def _refusal(match: _Match, effects: Effects) -> str | None:
    """Return why nodes cannot be one, or None.

    What is fused is computed in the layer's place, or, if its residual comes later, in the
    activation's. Nothing that happens between the old places and the new one may change what is
    read there, or read the running statistics.
    """
    passed, residual, source, act, _ = match
    norm = match.norm
    chain = [*passed, *([] if source is passed[-1] else [source]), act]
    if any(list(node.users) != [user] for node, user in itertools.pairwise(chain)):
        return "its output is used elsewhere, too"
    if residual is None:
        return None
    if effects.may_change(residual, effects.between(max(norm, residual), act, but=source)):
        return "the residual may change before the ReLU"
    if residual < norm:
        return None
    between = effects.between(norm, act, but=source)
    if effects.may_change(norm.args[0], between):
        return "its input may change before the ReLU"
    reader = effects.reader(norm, between)
    return None if reader is None else f"its statistics may be read before the ReLU, by {reader}"


def _replace(graph: fx.Graph, match: _Match, effects: Effects) -> None:
    passed, residual, source, act, activation = match
    norm = match.norm
    x = norm.args[0]
    late = residual is not None and norm < residual
    calls = [
        str(node.target)
        for node in effects.between(norm, act, but=source)
        if late and node.op == "call_module"
    ]
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    in_place = source.target in _ADD_IN_PLACE
    act_in_place = act.target in _RELU_IN_PLACE or bool(act.kwargs.get("inplace"))

    def module(node: fx.Node) -> fx.Node | None:
        return graph.get_attr(str(node.target)) if node.op == "call_module" else None

    with graph.inserting_before(norm):
        layers = tuple(map(module, passed)), module(act) or activation
        if late:
            called = tuple(graph.get_attr(name) for name in dict.fromkeys(calls))
            begun = graph.call_function(steps.defer, (*layers, x, called, inputs))
        else:
            begun = graph.call_function(steps.begin, (*layers, x, residual))
    with graph.inserting_before(act):
        rest = begun, residual, in_place, act_in_place
        finished = graph.call_function(steps.finish, (*layers, *rest))
    act.replace_all_uses_with(finished)
    for node in dict.fromkeys((act, source, *reversed(passed))):
        graph.erase_node(node)


def _activation(node: fx.Node, root: torch.nn.Module) -> Activation | None:
    """Return what a node is as an activation, None if it is none."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.op == "call_function" and node.target in _HARDTANH:
        return _ceiling_of_hardtanh(*node.args, **node.kwargs)
    if len(node.args) != 1:
        return None
    if node.op == "call_module":
        return activation_of(root.get_submodule(str(node.target)))
    if node.op == "call_function" and set(node.kwargs) <= {"inplace"}:
        known = {functional.relu6: 6.0} | dict.fromkeys(_RELU_FUNCTIONS, math.inf) | FUNCTIONS
        return known.get(node.target)
    plain = node.op == "call_method" and node.target in ("relu", "relu_")
    return math.inf if plain else None


def _ceiling_of_hardtanh(
    _: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False
) -> float | None:
    """Return the same of a call of `hardtanh` with these arguments."""
    return float(max_val) if is_exact(min_val, max_val) else None


def _is_norm(node: Any, root: torch.nn.Module) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.op == "call_module"
        and len(node.args) == 1
        and isinstance(node.args[0], fx.Node)
        and not node.kwargs
        and type(root.get_submodule(str(node.target))) in FUSABLE
    )


def _is_add(node: fx.Node) -> bool:
    return (
        len(node.args) == 2
        and not node.kwargs
        and all(isinstance(argument, fx.Node) for argument in node.args)
        and node.args[0] is not node.args[1]
        and (
            (node.op == "call_function" and node.target in _ADD_FUNCTIONS)
            or (node.op == "call_method" and node.target in ("add", "add_"))
        )
    )


def _passed(value: Any, root: torch.nn.Module) -> tuple[Any, ...]:
    """Return a value and those that it is, going back through modules that do nothing."""
    passed = [value]
    while _does_nothing(passed[0], root):
        passed.insert(0, passed[0].args[0])
    return tuple(passed)


def _does_nothing(node: Any, root: torch.nn.Module) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.op == "call_module"
        and len(node.args) == 1
        and not node.kwargs
        and type(root.get_submodule(str(node.target))) is torch.nn.Identity
    )


def _normalised(source: fx.Node) -> list[tuple[Any, Any]]:
    """Return what may be the normalisation and the residual of what goes into a ReLU."""
    if not _is_add(source):
        return [(source, None)]
    first, second = source.args
    # An addition in place writes to its first operand: only that can be the normalisation.
    if source.target in _ADD_IN_PLACE:
        return [(first, second)]
    return [(first, second), (second, first)]
