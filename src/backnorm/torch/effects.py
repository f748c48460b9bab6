"""What the nodes of a graph may read and change beside their own arguments.

`torch.fx` records what is called, not what that does. Here everything may change its arguments,
return memory of theirs, and read the state of any layer, unless it is known not to.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from backnorm.torch.steps import NORMS, keeps_to_itself, share_memory, state_of

__all__ = ["Effects"]

# What returns new memory and changes nothing; operators do of tensors.
_PURE_OPERATORS = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg}
)
_PURE_FUNCTIONS = frozenset({torch.add, torch.sub, torch.mul, torch.div, torch.cat})
_PURE_METHODS = frozenset({"add", "sub", "mul", "div", "neg", "clone"})
_PURE_MODULES = (
    torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.Linear,
    torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, *NORMS,
)  # fmt: skip
# Modules of functions that look at nothing but their arguments.
_PACKAGES = frozenset(
    {
        "_operator", "builtins", "math", "torch", "torch._C._nn", "torch.functional",
        "torch.nn.functional",
    }
)  # fmt: skip


class Effects:
    """What may share memory in a graph, and who may look at a layer's state.

    Where inputs are `lists` of tensors, there is no telling what is one, and the sum of two lists
    has the tensors of both.
    """

    def __init__(self, graph: fx.Graph, root: torch.nn.Module, *, lists: bool) -> None:
        self._nodes = list(graph.nodes)
        self._root = root
        self._pure = _PURE_FUNCTIONS if lists else _PURE_FUNCTIONS | _PURE_OPERATORS
        self._memory = {node: node for node in self._nodes}
        outside = [node for node in self._nodes if node.op in ("placeholder", "get_attr")]
        for node in self._nodes:
            sources = outside if node in outside else node.all_input_nodes
            if not self._is_pure(node):
                for source in sources:
                    self._memory[self._memory_of(source)] = self._memory_of(node)

    def between(self, first: fx.Node, last: fx.Node, but: fx.Node) -> list[fx.Node]:
        """Return the nodes after `first` and before `last`, without `but`."""
        return [node for node in self._nodes if first < node < last and node is not but]

    def may_change(self, value: Any, nodes: list[fx.Node]) -> bool:
        """Whether one of `nodes` may write to the memory of `value`."""
        memory = self._memory_of(value)
        return any(
            self._memory_of(argument) is memory
            for node in nodes
            if not self._is_pure(node)
            for argument in node.all_input_nodes
        )

    def reader(self, norm: fx.Node, nodes: list[fx.Node]) -> str | None:
        """Return a name for what may look at the state of a layer in one of `nodes`, or None."""
        layer = self._root.get_submodule(str(norm.target))
        for node in self._nodes:
            if node.op == "get_attr" and self._shares(str(node.target), layer):
                return f"self.{node.target}"
        return next(self._readers(layer, nodes), None)

    def _readers(self, layer: torch.nn.Module, nodes: list[fx.Node]) -> Iterator[str]:
        for node in nodes:
            if node.op == "call_module":
                if not keeps_to_itself(self._root.get_submodule(str(node.target)), layer):
                    yield f"self.{node.target}"
            elif node.op == "call_function":
                function: Any = node.target
                if getattr(function, "__module__", None) not in (*_PACKAGES, None):
                    yield getattr(function, "__qualname__", str(function))

    def _shares(self, name: str, layer: torch.nn.Module) -> bool:
        value: Any = self._root
        for part in name.split("."):
            value = getattr(value, part)
        return isinstance(value, Tensor) and share_memory([value], state_of(layer))

    def _memory_of(self, node: fx.Node) -> fx.Node:
        while self._memory[node] is not node:
            node = self._memory[node]
        return node

    def _is_pure(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self._root.get_submodule(str(node.target))) in _PURE_MODULES
        if node.op == "call_function":
            return node.target in self._pure and "out" not in node.kwargs
        return node.op == "call_method" and node.target in _PURE_METHODS
