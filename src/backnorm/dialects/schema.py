"""The description of one operator of one dialect.

One :class:`OperatorSchema` says everything that the dialect says about the operator: inputs,
outputs, attributes, which element types may stand together, ranks, data formats. It is data
only; validation (``_check.py``), the reference page and ``backnorm info`` are all driven by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from backnorm.problem import Operation

__all__ = [
    "ELEMENT_TYPE_NAMES",
    "REQUIRED",
    "AttributeSpec",
    "FormatSpec",
    "OperatorSchema",
    "Phrases",
    "Required",
    "TensorKind",
    "TensorSpec",
    "TypeRule",
]

#: What the dialects call the element types.
ELEMENT_TYPE_NAMES: dict[str, np.dtype] = {
    "f64": FLOAT64,
    "f32": FLOAT32,
    "f16": FLOAT16,
    "bf16": BFLOAT16,
    "float32": FLOAT32,
    "half": FLOAT16,
    "bfloat16": BFLOAT16,
}

TensorKind = Literal["data", "channel", "vector", "opaque"]
AttributeType = Literal["f32", "f64", "i64", "string", "bool"]
Range = Literal["positive", "not negative", "any"]


class Required:
    """The type of :data:`REQUIRED`, the default of an attribute that has none."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = Required()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output.

    Attributes
    ----------
    name : str
        The dialect's name.
    role : str
        The canonical name (x, dy, mean, variance, gamma, beta, dx, dgamma, dbeta, y), or
        inverse_deviation (1 / sqrt(variance + epsilon)), running_mean, running_variance, empty,
        ignored.
    type : str
        The type symbol or element type in the dialect's words, e.g. ``"T1"``.
    kind : {"data", "channel", "vector", "opaque"}
        data: the shape of x. channel: (C,). vector: rank 1, of a length that depends on the
        attributes. opaque: not looked at.
    required : bool
    summary : str
    """

    name: str
    role: str
    type: str
    kind: TensorKind
    required: bool = True
    summary: str = ""


@dataclass(frozen=True, slots=True)
class AttributeSpec:
    """One attribute.

    Attributes
    ----------
    name, type : str
        As in the dialect. A value of an ``f32`` attribute is rounded to float32.
    default : object
        :data:`REQUIRED` where there is none.
    role : str or None
        ``"epsilon"``, ``"data_format"``, ``"channel_axis"`` or ``"training"``, what it sets.
    choices : tuple of str
        Accepted values of a string attribute; empty: any.
    range : {"positive", "not negative", "any"}
        Accepted values of a number (always finite) or an integer.
    nullable : bool
        Whether None ("not given") is accepted.
    extension : bool
        True for an attribute of backnorm's own that the specification does not have.
    summary : str
    """

    name: str
    type: AttributeType
    default: object = REQUIRED
    role: str | None = None
    choices: tuple[str, ...] = ()
    range: Range = "any"
    nullable: bool = False
    extension: bool = False
    summary: str = ""

    @property
    def required(self) -> bool:
        """Whether the attribute has no default."""
        return self.default is REQUIRED


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """A data format: the dialect's name, the canonical layout, and its rank if it fixes one."""

    name: str
    layout: Literal["NCX", "NXC"]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class TypeRule:
    """With data of element type `data`, per-channel tensors may have the types `channel`."""

    data: str
    channel: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Phrases:
    """How the dialect says what is wrong. Fields in braces: x, channels, shape."""

    rank: str = "must have rank {ranks}"
    gradient_shape: str = "must have the shape of {x}"
    gradient_type: str = "must have the element type of {x}"
    channel_rank: str = "must have rank 1"
    channel_size: str = "must hold one value per channel of {x}"
    #: For dialects that compare the per-channel shapes with each other first.
    channel_shapes: str | None = None


@dataclass(frozen=True)
class OperatorSchema:
    """Everything a dialect says about one operator.

    Attributes
    ----------
    dialect, op : str
    revision : str or None
        Which of several texts under one name, e.g. ``"2020-21"``.
    operation : {"backward", "forward", "inference"}
        The canonical operation (forward: in training).
    summary, source : str
        What it computes; the text that is followed.
    inputs, outputs : tuple of TensorSpec
        In the dialect's order.
    attributes : tuple of AttributeSpec
    type_rules : tuple of TypeRule
        The allowed combinations of element types.
    one_channel_type : bool
        Whether all per-channel tensors have one element type.
    formats : tuple of FormatSpec
    ranks : tuple of int
        The accepted ranks of the data: (2, 0) means 2 and up, (4, 5) means 4 or 5.
    min_channels : int
    inputs_together, outputs_together : tuple of tuple of str
        Names of which all are given (requested) or none.
    notes : tuple of str
        Rules that are not in the tables above, and documented divergences.
    phrases : Phrases
    """

    dialect: str
    op: str
    operation: Operation
    summary: str
    source: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: tuple[AttributeSpec, ...]
    type_rules: tuple[TypeRule, ...]
    formats: tuple[FormatSpec, ...]
    ranks: tuple[int, int] = (2, 0)
    revision: str | None = None
    one_channel_type: bool = True
    min_channels: int = 0
    inputs_together: tuple[tuple[str, ...], ...] = ()
    outputs_together: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    phrases: Phrases = field(default_factory=Phrases)

    @cached_property
    def words(self) -> Mapping[str, str]:
        """The dialect's word for each canonical name."""
        named = {tensor.role: tensor.name for tensor in self.inputs}
        named |= {a.role: a.name for a in self.attributes if a.role is not None}
        return MappingProxyType(named | {"out": self.outputs[0].name})

    @property
    def rank_text(self) -> str:
        """The accepted ranks in words."""
        low, high = self.ranks
        if high == 0:
            return f"{low} or more"
        return (
            str(low)
            if low == high
            else f"{low} to {high}"
            if high - low > 1
            else f"{low} or {high}"
        )

    def input(self, name: str) -> TensorSpec:
        """Return the input called `name`."""
        return next(tensor for tensor in self.inputs if tensor.name == name)

    def to_dict(self) -> dict[str, object]:
        """Return the description as plain values, for JSON and tables."""
        return {
            "dialect": self.dialect,
            "op": self.op,
            "revision": self.revision,
            "operation": self.operation,
            "summary": self.summary,
            "source": self.source,
            "inputs": [_tensor(tensor) for tensor in self.inputs],
            "outputs": [_tensor(tensor) for tensor in self.outputs],
            "attributes": [_attribute(attribute) for attribute in self.attributes],
            "type_rules": [
                {"data": rule.data, "channel": list(rule.channel)} for rule in self.type_rules
            ],
            "one_channel_type": self.one_channel_type,
            "formats": [{"name": f.name, "layout": f.layout, "rank": f.rank} for f in self.formats],
            "ranks": self.rank_text,
            "min_channels": self.min_channels,
            "inputs_together": [list(names) for names in self.inputs_together],
            "outputs_together": [list(names) for names in self.outputs_together],
            "notes": list(self.notes),
        }


def _tensor(tensor: TensorSpec) -> dict[str, object]:
    return {
        "name": tensor.name,
        "role": tensor.role,
        "type": tensor.type,
        "kind": tensor.kind,
        "required": tensor.required,
        "summary": tensor.summary,
    }


def _attribute(attribute: AttributeSpec) -> dict[str, object]:
    return {
        "name": attribute.name,
        "type": attribute.type,
        "required": attribute.required,
        "default": None if attribute.required else attribute.default,
        "choices": list(attribute.choices),
        "range": attribute.range,
        "extension": attribute.extension,
        "summary": attribute.summary,
    }
