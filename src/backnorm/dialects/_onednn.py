"""What the two oneDNN specifications have in common."""

from __future__ import annotations

from dataclasses import replace

from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects.schema import AttributeSpec, FormatSpec, type_rules

__all__ = [
    "DATA_FORMAT",
    "EPSILON",
    "FORMATS",
    "MOMENTUM",
    "RUNNING_NOTE",
    "TYPE_RULES",
    "moving",
]

FORMATS = (FormatSpec("NXC", "NXC"), FormatSpec("NCX", "NCX"))

EPSILON = AttributeSpec(
    "epsilon", "f32", role="epsilon", range="positive", summary="added to the variance"
)

DATA_FORMAT = AttributeSpec(
    "data_format",
    "string",
    "NXC",
    role="data_format",
    choices=("NCX", "NXC"),
    summary="channel axis: 1 for NCX, the last for NXC; X is any number of spatial axes",
)

MOMENTUM = AttributeSpec(
    "momentum",
    "f32",
    None,
    range="positive",
    nullable=True,
    summary="weight of the old running statistics; not given: the simple average (0.5)",
)

TYPE_RULES = type_rules(f32="f32", bf16="f32 bf16", f16="f32")

RUNNING_NOTE = (
    "running = momentum * old + (1 - momentum) * batch, as oneDNN 3.2 computes it "
    "(PyTorch's momentum is one minus this one), of the biased batch variance. No batch (M = 0) "
    "leaves the running statistics as they are."
)


def moving(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """Return the canonical call of a training forward: its running statistics move."""
    momentum = call.attributes["momentum"]
    weight = 0.5 if momentum is None else 1.0 - call.number("momentum")
    return replace(canonical, weight=weight if call.count else 0.0)
