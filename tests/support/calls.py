"""Every operator of every dialect with good arguments, and how an operator is called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from backnorm.dialects.registry import DIALECTS, PARTS, invoke, operators, parts
from backnorm.dialects.schema import ELEMENT_TYPE_NAMES, OperatorSchema, TensorSpec
from tests.support.attributes import attributes_in_training

__all__ = ["SCHEMAS", "call", "good_arguments", "good_tensor", "invoked"]

CHANNELS = 3
SHAPES = {"NCX": (4, CHANNELS, 5, 2), "NXC": (4, 5, 2, CHANNELS)}
EPSILON = 1e-3


def _named() -> dict[str, OperatorSchema]:
    """Return the rules of each operator, and of each function of a part, by dialect and name."""
    found = [
        schema
        for dialect in DIALECTS
        for operator in operators(dialect).values()
        for schema in operator.schemas.values()
    ]
    found += [schema for dialect in PARTS for schema in parts(dialect).values()]
    return {
        " ".join(filter(None, (f"{schema.dialect}.{schema.op}", schema.revision))): schema
        for schema in found
    }


SCHEMAS = _named()


def good_tensor(schema: OperatorSchema, tensor: TensorSpec) -> np.ndarray:
    """Return an array that the operator accepts as this tensor, with positive elements."""
    shape = SHAPES[schema.formats[0].layout]
    shapes = {"data": shape, "kept": tuple(n if n == CHANNELS else 1 for n in shape)}
    rule = next(rule for rule in schema.type_rules if ELEMENT_TYPE_NAMES[rule.data] == np.float32)
    dtype = ELEMENT_TYPE_NAMES[rule.data if tensor.kind == "data" else rule.channel[0]]
    rng = np.random.default_rng(len(tensor.name))
    return rng.uniform(0.5, 2, shapes.get(tensor.kind, (CHANNELS,))).astype(dtype)


def good_arguments(schema: OperatorSchema) -> dict[str, Any]:
    """Return inputs, without memory for outputs, and required attributes, by name."""
    inputs = {
        tensor.name: good_tensor(schema, tensor)
        for tensor in schema.inputs
        if not tensor.role.startswith("memory_")
    }
    known = {*inputs, *(spec.name for spec in schema.attributes)}
    others: dict[str, Any] = {
        "output_mask": [True] * 3,
        "input_g": True,
        "weight_g": True,
        "bias_g": True,
        "sum_dy": np.ones(CHANNELS, "f"),
        "sum_dy_xmu": np.ones(CHANNELS, "f"),
        "count": np.array([40, 0]),
    }
    expected = {*schema.order, schema.choice} - known
    return {
        **inputs,
        **attributes_in_training(schema, EPSILON),
        **{name: value for name, value in others.items() if name in expected},
    }


def call(schema: OperatorSchema, arguments: Mapping[str, Any]) -> Any:
    """Call an operator as its users do, by the names of its specification."""
    function = getattr(importlib.import_module(f"backnorm.dialects.{schema.dialect}"), schema.op)
    if schema.style == "configured":
        names = [spec.name for spec in schema.attributes]
        attributes = {name: value for name, value in arguments.items() if name in names}
        if schema.revision:
            attributes["revision"] = schema.revision
        function = function(**attributes)
        arguments = {name: value for name, value in arguments.items() if name not in names}
    return function(**arguments)


def invoked(schema: OperatorSchema, arguments: Mapping[str, Any]) -> Any:
    """Call an operator by its name in the registry."""
    arguments = dict(arguments)
    options = {name: arguments.pop(name, None) for name in ("outputs", "arithmetic")}
    if schema.takes_memory:
        options["out"] = arguments.pop(schema.outputs[0].name, None)
    inputs = {
        name: value
        for name, value in arguments.items()
        if name in (tensor.name for tensor in schema.inputs) or name.startswith("no_such_input")
    }
    attributes = {name: value for name, value in arguments.items() if name not in inputs}
    if schema.revision:
        attributes["revision"] = schema.revision
    return invoke(schema.dialect, schema.op, inputs, attributes, **options)
