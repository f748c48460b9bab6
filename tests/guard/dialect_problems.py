"""Problems of the dialects' operators, made from their schemas and a seed."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import numpy as np
from operands import MOST, Operand, channel_values, data_values, laid_out, some_shape
from problems import Maker, Problem

from backnorm.dialects.registry import DIALECTS, operators
from backnorm.dialects.schema import ELEMENT_TYPE_NAMES, FormatSpec, OperatorSchema

__all__ = ["of_dialect"]


@functools.cache
def _subjects(dialect: str) -> list[Any]:
    return [*operators(dialect).values()]


def of_dialect(seed: int, rnd: random.Random) -> Problem:
    """Return the problem of an operator of a dialect; the call may be one that it refuses."""
    make = Maker(rnd)
    make.begin()
    dialect = rnd.choice(tuple(DIALECTS))
    operator = rnd.choice(_subjects(dialect))
    schema = operator.schema
    form = rnd.choice(schema.formats)
    shape, axis = _shape(rnd, schema, form)
    rule = rnd.choice(schema.type_rules)
    dtype = ELEMENT_TYPE_NAMES[rule.data]
    attributes = _attributes(rnd, schema, form, axis)
    axes = _channel_axes(rnd, schema, attributes, len(shape), axis)
    common = rnd.choice(rule.channel)
    arguments = _given(rnd, schema)
    for tensor in schema.inputs:
        if tensor.name not in arguments:
            continue
        # Where types may differ, they do.
        word = common if schema.one_channel_type else rnd.choice(rule.channel)
        own = dtype if tensor.kind == "data" else ELEMENT_TYPE_NAMES[word]
        one = _operand(make, tensor.role, own, _shape_of(rnd, tensor.kind, shape, axes))
        if tensor.role == "x":
            make.operands["x"] = one
        if tensor.role.startswith("memory"):
            make.memory(tensor.name, one)
        else:
            make.operands[tensor.name] = one
    if schema.words["x"] != "x":
        del make.operands["x"]
    memory = schema.outputs[0]
    if schema.takes_memory and make.often(0.4):
        count, offset, strides = laid_out(rnd, shape, rnd.choice(("rows", make.layout)))
        full = np.full(count, np.nan, dtype)
        make.memory(memory.name, Operand(shape, dtype, full, offset, strides))
    make.tags |= {
        "operation": f"{dialect} {schema.operation}", "type": str(dtype), "dialect": dialect,
        "statistics": str(ELEMENT_TYPE_NAMES[common]), "format": form.layout,
        "rank": str(len(shape)), "out": "dialect",
    }  # fmt: skip
    return make.finished(seed, _call(operator, schema, attributes, rnd))


def _shape(
    rnd: random.Random, schema: OperatorSchema, form: FormatSpec
) -> tuple[tuple[int, ...], int]:
    """Return a shape of a rank that the operator takes, and the axis of the channels."""
    low, high = schema.ranks
    rank = form.rank or rnd.randint(low, min(high or 6, 6))
    lengths = [size for size in some_shape(rnd)[0] if size != 1 or rnd.random() < 0.3]
    while len(lengths) > rank:
        lengths[-2:] = [lengths[-2] * lengths[-1]]
    while len(lengths) < rank:
        at, more = rnd.randint(0, len(lengths)), 1 if rnd.random() < 0.7 else 2
        lengths.insert(at, more if math.prod(lengths) < MOST else 1)
    axis = 1 if form.layout == "NCX" else rank - 1
    if form.is_any:
        axis = rnd.randrange(rank)
    return tuple(lengths), min(axis, rank - 1)


def _attributes(
    rnd: random.Random, schema: OperatorSchema, form: FormatSpec, axis: int
) -> dict[str, Any]:
    """Return values of the attributes, also of most that have a default."""
    found: dict[str, Any] = {}
    for attribute in schema.attributes:
        if attribute.role == "data_format":
            found[attribute.name] = form.name
        elif attribute.role == "epsilon":
            found[attribute.name] = rnd.choice((1e-3, 1e-5))
        elif attribute.role == "channel_axis":
            found[attribute.name] = axis
        elif not attribute.required and (rnd.random() < 0.3 or attribute.nullable):
            continue
        elif attribute.choices:
            found[attribute.name] = rnd.choice(attribute.choices)
        elif attribute.type == "bool":
            found[attribute.name] = rnd.random() < 0.7
        elif attribute.type == "i64":
            found[attribute.name] = rnd.choice((0, 1))
        else:
            found[attribute.name] = rnd.choice((1.0, 0.5, 0.0))
    return found


def _channel_axes(
    rnd: random.Random, schema: OperatorSchema, attributes: dict[str, Any], rank: int, axis: int
) -> tuple[int, ...]:
    if attributes.get("mode") == "PER_ACTIVATION":
        return tuple(range(1, rank))
    if schema.dialect == "directml":
        return tuple(sorted(rnd.sample(range(rank), rnd.randint(0, rank))))
    return (axis,)


def _given(rnd: random.Random, schema: OperatorSchema) -> set[str]:
    """Return the names of the inputs that are given."""
    together = {name: group for group in schema.inputs_together for name in group}
    arguments = {tensor.name for tensor in schema.inputs}
    for tensor in schema.inputs:
        if not tensor.required and rnd.random() < 0.3:
            arguments -= set(together.get(tensor.name, (tensor.name,)))
    return arguments


def _shape_of(
    rnd: random.Random, kind: str, shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[int, ...]:
    channels = math.prod(shape[axis] for axis in axes)
    if kind == "data":
        return shape
    if kind == "kept":
        return tuple(size if axis in axes else 1 for axis, size in enumerate(shape))
    if kind == "vector" and rnd.random() < 0.5:
        return (0,)
    return (channels,)


def _operand(make: Maker, role: str, dtype: np.dtype, shape: tuple[int, ...]) -> Operand:
    positive = role in ("variance", "inverse_deviation", "running_variance")
    if role in ("x", "dy", "memory_dx"):
        make.data(role, shape, dtype, like_x=True)
        return make.operands.pop(role)
    if role.startswith("memory"):
        values = data_values(make.rnd, dtype, math.prod(shape), make.values)
        return Operand(shape, dtype, values)
    values = channel_values(make.rnd, dtype, math.prod(shape), make.values, positive=positive)
    return Operand(shape, dtype, values)


def _call(
    operator: Any, schema: OperatorSchema, attributes: dict[str, Any], rnd: random.Random
) -> Any:
    fixed = dict(attributes)
    if schema.choice == "output_mask":
        fixed["output_mask"] = [True, rnd.random() < 0.8, rnd.random() < 0.8]

    def call(arguments: dict[str, Any]) -> tuple[Any, ...]:
        results = operator(**arguments, **fixed)
        if isinstance(results, np.ndarray):
            return (results,)
        return tuple(results)

    return call
