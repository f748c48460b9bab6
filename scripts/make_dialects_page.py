"""Write docs/dialects.md from the operators' own descriptions.

Usage: python -m scripts.make_dialects_page [--check]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast

import backnorm
from backnorm.dialects.registry import DIALECTS, PARTS, operators, parts
from backnorm.dialects.schema import AttributeSpec, OperatorSchema, TensorRole, TensorSpec
from backnorm.results import SecondGradients
from backnorm.signature import SIGNATURES
from scripts.generated import options, write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "dialects.md"

INTRODUCTION = """\
# The dialects

A dialect is the batch normalisation of one specification, with its names and rules.
`scripts/make_dialects_page.py` generates this page from the rules that validate each call
(each operator's `schema`). These rules hold except where a dialect or an operator states its own:

- [Brackets] mark what is optional. If gamma is absent, it is taken as 1; an absent beta is 0.
- Where backnorm's own name differs from the specification's, it stands in the column "Canonical",
  or in parentheses.
  An input `inverse_deviation` is 1 / sqrt(variance + epsilon); epsilon is not added to it again.
- x, dy, y and dx have the same shape, of rank 2 or more. Other tensors have one value per channel,
  in the shape (C,).
- "f16 with f32" means data of f16 and per-channel tensors of f32. All per-channel tensors share one
  type.
- A variance is biased. As inputs, running statistics are those before the call; as outputs, the
  updated ones.
- epsilon is added to the variance. Numeric attributes must be finite.
- Results have the same bits as those of backnorm's own operator, the canonical operator below.
- After "Source:", OPERATOR and REVISION stand for the operator's name and its revision.
- Every call takes the keyword `arithmetic`, an extension of backnorm: the type in which elements
  are computed, `"float32"` or `"float64"`.
"""

CANONICAL = """\
## The canonical operator

dy, y, dx, residuals and ddx (the gradient with respect to dx) have the shape and the element type
of x. A mask has one bit per element. Other arrays have one value per channel, in x's type. If x has
16 bits, these arrays may also be float32.
"""

FUNCTIONS = """\
## Functions that compute a part of the gradient

`backnorm info` lists these functions. Graphs, `backnorm run` and `backnorm verify` do not call
them. If an input has the canonical name of a result (such as dgamma), pass the output of the
function that computes this result.
"""

_CONDITIONS = {None: "", "relu": " with a ReLU", "residual": " with `residual`"}

# Summaries that only repeat the canonical name.
_KNOWN = {
    "x": ("input of the forward", "input data", "input"),
    "dy": ("gradient of the output", "gradient of y", "gradient of Y"),
    "y": ("normalised output",),
    "gamma": ("scale", "absent: 1", "None: 1"),
    "beta": ("offset", "absent: 0"),
    "mean": ("batch mean", "mean of the batch", "mean to normalise with"),
    "variance": ("biased", "biased batch variance", "biased variance to normalise with",
                 "variance to normalise with"),
    "inverse_deviation": ("1 / sqrt(batch variance + epsilon)", "1 / sqrt(batch variance + eps)"),
    "running_mean": ("old running mean", "new running mean", "running mean"),
    "running_variance": ("old running variance", "new running variance", "running variance"),
}  # fmt: skip
_GRADIENTS = ("dx", "dgamma", "dbeta")


def page() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, CANONICAL, _operations(), *_sections()]).rstrip() + "\n"


def _operations() -> str:
    """Return the operations that have a public function, as their signatures have them."""
    rows = []
    for name, signature in SIGNATURES.items():
        if not (hasattr(backnorm, name) or hasattr(backnorm, f"batch_norm_{name}")):
            continue
        operands = (f"`{o.name}`" if o.required else f"[`{o.name}`]" for o in signature.operands)
        results = [f"`{r.name}`{_CONDITIONS[r.option]}" for r in signature.results]
        # A kernel computes no result of `double_backward`, so its signature has none.
        results = results or [f"gradient of `{name}`" for name in SecondGradients._fields]
        options = ", ".join(f"`{name}`" for name in signature.options)
        place = f"; `out` may be `{signature.overwrites}`" if signature.overwrites else ""
        rows.append((signature.operation, ", ".join(operands), ", ".join(results), options + place))
    return _table(("Operation", "Operands", "Results", "Options"), rows)


def _sections() -> Iterator[str]:
    for dialect in DIALECTS:
        yield f"## `backnorm.dialects.{dialect}`\n"
        schemas = [schema for op in operators(dialect).values() for schema in op.schemas.values()]
        families = [list(family) for _, family in groupby(schemas, _family)]
        common = _common([first for first, *_ in families], schemas)
        yield from common.text()
        for family in families:
            yield _operator(family[0], common)
            for place, schema in enumerate(family[1:], 1):
                # Describe a variant by its differences from the version that it resembles most.
                pairs = [(each, _differences(schema, each, common)) for each in family[:place]]
                if pairs[0][1]:
                    yield _variant(schema, *min(pairs, key=lambda pair: len(pair[1].split())))
    yield FUNCTIONS
    for dialect in PARTS:
        yield f"### `backnorm.dialects.{dialect}`: parts of the gradient\n"
        functions = _resolved(parts(dialect))
        common = _common(functions)
        yield from common.text()
        for schema in functions:
            yield "#" + _operator(schema, common)


def _resolved(functions: Mapping[str, OperatorSchema]) -> list[OperatorSchema]:
    """Return the functions, with each summary "As `other`" replaced by that function's summary."""

    def resolved(attribute: AttributeSpec) -> AttributeSpec:
        found = re.match(r"As `(\w+)`", attribute.summary)
        if not found:
            return attribute
        return resolved(next(a for a in functions[found[1]].attributes if a.name == attribute.name))

    return [
        replace(each, attributes=tuple(map(resolved, each.attributes)))
        for each in functions.values()
    ]


class _Common(NamedTuple):
    """Attributes, rules and source of all operators of a dialect; rules by revision."""

    attributes: Sequence[AttributeSpec] = ()
    rules: Sequence[str] = ()
    source: str = ""
    revisions: Mapping[str, Sequence[str]] = MappingProxyType({})

    def text(self) -> Iterator[str]:
        if self.source or self.attributes or self.rules:
            source = f"Source: {self.source}. " if self.source else ""
            yield f"{source}All operators:\n"
            yield from _attributes(self.attributes)
            lines = [f"Revision {name}. {' '.join(own)}" for name, own in self.revisions.items()]
            yield _list([*self.rules, *lines])


def _common(schemas: Sequence[OperatorSchema], revised: Sequence[OperatorSchema] = ()) -> _Common:
    first, *others = schemas
    if not others:
        return _Common()
    rows = [set(map(_attribute, each.attributes)) for each in others]
    by_revision = {
        name: [each for each in revised if each.revision == name]
        for name in dict.fromkeys(each.revision for each in revised)
        if name and name != first.revision
    }
    usual = _rules_of_all(schemas)
    return _Common(
        [a for a in first.attributes if all(_attribute(a) in known for known in rows)],
        usual,
        _source(first) if all(_source(each) == _source(first) for each in others) else "",
        {
            name: [rule for rule in _rules_of_all(group) if rule not in usual]
            for name, group in by_revision.items()
        },
    )


def _rules_of_all(schemas: Sequence[OperatorSchema]) -> list[str]:
    first, *others = (_rules(each).values() for each in schemas)
    return [rule for rule in first if rule and all(rule in rules for rules in others)]


def _source(schema: OperatorSchema) -> str:
    """Return the source, without what differs between the operators of a dialect."""
    source = schema.source.replace(schema.op, "OPERATOR")
    source = re.sub(r", OPERATOR(?= \(|$)", ", under each operator's name", source)
    return source.replace(schema.revision, "REVISION") if schema.revision else source


def _family(schema: OperatorSchema) -> str:
    """Return the name that versions and revisions of an operator share."""
    return re.sub(r"V\d$", "", schema.op)


def _title(schema: OperatorSchema) -> str:
    revision = f" (revision {schema.revision})" if schema.revision else ""
    return f"{schema.op}{revision}"


def _operator(schema: OperatorSchema, common: _Common) -> str:
    source = "" if _source(schema) == common.source else f" Source: {schema.source}."
    rules = [text for text in _rules(schema).values() if text and text not in common.rules]
    tables, lines = _operands((schema.inputs, schema.outputs), schema)
    parts = [
        f"### {_title(schema)}\n",
        f"{schema.summary.replace(' of batch normalisation', '')}{source}\n",
        *_formula(schema),
        *tables,
        *_attributes(
            a for a in schema.attributes if _attribute(a) not in map(_attribute, common.attributes)
        ),
        _list([*lines, *rules]),
    ]
    return "\n".join(parts)


def _variant(schema: OperatorSchema, first: OperatorSchema, differences: str) -> str:
    """Return the section of a version or a revision that resembles another."""
    other = f"revision {first.revision}" if first.revision else first.op
    return f"### {_title(schema)}\n\nThe same as {other}" + (
        f", except:\n\n{differences}" if differences else ".\n"
    )


def _differences(schema: OperatorSchema, first: OperatorSchema, common: _Common) -> str:
    """Return the differences of a version or a revision from another, or an empty text.

    Rules that all operators of a revision have are on the page already.
    """
    known = set(map(_facts, (*first.inputs, *first.outputs)))
    found = [
        [tensor for tensor in tensors if _facts(tensor) not in known]
        for tensors in (schema.inputs, schema.outputs)
    ]
    absent = [
        *(f"the attribute `{name}`" for name in _absent(schema.attributes, first.attributes)),
        *(f"the input `{name}`" for name in _absent(schema.inputs, first.inputs)),
        *(f"the output `{name}`" for name in _absent(schema.outputs, first.outputs)),
    ]
    tables, lines = _operands(found, schema, "Other ")
    rules, before = _rules(schema), _rules(first)
    if _names(schema) == [name for name in _names(first) if name in _names(schema)]:
        del rules["call"], before["call"]
    told = common.revisions.get(schema.revision or "", ())
    lines += [
        text or _DEFAULTS[key]
        for key, text in rules.items()
        if text != before.get(key) and text not in told
    ]
    lines += [f"Not so: {text}" for key, text in before.items() if text and key not in rules]
    if absent:
        lines.append(f"Absent from this operator: {', '.join(absent)}.")
    # The description of an attribute is not repeated if only its default or choices differ.
    told_of = {(a.name, a.summary) for a in first.attributes}
    attributes = [
        replace(a, summary="") if (a.name, a.summary) in told_of else a
        for a in schema.attributes
        if _attribute(a) not in map(_attribute, first.attributes)
    ]
    formula = () if schema.formula == first.formula else _formula(schema)
    parts = [*formula, *tables, *_attributes(attributes)]
    return "\n".join([*parts, _list(lines)] if lines else parts)


def _formula(schema: OperatorSchema) -> Iterator[str]:
    """Yield the formula of the docstring as Markdown, if there is one."""
    text = re.sub(r" ?::$", ":", schema.formula, flags=re.MULTILINE).removeprefix(":").strip("\n")
    if text:
        yield f"{text}\n"


def _names(schema: OperatorSchema) -> Sequence[str]:
    """Return the names of a call, in order."""
    return re.findall(r"\w+", schema.call.partition("(")[2])


def _absent(
    mine: Iterable[TensorSpec | AttributeSpec], first: Iterable[TensorSpec | AttributeSpec]
) -> list[str]:
    """Return the names that a variant does not have."""
    names = {spec.name for spec in mine}
    return [spec.name for spec in first if spec.name not in names]


def _facts(tensor: TensorSpec) -> Sequence[object]:
    return tensor.name, tensor.role, tensor.required, tensor.shape, tensor.summary


def _operands(
    operands: Sequence[Sequence[TensorSpec]], schema: OperatorSchema, kind: str = ""
) -> tuple[list[str], list[str]]:
    """Return the tables of inputs and outputs; lines for those that need no third column."""
    tables: list[str] = []
    lines: list[str] = []
    for head, tensors in zip(("Input", "Output"), operands, strict=True):
        head = f"{kind}{head.lower()}" if kind else head
        rows = list(_tensors(tensors, schema))
        if any(note for *_, note in rows):
            cells = [(", ".join(names), canonical, note) for names, canonical, note in rows]
            tables.append(_table((head, "Canonical", ""), cells))
        elif rows:
            texts = (f"{name} ({role})" if role else name for (name,), role, _ in rows)
            lines.append(f"{head}s: {', '.join(texts)}.")
    return tables, lines


def _tensors(
    tensors: Iterable[TensorSpec], schema: OperatorSchema
) -> Iterator[tuple[Sequence[str], str, str]]:
    """Yield names, canonical names and note of each tensor, or of neighbours with one note."""
    for note, group in groupby(tensors, lambda tensor: _note(tensor, schema)):
        neighbours = list(group)
        for row in [neighbours] if note else [[each] for each in neighbours]:
            names = [f"`{t.name}`" if t.required else f"[`{t.name}`]" for t in row]
            roles = [role for tensor in row if (role := _canonical(tensor, schema))]
            same = roles == [tensor.name for tensor in row]
            yield names, "" if same else ", ".join(roles), note


def _canonical(tensor: TensorSpec, schema: OperatorSchema) -> str:
    """Return the canonical name, or both names if an attribute decides between them."""
    if f"{tensor.name}_is" in schema.order:
        return f"{tensor.role} or inverse_deviation, as `{tensor.name}_is` says"
    training, frozen = _role(tensor), _role(_if_frozen(tensor, schema))
    if training == frozen:
        return training
    texts = (training, "in training"), (frozen, "with constant statistics")
    return ", ".join(f"{role} {when}" for role, when in texts if role)


def _if_frozen(tensor: TensorSpec, schema: OperatorSchema) -> TensorSpec:
    """Return the specification of an operand in a call whose statistics are constants."""
    if tensor not in schema.inputs:
        return tensor
    if schema.operation == "forward" and {"is_training", "training_mode"} & set(schema.order):
        # Inference normalises with the running statistics.
        role = tensor.role.removeprefix("running_")
        return replace(tensor, role=cast("TensorRole", role))
    if schema.dialect not in DIALECTS or schema.op not in operators(schema.dialect):
        return tensor
    other = operators(schema.dialect)[schema.op].frozen_schema(schema)
    return next((each for each in other.inputs if each.name == tensor.name), tensor)


def _role(tensor: TensorSpec) -> str:
    no_name = tensor.role in ("empty", "ignored") or tensor.role.startswith("memory_")
    return "" if no_name or tensor.kind == "opaque" else tensor.role


def _note(tensor: TensorSpec, schema: OperatorSchema) -> str:
    """Return what the canonical name does not say."""
    is_gradient = tensor.role in _GRADIENTS and tensor.summary.startswith("gradient of ")
    summary = "" if is_gradient else _news(tensor)
    if _canonical(tensor, schema).endswith(summary):
        summary = ""
    kinds = {tensor.kind, _if_frozen(tensor, schema).kind}
    usual = kinds & {"data", "channel", "kept"} or tensor.role == "empty"
    return "; ".join(filter(None, ("" if usual else f"shape: {tensor.shape}", summary)))


def _news(tensor: TensorSpec) -> str:
    """Return a summary without its beginning, if that repeats the canonical name."""
    summary = tensor.summary
    for known in _KNOWN.get(tensor.role, ()):
        begin, rest = summary[: len(known)], summary[len(known) :].rstrip(".")
        if (
            begin.lower() == known.lower()
            and (not rest or rest[0] in ";,.")
            and not rest.startswith(", and")
        ):
            is_statistic = tensor.role in ("mean", "variance") and rest
            summary = summary if is_statistic else rest.lstrip(";,. ")
    return summary


def _attributes(attributes: Iterable[AttributeSpec]) -> Iterator[str]:
    rows = [_attribute(each) for each in attributes]
    if rows:
        yield _table(("Attribute", "Default", "Accepted", ""), rows)


def _attribute(attribute: AttributeSpec) -> Sequence[str]:
    default = "required" if attribute.required else f"`{attribute.default!r}`"
    accepted = ", ".join(f"`{choice}`" for choice in attribute.choices) or attribute.type
    if attribute.type in ("f32", "f64") and attribute.range != "any":
        accepted = f"{attribute.type}, {attribute.range}"
    summary = attribute.summary
    if summary.lower().rstrip(".") == "added to the variance":
        summary = ""
    return f"`{attribute.name}`", default, accepted, summary


# The introduction's rules, for a variant that follows them although its first schema does not.
_DEFAULTS = {
    "rank": "Rank of the data: 2 or more.",
    "channel types": "All per-channel tensors share one type.",
}


def _rules(schema: OperatorSchema) -> Mapping[str, str]:
    """Return the rules by what they are about; empty where the introduction has them."""
    channels = [t for t in (*schema.inputs, *schema.outputs) if t.kind in ("channel", "kept")]
    rules = {
        "call": "Call: all arguments are passed by keyword."
        if schema.style == "keywords"
        else f"Call: `{schema.call}`.",
        "types": f"Data and per-channel types: {_types(schema)}.",
        "channel types": ""
        if schema.one_channel_type
        else "Per-channel inputs may have different element types.",
        "rank": "" if schema.rank_text == "2 or more" else f"Rank of the data: {schema.rank_text}.",
        "channels": f"Channels: at least {schema.min_channels}." if schema.min_channels else "",
        "shape": _shape(channels) if not _tells_shape(schema) else "",
    }
    for together, text in (
        (schema.inputs_together, "given together or not at all"),
        (schema.outputs_together, "requested together or not at all"),
    ):
        rules |= {_and(names): f"{_and(names)}: {text}." for names in together}
    return rules | {note: note for note in schema.notes}


def _shape(channels: Sequence[TensorSpec]) -> str:
    """Return the rule on per-channel tensors that have the rank of x; empty if there are none."""
    names = [t.name for t in channels if t.kind == "kept"]
    if not names:
        return ""
    subject = "Per-channel tensors" if len(names) == len(channels) else ", ".join(names)
    have = "has" if len(names) == 1 < len(channels) else "have"
    return f"{subject} {have} the rank of x, and size 1 in the reduced axes."


def _tells_shape(schema: OperatorSchema) -> bool:
    return any(note.startswith("Per-channel tensors have the rank of x") for note in schema.notes)


def _types(schema: OperatorSchema) -> str:
    """Return the element types of the data, and of per-channel tensors beside each."""
    rules = schema.type_rules
    if all(rule.channel == (rule.data,) for rule in rules):
        *others, last = (rule.data for rule in rules)
        return f"{', '.join(others)} or {last}, the same for all tensors" if others else last
    together = groupby(sorted(rules, key=lambda rule: rule.channel), lambda rule: rule.channel)
    return "; ".join(
        f"{' or '.join(rule.data for rule in group)} with {' or '.join(channel)}"
        for channel, group in together
    )


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _and(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


if __name__ == "__main__":
    is_check = options(__doc__).check
    raise SystemExit(write_or_check({PAGE: page()}, check=is_check))
