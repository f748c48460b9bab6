"""The documentation of an operator's callable, written from its schema."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from backnorm.dialects._attributes import accepted_by
from backnorm.dialects.schema import AttributeSpec, OperatorSchema, TensorSpec

__all__ = ["documentation_of_call", "documentation_of_configuration"]

_WIDTH = 96


def documentation_of_configuration(schemas: Sequence[OperatorSchema]) -> str:
    """Return the documentation of an operator that is configured before it is called."""
    first = schemas[0]
    everything = {a.name: a for schema in reversed(schemas) for a in schema.attributes}
    lines = [*_title(first), *_section("Parameters", map(_attribute, everything.values()))]
    if first.example:
        lines += _section("Examples", [first.example.splitlines()])
    return "\n".join(lines)


def documentation_of_call(schema: OperatorSchema) -> str:
    """Return the documentation of a call."""
    entries = [_tensor(tensor, schema) for tensor in schema.inputs]
    if schema.style != "configured":
        entries += [_attribute(spec) for spec in schema.attributes]
    names = [tensor.name for tensor in schema.outputs]
    if schema.choice == "outputs":
        entries.append(
            _entry("outputs : int or collection of str", "that many from the first, or their names")
        )
    elif schema.choice == "output_mask":
        entries.append(
            _entry("output_mask : sequence of bool", "which results are wanted; others are None")
        )
    if schema.takes_memory:
        text, gradient = "memory for this output", schema.words.get("dy")
        if gradient is not None:
            text += f"; may be {gradient}, which it then overwrites"
        entries.append(_entry(f"{names[0]} : numpy.ndarray, optional", text))
    text = "backnorm's own: what elements are computed in; see `backnorm.arithmetic`"
    entries.append(_entry('arithmetic : {"float32", "float64"}, optional', text))
    raised = ["ArgumentTypeError, ArgumentValueError"]
    raised += _wrapped("for an argument that is not as described, by its name here")
    lines = [
        *_title(schema),
        *_section("Parameters", entries),
        *_section("Returns", [_tensor(tensor, schema) for tensor in schema.outputs]),
        *_section("Raises", [raised]),
    ]
    notes = (_types(schema), *schema.notes)
    lines += _section("Notes", [_wrapped(f"- {note}", "", "  ") for note in notes])
    return "\n".join(lines)


def _types(schema: OperatorSchema) -> str:
    rules = (f"{rule.data} with {' or '.join(rule.channel)}" for rule in schema.type_rules)
    return f"Element types of data and of per-channel tensors: {', '.join(rules)}."


def _title(schema: OperatorSchema) -> list[str]:
    return [schema.summary, "", *_wrapped(f"Follows {schema.source}.", "")]


def _section(title: str, entries: Iterable[Iterable[str]]) -> Iterator[str]:
    yield from ("", title, "-" * len(title))
    for entry in entries:
        yield from entry


def _tensor(tensor: TensorSpec, schema: OperatorSchema) -> list[str]:
    rank = f" of rank {schema.rank_text}" if tensor.role == "x" else ""
    shape = rank if tensor.kind == "data" else f" of shape {tensor.shape}"
    optional = "" if tensor.required else ", optional"
    return _entry(f"{tensor.name} : {tensor.type} array{shape}{optional}", tensor.summary)


def _attribute(spec: AttributeSpec) -> list[str]:
    default = "" if spec.required else f", default {spec.default!r}"
    text = f"{spec.summary}" + ("; an extension of backnorm" if spec.extension else "")
    return _entry(f"{spec.name} : {accepted_by(spec)}{default}", text)


def _entry(head: str, text: str) -> list[str]:
    return [head, *(_wrapped(text) if text else ())]


def _wrapped(text: str, first: str = "    ", rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=first if rest is None else rest
    )
