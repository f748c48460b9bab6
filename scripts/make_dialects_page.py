"""Write docs/dialects.md from the operators' own descriptions.

With --check: say whether the page is current, and write nothing.

Usage: python scripts/make_dialects_page.py [--check]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from backnorm.dialects.registry import DIALECTS, PARTS, operators, parts
from backnorm.dialects.schema import AttributeSpec, OperatorSchema, TensorSpec
from backnorm.signature import SIGNATURES
from generated import write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "dialects.md"

INTRODUCTION = """\
# The dialects

A dialect is the batch normalisation of one specification, with the specification's names and rules.
`scripts/make_dialects_page.py` generates this page from the rules that validate each call
(`.schema`). If a line is absent, this holds:

- Canonical is another name in backnorm's own operator; `inverse_deviation` is 1 / sqrt(variance +
  epsilon), used without conversion.
- x, dy, y and dx have one shape, of rank 2 or more. Other tensors have one value per channel, (C,).
- "f16 with f32": data of f16, per-channel tensors of f32. All per-channel tensors
  of a call have one type.
- Inputs and outputs are required. An absent gamma is 1, an absent beta 0.
- epsilon is added to the variance. Numbers are finite.
- Statistics are those of the call, a mean and a biased variance.
- Results have the bits of the canonical operator.
- Every call takes the keyword `arithmetic`, an extension of backnorm: the compute type of elements,
  `"float32"` or `"float64"`.
"""

CANONICAL = """\
## The canonical operator

Operands in brackets may be absent (`backnorm/signature.py`). x, dy, y, dx, residuals and ddx have
the shape and the element type of x. A mask has one bit per element. Others have one value per
channel, in x's type, or also in float32 if x has 16 bits.
"""

FUNCTIONS = """\
## Functions that compute a part of the gradient

`backnorm info` lists these functions. Graphs, `backnorm run` and `backnorm verify` do not call
them; they call only operators that return all gradients. An input with the canonical name of a
result is what another function returned.
"""

_CONDITIONS = {None: "", "relu": " with a ReLU", "residual": " with `residual`"}

# Summaries that only repeat the canonical name.
_KNOWN = {
    "x": {"input", "input of the forward"},
    "dy": {"gradient of the output", "gradient of y", "gradient of Y"},
    "y": {"normalised output"},
    "gamma": {"scale", "scale; absent: 1", "scale; None: 1", "Scale.", "Scale. None: 1."},
    "beta": {"offset", "offset; absent: 0"},
    "mean": {"batch mean", "mean of the batch", "mean to normalise with"},
    "variance": {"biased", "biased batch variance", "biased variance to normalise with",
                 "variance to normalise with"},
    "inverse_deviation": {"1 / sqrt(batch variance + epsilon)"},
}  # fmt: skip
_GRADIENTS = ("dx", "dgamma", "dbeta")


def page() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, CANONICAL, _operations(), *_sections()]).rstrip() + "\n"


def _operations() -> str:
    """Return the canonical operations, as their signatures have them."""
    rows = []
    for signature in filter(lambda each: each.public, SIGNATURES.values()):
        operands = (f"`{o.name}`" if o.required else f"[`{o.name}`]" for o in signature.operands)
        results = (f"`{r.name}`{_CONDITIONS[r.option]}" for r in signature.results)
        options = ", ".join(f"`{name}`" for name in signature.options)
        place = f"; `out` may be `{signature.overwrites}`" if signature.overwrites else ""
        rows.append((signature.operation, ", ".join(operands), ", ".join(results), options + place))
    return _table(("Operation", "Operands", "Results", "Options"), rows)


def _sections() -> Iterator[str]:
    for dialect in DIALECTS:
        yield f"## `backnorm.dialects.{dialect}`\n"
        schemas = [schema for op in operators(dialect).values() for schema in op.schemas.values()]
        families = [list(family) for _, family in groupby(schemas, _family)]
        common = _common([first for first, *_ in families])
        yield from common.text()
        for first, *others in families:
            yield _operator(first, common)
            for schema in others:
                yield _variant(schema, first)
    yield FUNCTIONS
    for dialect in PARTS:
        yield f"### `backnorm.dialects.{dialect}`: parts of the gradient\n"
        functions = list(parts(dialect).values())
        common = _common(functions)
        yield from common.text()
        for schema in functions:
            yield "#" + _operator(schema, common)


class _Common(NamedTuple):
    """Attributes and rules that all operators of a dialect have."""

    attributes: Sequence[AttributeSpec] = ()
    rules: Sequence[str] = ()

    def text(self) -> Iterator[str]:
        if self.attributes or self.rules:
            yield "All operators, unless they say otherwise:\n"
            yield from _attributes(self.attributes)
            if self.rules:
                yield _list(self.rules)


def _common(schemas: Sequence[OperatorSchema]) -> _Common:
    first, *others = schemas
    if not others:
        return _Common()
    rows = [set(map(_attribute, each.attributes)) for each in others]
    texts = [set(_rules(each).values()) for each in others]
    return _Common(
        [a for a in first.attributes if all(_attribute(a) in known for known in rows)],
        [r for r in _rules(first).values() if r and all(r in known for known in texts)],
    )


def _family(schema: OperatorSchema) -> str:
    """Return the name that versions and revisions of an operator share."""
    return re.sub(r"V\d$", "", schema.op)


def _title(schema: OperatorSchema) -> str:
    revision = f" (revision {schema.revision})" if schema.revision else ""
    return f"{schema.op}{revision}"


def _operator(schema: OperatorSchema, common: _Common) -> str:
    parts = [
        f"### {_title(schema)}\n",
        f"{schema.summary} Follows {schema.source}.\n",
        _table(("Input", "Canonical", ""), _tensors(schema.inputs)),
        _table(("Output", "Canonical", ""), _tensors(schema.outputs)),
        *_attributes(a for a in schema.attributes if a not in common.attributes),
        _list(text for text in _rules(schema).values() if text and text not in common.rules),
    ]
    return "\n".join(parts)


def _variant(schema: OperatorSchema, first: OperatorSchema) -> str:
    """Return in what a version or a revision of an operator differs from the first."""
    parts = [
        f"### {_title(schema)}\n",
        f"As {_title(first)}, except for what follows. Follows {schema.source}.\n",
    ]
    absent = [f"the attribute {name}" for name in _absent(schema.attributes, first.attributes)]
    for head, mine, other in (
        ("Input", schema.inputs, first.inputs),
        ("Output", schema.outputs, first.outputs),
    ):
        known = set(map(_facts, other))
        found = [tensor for tensor in mine if _facts(tensor) not in known]
        absent += [f"the {head.lower()} {name}" for name in _absent(mine, other)]
        if found:
            parts.append(_table((head, "Canonical", ""), _tensors(found)))
    parts += _attributes(
        a for a in schema.attributes if _attribute(a) not in set(map(_attribute, first.attributes))
    )
    rules, before = _rules(schema), _rules(first)
    lines = [text or _DEFAULTS[key] for key, text in rules.items() if text != before.get(key)]
    lines += [f"Not so: {text}" for key, text in before.items() if text and key not in rules]
    if absent:
        lines.append(f"Without {', '.join(absent)}.")
    return "\n".join([*parts, _list(lines)])


def _absent(
    mine: Iterable[TensorSpec | AttributeSpec], first: Iterable[TensorSpec | AttributeSpec]
) -> list[str]:
    """Return the names that a variant does not have."""
    names = {spec.name for spec in mine}
    return [f"`{spec.name}`" for spec in first if spec.name not in names]


def _facts(tensor: TensorSpec) -> Sequence[object]:
    return tensor.name, tensor.role, tensor.required, tensor.shape, tensor.summary


def _tensors(tensors: Iterable[TensorSpec]) -> Iterator[Sequence[str]]:
    """Yield a row for each tensor, or for neighbours that one sentence describes."""
    for note, group in groupby(tensors, _note):
        neighbours = list(group)
        for row in [neighbours] if note else [[each] for each in neighbours]:
            names = (f"`{t.name}`" + ("" if t.required else " (optional)") for t in row)
            roles = list(filter(None, map(_canonical, row)))
            same = roles == [tensor.name for tensor in row]
            yield ", ".join(names), "" if same else ", ".join(roles), note


def _canonical(tensor: TensorSpec) -> str:
    no_name = tensor.role in ("empty", "ignored") or tensor.role.startswith("memory_")
    return "" if no_name else tensor.role


def _note(tensor: TensorSpec) -> str:
    """Return what the canonical name does not say."""
    known = tensor.role in _GRADIENTS and tensor.summary.startswith("gradient of ")
    summary = "" if known or tensor.summary in _KNOWN.get(tensor.role, ()) else tensor.summary
    usual = tensor.kind in ("data", "channel", "kept") or tensor.role == "empty"
    return "; ".join(filter(None, ("" if usual else f"shape: {tensor.shape}", summary)))


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


# Rules that a variant has, and its first does not: what the introduction says.
_DEFAULTS = {
    "rank": "Rank of the data: 2 or more.",
    "channel types": "Per-channel tensors have one type.",
}


def _rules(schema: OperatorSchema) -> Mapping[str, str]:
    """Return the rules by what they are about; empty where the introduction has them."""
    channels = [t for t in (*schema.inputs, *schema.outputs) if t.kind in ("channel", "kept")]
    by_type = {t.type: [each.name for each in channels if each.type == t.type] for t in channels}
    groups = "; ".join(", ".join(f"`{name}`" for name in names) for names in by_type.values())
    own = f": {groups}" if len(by_type) > 1 else ""
    rules = {
        "call": f"Call: `{schema.call}`.",
        "types": f"Types: {_types(schema)}.",
        "channel types": ""
        if schema.one_channel_type
        else f"Per-channel tensors may differ in element type{own}.",
        "rank": "" if schema.rank_text == "2 or more" else f"Rank of the data: {schema.rank_text}.",
        "encoding": ""
        if schema.encoding == "variance"
        else f"The statistic beside the mean: the {schema.encoding}.",
        "channels": f"Channels: at least {schema.min_channels}." if schema.min_channels else "",
        "shape": "Per-channel tensors have the rank of x, and size 1 where it is reduced."
        if any(t.kind == "kept" for t in channels)
        else "",
    }
    for together, text in (
        (schema.inputs_together, "given together or not at all"),
        (schema.outputs_together, "requested together or not at all"),
    ):
        rules |= {_and(names): f"{_and(names)}: {text}." for names in together}
    return rules | {note: note for note in schema.notes}


def _types(schema: OperatorSchema) -> str:
    """Return the element types of the data, and of per-channel tensors beside each."""
    rules = schema.type_rules
    if all(rule.channel == (rule.data,) for rule in rules):
        *others, last = (rule.data for rule in rules)
        return (
            f"{', '.join(others)} or {last}, the same for all tensors of a call" if others else last
        )
    together = groupby(sorted(rules, key=lambda rule: rule.channel), lambda rule: rule.channel)
    return "; ".join(
        f"{', '.join(rule.data for rule in group)} with {' or '.join(channel)}"
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
    raise SystemExit(write_or_check({PAGE: page()}))
