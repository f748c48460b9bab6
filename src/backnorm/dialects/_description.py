"""Complete a schema with the parameters, defaults and documentation of the operator's class.

Parameters, defaults and documentation are read from the signature and the docstring of
``__call__``. If the operator is configured before it is called, attributes are read from the
signature of ``__init__`` and the class docstring.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from backnorm.dialects._attributes import check_attribute
from backnorm.dialects._docstring import bullets, entries_of, sections
from backnorm.dialects.schema import UNKNOWN, AttributeSpec, Choice, OperatorSchema
from backnorm.errors import ArgumentError, ArgumentTypeError

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_CHOICES: tuple[Choice, ...] = ("outputs", "output_mask")
# The roles of attributes that must not be None, because backnorm's own operator needs a value.
_NEVER_NONE = "epsilon", "data_format", "training", "frozen"


def described(rules: OperatorSchema, cls: Any) -> OperatorSchema:
    """Return the schema of an operator, with the parameters and documentation of its class.

    `cls` may also be a function that computes a part of a gradient.
    """
    is_function = inspect.isfunction(cls)
    is_configured = not is_function and cls.__init__ is not object.__init__
    function = cls if is_function else cls.__call__
    call = _parameters(function)
    parameters = _parameters(cls.__init__) if is_configured else call
    by_name = all(p.kind is _KEYWORD for name, p in call.items() if name != "self")
    if not is_function and rules.revision is None:
        _check_parameters(rules, {**call, **parameters})
    text = sections(function)
    of_attributes = sections(cls) if is_configured else text
    inputs = entries_of(text.get("Parameters", ""))
    outputs = entries_of(text.get("Returns", ""))
    attributes = entries_of(of_attributes.get("Parameters", ""))
    summary, _, formula = text.get("", "").partition("\n")
    known = {tensor.name for tensor in rules.inputs} | {a.name for a in rules.attributes}
    # If an operator has several revisions, the signature of its ``__call__`` has no names of
    # inputs. The order of the inputs is then that of the rules of the revision.
    order = tuple(name for name in call if name in known) or tuple(t.name for t in rules.inputs)
    if is_function:
        # For a function, the inputs have the order of the parameters in its signature, because a
        # function may have parameters that its rules do not list.
        order = tuple(name for name in call if name != "arithmetic")
    schema = replace(
        rules,
        source=rules.source.replace("{op}", rules.op),
        inputs=tuple(replace(t, summary=inputs.get(t.name, "")) for t in rules.inputs),
        outputs=tuple(replace(t, summary=outputs.get(t.name, "")) for t in rules.outputs),
        attributes=tuple(
            _completed(spec, parameters, attributes.get(spec.name, "")) for spec in rules.attributes
        ),
        summary=summary,
        formula=formula.strip("\n"),
        notes=tuple(bullets(text.get("Notes", ""))),
        style="configured" if is_configured else "keywords" if by_name else "positional",
        order=order,
        configuration=_listed(parameters, rules) if is_configured else (),
        choice=next((choice for choice in _CHOICES if choice in call), "all"),
        takes_memory=rules.outputs[0].name in call.keys() - known,
    )
    _check_defaults(schema)
    return schema


def _listed(parameters: Mapping[str, inspect.Parameter], rules: OperatorSchema) -> tuple[str, ...]:
    """Return the names of parameters that are attributes; "*" precedes keyword-only ones."""
    names = [attribute.name for attribute in rules.attributes]
    listed = [parameter for name, parameter in parameters.items() if name in names]
    before = [parameter.name for parameter in listed if parameter.kind is not _KEYWORD]
    after = [parameter.name for parameter in listed if parameter.kind is _KEYWORD]
    return (*before, *(["*", *after] if after else []))


def _check_defaults(schema: OperatorSchema) -> None:
    """Raise if an attribute has a default that the operator does not accept."""
    for spec in schema.attributes:
        try:
            if spec.default is None and spec.role in _NEVER_NONE:
                raise ArgumentTypeError(
                    spec.name, "must not be None", accepted=f"{spec.type}, or REQUIRED in the table"
                )
            if not spec.required:
                check_attribute(spec, spec.default, schema)
        except ArgumentError as error:
            raise ValueError(f"{schema.dialect}.{schema.op}: the default of {error}") from None


def _check_parameters(rules: OperatorSchema, parameters: Collection[str]) -> None:
    """Raise if the parameters of an operator are not the inputs and attributes of its tables."""
    names = [*(t.name for t in rules.inputs), *(a.name for a in rules.attributes)]
    known = {*names, *_CHOICES, rules.outputs[0].name, "self", "arithmetic"}
    missing = [name for name in names if name not in parameters]
    others = [name for name in parameters if name not in known]
    if missing or others:
        raise ValueError(
            f"{rules.dialect}.{rules.op}: the parameters must be the inputs and attributes of the "
            f"tables; got {', '.join(others) or 'too few'}; "
            f"expected {', '.join(missing) or 'no others'}"
        )


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _completed(
    spec: AttributeSpec, parameters: Mapping[str, inspect.Parameter], summary: str
) -> AttributeSpec:
    """Return `spec` with `summary`, and with the parameter's default in place of `UNKNOWN`."""
    default = parameters[spec.name].default if spec.default is UNKNOWN else spec.default
    return replace(spec, default=default, summary=summary)
