"""What became of each layer of a model that was converted, in words."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from backnorm.arithmetics import Arithmetic

__all__ = ["LayerReport", "class_name", "is_batch_norm", "why_left"]


@dataclass(frozen=True)
class LayerReport:
    """What `convert` did with one layer of batch normalisation; ``str()`` makes a line of it.

    Attributes
    ----------
    name : str
        Of the layer in the model, as in `named_modules`: empty for the model itself.
    before, after : str
        Its class, with the package that users import it from. They are equal for a layer that is
        left as it is, and for one that was backnorm's before.
    fused : bool
        Whether it is computed in one pass with what follows it.
    reason : str
        What it is fused with, or why it was not converted or not fused. Empty for a layer that is
        converted where no fusion was asked for.
    arithmetic : {"float32", "float64"} or None
        What its elements are computed in, where the layer says it.
    """

    name: str
    before: str
    after: str
    fused: bool
    reason: str
    arithmetic: Arithmetic | None = None

    def __str__(self) -> str:
        name = self.name or "the model itself"
        if not self.after.startswith("backnorm."):
            return f"{name}: {self.before}, left as it is: {self.reason}"
        became = self.after if self.before == self.after else f"{self.before} -> {self.after}"
        if self.arithmetic is not None:
            became += f" in {self.arithmetic}"
        words = "fused with" if self.fused else "not fused:"
        return f"{name}: {became}" + (f", {words} {self.reason}" if self.reason else "")


def class_name(cls: type) -> str:
    """Return a class's name, with the package that users import it from."""
    module = re.sub(r"^torch\.nn\.modules\..*", "torch.nn", cls.__module__)
    return f"{re.sub(r'^backnorm[.]torch[.]modules$', 'backnorm.torch', module)}.{cls.__qualname__}"


def is_batch_norm(module: torch.nn.Module) -> bool:
    """Whether a module is batch normalisation, by its class or by the name of its class."""
    return (
        isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        or "batchnorm" in type(module).__name__.lower()
    )


def why_left(module: torch.nn.Module) -> str:
    """Say why a layer is none that can be converted."""
    if isinstance(module, torch.nn.SyncBatchNorm):
        return "it normalises over several processes"
    return "its class is not PyTorch's own, and may do something else"
