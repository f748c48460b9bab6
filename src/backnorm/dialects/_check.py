"""Check the inputs and requested outputs of a call against the rules of its operator.

Errors use the names and words of the dialect. No check here is specific to a dialect.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from backnorm.dialects._attributes import elements, refuse_unknown
from backnorm.dialects.schema import (
    ELEMENT_TYPE_NAMES,
    OperatorSchema,
    TensorSpec,
    TypeRule,
)
from backnorm.dtypes import element_type
from backnorm.errors import ArgumentTypeError, ArgumentValueError, shown
from backnorm.layout import kept_shape
from backnorm.scalars import as_array, check_integer, check_word

Attributes = Mapping[str, object]
Arrays = dict[str, np.ndarray]


def check_inputs(
    schema: OperatorSchema, attributes: Attributes, inputs: Mapping[str, object]
) -> Arrays:
    """Check the inputs; return them as arrays, without those that are None."""
    refuse_unknown(inputs, [tensor.name for tensor in schema.inputs], "input", schema)
    arrays: Arrays = {}
    for tensor in schema.inputs:
        value = inputs.get(tensor.name)
        if value is None:
            if tensor.required:
                raise ArgumentTypeError(
                    tensor.name, f"is a required input of {schema.op}", accepted="an array"
                )
        elif tensor.kind != "opaque":
            if tensor.role.startswith("memory_"):
                check_memory(tensor.name, value)
            arrays[tensor.name] = as_array(tensor.name, value)
    _check_together(schema.inputs_together, arrays, "given")
    rule = _check_data(schema, attributes, arrays)
    _check_channels(schema, attributes, arrays, rule)
    return arrays


def check_memory(name: str, memory: object) -> None:
    """Raise if the memory for an output is not an array."""
    if not issubclass(type(memory), np.ndarray):
        raise ArgumentTypeError(
            name,
            "the memory for an output must be a NumPy array",
            came=type(memory).__name__,
            accepted="numpy.ndarray",
        )


def check_outputs(
    schema: OperatorSchema, outputs: int | Collection[str] | None, inputs: Collection[str]
) -> tuple[str, ...]:
    """Return the names of the requested outputs in the schema's order.

    `outputs` is a number n for the first n outputs, a collection of names, or None for all outputs.
    `inputs` has the names of the call's inputs.
    """
    tensors = schema.outputs_with(inputs)
    names = tuple(tensor.name for tensor in tensors)
    required = sum(tensor.required for tensor in tensors)
    accepted = f"{required} to {len(names)}, or names of {', '.join(names)}"
    if outputs is None:
        return names
    kind = type(outputs)
    if issubclass(kind, Collection) and not issubclass(kind, str | bytes):
        listed = elements("outputs", outputs, accepted)
        requested = [check_word("outputs", name, accepted=accepted) for name in listed]
    else:
        problem = "must be a number of outputs or their names"
        number = check_integer("outputs", outputs, problem=problem, accepted=accepted)
        if not required <= number <= len(names):
            raise ArgumentValueError(
                "outputs",
                f"{schema.op} does not have this number of outputs",
                came=number,
                accepted=accepted,
            )
        requested = list(names[:number])
    unknown = [name for name in requested if name not in names]
    missing = [t.name for t in tensors if t.required and t.name not in requested]
    if unknown or missing:
        raise ArgumentValueError(
            "outputs",
            f"{schema.op} has no output {shown(unknown[0])}"
            if unknown
            else f"{missing[0]} is a required output",
            came=shown(requested),
            accepted=accepted,
        )
    _check_together(schema.outputs_together, requested, "requested")
    return tuple(name for name in names if name in requested)


def check_mask(schema: OperatorSchema, output_mask: object) -> list[bool]:
    """Return the flags of an output mask; each says whether an output is requested."""
    kind, outputs = type(output_mask), schema.outputs
    accepted = "a sequence of three booleans"
    if issubclass(kind, str) or not issubclass(kind, (np.ndarray, Sequence)):
        raise ArgumentTypeError(
            "output_mask", "must be a sequence", came=kind.__name__, accepted=accepted
        )
    flags = elements("output_mask", output_mask, accepted)
    if len(flags) != len(outputs):
        names = [tensor.name for tensor in outputs]
        raise ArgumentValueError(
            "output_mask",
            f"must have an element for each of {', '.join(names[:-1])} and {names[-1]}",
            came=f"{len(flags)} elements",
            accepted=accepted,
        )
    for flag in flags:
        if type(flag) is not bool and type(flag) is not np.bool_:
            raise ArgumentTypeError(
                "output_mask", "must hold booleans", came=shown(flag), accepted=accepted
            )
    return flags


def _check_together(groups: Iterable[tuple[str, ...]], names: Collection[str], verb: str) -> None:
    """Raise if some names of a group are present and others are missing."""
    for group in groups:
        present = [name for name in group if name in names]
        if present and len(present) != len(group):
            absent = [name for name in group if name not in names]
            raise ArgumentValueError(
                absent[0],
                f"{' and '.join(group)} must be {verb} together or not at all",
                came=f"{' and '.join(present)} alone",
            )


def _check_data(schema: OperatorSchema, attributes: Attributes, arrays: Arrays) -> TypeRule:
    """Check x and the data tensors that must match it; return the rule for x's element type."""
    words = schema.words
    name = words["x"]
    x = arrays[name]
    rule = _rule_of(schema, name, x)
    low, high = schema.ranks
    if x.ndim < low or (high and x.ndim > high):
        raise ArgumentValueError(
            name,
            schema.phrases.rank.format(ranks=schema.rank_text),
            came=f"rank {x.ndim}, shape {x.shape}",
            accepted=f"rank {schema.rank_text}",
        )
    for spec in schema.attributes:
        if spec.role not in ("channel_axis", "reduced_axes"):
            continue
        value = attributes[spec.name]
        axes = value if isinstance(value, tuple) else (value,)
        # If the attribute's range is "any", a negative channel axis counts from the end.
        lowest = -x.ndim if spec.range == "any" and spec.role == "channel_axis" else 0
        for axis in axes:
            if not lowest <= axis < x.ndim:
                raise ArgumentValueError(
                    spec.name,
                    f"must be an axis of {name}",
                    came=f"{shown(axis)} with {name} of rank {x.ndim}",
                    accepted=f"{lowest} to {x.ndim - 1}",
                )
    data_format = schema.format_of(attributes)
    if data_format.rank is not None and x.ndim != data_format.rank:
        fitting = [f.name for f in schema.formats if f.rank == x.ndim]
        raise ArgumentValueError(
            words["data_format"],
            f"must name as many axes as {name} has",
            came=f"{data_format.name!r} with {name} of rank {x.ndim}",
            accepted=" or ".join(map(repr, fitting)) or f"{name} of rank {data_format.rank}",
        )
    for tensor in schema.inputs:
        if tensor.kind != "data" or tensor.name == name or tensor.name not in arrays:
            continue
        like = arrays[tensor.name]
        if like.shape != x.shape:
            raise ArgumentValueError(
                tensor.name,
                schema.phrases.gradient_shape.format(x=name),
                came=f"{tensor.name} of shape {like.shape}",
                accepted=f"the shape of {name}, {x.shape}",
            )
        own = element_type(like.dtype)
        if own is None or own != ELEMENT_TYPE_NAMES[rule.data]:
            raise ArgumentTypeError(
                tensor.name,
                schema.phrases.gradient_type.format(x=name),
                came=f"{tensor.name} of type {like.dtype}",
                accepted=f"the type of {name}, {rule.data}",
            )
    return rule


def _rule_of(schema: OperatorSchema, name: str, x: np.ndarray) -> TypeRule:
    dtype = element_type(x.dtype)
    for rule in schema.type_rules:
        # None must not be compared with a dtype, because NumPy's float64 type equals None.
        if dtype is not None and ELEMENT_TYPE_NAMES[rule.data] == dtype:
            return rule
    raise ArgumentTypeError(
        name,
        "unsupported element type",
        came=x.dtype,
        accepted=", ".join(rule.data for rule in schema.type_rules),
        hint=f"convert it first, e.g. {name}.astype('float32')",
    )


def _check_channels(
    schema: OperatorSchema, attributes: Attributes, arrays: Arrays, rule: TypeRule
) -> None:
    name = schema.words["x"]
    x = arrays[name]
    axes = schema.channel_axes_of(attributes, arrays)
    channels = math.prod(x.shape[axis] for axis in axes)
    kept = kept_shape(x.shape, axes)
    specs = [
        t for t in schema.inputs if t.kind in ("channel", "kept", "vector") and t.name in arrays
    ]
    phrases = schema.phrases
    shapes = {t.name: arrays[t.name].shape for t in specs}
    if phrases.channel_shapes is not None and len(set(shapes.values())) > 1:
        odd = next(n for n, shape in shapes.items() if shape != (channels,))
        raise ArgumentValueError(
            odd,
            phrases.channel_shapes,
            came=", ".join(f"{n} {shape}" for n, shape in shapes.items()),
            accepted=f"shape ({channels},)",
        )
    for tensor in specs:
        shape = shapes[tensor.name]
        is_kept = tensor.kind == "kept" or (tensor.kind == "channel" and len(axes) > 1)
        expected = kept if is_kept else (channels,)
        if len(shape) != len(expected):
            raise ArgumentValueError(
                tensor.name,
                phrases.channel_rank.format(x=name, rank=len(expected)),
                came=f"shape {shape}",
                accepted=f"shape {expected}",
            )
        if tensor.kind != "vector" and shape != expected:
            raise ArgumentValueError(
                tensor.name,
                phrases.channel_size.format(x=name, channels=channels, shape=shape),
                came=f"{shape} and {expected}" if is_kept else f"{shape[0]} and {channels}",
                accepted=f"shape {expected}",
            )
    _check_channel_types(schema, specs, arrays, rule)
    if channels < schema.min_channels:
        raise ArgumentValueError(
            name,
            f"channel count must be at least {schema.min_channels}",
            came=f"{channels} channels, shape {x.shape}",
        )


def _check_channel_types(
    schema: OperatorSchema, specs: Sequence[TensorSpec], arrays: Arrays, rule: TypeRule
) -> None:
    accepted = [ELEMENT_TYPE_NAMES[name] for name in rule.channel]
    first: tuple[str, np.dtype] | None = None
    for tensor in specs:
        dtype = arrays[tensor.name].dtype
        own = element_type(dtype)
        if own is None or own not in accepted:
            raise ArgumentTypeError(
                tensor.name,
                f"element types do not match: {schema.words['x']} has type {rule.data}",
                came=dtype,
                accepted=" or ".join(rule.channel),
            )
        if first is None:
            first = (tensor.name, own)
        elif schema.one_channel_type and own != first[1]:
            raise ArgumentTypeError(
                tensor.name,
                f"must have the element type of {first[0]}",
                came=dtype,
                accepted=first[1],
            )
