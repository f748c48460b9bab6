"""A module's forward as a graph, if the graph is sure to do what the forward does.

`torch.fx` runs the Python code of a forward once, with stand-ins for tensors, and records what
happens to them. What the code decides on the way (an ``if self.training``, a random number, a
``with torch.no_grad()``) is lost. So this tracer notes what the code looks at, refuses what a
graph cannot express, and says on what the graph depends.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import operator
import random
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, fx
from torch.nn import Sequential
from torch.overrides import TorchFunctionMode

from backnorm.torch.steps import is_observed

__all__ = ["CONTAINERS", "Trace", "UntraceableError", "traces"]

#: Modules whose forward is not called, or is a loop over their children.
CONTAINERS = (Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)

# Values of these types do not change unless the attribute is set again.
_CONSTANTS = (
    bool, int, float, complex, str, bytes, types.NoneType, types.FunctionType,
    types.BuiltinFunctionType, type, torch.dtype, torch.device, torch.memory_format,
)  # fmt: skip
# What every module has; "training" is looked at like any attribute.
_INTERNAL = frozenset(vars(torch.nn.Module())) - {"training"}
_MISSING = object()
# What a call of a sequence calls.
_CALLED = ("__call__", "forward", "__iter__")
# What tells of a tensor more than its metadata.
_READS = frozenset(
    {
        Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__,
        Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__,
        Tensor.__contains__, Tensor.__format__, Tensor.__repr__, Tensor.is_nonzero, Tensor.equal,
        Tensor.allclose, torch.is_nonzero, torch.equal, torch.allclose,
    }
)  # fmt: skip


class UntraceableError(Exception):
    """A forward is not a graph; the message says why."""


@dataclass(frozen=True)
class Trace:
    """A graph, and what it depends on.

    Attributes
    ----------
    graph : torch.fx.Graph
    inputs : int
        Number of arguments that the forward takes; those with a default are left out.
    kind : type
        What they are: tensors, or lists of tensors.
    attributes : dict
        Plain attributes of the module that the forward looked at, and their values.
    children : list of (str, tuple)
        Containers by name, and the modules that they held.
    opened : list of str
        Those of them, in any depth, that the graph does not call: it calls what they held.
    """

    graph: fx.Graph
    inputs: int
    kind: type
    attributes: dict[str, Any]
    children: list[tuple[str, tuple[torch.nn.Module | None, ...]]]
    opened: list[str]

    def takes(self, arguments: tuple[Any, ...]) -> bool:
        """Whether arguments are what the graph was made for."""
        if len(arguments) != self.inputs:
            return False
        if self.kind is Tensor:
            return all(isinstance(each, Tensor) for each in arguments)
        return all(
            type(each) is list and all(isinstance(one, Tensor) for one in each)
            for each in arguments
        )

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether the graph still does what the forward of `module` does."""
        own = module.__dict__
        for name, value in self.attributes.items():
            if own.get(name, _MISSING) != value:
                return False
        return all(
            tuple(module.get_submodule(name)._modules.values()) == held
            for name, held in self.children
        ) and all(_only_calls_children(module.get_submodule(name)) for name in self.opened)


def traces(module: torch.nn.Module, opens: Callable[[Sequential], bool]) -> list[Trace]:
    """Return the graphs of a module's forward in its present state.

    Children are called as they are, but for a sequence that `opens` is true of: the graph calls
    what that holds, if a call of the sequence does nothing else.

    The first is of tensors. A forward of one argument that asks what that is has another of a list
    of tensors, such as the layers of a DenseNet take, if that is a graph.

    Raises
    ------
    UntraceableError
        If the forward is more than a graph of its tensors, or may be.
    """
    inputs = _inputs_of(module)
    tracer = _Tracer(Tensor, opens)
    found = [_trace(module, inputs, tracer)]
    if inputs == 1 and tracer.asked:
        with suppress(UntraceableError):
            found.append(_trace(module, inputs, _Tracer(list, opens)))
    return found


def _trace(module: torch.nn.Module, inputs: int, tracer: _Tracer) -> Trace:
    states = _random_states()
    with _watched(module, inputs) as attributes, _NoConstants():
        try:
            graph = tracer.trace(module)
        except UntraceableError:
            raise
        except Exception as error:
            raise UntraceableError(f"{type(error).__name__}: {error}") from error
    if states != _random_states():
        raise UntraceableError("its forward draws random numbers")
    if tracer.kept():
        raise UntraceableError("its forward keeps a value elsewhere")
    for name, value in attributes.items():
        if not _is_constant(value):
            raise UntraceableError(f"its forward looks at self.{name}, which may change")
    children = [
        (name, tuple(container._modules.values()))
        for name, container in itertools.chain(_containers(module), tracer.opened.items())
    ]
    return Trace(graph, inputs, tracer.kind, attributes, children, list(tracer.opened))


def _inputs_of(module: torch.nn.Module) -> int:
    """Return the number of required arguments of a forward."""
    kinds = inspect.Parameter
    required = 0
    for parameter in list(inspect.signature(type(module).forward).parameters.values())[1:]:
        if parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            raise UntraceableError("its forward takes any number of arguments")
        if parameter.default is kinds.empty:
            if parameter.kind is kinds.KEYWORD_ONLY:
                raise UntraceableError("its forward takes keywords only")
            required += 1
    if required not in _ENTRIES:
        raise UntraceableError(f"its forward takes {required} arguments")
    return required


# What the tracer calls instead of a forward: arguments with a default keep it.
_ENTRIES: dict[int, Callable[[Any], Callable[..., Any]]] = {
    1: lambda forward: lambda self, a: forward(self, a),
    2: lambda forward: lambda self, a, b: forward(self, a, b),
    3: lambda forward: lambda self, a, b, c: forward(self, a, b, c),
}


@contextmanager
def _watched(module: torch.nn.Module, inputs: int) -> Iterator[dict[str, Any]]:
    """Note which plain attributes are looked at, and let none be set."""
    cls, seen = type(module), dict[str, Any]()
    attribute: Any = cls.__getattribute__

    def getattribute(self: torch.nn.Module, name: str) -> Any:
        value = attribute(self, name)
        if name not in _INTERNAL and name in attribute(self, "__dict__"):
            seen[name] = value
        return value

    def setattribute(self: torch.nn.Module, name: str, value: Any) -> None:
        raise UntraceableError(f"its forward sets self.{name}")

    namespace = {
        "__getattribute__": getattribute,
        "__setattr__": setattribute,
        "forward": _ENTRIES[inputs](cls.forward),
    }
    object.__setattr__(module, "__class__", type(cls.__name__, (cls,), namespace))
    try:
        yield seen
    finally:
        object.__setattr__(module, "__class__", cls)


class _NoConstants(TorchFunctionMode):
    """Refuse tensors that do not come of the inputs, and values: the graph would hold them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            raise UntraceableError(f"its forward reads the values of a tensor ({func.__name__})")
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not isinstance(result, fx.Proxy):
            name = getattr(func, "__name__", str(func))
            raise UntraceableError(f"its forward makes a tensor of no input ({name})")
        return result


class _Proxy(fx.Proxy):
    """Stands for a value, and does not take ``a += b`` for ``a = a + b``."""

    def _in_place(self, function: Callable[..., Any], other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    __iadd__ = functools.partialmethod(_in_place, operator.iadd)
    __isub__ = functools.partialmethod(_in_place, operator.isub)
    __imul__ = functools.partialmethod(_in_place, operator.imul)
    __itruediv__ = functools.partialmethod(_in_place, operator.itruediv)
    __ifloordiv__ = functools.partialmethod(_in_place, operator.ifloordiv)
    __imod__ = functools.partialmethod(_in_place, operator.imod)
    __ipow__ = functools.partialmethod(_in_place, operator.ipow)
    __iand__ = functools.partialmethod(_in_place, operator.iand)
    __ior__ = functools.partialmethod(_in_place, operator.ior)
    __ixor__ = functools.partialmethod(_in_place, operator.ixor)


class _Input(_Proxy):
    """Stands for an input, which is a tensor, or a list of them, to a forward that asks."""

    @property
    def __class__(self) -> type:
        self.tracer.asked = True
        return self.tracer.kind

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise AttributeError


class _Tracer(fx.Tracer):
    """Takes every child as it is, or opens it, and sees to it that modes stay what they were.

    Attributes
    ----------
    opened : dict
        Sequences that were opened, by name.
    kind : type
        What inputs are: tensors, or lists of them.
    asked : bool
        Whether the forward asked what an input is.
    """

    proxy_buffer_attributes = True

    def __init__(self, kind: type, opens: Callable[[Sequential], bool]) -> None:
        super().__init__()
        self.kind, self.asked = kind, False
        self.opened: dict[str, Sequential] = {}
        self._opens = opens
        self._modes = _modes()
        self._proxies: list[weakref.ref[fx.Proxy]] = []

    def kept(self) -> bool:
        """Whether somebody has a value that the forward had, who is not part of the graph."""

        def alive() -> bool:
            return any(proxy() is not None for proxy in self._proxies)

        # Values in a cycle are gone only after a collection.
        return alive() and bool(gc.collect() or True) and alive()

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True

    def call_module(
        self,
        m: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        alone = len(args) == 1 and not kwargs
        if not (alone and _only_calls_children(m) and self._opens(m)):
            return super().call_module(m, forward, args, kwargs)
        self.opened[self.path_of_module(m)] = m
        (value,) = args
        for child in m:
            value = child(value)
        return value

    def proxy(self, node: fx.Node) -> fx.Proxy:
        proxy = _Input(node, self) if node.op == "placeholder" else _Proxy(node, self)
        self._proxies.append(weakref.ref(proxy))
        return proxy

    def create_arg(self, a: Any) -> Any:
        return a.node if issubclass(type(a), fx.Proxy) else super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise UntraceableError("its forward changes autograd's or autocast's mode")
        return super().create_node(*args, **kwargs)


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        # What checkpointing and offloading set.
        torch._C._autograd._top_saved_tensors_default_hooks(False),
    )


def _only_calls_children(module: torch.nn.Module) -> TypeGuard[Sequential]:
    """Whether a call of a module calls its children, one after another, and does nothing else."""
    # A fused one does what its class does.
    cls = getattr(type(module), "_backnorm_unfused", type(module))
    return (
        isinstance(module, Sequential)
        and all(getattr(cls, name) is getattr(Sequential, name) for name in _CALLED)
        and "forward" not in module.__dict__
        and module._compiled_call_impl is None
        and not is_observed(module)
    )


def _containers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the containers whose children the forward may have looped over, by name."""
    pending = [("", module)] if isinstance(module, CONTAINERS) else []
    pending += [
        (name, child)
        for name, child in module.named_children()
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict))
    ]
    while pending:
        name, container = pending.pop()
        yield name, container
        pending += [
            (f"{name}.{last}" if name else last, child)
            for last, child in container.named_children()
            if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict))
        ]


def _is_constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return isinstance(value, _CONSTANTS)


def _random_states() -> tuple[Any, ...]:
    """Return the states of the global generators; PyTorch's makes tensors, which are noticed."""
    name, key, *rest = np.random.get_state()  # noqa: NPY002 (a forward may draw from this one)
    return random.getstate(), name, np.asarray(key).tobytes(), *rest
