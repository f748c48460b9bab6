"""The elementwise operators of oneDNN's graphs: ReLU, its gradient, quantisation.

Source: oneDNN developer guide (oneDNN 3.13), operations ReLU, ReLUBackward, Quantize and
Dequantize. The guide leaves rounding and NaN open. Here `Quantize` rounds to the nearest integer
(ties to even), and replaces integers outside the range of the type by the nearest integer in the
range. ReLU returns NaN for NaN, and `Quantize` raises an error for NaN. A quantisation
must have one scale and one zero point for the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32
from backnorm.errors import ArgumentTypeError, ArgumentValueError, shown

Types = tuple[np.dtype, ...]
Attributes = Mapping[str, Any]

FLOATS: Types = (FLOAT32, BFLOAT16, FLOAT16)
INTEGERS: Types = (np.dtype(np.int8), np.dtype(np.uint8))


def _as_given(label: str, attributes: Attributes, types: Mapping[str, np.dtype]) -> Attributes:
    return attributes


@dataclass(frozen=True, slots=True)
class Pointwise:
    """An elementwise operator.

    Attributes
    ----------
    inputs, outputs : mapping of str to tuple of numpy.dtype
        The accepted element types of each port, in index order.
    attributes : mapping of str to str
        The type of each attribute, as oneDNN's JSON names it.
    compute : callable
        Takes checked attributes, the element type of the result, and the inputs; returns the
        result.
    check : callable
        Takes the operator's name for errors, its attributes, which have the right types, and the
        element type of each port; returns all attributes with checked values.
    one_type : bool
        Whether all ports must have the same element type.
    arithmetic : str or None
        The type in which elements are computed; None if they are only copied or zeroed.
    """

    inputs: Mapping[str, Types]
    outputs: Mapping[str, Types]
    attributes: Mapping[str, str]
    compute: Callable[..., np.ndarray]
    check: Callable[[str, Attributes, Mapping[str, np.dtype]], Attributes] = _as_given
    one_type: bool = False
    arithmetic: str | None = None


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


def _quantisation(label: str, attributes: Attributes, types: Mapping[str, np.dtype]) -> Attributes:
    """Return the scale and the zero point of a quantisation, each in a list."""
    if attributes.get("qtype", "per_tensor") != "per_tensor":
        raise ArgumentValueError(
            f"{label}.qtype", "is not supported", came=shown(attributes["qtype"]),
            accepted="per_tensor",
        )  # fmt: skip
    if "scales" not in attributes:
        raise ArgumentTypeError(f"{label}.scales", "is required", accepted="a list of one number")
    values = {"scales": attributes["scales"], "zps": attributes.get("zps", [0])}
    for name, entries in values.items():
        if len(entries) != 1:
            raise ArgumentValueError(
                f"{label}.{name}", "wrong number of values", came=len(entries),
                accepted="1 per tensor",
            )  # fmt: skip
    (scale,), (zero_point,) = values.values()
    if not 0 < _as_float32(scale) < np.inf:
        raise ArgumentValueError(
            f"{label}.scales[0]", "cannot scale", came=shown(scale),
            accepted="a number, finite and positive as float32",
        )  # fmt: skip
    limits = np.iinfo(next(dtype for dtype in types.values() if dtype in INTEGERS))
    if not limits.min <= zero_point <= limits.max:
        raise ArgumentValueError(
            f"{label}.zps[0]", "is out of range", came=zero_point,
            accepted=f"an integer from {limits.min} to {limits.max}",
        )  # fmt: skip
    return {"scales": [_as_float32(scale)], "zps": [zero_point]}


def _quantize(attributes: Attributes, dtype: np.dtype, src: np.ndarray) -> np.ndarray:
    """Return round(src / scale + zero point), limited to the range of `dtype`.

    The quotient and the sum are each rounded to float32. The sum is then rounded to the nearest
    integer, halves to even.
    """
    scale, zero_point = (np.float32(attributes[name][0]) for name in ("scales", "zps"))
    if np.isnan(src).any():
        raise ArgumentValueError("src", "cannot be quantised", came="NaN", accepted="numbers")
    limits = np.iinfo(dtype)
    with np.errstate(over="ignore"):
        values: np.ndarray = np.rint(src / scale + zero_point)
    return values.clip(limits.min, limits.max).astype(dtype)


def _dequantize(attributes: Attributes, dtype: np.dtype, src: np.ndarray) -> np.ndarray:
    """Return (src - zp) * scale. The difference is exact; the product is rounded to float32."""
    scale, zero_point = (np.float32(attributes[name][0]) for name in ("scales", "zps"))
    with np.errstate(over="ignore"):
        dst: np.ndarray = (src.astype(np.float32) - zero_point) * scale
    return dst


def _as_float32(number: float) -> float:
    try:
        with np.errstate(over="ignore", under="ignore"):
            return float(np.float32(number))
    # An integer beyond the range of float64.
    except OverflowError:
        return np.inf


_QUANTISATION = {"qtype": "string", "axis": "s64", "scales": "f32[]", "zps": "s64[]"}

#: Maps oneDNN's name of each elementwise operator to the operator.
POINTWISE: Mapping[str, Pointwise] = {
    "ReLU": Pointwise({"src": FLOATS}, {"dst": FLOATS}, {}, _relu, one_type=True),
    "ReLUBackward": Pointwise(
        {"src": FLOATS, "diff_dst": FLOATS},
        {"diff_src": FLOATS},
        {"use_dst": "bool"},
        _relu_backward,
        one_type=True,
    ),
    "Quantize": Pointwise(
        {"src": (FLOAT32,)}, {"dst": INTEGERS}, _QUANTISATION, _quantize, _quantisation,
        arithmetic="float32",
    ),
    "Dequantize": Pointwise(
        {"src": INTEGERS}, {"dst": (FLOAT32,)}, _QUANTISATION, _dequantize, _quantisation,
        arithmetic="float32",
    ),
}  # fmt: skip
