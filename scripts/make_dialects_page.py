"""Write docs/dialects.md from the operators' own descriptions.

Usage: python -m scripts.make_dialects_page [--check]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

import backnorm
from backnorm.dialects.registry import DIALECTS, PARTS, operators, parts
from backnorm.dialects.schema import AttributeSpec, OperatorSchema, TensorSpec
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
- The column "Canonical" has backnorm's own name.
  An input `inverse_deviation` is 1 / sqrt(variance + epsilon); epsilon is not added to it again.
- x, dy, y and dx have the same shape, of rank 2 or more. Other tensors have one value per channel,
  in the shape (C,).
- "f16 with f32" means data of f16 and per-channel tensors of f32. All per-channel tensors share one
  type.
- A variance is biased. As inputs, running statistics are those before the call; as outputs, the
  updated ones.
- epsilon is added to the variance. Numeric attributes must be finite.
- Results have the same bits as those of backnorm's own operator, the canonical operator below.
- After "Source:", OPERATOR stands for the operator's name.
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

#: The rows and lines that describe an operator, by heading.
Description = Mapping[str, list[str]]

_HEADINGS = {
    "Input": "| Input | Canonical |  |",
    "Output": "| Output | Canonical |  |",
    "Attribute": "| Attribute | Default | Accepted |  |",
}


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
        cells = signature.operation, ", ".join(operands), ", ".join(results), options + place
        rows.append(_row(*cells))
    return _table("| Operation | Operands | Results | Options |", rows)


def _sections() -> Iterator[str]:
    for dialect in DIALECTS:
        yield f"## `backnorm.dialects.{dialect}`\n"
        yield from _operators([each.schema for each in operators(dialect).values()], "###")
    yield FUNCTIONS
    for dialect in PARTS:
        yield f"### `backnorm.dialects.{dialect}`: parts of the gradient\n"
        yield from _operators([*parts(dialect).values()], "####")


def _operators(schemas: list[OperatorSchema], level: str) -> Iterator[str]:
    """Yield what the operators of a dialect have in common, and then each operator."""
    families = [[*family] for _, family in groupby(schemas, _family)]
    descriptions = {schema.op: _description(schema) for schema in schemas}
    first, *others = (descriptions[family[0].op] for family in families)
    common = {
        head: [row for row in first[head] if all(row in other[head] for other in others)]
        for head in ("Source", "Attribute", "Rule")
        if others
    }
    if any(common.values()):
        yield " ".join([*common["Source"], "All operators:\n"])
        yield _text({**common, "Source": []})
    for family in families:
        for place, schema in enumerate(family):
            yield f"{level} {schema.op}\n"
            own = _without(descriptions[schema.op], common)
            if place == 0:
                yield _text(own)
                continue
            # Describe a version by its differences from the version that it resembles most.
            pairs = [(each.op, _differences(own, descriptions[each.op])) for each in family[:place]]
            other, text = min(pairs, key=lambda pair: len(pair[1]))
            yield f"The same as {other}" + (f", except:\n\n{text}" if text.strip() else ".\n")


def _family(schema: OperatorSchema) -> str:
    """Return the name that the versions of an operator share."""
    name = schema.op.replace("miopen", "cudnn")
    return re.sub(r"(V\d|_2020_21|_early|_functional|_no_stats)$", "", name)


def _without(description: Description, known: Description) -> Description:
    """Return what `known` does not have."""
    return {
        head: [row for row in rows if row not in known.get(head, ())]
        for head, rows in description.items()
    }


def _differences(own: Description, other: Description) -> str:
    """Return the differences of a version from another one."""
    found = _without(own, other)
    names = {row.split("`")[1] for head in _HEADINGS for row in own[head]}
    lacking = [
        f"the {head.lower()} `{name}`"
        for head in _HEADINGS
        for row in other[head]
        if (name := row.split("`")[1]) not in names and head != "Attribute"
    ]
    if lacking:
        found["Rule"].append(f"- Absent from this operator: {', '.join(lacking)}.")
    return _text(found)


def _description(schema: OperatorSchema) -> Description:
    source = schema.source.replace(schema.op, "OPERATOR")
    formula = re.sub(r" ?::$", ":", schema.formula, flags=re.MULTILINE).removeprefix(":")
    return {
        "Summary": [schema.summary],
        "Source": [f"Source: {source}."],
        "Formula": [formula.strip("\n")] if formula else [],
        "Input": [_tensor(tensor, schema) for tensor in schema.inputs],
        "Output": [_tensor(tensor, schema) for tensor in schema.outputs],
        "Attribute": [_attribute(attribute) for attribute in schema.attributes],
        "Rule": [f"- {rule}" for rule in _rules(schema)],
    }


def _text(description: Description) -> str:
    """Return a description as Markdown."""
    paragraphs = [
        " ".join([*description.get("Summary", []), *description["Source"]]),
        *description.get("Formula", []),
        *(_table(head, description.get(key, [])) for key, head in _HEADINGS.items()),
        "\n".join(description["Rule"]),
    ]
    return "\n\n".join(text.rstrip("\n") for text in paragraphs if text) + "\n"


def _tensor(tensor: TensorSpec, schema: OperatorSchema) -> str:
    name = f"`{tensor.name}`" if tensor.required else f"[`{tensor.name}`]"
    is_usual = tensor.kind in ("data", "channel", "kept") or tensor.frozen
    is_usual = is_usual or tensor.role in ("empty", "reserve")
    notes = ["" if is_usual else f"shape: {tensor.shape}", tensor.summary]
    return _row(name, _canonical(tensor, schema), "; ".join(filter(None, notes)))


def _canonical(tensor: TensorSpec, schema: OperatorSchema) -> str:
    """Return the canonical name, or both names if an attribute decides between them."""
    if f"{tensor.name}_is" in schema.order:
        return f"{tensor.role} or inverse_deviation, as `{tensor.name}_is` says"
    training, constant = _role(tensor), _role(tensor.frozen or tensor)
    if tensor in schema.inputs and {"is_training", "training_mode"} & {*schema.order}:
        # Inference normalises with the running statistics.
        constant = constant.removeprefix("running_")
    if training == constant:
        return training
    texts = (training, "in training"), (constant, "with constant statistics")
    return ", ".join(f"{role} {when}" for role, when in texts if role)


def _role(tensor: TensorSpec) -> str:
    has_none = tensor.role in ("empty", "reserve", "ignored") or tensor.role.startswith("memory_")
    return "" if has_none or tensor.kind == "opaque" else tensor.role


def _attribute(attribute: AttributeSpec) -> str:
    default = "required" if attribute.required else f"`{attribute.default!r}`"
    accepted = ", ".join(f"`{choice}`" for choice in attribute.choices) or attribute.type
    if attribute.type in ("f32", "f64") and attribute.range != "any":
        accepted = f"{attribute.type}, {attribute.range}"
    return _row(f"`{attribute.name}`", default, accepted, attribute.summary)


def _rules(schema: OperatorSchema) -> Iterator[str]:
    """Yield the rules of a schema as sentences."""
    yield f"Call: `{schema.call}`."
    yield f"Data and per-channel types: {_types(schema)}."
    if not schema.one_channel_type:
        yield "Per-channel inputs may have different element types."
    yield f"Rank of the data: {schema.rank_text}."
    if schema.min_channels:
        yield f"Channels: at least {schema.min_channels}."
    kept = [t.name for t in (*schema.inputs, *schema.outputs) if t.kind == "kept"]
    if kept:
        yield f"{', '.join(kept)}: the rank of x, and size 1 in the reduced axes."
    for verb in ("given", "requested"):
        groups = schema.inputs_together if verb == "given" else schema.outputs_together
        for group in groups:
            yield f"{' and '.join(f'`{name}`' for name in group)}: {verb} together or not at all."
    yield from schema.notes


def _types(schema: OperatorSchema) -> str:
    """Return the element types of the data, and of per-channel tensors beside each."""
    rules = schema.type_rules
    if all(rule.channel == (rule.data,) for rule in rules):
        return f"{' or '.join(rule.data for rule in rules)}, the same for all tensors"
    together = groupby(sorted(rules, key=lambda rule: rule.channel), lambda rule: rule.channel)
    return "; ".join(
        f"{' or '.join(rule.data for rule in group)} with {' or '.join(channel)}"
        for channel, group in together
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: str, rows: list[str]) -> str:
    """Return a table with a heading, or an empty text if there are no rows."""
    lines = [head, re.sub(r"[^|]+", " --- ", head), *rows]
    return "".join(f"{line}\n" for line in lines) if rows else ""


if __name__ == "__main__":
    is_check = options(__doc__).check
    raise SystemExit(write_or_check({PAGE: page()}, check=is_check))
