"""Read the schema of an operator from the function that declares it.

Each tensor or attribute is a parameter whose `Annotated` type has its role (`roles.py`). Names,
order and defaults are those of the signature; summaries are those of the docstring.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from backnorm.dialects._docstring import bullets, entries_of, sections
from backnorm.dialects.schema import AttributeSpec, OperatorSchema, Rules, TensorSpec
from backnorm.signature import Operation


def schema_of(
    rules: Rules,
    operation: Operation,
    function: Callable[..., Any],
    results: Mapping[str, TensorSpec],
    name: str,
) -> OperatorSchema:
    """Return the schema of the operator that `function` declares.

    Parameters
    ----------
    rules : Rules
    operation : str
    function : callable
        Its signature and docstring are read.
    results : mapping of str to TensorSpec
        The roles of the results by name.
    name : str
        The name of the operator.
    """
    parameters = inspect.signature(function, eval_str=True).parameters
    text = sections(function)
    summary, _, formula = text.get("", "").partition("\n")
    entries = entries_of(text.get("Parameters", ""))
    of_results = entries_of(text.get("Returns", ""))
    inputs: list[TensorSpec] = []
    attributes: list[AttributeSpec] = []
    for parameter in parameters.values():
        tensors, described = _roles(parameter, entries.get(parameter.name, ""))
        inputs += tensors
        attributes += described
    outputs = [
        _result(result, spec, of_results.get(result, "")) for result, spec in results.items()
    ]
    if all(rule.channel == (rule.data,) for rule in rules.type_rules):
        # All tensors have one element type, and so one symbol, also if another version of the
        # operator has several.
        symbol = next((tensor.type for tensor in inputs if tensor.kind == "data"), "")
        inputs, outputs = (
            [replace(tensor, type=symbol) for tensor in tensors] for tensors in (inputs, outputs)
        )
    order = tuple(each for each in parameters if each != "arithmetic")
    kind = inspect.Parameter.KEYWORD_ONLY
    # `Literal` types are cached, and two with the same words in another order are equal. So formats
    # have the order of the rules.
    formats = rules.formats
    for place, each in enumerate(attributes):
        if each.role == "data_format":
            formats = tuple(form for form in formats if form.name in each.choices)
            choices = tuple(form.name for form in formats)
            attributes[place] = replace(each, choices=choices)
    return OperatorSchema(
        **{
            **vars(rules),
            "source": rules.source.replace("{op}", name),
            "formats": formats,
        },
        op=name,
        operation=operation,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        attributes=tuple(attributes),
        summary=summary,
        formula=formula.strip("\n"),
        notes=tuple(bullets(text.get("Notes", ""))),
        order=order,
        keyword_only=tuple(each for each in order if parameters[each].kind is kind),
    )


def _result(name: str, spec: TensorSpec, summary: str) -> TensorSpec:
    """Return a result with its name and its description."""
    named = replace(spec, name=name, summary=summary)
    frozen = spec.frozen
    return named if frozen is None else replace(named, frozen=_result(name, frozen, summary))


def _roles(
    parameter: inspect.Parameter, summary: str
) -> tuple[list[TensorSpec], list[AttributeSpec]]:
    """Return the tensor or the attribute that a parameter is; neither if it has no role."""
    name, types = parameter.name, [*_types(parameter.annotation)]
    is_optional = NoneType in types
    roles = [role for each in types for role in getattr(each, "__metadata__", ())]
    tensors = [
        replace(role, name=name, summary=summary) for role in roles if isinstance(role, TensorSpec)
    ]
    if len(tensors) == 2:
        # The second role is that in calls whose statistics are constants. In each of the two kinds
        # of calls, the tensor is required if it is read. If both kinds read it, `None` stands for
        # calls in training.
        of_training, of_constants = (
            replace(tensor, required=tensor.kind != "opaque" or not is_optional)
            for tensor in tensors
        )
        if "opaque" not in (of_training.kind, of_constants.kind):
            of_training = replace(of_training, required=not is_optional)
        return [replace(of_training, frozen=of_constants)], []
    if tensors:
        return [replace(tensors[0], required=not is_optional)], []
    required = parameter.default is parameter.empty
    literals = [each for each in types if get_origin(each) is Literal]
    choices = tuple(word for each in literals for word in get_args(each))
    default = None if required else parameter.default
    attribute = {"name": name, "choices": choices, "required": required, "default": default}
    return [], [replace(role, summary=summary, **attribute) for role in roles]


def _types(annotation: Any) -> Iterator[Any]:
    """Yield a type, and the types that it consists of if it is a union or `Annotated`."""
    yield annotation
    if get_origin(annotation) is Annotated:
        yield from _types(annotation.__origin__)
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from _types(each)
