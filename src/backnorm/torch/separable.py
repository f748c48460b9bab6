"""A layer and the activation behind it, fused: the layer computes both.

Fusing changes two modules, which stay the same objects. The layer gets an `activation`, which its
forward applies. The activation's module becomes a `FusedActivation`, which returns its input while
the layer has an `activation`, and applies the activation otherwise.

So one attribute of the layer decides which of the two modules computes the activation: the
activation is neither computed twice nor left out when the layer loses the attribute. Both modules
remove it (`separate`) when a change could make the fusion visible: a hook, another `forward`, other
settings of the activation, a graph of `torch.fx`. Each module then computes its own part.

Neither module notices that a third module replaces one of them, or is inserted between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from backnorm.activations import Activation
from backnorm.torch import tools

__all__ = ["FusedActivation", "Separable", "alteration_of", "as_node", "described_activation"]

_PHRASES = {"relu": "a ReLU", "silu": "a SiLU", "hardswish": "a Hardswish"}


def described_activation(activation: Activation) -> str:
    """Return an activation as a phrase, such as "a ReLU with the ceiling 6.0"."""
    phrase, ceiling = _PHRASES[activation.name], activation.ceiling
    return phrase if ceiling is None else f"{phrase} with the ceiling {ceiling}"


def alteration_of(module: torch.nn.Module) -> str | None:
    """Return what makes a module's call differ from the forward of its class, or None."""
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    ):
        return "has hooks"
    if "forward" in module.__dict__ or module._compiled_call_impl is not None:
        return "has a forward of its own"
    return None


def as_node(module: torch.nn.Module, *inputs: Proxy) -> Proxy:
    """Return a call of a module in the graph that `torch.fx` records.

    `torch.fx` traces the forward of modules that PyTorch does not define. Tools expect one node,
    as for PyTorch's layer.
    """
    tracer = inputs[0].tracer
    tools.warn_of_tracing(tracer, module.training)
    return tracer.create_proxy("call_module", tracer.path_of_module(module), inputs, {})


def _separating(register: Callable[..., Any]) -> Any:
    """Return the method of PyTorch that registers a hook, preceded by the pair's separation."""

    @functools.wraps(register)
    def separate_and_register(self: Separable, *arguments: Any, **options: Any) -> Any:
        self.separate()
        return register(self, *arguments, **options)

    return separate_and_register


class Separable(torch.nn.Module):
    """A module of a fused pair. A hook or another `forward` separates the pair."""

    def separate(self) -> None:
        """Let the activation's module compute the activation from now on."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            self.separate()
        super().__setattr__(name, value)

    register_forward_hook = _separating(torch.nn.Module.register_forward_hook)
    register_backward_hook = _separating(torch.nn.Module.register_backward_hook)
    register_full_backward_hook = _separating(torch.nn.Module.register_full_backward_hook)
    register_full_backward_pre_hook = _separating(torch.nn.Module.register_full_backward_pre_hook)


class FusedActivation(Separable, torch.nn.Identity):
    """The module of an activation while the layer before it computes the activation."""

    #: The layer that computes the activation, and the class of the activation's module. Both are
    #: stored in `__dict__`: the layer is not a child.
    fused_layer: torch.nn.Module
    original_class: type[torch.nn.Module]

    @staticmethod
    def replace(module: torch.nn.Module, layer: torch.nn.Module) -> None:
        """Turn the module of an activation into a `FusedActivation` of a layer."""
        module.__dict__.update(fused_layer=layer, original_class=type(module))
        module.__class__ = FusedActivation

    def restore(self) -> None:
        """Turn into the module of the activation again."""
        del self.__dict__["fused_layer"]
        self.__class__ = self.__dict__.pop("original_class")

    def separate(self) -> None:
        """Let this module compute the activation from now on."""
        self.fused_layer.__dict__.pop("activation", None)

    def forward(self, input: Tensor) -> Tensor:
        """Return the input, or its activation if the layer has not computed it."""
        if isinstance(input, Proxy):
            self.separate()
            return as_node(self, input)
        if getattr(self.fused_layer, "activation", None) is not None:
            return input
        y: Tensor = self.original_class.forward(self, input)
        return y

    register_forward_pre_hook = _separating(torch.nn.Module.register_forward_pre_hook)

    def __setattr__(self, name: str, value: Any) -> None:
        # Settings of the activation, such as `max_val`; not the attributes of every module.
        if name != "training" and not name.startswith("_"):
            self.separate()
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Return the activation's class and settings."""
        return f"{self.original_class.__name__}({self.original_class.extra_repr(self)})"
