"""Random tensors for the inputs that are missing in a tensor file (`backnorm run --random`)."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from backnorm.dialects._attributes import check_attributes
from backnorm.dialects.schema import (
    ELEMENT_TYPE_NAMES,
    OperatorSchema,
)
from backnorm.dtypes import FLOAT32
from backnorm.errors import ArgumentValueError
from backnorm.layout import kept_shape

# The roles of statistics of x.
_STATISTICS = ("mean", "variance", "inverse_deviation")


class Declared(Protocol):
    """The declaration of a tensor: its key, and its shape and type, or None."""

    @property
    def key(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...] | None: ...  # noqa: D102
    @property
    def dtype(self) -> np.dtype | None: ...  # noqa: D102


def random_data(tensor: Declared, seed: int) -> np.ndarray:
    """Return random numbers of the declared shape and type of an input of an elementwise operator.

    Integers are uniformly distributed over the range of their type. Other numbers are normally
    distributed.
    """
    assert tensor.shape is not None
    assert tensor.dtype is not None
    rng = _generator(tensor, seed)
    if tensor.dtype.kind in "iu":
        limits = np.iinfo(tensor.dtype)
        return rng.integers(limits.min, limits.max, tensor.shape, tensor.dtype, endpoint=True)
    return rng.standard_normal(tensor.shape, np.float32).astype(tensor.dtype)


def random_tensors(
    schema: OperatorSchema,
    attributes: Mapping[str, object],
    known: Mapping[str, np.ndarray],
    missing: Mapping[str, Declared],
    seed: int,
) -> dict[str, np.ndarray]:
    """Return arrays for the `missing` inputs of one operator call.

    Parameters
    ----------
    schema : OperatorSchema
    attributes : mapping
    known, missing : mapping
        Arrays, and declarations of missing tensors, by the operator's input names.
    seed : int
        Each tensor's random numbers depend on the seed, its key and its shape, so supplying another
        tensor does not change them. Statistics that are computed from x change with x.

    Returns
    -------
    dict
        x, dy and beta are normally distributed; the mean and deviation of x differ between
        channels. gamma is in [0.5, 1.5). For a backward pass, the mean and the biased variance are
        those of x (a variance of 0 is replaced by 1), and an inverse deviation is
        1 / sqrt(variance + epsilon), with the operator's epsilon (1e-5 if it has none). For other
        operations, the mean is normally distributed, and the variance is in [0.5, 2).

    Raises
    ------
    ArgumentValueError
        If neither a declaration nor another tensor determines the shape.
    """
    specs = {spec.name: spec for spec in schema.inputs}
    shapes = {port: array.shape for port, array in known.items()}
    shapes |= {port: tensor.shape for port, tensor in missing.items() if tensor.shape}
    types = {port: array.dtype for port, array in known.items()}
    types |= {port: tensor.dtype for port, tensor in missing.items() if tensor.dtype}
    data = [name for name, spec in specs.items() if spec.kind == "data"]
    # If the shape and type of x are known, they determine the shapes and types of the tensors that
    # are made up, because the operator later compares its other inputs with x.
    x_first = schema.words["x"], *shapes, *types
    known_shapes = (shapes[port] for port in x_first if port in data and port in shapes)
    shape = next((shape for shape in known_shapes if len(shape) > 1), ())
    if not shape:
        raise ArgumentValueError(
            "shapes",
            "cannot make up tensors: no shape of 2 or more dimensions is known",
            accepted=f"a shape for {', '.join(data)}",
        )
    dtype = next((types[port] for port in x_first if port in data and port in types), FLOAT32)
    accepted = parameter_types(schema, dtype)
    # If a tensor is declared with a type that the operator does not accept, no other tensor gets
    # this type, so that the operator's error names the declared tensor.
    channel_type = next(
        (
            types[port]
            for port in types
            if specs[port].kind in ("channel", "kept") and types[port] in accepted
        ),
        parameter_type(schema, dtype) or dtype,
    )
    checked = check_attributes(schema, attributes)
    axes = _channel_axes(schema, checked, shapes, shape)
    epsilon = checked.get(schema.words.get("epsilon", ""), 1e-5)
    assert isinstance(epsilon, float)
    kept = kept_shape(shape, axes)
    arrays = dict(known)
    # Make x before the statistics, which are computed from it.
    for port in sorted(missing, key=lambda port: specs[port].kind != "data"):
        spec, rng = specs[port], _generator(missing[port], seed)
        array: np.ndarray
        x = arrays.get(schema.words["x"]) if schema.operation == "backward" else None
        if spec.kind == "data":
            array = rng.standard_normal(shapes.get(port, shape), np.float32)
            if spec.role == "x" and array.ndim == len(kept):
                array *= rng.uniform(0.5, 2.0, kept).astype(np.float32)
                array += rng.standard_normal(kept, np.float32)
            usual = dtype
        elif spec.kind == "opaque":
            array, usual = np.zeros(shapes.get(port, (0,))), FLOAT32
        elif spec.role in _STATISTICS and x is not None and x.size:
            array, usual = _statistic(spec.role, x, axes, epsilon), channel_type
            array = array if spec.kind == "kept" else array.reshape(-1)
        else:
            size = shapes.get(port, kept if spec.kind == "kept" else (math.prod(kept),))
            array, usual = _parameter(rng, spec.role, size), channel_type
        arrays[port] = array.astype(types.get(port, usual))
    return {port: arrays[port] for port in missing}


def _generator(tensor: Declared, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(tensor.key.encode())])


def parameter_type(schema: OperatorSchema, dtype: np.dtype) -> np.dtype | None:
    """Return a type for per-channel tensors with data of `dtype`: float32 if it is allowed.

    Return None if the operator does not take data of `dtype`.
    """
    types = parameter_types(schema, dtype)
    return FLOAT32 if FLOAT32 in types else next(iter(types), None)


def parameter_types(schema: OperatorSchema, dtype: np.dtype) -> list[np.dtype]:
    """Return the types that per-channel tensors may have with data of `dtype`."""
    rules = (rule for rule in schema.type_rules if ELEMENT_TYPE_NAMES[rule.data] == dtype)
    return [ELEMENT_TYPE_NAMES[name] for rule in rules for name in rule.channel]


def _channel_axes(
    schema: OperatorSchema,
    attributes: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    shape: tuple[int, ...],
) -> tuple[int, ...]:
    """Return the channel axes, or axis 1 if they depend on a tensor of unknown or wrong shape.

    No error is raised here: when the operator is called, it rejects a tensor of a wrong shape, and
    an axis that the data do not have.
    """
    # Each array is one element that is broadcast to a shape, so it takes no memory.
    known = {**shapes, schema.words["x"]: shape}
    arrays = {port: np.broadcast_to(np.float32(0), size) for port, size in known.items()}
    with contextlib.suppress(KeyError, ValueError):
        return schema.channel_axes_of(attributes, arrays)
    return (1,)


def _statistic(role: str, x: np.ndarray, axes: tuple[int, ...], epsilon: float) -> np.ndarray:
    """Return a statistic of `x` with the rank of x, in float64."""
    reduced = tuple(axis for axis in range(x.ndim) if axis not in axes)
    if role == "mean":
        return np.asarray(x.mean(reduced, np.float64, keepdims=True))
    variance = x.astype(np.float64).var(reduced, keepdims=True)
    variance = np.where(variance > 0, variance, 1.0)
    return variance if role == "variance" else 1.0 / np.sqrt(variance + epsilon)


def _parameter(rng: np.random.Generator, role: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a random per-channel tensor."""
    if role == "gamma":
        return rng.uniform(0.5, 1.5, shape)
    # No call accepts a negative variance or deviation.
    return (
        rng.uniform(0.5, 2.0, shape)
        if role.endswith(("variance", "deviation"))
        else rng.standard_normal(shape)
    )
