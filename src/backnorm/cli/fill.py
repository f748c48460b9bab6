"""Made-up tensors for the inputs that a tensor file lacks (`backnorm run --random`)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np

from backnorm import machine
from backnorm.dialects.schema import ELEMENT_TYPE_NAMES, OperatorSchema, TensorSpec
from backnorm.dtypes import FLOAT32
from backnorm.errors import ArgumentValueError
from backnorm.graph.program import Tensor

__all__ = ["fill"]

# Statistics are computed in float64, and random numbers drawn in it.
_WORKING_BYTES = 8 * 3


def fill(
    schema: OperatorSchema,
    attributes: Mapping[str, object],
    given: Mapping[str, np.ndarray],
    missing: Mapping[str, Tensor],
    seed: int,
) -> dict[str, np.ndarray]:
    """Return arrays for the `missing` inputs of one operator call.

    Parameters
    ----------
    schema : OperatorSchema
    attributes : mapping
    given, missing : mapping
        By the operator's input names; a missing one comes with what is declared of it.
    seed : int
        Each tensor's values depend on the seed, its key and its shape, so supplying one tensor
        leaves the others as they were.

    Returns
    -------
    dict
        x of a different mean and deviation in every channel and dy, both normal; gamma in
        [0.5, 1.5) and beta normal. For a backward pass the mean and the biased variance are those
        of x (1 where that is 0), and an inverse deviation is that of the variance and 1e-5;
        elsewhere the mean is normal and the variance in [0.5, 2).

    Raises
    ------
    ArgumentValueError
        If neither a declaration nor another tensor tells the shape, or memory would not suffice.
    """
    specs = {spec.name: spec for spec in schema.inputs}
    shape = _data_shape(specs, given, missing)
    dtype = _data_type(specs, given, missing)
    axis = _axis(schema, attributes, len(shape))
    _check_memory(specs, missing, shape, shape[axis])
    arrays = dict(given)
    made = {}
    # x comes before the statistics that are computed from it.
    for port in sorted(missing, key=lambda port: specs[port].kind != "data"):
        tensor, spec = missing[port], specs[port]
        rng = np.random.default_rng([seed, zlib.crc32(tensor.key.encode())])
        if spec.kind == "data":
            array = _data(rng, spec, tensor.shape or shape, tensor.dtype or dtype, axis)
        elif spec.kind in ("channel", "vector"):
            kind = tensor.dtype or _channel_type(schema, specs, given, missing, dtype)
            size = tensor.shape or (shape[axis],)
            array = _channel(rng, spec, size, schema, arrays, axis).astype(kind)
        else:
            # Opaque: nothing looks at it.
            array = np.zeros(tensor.shape or (0,), tensor.dtype or FLOAT32)
        arrays[port] = made[port] = array
    return made


def _data_shape(
    specs: Mapping[str, TensorSpec],
    given: Mapping[str, np.ndarray],
    missing: Mapping[str, Tensor],
) -> tuple[int, ...]:
    known = [given[p].shape for p in given if specs[p].kind == "data"]
    known += [t.shape for p, t in missing.items() if specs[p].kind == "data" and t.shape]
    if not known or len(known[0]) < 2:
        names = ", ".join(name for name, spec in specs.items() if spec.kind == "data")
        raise ArgumentValueError(
            "shapes",
            "cannot make up tensors: no shape of 2 or more dimensions is known",
            accepted=f"a shape for {names}",
        )
    return known[0]


def _check_memory(
    specs: Mapping[str, TensorSpec],
    missing: Mapping[str, Tensor],
    shape: tuple[int, ...],
    channels: int,
) -> None:
    """Raise if the missing tensors would not fit: their size is only somebody's word."""
    usual = {"data": shape, "channel": (channels,), "vector": (channels,), "opaque": (0,)}
    count = sum(
        math.prod(tensor.shape or usual[specs[port].kind]) for port, tensor in missing.items()
    )
    if count * _WORKING_BYTES > machine.free_memory():
        raise ArgumentValueError(
            "shapes", "random tensors of this size do not fit in memory", came=list(shape)
        )


def _data_type(
    specs: Mapping[str, TensorSpec],
    given: Mapping[str, np.ndarray],
    missing: Mapping[str, Tensor],
) -> np.dtype:
    known = [given[p].dtype for p in given if specs[p].kind == "data"]
    known += [t.dtype for p, t in missing.items() if specs[p].kind == "data" and t.dtype]
    return known[0] if known else FLOAT32


def _channel_type(
    schema: OperatorSchema,
    specs: Mapping[str, TensorSpec],
    given: Mapping[str, np.ndarray],
    missing: Mapping[str, Tensor],
    dtype: np.dtype,
) -> np.dtype:
    """Return the type of the other per-channel tensors, or the schema's (float32 if it may be)."""
    known = [given[p].dtype for p in given if specs[p].kind == "channel"]
    known += [t.dtype for p, t in missing.items() if specs[p].kind == "channel" and t.dtype]
    if known:
        return known[0]
    for rule in schema.type_rules:
        if ELEMENT_TYPE_NAMES[rule.data] == dtype:
            types = [ELEMENT_TYPE_NAMES[name] for name in rule.channel]
            return FLOAT32 if FLOAT32 in types else types[0]
    return dtype


def _axis(schema: OperatorSchema, attributes: Mapping[str, object], rank: int) -> int:
    """Return the channel axis; of attributes that will be refused anyway, any axis there is."""
    for spec in schema.attributes:
        if spec.role == "channel_axis":
            axis = attributes.get(spec.name)
            return axis if isinstance(axis, int) and 0 <= axis < rank else 0
    chosen = next(
        (attributes.get(a.name, a.default) for a in schema.attributes if a.role == "data_format"),
        None,
    )
    layout = next((f.layout for f in schema.formats if f.name == chosen), schema.formats[0].layout)
    return 1 if layout == "NCX" else -1


def _data(
    rng: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...], dtype: np.dtype, axis: int
) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32)
    if spec.role == "x" and len(shape) >= 2:
        along = [1] * len(shape)
        along[axis] = shape[axis]
        values *= rng.uniform(0.5, 2.0, along).astype(np.float32)
        values += rng.standard_normal(along, np.float32)
    return values.astype(dtype)


def _channel(
    rng: np.random.Generator,
    spec: TensorSpec,
    shape: tuple[int, ...],
    schema: OperatorSchema,
    arrays: Mapping[str, np.ndarray],
    axis: int,
) -> np.ndarray:
    if spec.role == "gamma":
        return rng.uniform(0.5, 1.5, shape)
    x = arrays.get(schema.words["x"])
    if schema.operation == "backward" and x is not None and x.ndim >= 2 and x.size:
        others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
        if spec.role == "mean":
            return np.asarray(x.mean(others, np.float64))
        if spec.role in ("variance", "inverse_deviation"):
            variance = x.astype(np.float64).var(others)
            variance = np.where(variance > 0, variance, 1.0)
            return variance if spec.role == "variance" else 1.0 / np.sqrt(variance + 1e-5)
    if spec.role.endswith("variance"):
        return rng.uniform(0.5, 2.0, shape)
    return rng.standard_normal(shape)
