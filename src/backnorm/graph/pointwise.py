"""The elementwise operators of oneDNN's graphs: ReLU, its gradient, quantisation.

Source: oneDNN developer guide (oneDNN 3.13), operations ReLU, ReLUBackward, Quantize and
Dequantize. The guide leaves rounding and NaN open. Here `Quantize` rounds to the nearest integer
(ties to even), and replaces integers outside the range of the type by the nearest integer in the
range. ReLU returns NaN for NaN, and `Quantize` raises an error for NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32
from backnorm.errors import ArgumentTypeError, ArgumentValueError, shown
from backnorm.scalars import check_flag, check_integer, check_number, check_word

Types = tuple[np.dtype, ...]
Attributes = Mapping[str, object]

FLOATS: Types = (FLOAT32, BFLOAT16, FLOAT16)
INTEGERS: Types = (np.dtype(np.int8), np.dtype(np.uint8))

_QTYPES = ("per_tensor", "per_channel")


@dataclass(frozen=True, slots=True)
class Pointwise:
    """An elementwise operator.

    Attributes
    ----------
    inputs, outputs : mapping of str to tuple of numpy.dtype
        The accepted element types of each port, in index order.
    attributes : mapping of str to str
        The type of each attribute, as oneDNN's JSON names it.
    check : callable
        Takes the operator's name for errors, its attributes and the element type of each port;
        returns all attributes with checked values.
    compute : callable
        Takes checked attributes, the element type of the result, and the inputs; returns the
        result.
    one_type : bool
        Whether all ports must have the same element type.
    arithmetic : str or None
        The type in which elements are computed; None if they are only copied or zeroed.
    """

    inputs: Mapping[str, Types]
    outputs: Mapping[str, Types]
    attributes: Mapping[str, str]
    check: Callable[[str, Attributes, Mapping[str, np.dtype]], dict[str, object]]
    compute: Callable[..., np.ndarray]
    one_type: bool = False
    arithmetic: str | None = None


def _no_attributes(
    label: str, attributes: Attributes, types: Mapping[str, np.dtype]
) -> dict[str, object]:
    return {}


def _use_dst(
    label: str, attributes: Attributes, types: Mapping[str, np.dtype]
) -> dict[str, object]:
    value = attributes.get("use_dst", True)
    # In the graphs that oneDNN writes, booleans are 0 and 1.
    return {"use_dst": check_flag(f"{label}.use_dst", bool(value) if value in (0, 1) else value)}


def _quantisation(
    label: str, attributes: Attributes, types: Mapping[str, np.dtype]
) -> dict[str, object]:
    """Return the checked attributes of a quantisation: qtype, axis, scales and zero points."""
    where = {name: f"{label}.{name}" for name in _QUANTISATION}
    accepted = " or ".join(_QTYPES)
    qtype = check_word(where["qtype"], attributes.get("qtype", _QTYPES[0]), accepted=accepted)
    if qtype not in _QTYPES:
        raise ArgumentValueError(
            where["qtype"], "unknown value", came=shown(qtype), accepted=accepted
        )
    scales = [
        _scale(f"{where['scales']}[{i}]", value)
        for i, value in enumerate(_list(where["scales"], attributes.get("scales")))
    ]
    integers = np.iinfo(next(dtype for dtype in types.values() if dtype in INTEGERS))
    zps = [
        _zero_point(f"{where['zps']}[{i}]", value, integers)
        for i, value in enumerate(_list(where["zps"], attributes.get("zps", [0] * len(scales))))
    ]
    for name, values in (("scales", scales), ("zps", zps)):
        if qtype == "per_tensor" and len(values) != 1:
            raise ArgumentValueError(
                where[name], "wrong number of values", came=len(values), accepted="1 per tensor"
            )
    return {
        "qtype": qtype,
        "axis": check_integer(where["axis"], attributes.get("axis", 1), accepted="an integer"),
        "scales": np.array(scales, np.float32),
        "zps": np.array(zps, np.int32),
    }


def _list(where: str, value: object) -> list[object]:
    if isinstance(value, list):
        return value
    came = "nothing" if value is None else shown(value)
    raise ArgumentTypeError(where, "must be a list", came=came, accepted="a list of numbers")


def _scale(where: str, value: object) -> float:
    accepted = "a number, finite and positive as float32"
    with np.errstate(over="ignore", under="ignore"):
        scale = float(np.float32(check_number(where, value, accepted=accepted)))
    if not (math.isfinite(scale) and scale > 0):
        raise ArgumentValueError(where, "cannot scale", came=shown(value), accepted=accepted)
    return scale


def _zero_point(where: str, value: object, integers: np.iinfo) -> int:
    accepted = f"an integer from {integers.min} to {integers.max}"
    point = check_integer(where, value, accepted=accepted)
    if not integers.min <= point <= integers.max:
        raise ArgumentValueError(where, "is out of range", came=point, accepted=accepted)
    return point


def _relu(attributes: Attributes, dtype: np.dtype, src: np.ndarray) -> np.ndarray:
    """Return src where it is positive, and 0 elsewhere; NaN stays NaN."""
    dst = src.copy(order="K")
    # Compare in float32, because ml_dtypes warns when it compares NaN.
    dst[src.astype(np.float32, copy=False) <= 0] = 0
    return dst


def _relu_backward(
    attributes: Attributes, dtype: np.dtype, src: np.ndarray, diff_dst: np.ndarray
) -> np.ndarray:
    """Return diff_dst where the ReLU's src is positive, and 0 elsewhere.

    If the attribute `use_dst` is true, the argument `src` has the ReLU's output (dst) instead of
    its input. The result is the same, because the ReLU's output is positive exactly where its input
    is.
    """
    if diff_dst.shape != src.shape:
        raise ArgumentValueError(
            "diff_dst",
            "must have the shape of src",
            came=f"shape {diff_dst.shape}",
            accepted=f"shape {src.shape}",
        )
    diff_src = diff_dst.copy(order="K")
    diff_src[~(src.astype(np.float32, copy=False) > 0)] = 0
    return diff_src


def _quantize(attributes: Attributes, dtype: np.dtype, src: np.ndarray) -> np.ndarray:
    """Return round(src / scale + zero point), limited to the range of `dtype`.

    The quotient and the sum are each rounded to float32. The sum is then rounded to the nearest
    integer, halves to even.
    """
    scales, zps = _spread(attributes, src.shape)
    if np.isnan(src).any():
        raise ArgumentValueError("src", "cannot be quantised", came="NaN", accepted="numbers")
    limits = np.iinfo(dtype)
    with np.errstate(over="ignore"):
        values: np.ndarray = np.rint(src / scales + zps.astype(np.float32))
    return values.clip(limits.min, limits.max).astype(dtype)


def _dequantize(attributes: Attributes, dtype: np.dtype, src: np.ndarray) -> np.ndarray:
    """Return (src - zp) * scale. The difference is exact; the product is rounded to float32."""
    scales, zps = _spread(attributes, src.shape)
    with np.errstate(over="ignore"):
        dst: np.ndarray = (src.astype(np.int32) - zps).astype(np.float32) * scales
    return dst


def _spread(attributes: Attributes, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and zero points in a shape that NumPy broadcasts to `shape`."""
    scales, zps, axis = attributes["scales"], attributes["zps"], attributes["axis"]
    assert isinstance(scales, np.ndarray)
    assert isinstance(zps, np.ndarray)
    assert isinstance(axis, int)
    if attributes["qtype"] == "per_tensor":
        return scales[0], zps[0]
    rank = len(shape)
    if not -rank <= axis < rank:
        raise ArgumentValueError(
            "axis", "is out of range", came=axis, accepted=f"{-rank} to {rank - 1}"
        )
    spread = [1] * rank
    spread[axis] = -1
    for name, values in (("scales", scales), ("zps", zps)):
        if values.size != shape[axis]:
            raise ArgumentValueError(
                name,
                "wrong number of values",
                came=values.size,
                accepted=f"{shape[axis]}, the size of axis {axis}",
            )
    return scales.reshape(spread), zps.reshape(spread)


_QUANTISATION = {"qtype": "string", "axis": "s64", "scales": "f32[]", "zps": "s64[]"}

#: Maps oneDNN's name of each elementwise operator to the operator.
POINTWISE: Mapping[str, Pointwise] = {
    "ReLU": Pointwise(
        {"src": FLOATS}, {"dst": FLOATS}, {}, _no_attributes, _relu, one_type=True
    ),
    "ReLUBackward": Pointwise(
        {"src": FLOATS, "diff_dst": FLOATS},
        {"diff_src": FLOATS},
        {"use_dst": "bool"},
        _use_dst,
        _relu_backward,
        one_type=True,
    ),
    "Quantize": Pointwise(
        {"src": (FLOAT32,)}, {"dst": INTEGERS}, _QUANTISATION, _quantisation, _quantize,
        arithmetic="float32",
    ),
    "Dequantize": Pointwise(
        {"src": INTEGERS}, {"dst": (FLOAT32,)}, _QUANTISATION, _quantisation, _dequantize,
        arithmetic="float32",
    ),
}  # fmt: skip
