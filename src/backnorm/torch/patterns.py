"""Normalisation followed by ReLU, with or without an addition between, found in a graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from backnorm.torch.modules import BatchNorm1d, BatchNorm2d, BatchNorm3d

__all__ = ["fuse"]

_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d)
_RELU_FUNCTIONS = (functional.relu, functional.relu_, torch.relu, torch.relu_)
_ADD_FUNCTIONS = (operator.add, operator.iadd, torch.add)
_ADD_IN_PLACE = (operator.iadd, "add_")


def fuse(graph: fx.Graph, root: torch.nn.Module) -> int:
    """Replace what can be fused in `graph`, whose modules are those of `root`; say how often."""
    found = 0
    for relu in list(graph.nodes):
        if not _is_relu(relu, root):
            continue
        source = relu.args[0]
        movable = (
            (norm, residual)
            for norm, residual in _normalised(source)
            if _is_norm(norm, root) and _may_move(norm, source, relu, residual)
        )
        norm, residual = next(movable, (None, None))
        if norm is None:
            continue
        in_place = source.target in _ADD_IN_PLACE
        with graph.inserting_before(relu):
            layers = [
                graph.get_attr(node.target) if node.op == "call_module" else None
                for node in (norm, relu)
            ]
            fused = graph.call_function(call_fused, (*layers, norm.args[0], residual, in_place))
        relu.replace_all_uses_with(fused)
        for node in dict.fromkeys((relu, source, norm)):
            graph.erase_node(node)
        found += 1
    return found


def call_fused(
    norm: torch.nn.Module,
    relu: torch.nn.Module | None,
    x: Tensor,
    residual: Tensor | None,
    in_place: bool,
) -> Tensor:
    """Return relu(norm(x) + residual): in one, if the modules are still plain and unobserved.

    `relu` is None where it was a function.
    """
    if (
        isinstance(norm, _NORMS)
        and type(norm) in _NORMS
        and not _observed(norm)
        and (relu is None or (type(relu) is torch.nn.ReLU and not _observed(relu)))
        and (residual is None or (residual.shape == x.shape and residual.dtype == x.dtype))
    ):
        return norm.with_relu(x, residual)
    y = norm(x)
    if residual is not None:
        y = y.add_(residual) if in_place else y + residual
    return torch.relu(y) if relu is None else relu(y)


def _observed(module: torch.nn.Module) -> bool:
    """Whether somebody wants to see what the module gets and gives."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def _is_relu(node: fx.Node, root: torch.nn.Module) -> bool:
    if len(node.args) != 1 or not isinstance(node.args[0], fx.Node):
        return False
    if node.op == "call_module":
        return type(root.get_submodule(node.target)) is torch.nn.ReLU
    if node.op == "call_function":
        return node.target in _RELU_FUNCTIONS and set(node.kwargs) <= {"inplace"}
    return node.op == "call_method" and node.target in ("relu", "relu_")


def _is_norm(node: Any, root: torch.nn.Module) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.op == "call_module"
        and len(node.args) == 1
        and isinstance(node.args[0], fx.Node)
        and not node.kwargs
        and type(root.get_submodule(node.target)) in _NORMS
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


def _normalised(source: fx.Node) -> list[tuple[fx.Node, fx.Node | None]]:
    """Return what may be the normalisation and the residual of what goes into a ReLU."""
    if not _is_add(source):
        return [(source, None)]
    first, second = source.args
    # An addition in place writes to its first operand: only that can be the normalisation.
    if source.target in _ADD_IN_PLACE:
        return [(first, second)]
    return [(first, second), (second, first)]


def _may_move(norm: fx.Node, source: fx.Node, relu: fx.Node, residual: fx.Node | None) -> bool:
    """Whether the normalisation, and the addition, may as well happen where the ReLU is.

    The values in between may have no other users. From the old place to the new one nothing may use
    the inputs (an operation in place would change them) or call the same module.
    """
    if list(norm.users) != [source if source is not norm else relu] or list(source.users) != [relu]:
        return False
    order = {node: position for position, node in enumerate(norm.graph.nodes)}

    def touched(value: fx.Node, since: fx.Node) -> bool:
        return any(
            order[since] < order[user] < order[relu] for user in value.users if user is not source
        )

    again = any(
        node.op == "call_module"
        and node.target == norm.target
        and order[norm] < order[node] < order[relu]
        for node in norm.graph.nodes
    )
    return not (
        again or touched(norm.args[0], norm) or (residual is not None and touched(residual, source))
    )
