"""The description of one operator of one dialect.

One :class:`OperatorSchema` says everything that the dialect says about the operator: inputs,
outputs, attributes, which element types may stand together, ranks, data formats, and how the
operator is called. Everything else is made from it: the callable with its signature and
documentation (``operator.py``), the checks (``_check.py``), the type stubs, the reference page and
``backnorm info``. What no table can say is a named function of the dialect's file: :class:`Hooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from backnorm.signature import Operation

if TYPE_CHECKING:
    from backnorm.dialects._call import Call, CanonicalCall

__all__ = [
    "ELEMENT_TYPE_NAMES",
    "REQUIRED",
    "AttributeSpec",
    "FormatSpec",
    "Hooks",
    "OperatorSchema",
    "Phrases",
    "Required",
    "TensorKind",
    "TensorSpec",
    "TypeRule",
    "channel",
    "data",
    "kept",
    "type_rules",
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

TensorKind = Literal["data", "channel", "kept", "vector", "opaque"]
AttributeType = Literal["f32", "f64", "i64", "string", "bool"]
Range = Literal["positive", "not negative", "any"]
Style = Literal["positional", "keywords", "configured"]
Choice = Literal["all", "outputs", "output_mask"]
Arrays = Mapping[str, np.ndarray]


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
        ignored; and memory_dx, memory_dgamma, memory_dbeta, where an output is to be written.
    type : str
        The type symbol or element type in the dialect's words, e.g. ``"T1"``.
    kind : {"data", "channel", "kept", "vector", "opaque"}
        data: the shape of x. channel: (C,). kept: the shape of x with 1 for each axis that is
        reduced. vector: rank 1, of a length that depends on the attributes. opaque: not looked at.
    required : bool
    summary : str
    """

    name: str
    role: str
    type: str
    kind: TensorKind
    required: bool = True
    summary: str = ""

    @property
    def shape(self) -> str:
        """Its shape in words."""
        if self.kind == "vector":
            return "(0,)" if self.role == "empty" else "(C,) or (0,)"
        known = {"data": "data", "channel": "(C,)", "kept": "1 where reduced", "opaque": "any"}
        return known[self.kind]


def data(name: str, role: str, type: str, summary: str = "", required: bool = True) -> TensorSpec:
    """Return a tensor of the shape of x."""
    return TensorSpec(name, role, type, "data", required, summary)


def channel(
    name: str, role: str, type: str, summary: str = "", required: bool = True
) -> TensorSpec:
    """Return a tensor of one value per channel."""
    return TensorSpec(name, role, type, "channel", required, summary)


def kept(name: str, role: str, type: str, summary: str = "", required: bool = True) -> TensorSpec:
    """Return a tensor of one value per channel that has the rank of x."""
    return TensorSpec(name, role, type, "kept", required, summary)


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
    keyword : bool
        Whether it can be given by name alone.
    usual : object
        What to give a required attribute without a role where nothing says it: in a demonstration.
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
    keyword: bool = False
    usual: object = None
    summary: str = ""

    @property
    def required(self) -> bool:
        """Whether the attribute has no default."""
        return self.default is REQUIRED


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """A data format: the dialect's name, the canonical layout, and its rank if it fixes one.

    `is_any` says that the channels may be any axis; the layout is then the usual one.
    """

    name: str
    layout: Literal["NCX", "NXC"]
    rank: int | None = None
    is_any: bool = False


@dataclass(frozen=True, slots=True)
class TypeRule:
    """With data of element type `data`, per-channel tensors may have the types `channel`."""

    data: str
    channel: tuple[str, ...]


def type_rules(**types: str) -> tuple[TypeRule, ...]:
    """Return a rule for each type of data, with the types of per-channel tensors beside it."""
    return tuple(TypeRule(name, tuple(beside.split())) for name, beside in types.items())


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


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a dialect's operator does that its tables cannot say: functions in the dialect's file.

    Attributes
    ----------
    channel_axes : callable, optional
        From attributes and arrays, both by name, to the axes that are not reduced.
    check : callable, optional
        Raises for a call that the tables' checks let through. As they do it looks at shapes,
        types and attributes alone: a repeated call is not checked again.
    canonical : callable, optional
        From a call and the canonical call that the roles say to the one that it is.
    finish : callable, optional
        From a call, its arrays by name and the results of the canonical operation by role to all
        results by role. Of the call's own inputs it may look at shapes and types alone. It is
        called where the canonical operation has not all outputs, or memory is given for them.
    variant : callable, optional
        From attributes that are not yet checked to the schema that the call follows.
    """

    channel_axes: (
        Callable[[Mapping[str, Any], Mapping[str, np.ndarray]], tuple[int, ...]] | None
    ) = None
    check: Callable[[Call], None] | None = None
    canonical: Callable[[Call, CanonicalCall], CanonicalCall] | None = None
    finish: Callable[[Call, Arrays, dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None
    variant: Callable[[Mapping[str, object]], OperatorSchema] | None = None


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
        What it computes; the text that is followed, ``{op}`` in it being the operator's name.
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
    style : {"positional", "keywords", "configured"}
        How it is called: inputs and attributes together, in `order`; the same, by name alone;
        or attributes first, which gives a callable that takes the inputs.
    order : tuple of str
        Inputs and attributes in the order of a call; empty: all inputs, then all attributes.
    other_orders : mapping of str to tuple of str
        Further orders of the inputs, by the name of the method that takes them.
    choice : {"all", "outputs", "output_mask"}
        How a call says which outputs it wants.
    result : str
        What a call returns: "tuple", "array" (there is one output), or the name of the NamedTuple
        of its outputs.
    unbiased : bool
        Whether running variances are those of variances with Bessel's correction.
    takes_memory : bool
        Whether a call takes memory for the first output, by the output's name.
    notes : tuple of str
        Rules that are not in the tables above, and documented divergences.
    example : str
        Lines of the documentation.
    phrases : Phrases
    hooks : Hooks
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
    style: Style = "positional"
    order: tuple[str, ...] = ()
    other_orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    choice: Choice = "all"
    result: str = "tuple"
    unbiased: bool = False
    takes_memory: bool = False
    notes: tuple[str, ...] = ()
    example: str = ""
    phrases: Phrases = field(default_factory=Phrases)
    hooks: Hooks = field(default_factory=Hooks)

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", self.source.replace("{op}", self.op))

    @property
    def call(self) -> str:
        """How it is called."""
        inputs = [tensor.name for tensor in self.inputs]
        attributes = [attribute.name for attribute in self.attributes]
        names = list(self.order) or inputs + attributes
        if self.style == "configured":
            names = inputs
        if self.choice != "all":
            names.append(self.choice)
        if self.takes_memory:
            names.append(self.outputs[0].name)
        if self.style == "keywords":
            names.insert(0, "*")
        first = f"({', '.join(attributes)})" if self.style == "configured" else ""
        return f"{self.op}{first}({', '.join(names)})"

    @property
    def encoding(self) -> str:
        """What the saved statistic of the second order is."""
        roles = {tensor.role for tensor in (*self.inputs, *self.outputs)}
        return "inverse standard deviation" if "inverse_deviation" in roles else "variance"

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
            "call": self.call,
            "encoding": self.encoding,
            "notes": list(self.notes),
        }


def _tensor(tensor: TensorSpec) -> dict[str, object]:
    return {
        "name": tensor.name,
        "role": tensor.role,
        "type": tensor.type,
        "kind": tensor.kind,
        "shape": tensor.shape,
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
