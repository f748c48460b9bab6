"""A layer and the activation behind it, fused: the layer computes both.

Fusing changes two modules, which stay the same objects. The layer has an `activation`, which its
forward applies. The activation's module is a `FusedActivation`, which returns its input for as long
as the layer has an `activation`, and applies the activation otherwise.

So one attribute of the layer decides which of the two modules computes the activation: it is never
computed twice or left out when the layer loses the attribute, for whatever reason. Both modules
drop it (`separate`) when something is attached to them that could tell that they are fused: hooks,
another `forward`, other settings of the activation, a graph of `torch.fx`. The modules then compute
what their places in the model say.

Nothing can tell the two that a third module has taken the place of one of them, or comes between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from backnorm.torch import tools

__all__ = ["FusedActivation", "Separable", "as_node", "is_observed"]

_Modules = torch.nn.modules.module


def is_observed(module: torch.nn.Module) -> bool:
    """Whether a module has hooks on its inputs, results or gradients."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _Modules._has_any_global_hook()
    )


def as_node(module: torch.nn.Module, *inputs: Proxy) -> Proxy:
    """Return a call of a module in the graph that `torch.fx` records.

    `torch.fx` looks into modules that are not PyTorch's own; but it is PyTorch's node that tools
    know.
    """
    tracer = inputs[0].tracer
    tools.warn_of_tracing(tracer, module.training)
    return tracer.create_proxy("call_module", tracer.path_of_module(module), inputs, {})


class Separable(torch.nn.Module):
    """A module of a fused pair. Hooks and another `forward` separate the pair."""

    def separate(self) -> None:
        """Let the activation's module compute the activation from now on."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            self.separate()
        super().__setattr__(name, value)

    def register_forward_hook(self, *arguments: Any, **options: Any) -> Any:
        """Register a hook as PyTorch does, which gets the result of this module alone."""
        self.separate()
        return super().register_forward_hook(*arguments, **options)

    def register_backward_hook(self, *arguments: Any, **options: Any) -> Any:
        """Register a hook as PyTorch does, which gets the gradients of this module alone."""
        self.separate()
        return super().register_backward_hook(*arguments, **options)

    def register_full_backward_hook(self, *arguments: Any, **options: Any) -> Any:
        """Register a hook as PyTorch does, which gets the gradients of this module alone."""
        self.separate()
        return super().register_full_backward_hook(*arguments, **options)

    def register_full_backward_pre_hook(self, *arguments: Any, **options: Any) -> Any:
        """Register a hook as PyTorch does, which gets the gradient of this module's result."""
        self.separate()
        return super().register_full_backward_pre_hook(*arguments, **options)


class FusedActivation(Separable, torch.nn.Identity):
    """What the module of an activation is while the layer before it computes the activation.

    It returns its input. Once the layer does not compute the activation any more (it was reverted,
    or the pair was separated), it applies the activation itself.
    """

    #: The layer, and the class of the activation's module. In a tuple the layer is no child.
    _fused_with: tuple[torch.nn.Module, type[torch.nn.Module]]

    @staticmethod
    def take_the_place_of(module: torch.nn.Module, layer: torch.nn.Module) -> None:
        """Turn a module into a `FusedActivation` behind a layer."""
        module.__dict__["_fused_with"] = layer, type(module)
        module.__class__ = FusedActivation

    def restore(self) -> None:
        """Turn into the module of the activation again."""
        _, original = self.__dict__.pop("_fused_with")
        self.__class__ = original

    @property
    def original(self) -> type[torch.nn.Module]:
        """The class of the activation's module."""
        return self._fused_with[1]

    @property
    def layer(self) -> torch.nn.Module:
        """The layer that this module was fused with."""
        return self._fused_with[0]

    def separate(self) -> None:
        """Let this module compute the activation from now on."""
        self.layer.__dict__.pop("activation", None)

    def forward(self, input: Tensor) -> Tensor:
        """Return the input, or its activation if the layer has not computed it."""
        if isinstance(input, Proxy):
            self.separate()
            return as_node(self, input)
        layer, original = self._fused_with
        if getattr(layer, "activation", None) is not None:
            return input
        y: Tensor = original.forward(self, input)
        return y

    def register_forward_pre_hook(self, *arguments: Any, **options: Any) -> Any:
        """Register a hook as PyTorch does, which gets the result of the layer alone."""
        self.separate()
        return super().register_forward_pre_hook(*arguments, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        # Settings of the activation, such as `max_val`; not those of any module.
        if name != "training" and not name.startswith("_"):
            self.separate()
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Return the activation's class and settings."""
        return f"{self.original.__name__}({self.original.extra_repr(self)})"
