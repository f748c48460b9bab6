"""Write docs/dialects.md from the operators' own descriptions.

With --check: say whether the page is current, and write nothing.

Usage: python scripts/make_dialects_page.py [--check]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from backnorm.dialects.registry import DIALECTS, PARTS, operators, parts
from backnorm.dialects.schema import AttributeSpec, OperatorSchema, TensorSpec
from backnorm.signature import SIGNATURES
from generated import write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "dialects.md"

INTRODUCTION = """\
# The dialects

A dialect is the batch normalisation of one specification, with the specification's names and rules.
`scripts/make_dialects_page.py` generates this page from the rules that validate each call
(`.schema`).

"Canonical" is the name in backnorm's own operator, e.g. `dx` in `batch_norm_backward`. All
operators use the statistics of the call, take and return the biased variance unless a rule says
otherwise, and return the bits of the canonical operator. An inverse standard deviation is used
without conversion.

Every call also takes the keyword `arithmetic`, an extension of backnorm: the compute type of
elements, `"float32"` or `"float64"` (`backnorm.arithmetic`).
"""

CANONICAL = """\
## The canonical operator

The operands and results of every operation (`backnorm/signature.py`). An array of the kind *data*
has the shape and the element type of x. A *channel* array has one value per channel, in x's type,
or also in float32 if x has 16 bits. A *mask* has one bit per element.
"""

FUNCTIONS = """\
## Functions that compute a part of the gradient

Where a specification has an operator for the gradients of the parameters and another for that of
x, they are functions here. `backnorm info` shows them; graphs, `backnorm run` and `backnorm verify`
only call operators with the whole gradient. An input whose canonical name is that of a result is
what another function returned.
"""

_CONDITIONS = {None: "always", "relu": "with a ReLU", "residual": "with `residual`"}


def page() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, CANONICAL, *_operations(), *_sections()]).rstrip() + "\n"


def _operations() -> Iterator[str]:
    """Yield the canonical operations, as their signatures have them."""
    for signature in filter(lambda each: each.public, SIGNATURES.values()):
        operands = [
            (f"`{o.name}`", o.kind, "yes" if o.required else "no") for o in signature.operands
        ]
        results = [(f"`{r.name}`", r.kind, _CONDITIONS[r.option]) for r in signature.results]
        options = ", ".join(f"`{name}`" for name in signature.options)
        place = f"; `out` may be `{signature.overwrites}`" if signature.overwrites else ""
        yield f"### {signature.operation}\n\nOptions: {options}{place}.\n"
        yield _table(("Operand", "Kind", "Required"), operands)
        if results:
            yield _table(("Result", "Kind", "When"), results)


def _sections() -> Iterator[str]:
    for dialect in DIALECTS:
        yield f"## `backnorm.dialects.{dialect}`\n"
        for op in operators(dialect).values():
            for schema in op.schemas.values():
                yield _operator(schema)
    yield FUNCTIONS
    for dialect in PARTS:
        yield f"### `backnorm.dialects.{dialect}`: parts of the gradient\n"
        for schema in parts(dialect).values():
            yield "#" + _operator(schema)


def _operator(schema: OperatorSchema) -> str:
    revision = f" (revision {schema.revision})" if schema.revision else ""
    parts = [
        f"### {schema.op}{revision}\n",
        f"{schema.summary} Follows {schema.source}.\n",
        _table(
            ("Input", "Type", "Shape", "Required", "Canonical", ""),
            map(_tensor, schema.inputs),
        ),
        _table(
            ("Output", "Type", "Shape", "Required", "Canonical", ""),
            map(_tensor, schema.outputs),
        ),
        *_attributes(schema),
        _table(
            ("Element type of the data", "Element types of per-channel tensors"),
            ((rule.data, ", ".join(rule.channel)) for rule in schema.type_rules),
        ),
        "\n".join(f"- {rule}" for rule in _rules(schema)) + "\n",
    ]
    return "\n".join(parts)


def _tensor(tensor: TensorSpec) -> Sequence[str]:
    no_name = tensor.role in ("empty", "ignored") or tensor.role.startswith("memory_")
    canonical = "" if no_name else tensor.role
    return (
        f"`{tensor.name}`",
        tensor.type,
        tensor.shape,
        "yes" if tensor.required else "optional",
        canonical,
        tensor.summary,
    )


def _attributes(schema: OperatorSchema) -> Iterator[str]:
    if schema.attributes:
        head = ("Attribute", "Type", "Default", "Accepted", "")
        yield _table(head, map(_attribute, schema.attributes))


def _attribute(attribute: AttributeSpec) -> Sequence[str]:
    default = "required" if attribute.required else f"`{attribute.default!r}`"
    accepted = ", ".join(f"`{choice}`" for choice in attribute.choices)
    if attribute.type in ("f32", "f64"):
        accepted = "finite" if attribute.range == "any" else f"finite, {attribute.range}"
    return f"`{attribute.name}`", attribute.type, default, accepted, attribute.summary


def _rules(schema: OperatorSchema) -> Iterator[str]:
    yield f"Call: `{schema.call}`."
    yield f"Rank of the data: {schema.rank_text}."
    if "mean" in {tensor.role for tensor in (*schema.inputs, *schema.outputs)}:
        yield f"The statistic beside the mean: the {schema.encoding}."
    if schema.min_channels:
        yield f"Channels: at least {schema.min_channels}."
    if not schema.one_channel_type:
        yield "Per-channel tensors may differ in element type."
    for names in schema.inputs_together:
        yield f"{_and(names)}: all given or none."
    for names in schema.outputs_together:
        yield f"{_and(names)}: all requested or none."
    yield from schema.notes


def _and(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


if __name__ == "__main__":
    raise SystemExit(write_or_check({PAGE: page()}))
