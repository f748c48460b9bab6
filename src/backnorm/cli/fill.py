"""Made-up tensors for the inputs that a tensor file lacks (`backnorm run --random`)."""

from __future__ import annotations

import contextlib
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
    declared = {port: tensor.shape for port, tensor in missing.items() if tensor.shape}
    declared |= {port: array.shape for port, array in given.items()}
    axes = _axes(schema, attributes, declared, shape)
    kept = tuple(size if axis in axes else 1 for axis, size in enumerate(shape))
    _check_memory(specs, missing, shape, math.prod(kept))
    arrays = dict(given)
    made = {}
    # x comes before the statistics that are computed from it.
    for port in sorted(missing, key=lambda port: specs[port].kind != "data"):
        tensor, spec = missing[port], specs[port]
        rng = np.random.default_rng([seed, zlib.crc32(tensor.key.encode())])
        if spec.kind == "data":
            array = _data(rng, spec, tensor.shape or shape, tensor.dtype or dtype, kept)
        elif spec.kind in ("channel", "kept", "vector"):
            kind = tensor.dtype or _channel_type(schema, specs, given, missing, dtype)
            size = tensor.shape or (kept if spec.kind == "kept" else (math.prod(kept),))
            array = _channel(rng, spec, size, schema, arrays, axes).astype(kind)
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
    usual = {"data": shape, "opaque": (0,)}
    count = sum(
        math.prod(tensor.shape or usual.get(specs[port].kind, (channels,)))
        for port, tensor in missing.items()
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
    known = [given[p].dtype for p in given if specs[p].kind in ("channel", "kept")]
    known += [
        t.dtype for p, t in missing.items() if specs[p].kind in ("channel", "kept") and t.dtype
    ]
    if known:
        return known[0]
    for rule in schema.type_rules:
        if ELEMENT_TYPE_NAMES[rule.data] == dtype:
            types = [ELEMENT_TYPE_NAMES[name] for name in rule.channel]
            return FLOAT32 if FLOAT32 in types else types[0]
    return dtype


def _axes(
    schema: OperatorSchema,
    attributes: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    shape: tuple[int, ...],
) -> tuple[int, ...]:
    """Return the channel axes; of attributes that will be refused anyway, any axis there is."""
    rank, usual = len(shape), {a.name: a.default for a in schema.attributes}
    if schema.channel_axes is not None:
        # Arrays that have a shape, and hold but one element.
        known = {**shapes, schema.words["x"]: shape}
        with contextlib.suppress(KeyError, TypeError, ValueError):
            arrays = {port: np.broadcast_to(np.float32(0), size) for port, size in known.items()}
            return schema.channel_axes(usual | dict(attributes), arrays)
    for spec in schema.attributes:
        if spec.role == "channel_axis":
            axis = attributes.get(spec.name)
            return (axis if isinstance(axis, int) and 0 <= axis < rank else 0,)
    chosen = next(
        (attributes.get(a.name, a.default) for a in schema.attributes if a.role == "data_format"),
        None,
    )
    layout = next((f.layout for f in schema.formats if f.name == chosen), schema.formats[0].layout)
    return (1 if layout == "NCX" else rank - 1,)


def _data(
    rng: np.random.Generator,
    spec: TensorSpec,
    shape: tuple[int, ...],
    dtype: np.dtype,
    kept: tuple[int, ...],
) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32)
    if spec.role == "x" and len(shape) == len(kept):
        values *= rng.uniform(0.5, 2.0, kept).astype(np.float32)
        values += rng.standard_normal(kept, np.float32)
    return values.astype(dtype)


def _channel(
    rng: np.random.Generator,
    spec: TensorSpec,
    shape: tuple[int, ...],
    schema: OperatorSchema,
    arrays: Mapping[str, np.ndarray],
    axes: tuple[int, ...],
) -> np.ndarray:
    if spec.role == "gamma":
        return rng.uniform(0.5, 1.5, shape)
    x = arrays.get(schema.words["x"])
    if schema.operation == "backward" and x is not None and x.ndim >= 2 and x.size:
        others = tuple(axis for axis in range(x.ndim) if axis not in axes)
        keep = spec.kind == "kept"
        if spec.role == "mean":
            return np.asarray(x.mean(others, np.float64, keepdims=keep))
        if spec.role in ("variance", "inverse_deviation"):
            variance = x.astype(np.float64).var(others, keepdims=keep)
            variance = np.where(variance > 0, variance, 1.0)
            return variance if spec.role == "variance" else 1.0 / np.sqrt(variance + 1e-5)
    if spec.role.endswith("variance"):
        return rng.uniform(0.5, 2.0, shape)
    return rng.standard_normal(shape)
