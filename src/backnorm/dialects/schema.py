"""The rules of one operator of one dialect.

An :class:`OperatorSchema` contains the rules of a specification: the roles and shapes of tensors,
permitted combinations of element types, ranks, data formats, and the wording of errors. It is read
from the function that declares the operator (``_declaration.py``). The checks (``_check.py``,
``_attributes.py``), the command, graphs, and the script that writes the reference page read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from backnorm.signature import SIGNATURES, Operation

__all__ = [
    "ELEMENT_TYPE_NAMES",
    "AttributeRole",
    "AttributeSpec",
    "FormatSpec",
    "OperatorSchema",
    "Phrases",
    "Rules",
    "TensorKind",
    "TensorRole",
    "TensorSpec",
    "TypeRule",
    "type_rules",
]

#: The names of element types in the dialects.
ELEMENT_TYPE_NAMES: dict[str, np.dtype] = {
    "f64": FLOAT64,
    "f32": FLOAT32,
    "f16": FLOAT16,
    "bf16": BFLOAT16,
    "float64": FLOAT64,
    "float32": FLOAT32,
    "float16": FLOAT16,
    "half": FLOAT16,
    "bfloat16": BFLOAT16,
}

TensorKind = Literal["data", "channel", "kept", "vector", "opaque"]
TensorRole = Literal[
    "x",
    "dy",
    "mean",
    "variance",
    "inverse_deviation",
    "gamma",
    "beta",
    "y",
    "dx",
    "dgamma",
    "dbeta",
    "running_mean",
    "running_variance",
    "sum_dy",
    "sum_dy_xmu",
    "memory_dx",
    "memory_dgamma",
    "memory_dbeta",
    "empty",
    "reserve",
    "ignored",
]
AttributeRole = Literal[
    "epsilon",
    "data_format",
    "training",
    "frozen",
    "channel_axis",
    "reduced_axes",
    "batch_weight",
    "old_weight",
]
AttributeType = Literal["f32", "f64", "i64", "string", "bool", "axes"]
Range = Literal["positive", "not negative", "any"]
Choice = Literal["all", "outputs", "output_mask"]
ChannelAxes = Callable[[Mapping[str, Any], Mapping[str, np.ndarray]], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of an operator.

    Attributes
    ----------
    role : str
        The canonical name (x, dy, mean, variance, gamma, beta, dx, dgamma, dbeta, y, sum_dy,
        sum_dy_xmu), or inverse_deviation (1 / sqrt(variance + epsilon)), running_mean,
        running_variance, empty, reserve (bytes that some libraries pass from the forward to the
        backward pass; backnorm returns none), ignored; or memory_dx, memory_dgamma, memory_dbeta,
        the memory for an output.
    type : str
        The type symbol or element type in the dialect's words, e.g. ``"T1"``.
    kind : {"data", "channel", "kept", "vector", "opaque"}
        data: the shape of x. channel: (C,), but as kept if x has several channel axes. kept: the
        shape of x with 1 for each axis that is reduced. vector: rank 1, of a length that depends on
        the attributes. opaque: neither checked nor used.
    name : str
        The dialect's name.
    required : bool
    summary : str
        From the operator's docstring.
    frozen : TensorSpec or None
        The same input or output in calls whose statistics are constants, if it then has another
        role.
    """

    role: TensorRole
    type: str
    kind: TensorKind
    name: str = ""
    required: bool = True
    summary: str = ""
    frozen: TensorSpec | None = None

    @property
    def shape(self) -> str:
        """The shape in words."""
        if self.kind == "vector":
            return "(0,)" if self.role in ("empty", "reserve") else "(C,) or (0,)"
        known = {"data": "data", "channel": "(C,)", "kept": "1 where reduced", "opaque": "any"}
        return known[self.kind]


@dataclass(frozen=True, slots=True)
class AttributeSpec:
    """One attribute.

    Attributes
    ----------
    type : str
        As in the dialect. The value of an ``f32`` attribute is rounded to float32.
    role : str or None
        The canonical option: ``"epsilon"``, ``"data_format"``, ``"channel_axis"`` or
        ``"training"``; ``"frozen"`` is the opposite of ``"training"`` (of several such attributes,
        one that is true is enough), and ``"reduced_axes"`` are all axes that are not channel axes.
        In the new running statistics, ``"batch_weight"`` is the weight of the batch, and
        ``"old_weight"`` that of the old ones (None: 0.5).
    range : {"positive", "not negative", "any"}
        Accepted values of a number (always finite) or an integer. With "any", a negative channel
        axis counts from the end.
    extension : bool
        True for an extension of backnorm, which the specification does not have.
    example : object
        The value that `backnorm demo`, `backnorm verify` and the tests pass for a required
        attribute without a role; for an optional attribute, a value that `backnorm verify` passes
        because the default would not show mistakes.
    name : str
        As in the dialect.
    choices : tuple of str
        Accepted values of a string attribute; empty: any.
    required : bool
        Whether the attribute has no default.
    default : object
        From the operator's signature. If the default is None, the value None is accepted.
    summary : str
        From the operator's docstring.
    """

    type: AttributeType
    role: AttributeRole | None = None
    range: Range = "any"
    extension: bool = False
    example: object = None
    name: str = ""
    choices: tuple[str, ...] = ()
    required: bool = True
    default: object = None
    summary: str = ""

    @property
    def typical(self) -> object:
        """The value of an attribute without a role in `backnorm verify`."""
        return self.default if self.example is None else self.example

    @property
    def nullable(self) -> bool:
        """Whether None is accepted."""
        return not self.required and self.default is None


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """A data format: its name in the dialect, its canonical layout, and the rank of its arrays.

    If the format does not fix the rank, `rank` is None.
    If `is_any` is true, an attribute of the call says which axis is the channel axis, and `layout`
    is only the most usual layout.
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
    """Return a rule for each data type, with the permitted types of per-channel tensors."""
    return tuple(TypeRule(name, tuple(beside.split())) for name, beside in types.items())


@dataclass(frozen=True, slots=True)
class Phrases:
    """The words that a dialect uses in messages of errors.

    Attributes
    ----------
    rank : str
        ``{ranks}`` in it stands for the accepted ranks.
    gradient_shape, gradient_type, channel_rank : str
        ``{x}`` stands for the name of x; in `channel_rank`, ``{rank}`` for the accepted rank.
    channel_size : str
        ``{x}`` stands for the name of x, ``{channels}`` for the number of channels, ``{shape}`` for
        the tensor's shape.
    channel_shapes : str, optional
        Only for dialects that first compare the per-channel shapes with each other. No braces.
    """

    rank: str = "must have rank {ranks}"
    gradient_shape: str = "must have the shape of {x}"
    gradient_type: str = "must have the element type of {x}"
    channel_rank: str = "must have rank {rank}"
    channel_size: str = "must hold one value per channel of {x}"
    channel_shapes: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules that several operators of a dialect have in common.

    Attributes
    ----------
    dialect : str
    source : str
        The name of the specification; ``{op}`` in it stands for the operator's name.
    type_rules : tuple of TypeRule
        The allowed combinations of element types.
    formats : tuple of FormatSpec
        An operator with an attribute of the role ``"data_format"`` has those that the attribute
        accepts.
    ranks : tuple of int
        The accepted ranks of the data: (2, 0) means 2 and up, (4, 5) means 4 or 5.
    one_channel_type : bool
        Whether all per-channel tensors have one element type.
    min_channels : int
    inputs_together, outputs_together : tuple of tuple of str
        Groups of inputs to give, or outputs to request, together or not at all.
    unbiased : bool
        Whether running variances are averages of variances with Bessel's correction.
    frozen : bool
        Whether the statistics are constants, for an operator without an attribute for this.
    channel_axes : callable, optional
        Maps attributes and arrays, both by name, to the axes that are not reduced.
    phrases : Phrases
    """

    dialect: str
    source: str
    type_rules: tuple[TypeRule, ...]
    formats: tuple[FormatSpec, ...]
    ranks: tuple[int, int] = (2, 0)
    one_channel_type: bool = True
    min_channels: int = 0
    inputs_together: tuple[tuple[str, ...], ...] = ()
    outputs_together: tuple[tuple[str, ...], ...] = ()
    unbiased: bool = False
    frozen: bool = False
    channel_axes: ChannelAxes | None = None
    phrases: Phrases = field(default_factory=Phrases)


@dataclass(frozen=True, kw_only=True)
class OperatorSchema(Rules):
    """The description of one operator of a dialect.

    Attributes
    ----------
    op : str
    operation : {"backward", "forward", "inference", "reduce", "apply"}
        The canonical operation (forward: in training). reduce and apply: a function that computes a
        part of a gradient.
    inputs, outputs : tuple of TensorSpec
        In the dialect's order.
    attributes : tuple of AttributeSpec
    summary : str
        The first line of the operator's docstring.
    formula : str
        The text between the first line and the sections of the docstring.
    notes : tuple of str
        The notes in the docstring: rules that no table expresses, and divergences.
    order : tuple of str
        Inputs, attributes and arguments without a role in the order of a call.
    keyword_only : tuple of str
        The keyword-only ones.
    """

    op: str
    operation: Operation
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: tuple[AttributeSpec, ...]
    summary: str = ""
    formula: str = ""
    notes: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise if roles are not those of the operation.

        With such roles, a kernel could be called without an operand that it reads.
        """
        inputs = [tensor.role for tensor in self.inputs]
        outputs = [tensor.role for tensor in self.outputs]
        attributes = [each.role for each in self.attributes]
        for roles in (inputs, outputs, attributes):
            for role in {*roles} - {"ignored", "empty", "frozen", None}:
                self._require(f"one parameter or result of the role {role}", roles.count(role) == 1)
        known = {"empty", *(result.name for result in SIGNATURES[self.operation].results)}
        known |= _MORE_RESULTS.get(self.operation, frozenset())
        self._require(f"results of the roles {', '.join(sorted(known))}", known >= {*outputs})
        for tensor in self.inputs:
            is_unused = tensor.role in ("ignored", "reserve", "running_mean", "running_variance")
            text = f"a role that is not used for {tensor.name}, which is opaque"
            self._require(text, tensor.kind != "opaque" or is_unused)
        # An operator of another operation, which computes only a part of a gradient, may have no
        # statistics.
        if self.operation in ("backward", "forward", "inference"):
            operands = {role.replace("inverse_deviation", "variance") for role in inputs}
            for operand in SIGNATURES[self.operation].operands:
                is_met = operand.name in operands or not operand.required
                self._require(f"an input of the role {operand.name}", is_met)
        # The author of a schema without epsilon may have taken an inverse deviation for a variance.
        is_met = "variance" not in inputs or "epsilon" in attributes
        self._require("an attribute of the role epsilon, which is added to the variance", is_met)

    def _require(self, what: str, is_met: bool) -> None:
        if not is_met:
            raise ValueError(f"{self.dialect}.{self.op} must have {what}")

    @property
    def names(self) -> list[str]:
        """The names of inputs and attributes."""
        return [*(tensor.name for tensor in self.inputs), *(each.name for each in self.attributes)]

    @property
    def results(self) -> tuple[str, ...]:
        """The roles of the outputs."""
        return tuple(tensor.role for tensor in self.outputs)

    @cached_property
    def with_constants(self) -> OperatorSchema:
        """The schema that calls with constant statistics follow."""
        if not any(tensor.frozen for tensor in (*self.inputs, *self.outputs)):
            return self
        inputs, outputs = (
            tuple(tensor.frozen or tensor for tensor in tensors)
            for tensors in (self.inputs, self.outputs)
        )
        return replace(self, inputs=inputs, outputs=outputs, frozen=True)

    def outputs_with(self, inputs: Collection[str]) -> tuple[TensorSpec, ...]:
        """Return the outputs that a call with these inputs has. An optional output that updates an
        input, such as a running mean, needs this input.
        """
        return tuple(
            tensor
            for tensor in self.outputs
            if tensor.required or self.words.get(tensor.role) in (None, *inputs)
        )

    @property
    def choice(self) -> Choice:
        """The parameter that selects outputs."""
        known: tuple[Choice, ...] = ("outputs", "output_mask")
        return next((name for name in known if name in self.order), "all")

    @property
    def takes_memory(self) -> bool:
        """Whether memory for the first output is an argument that is not an input."""
        first = self.outputs[0].name
        return first in self.order and first not in self.names

    def format_of(self, attributes: Mapping[str, object]) -> FormatSpec:
        """Return the data format that the attributes select."""
        name = attributes.get(self.words.get("data_format", ""))
        return next((each for each in self.formats if each.name == name), self.formats[0])

    def channel_axes_of(
        self, attributes: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> tuple[int, ...]:
        """Return the axes of the data that are not reduced, ascending."""
        if self.channel_axes is not None:
            return self.channel_axes(attributes, arrays)
        rank = arrays[self.words["x"]].ndim
        if "channel_axis" in self.words:
            return (attributes[self.words["channel_axis"]] % rank,)
        if "reduced_axes" in self.words:
            reduced = attributes[self.words["reduced_axes"]]
            return tuple(axis for axis in range(rank) if axis not in reduced)
        return (1 if self.format_of(attributes).layout == "NCX" else rank - 1,)

    @property
    def call(self) -> str:
        """The signature of a call, as text."""
        before = [name for name in self.order if name not in self.keyword_only]
        after = ["*", *self.keyword_only] if self.keyword_only else []
        return f"{self.op}({', '.join([*before, *after])})"

    @property
    def encoding(self) -> str:
        """Which statistic is saved besides the mean: variance or inverse standard deviation."""
        roles = {tensor.role for tensor in (*self.inputs, *self.outputs)}
        return "inverse standard deviation" if "inverse_deviation" in roles else "variance"

    @cached_property
    def words(self) -> Mapping[str, str]:
        """Maps the canonical name of an input, an attribute or `out` to the dialect's name."""
        named: dict[str, str] = {tensor.role: tensor.name for tensor in self.inputs}
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

    def to_dict(self) -> dict[str, object]:
        """Return the description as plain values, for JSON and tables."""
        tensor = "name", "role", "type", "kind", "shape", "required", "summary"
        attribute = "name", "role", "type", "required", "default", "choices", "range", "extension"
        return {
            **_values(self, "dialect", "op", "operation", "summary", "source"),
            "inputs": [_values(each, *tensor) for each in self.inputs],
            "outputs": [_values(each, *tensor) for each in self.outputs],
            "attributes": [_values(each, *attribute, "summary") for each in self.attributes],
            "type_rules": [_values(each, "data", "channel") for each in self.type_rules],
            "one_channel_type": self.one_channel_type,
            "formats": [_values(each, "name", "layout", "rank", "is_any") for each in self.formats],
            "ranks": self.rank_text,
            **_values(self, "min_channels", "inputs_together", "outputs_together", "call"),
            **_values(self, "encoding", "notes"),
        }


#: Results of operators that backnorm's operation does not have, or not in this form.
_MORE_RESULTS: Mapping[Operation, frozenset[str]] = {
    "forward": frozenset({"inverse_deviation", "running_mean", "running_variance", "reserve"}),
    "reduce": frozenset({"sum_dy", "sum_dy_xmu", "dgamma", "dbeta"}),
}


def _values(spec: object, *names: str) -> dict[str, object]:
    """Return attributes of an object by name, as plain values."""
    return {name: _plain(getattr(spec, name)) for name in names}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value
