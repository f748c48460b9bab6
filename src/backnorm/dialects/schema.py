"""The rules of one operator of one dialect.

An :class:`OperatorSchema` contains the rules of a specification: the roles and shapes of tensors,
permitted combinations of element types, ranks, data formats, and the wording of errors. The schema
is read by the checks (``_check.py``, ``_attributes.py``), the command, graphs, and the script that
writes the reference page. Parameters, defaults and documentation belong to the operator's class;
``_description.py`` adds them to the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from string import Formatter
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from backnorm.signature import SIGNATURES, Operation

__all__ = [
    "ELEMENT_TYPE_NAMES",
    "REQUIRED",
    "AttributeRole",
    "AttributeSpec",
    "FormatSpec",
    "OperatorSchema",
    "Phrases",
    "Required",
    "Rules",
    "TensorKind",
    "TensorRole",
    "TensorSpec",
    "TypeRule",
    "channel",
    "data",
    "kept",
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
    "ignored",
]
AttributeRole = Literal[
    "epsilon", "data_format", "training", "frozen", "channel_axis", "reduced_axes"
]
AttributeType = Literal["f32", "f64", "i64", "string", "bool", "axes"]
Range = Literal["positive", "not negative", "any"]
Style = Literal["positional", "keywords", "configured"]
Choice = Literal["all", "outputs", "output_mask"]
ChannelAxes = Callable[[Mapping[str, Any], Mapping[str, np.ndarray]], tuple[int, ...]]


class Required:
    """The type of :data:`REQUIRED`, which marks an attribute without a default."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = Required()

#: The value of `AttributeSpec.default` in a dialect's table, until `_description` replaces it by
#: the default in the signature of the operator's class.
UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of an operator.

    Attributes
    ----------
    name : str
        The dialect's name.
    role : str
        The canonical name (x, dy, mean, variance, gamma, beta, dx, dgamma, dbeta, y, sum_dy,
        sum_dy_xmu), or inverse_deviation (1 / sqrt(variance + epsilon)), running_mean,
        running_variance, empty, ignored; or memory_dx, memory_dgamma, memory_dbeta, the memory for
        an output.
    type : str
        The type symbol or element type in the dialect's words, e.g. ``"T1"``.
    kind : {"data", "channel", "kept", "vector", "opaque"}
        data: the shape of x. channel: (C,), but as kept if x has several channel axes. kept: the
        shape of x with 1 for each axis that is reduced. vector: rank 1, of a length that depends
        on the attributes. opaque: neither checked nor used.
    required : bool
    summary : str
        From the operator's docstring.
    frozen : TensorSpec or None
        The same input in calls whose statistics are constants, if it then has another role.
    """

    name: str
    role: TensorRole
    type: str
    kind: TensorKind
    required: bool = True
    summary: str = ""
    frozen: TensorSpec | None = None

    @property
    def shape(self) -> str:
        """The shape in words."""
        if self.kind == "vector":
            return "(0,)" if self.role == "empty" else "(C,) or (0,)"
        known = {"data": "data", "channel": "(C,)", "kept": "1 where reduced", "opaque": "any"}
        return known[self.kind]


#: Describe a tensor of the shape of x.
data = partial(TensorSpec, kind="data")
#: Describe a tensor with one value per channel.
channel = partial(TensorSpec, kind="channel")
#: Describe a tensor with one value per channel and as many axes as x: all axes except the channel
#: axes have size 1.
kept = partial(TensorSpec, kind="kept")


@dataclass(frozen=True, slots=True)
class AttributeSpec:
    """One attribute.

    Attributes
    ----------
    name, type : str
        As in the dialect. The value of an ``f32`` attribute is rounded to float32.
    role : str or None
        The canonical option: ``"epsilon"``, ``"data_format"``, ``"channel_axis"`` or
        ``"training"``; ``"frozen"`` is the opposite of ``"training"`` (of several such attributes,
        one that is true is enough), and ``"reduced_axes"`` are all axes that are not channel axes.
    choices : tuple of str
        Accepted values of a string attribute; empty: any.
    range : {"positive", "not negative", "any"}
        Accepted values of a number (always finite) or an integer. With "any", a negative channel
        axis counts from the end.
    extension : bool
        True for an extension of backnorm, which the specification does not have.
    usual : object
        The value that `backnorm demo`, `backnorm verify` and the tests pass for a required
        attribute without a role. The tests also pass it with the role ``"reduced_axes"``.
    default : object
        From the operator's signature, unless a revision has its own; :data:`REQUIRED` if there is
        no default. If the default is None, the value None is accepted.
    summary : str
        From the operator's docstring.
    """

    name: str
    type: AttributeType
    role: AttributeRole | None = None
    choices: tuple[str, ...] = ()
    range: Range = "any"
    extension: bool = False
    usual: object = None
    default: object = UNKNOWN
    summary: str = ""

    @property
    def required(self) -> bool:
        """Whether the attribute has no default."""
        return self.default is REQUIRED

    @property
    def nullable(self) -> bool:
        """Whether None is accepted."""
        return self.default is None


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
    copies_one : bool
        Whether a batch of one element per channel is copied in training, and not normalised.
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
    copies_one: bool = False
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
    revision : str or None
        The revision of a specification that has several, e.g. ``"2020-21"``.
    summary : str
        The first line of the operator's docstring.
    formula : str
        The text between the first line and the sections of the docstring.
    notes : tuple of str
        The notes in the docstring: rules that no table expresses, and divergences.
    style : {"positional", "keywords", "configured"}
        How the operator is called. positional: with inputs and attributes, in `order`. keywords:
        with inputs and attributes by name only. configured: the attributes are passed to the class,
        and the inputs to the instance.
    order : tuple of str
        Inputs and attributes in the order of a call.
    configuration : tuple of str
        The parameters of a configured operator's class; those after ``"*"`` are keyword-only.
    choice : {"all", "outputs", "output_mask"}
        The parameter that selects outputs.
    takes_memory : bool
        Whether a call takes memory for the first output, as an argument with the output's name.
    """

    op: str
    operation: Operation
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: tuple[AttributeSpec, ...]
    revision: str | None = None
    summary: str = ""
    formula: str = ""
    notes: tuple[str, ...] = ()
    style: Style = "positional"
    order: tuple[str, ...] = ()
    configuration: tuple[str, ...] = ()
    choice: Choice = "all"
    takes_memory: bool = False

    def __post_init__(self) -> None:
        """Raise if a table has a word or a type that is not accepted.

        With such a table, a kernel could be called without an operand that it reads.
        """
        for name, came, accepted in self._words():
            if came not in accepted:
                expected = " or ".join(map(repr, accepted)) or "none"
                operator = f"{self.dialect}.{self.op}"
                raise ValueError(f"{operator}: {name}: got {came!r}; expected {expected}")

    def _words(self) -> Iterator[tuple[str, object, Collection[object]]]:
        """For each word or type to check, yield its name, its value and the accepted values."""
        yield "operation", self.operation, SIGNATURES
        for table, (kind, fields) in _TABLES.items():
            yield table, type(getattr(self, table)).__name__, ["tuple"]
            for spec in getattr(self, table):
                yield table, type(spec).__name__, [kind.__name__]
                for each, words in fields.items():
                    yield f"{table}: the {each} of {spec.name}", getattr(spec, each), words
        for table, roles in (
            ("inputs", [*get_args(TensorRole)]),
            ("outputs", ["empty", *_results(self.operation)]),
            ("attributes", [None, *get_args(AttributeRole)]),
        ):
            for spec in getattr(self, table):
                yield f"{table}: the role of {spec.name} (each role once)", spec.role, roles
                # Most roles may occur only once in a table. So the role of this tensor or attribute
                # is removed from the roles that the following ones may have.
                if spec.role not in ("ignored", "empty", "frozen", None):
                    roles.remove(spec.role)
        names = {tensor.role for tensor in self.inputs}
        # Only the operators of these three operations must have all required operands. An operator
        # of another operation, which computes only a part of a gradient, may have no statistics.
        if self.operation in ("backward", "forward", "inference"):
            for operand in SIGNATURES[self.operation].operands:
                accepted_roles = [operand.name]
                if operand.name == "variance":
                    accepted_roles.append("inverse_deviation")
                if operand.required and names.isdisjoint(accepted_roles):
                    yield "inputs: the roles", sorted(names), accepted_roles
        unused = "ignored", "running_mean", "running_variance"
        for spec in self.inputs:
            if spec.kind == "opaque":
                yield f"inputs: the role of {spec.name}, which is opaque", spec.role, unused
        for table in ("inputs", "outputs"):
            optional = [tensor.name for tensor in getattr(self, table) if not tensor.required]
            for name in (name for group in getattr(self, f"{table}_together") for name in group):
                yield f"{table}_together (optional {table})", name, optional
        for name in (name for rule in self.type_rules for name in (rule.data, *rule.channel)):
            yield "type_rules", name, ELEMENT_TYPE_NAMES
        dtypes = [ELEMENT_TYPE_NAMES[name] for rule in self.type_rules for name in rule.channel]
        of_channels = [name for name, dtype in ELEMENT_TYPE_NAMES.items() if dtype in dtypes]
        for tensor in (*self.inputs, *self.outputs):
            if tensor.kind in ("channel", "kept") and tensor.type in ELEMENT_TYPE_NAMES:
                yield f"type_rules: the type of {tensor.name}", tensor.type, of_channels
        for spec in self.attributes:
            if spec.role is not None:
                role = f"attributes: the type of {spec.name}, which is the {spec.role}"
                yield role, spec.type, _TYPES_OF_ROLES[spec.role]
            choices = f"attributes: the choices of {spec.name}"
            yield choices, type(spec.choices).__name__, ["tuple"]
            if spec.role == "data_format":
                yield choices, {*spec.choices}, [{form.name for form in self.formats}]
            if spec.required and spec.role in (None, "reduced_axes") and spec.usual is None:
                yield f"attributes: the usual value of {spec.name}", None, ["a value"]
        roles = [spec.role for spec in self.attributes]
        if "variance" in names and "epsilon" not in roles:
            (variance,) = (tensor.name for tensor in self.inputs if tensor.role == "variance")
            # The schema has a variance but no epsilon. Its author may have taken an inverse
            # deviation for a variance.
            text = f"the role of {variance} is variance, not inverse_deviation"
            yield f"attributes: the roles ({text})", roles, ["epsilon"]
        if len(self.formats) > 1 and "data_format" not in roles:
            yield "attributes: the roles, with several formats", roles, ["data_format"]
        if self.channel_axes is None:
            by_call = not {"channel_axis", "reduced_axes"}.isdisjoint(roles)
            for form in self.formats:
                is_any = f"formats: is_any of {form.name}, whether an attribute is the channel axis"
                yield is_any, form.is_any, [by_call]
        low, high = self.ranks[0], self.ranks[-1]
        ordered = (low, high) if high == 0 else (min(low, high), max(low, high))
        yield "ranks (lowest, highest or 0)", self.ranks, [ordered]
        for name in _in_braces(self.source):
            yield "source: the name in braces", name, ["op"]
        for phrase, accepted in _FIELDS.items():
            for name in _in_braces(getattr(self.phrases, phrase) or ""):
                yield f"phrases: the name in braces in {phrase}", name, accepted

    @cached_property
    def with_constants(self) -> OperatorSchema:
        """The schema that calls with constant statistics follow."""
        if not any(tensor.frozen for tensor in self.inputs):
            return self
        return replace(self, inputs=tuple(t.frozen or t for t in self.inputs), frozen=True)

    @property
    def call(self) -> str:
        """The signature of a call, as text."""
        names = list(self.order)
        if self.choice != "all":
            names.append(self.choice)
        if self.takes_memory:
            names.append(self.outputs[0].name)
        if self.style == "keywords":
            names.insert(0, "*")
        first = f"({', '.join(self.configuration)})" if self.style == "configured" else ""
        return f"{self.op}{first}({', '.join(names)})"

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
            **_values(self, "dialect", "op", "revision", "operation", "summary", "source"),
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


#: Each key is the name of a field of `OperatorSchema` that is a list. The value is a pair: the type
#: of the list's elements, and a mapping from some fields of an element to the values that these
#: fields accept. All other fields accept all values of their type.
_TABLES: Mapping[str, tuple[type, Mapping[str, tuple[object, ...]]]] = {
    "ranks": (int, {}),
    "type_rules": (TypeRule, {}),
    "formats": (FormatSpec, {"layout": ("NCX", "NXC")}),
    "inputs": (TensorSpec, {"kind": get_args(TensorKind)}),
    "outputs": (TensorSpec, {"kind": get_args(TensorKind)}),
    "attributes": (
        AttributeSpec,
        {"type": get_args(AttributeType), "range": get_args(Range)},
    ),
}


#: Maps the role of an attribute to the types that the attribute may have.
_TYPES_OF_ROLES: Mapping[AttributeRole, tuple[AttributeType, ...]] = {
    "epsilon": ("f32", "f64"),
    "data_format": ("string",),
    "training": ("bool",),
    "frozen": ("bool",),
    "channel_axis": ("i64",),
    "reduced_axes": ("axes",),
}

#: Maps each phrase to the names that may stand in braces in the phrase's text, for example {x}.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "rank": ("ranks",),
    "gradient_shape": ("x",),
    "gradient_type": ("x",),
    "channel_rank": ("x", "rank"),
    "channel_size": ("x", "channels", "shape"),
    "channel_shapes": (),
}


def _in_braces(text: str) -> list[str]:
    """Return the names that a format string has in braces."""
    return [name for _, name, _, _ in Formatter().parse(text) if name is not None]


def _results(operation: Operation) -> Iterator[str]:
    """Yield the roles that the outputs of an operation may have."""
    yield from (result.name for result in SIGNATURES[operation].results)
    if operation == "forward":
        yield from ("inverse_deviation", "running_mean", "running_variance")
    if operation == "reduce":
        yield from ("sum_dy", "sum_dy_xmu", "dgamma", "dbeta")


def _values(described: object, *names: str) -> dict[str, object]:
    """Return attributes of an object by name, as plain values."""
    return {name: _plain(getattr(described, name)) for name in names}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return None if value is REQUIRED else value
