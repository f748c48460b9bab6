"""Grades of the elementwise operators of oneDNN's graphs.

The expected values are computed in float64, by formulas that are written differently from those in
the operators. The allowed errors are:

- A ReLU and its gradient: none, because they copy an element or return 0.
- Dequantize: half an ulp. The difference src - zp has at most 9 bits, so its product with a float32
  scale is exact in float64, and is rounded once.
- Quantize: half a step for the rounding to nearest, and u (|src / scale| + |src / scale + zp|) for
  a quotient and a sum in float32, where u = 2**-24. Usually only the integer
  nearest to the exact value is accepted. Both neighbouring integers are accepted if the exact value
  is so near their midpoint that the error of the quotient and the sum can cross it. If an expected
  value is outside the range of the integer type, the nearest integer of this range is expected
  instead.

Errors are reported in ulps of the result's type. For integer types, one ulp is 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from backnorm.conformance._grade import Grade, best_rung, refused
from backnorm.conformance._ulps import absolute_error, ulp_at
from backnorm.conformance.judge._relu import judge_equal
from backnorm.dtypes import FLOAT32
from backnorm.reference import Exact

_ROUNDOFF = 2.0**-24


def check_relu(src: np.ndarray, dst: np.ndarray) -> Grade:
    """Judge dst = max(0, src); NaN must stay NaN."""
    if dst.dtype != src.dtype or dst.shape != src.shape:
        return _of_other_kind("dst", dst, src.dtype, src.shape)
    return judge_equal("dst", dst.astype(np.float64), src.astype(np.float64).clip(0.0, None))


def check_relu_gradient(src: np.ndarray, diff_dst: np.ndarray, diff_src: np.ndarray) -> Grade:
    """Judge diff_src: it must be diff_dst where `src` (or the ReLU's dst) is positive, else 0."""
    if diff_src.dtype != diff_dst.dtype or diff_src.shape != src.shape:
        return _of_other_kind("diff_src", diff_src, diff_dst.dtype, src.shape)
    expected = np.zeros(src.shape)
    positive = np.sign(src.astype(np.float64)) == 1
    expected[positive] = diff_dst[positive]
    return judge_equal("diff_src", diff_src.astype(np.float64), expected)


def check_dequantize(src: np.ndarray, dst: np.ndarray, attributes: Mapping[str, object]) -> Grade:
    """Judge dst, whose exact value is (src - zp) * scale, where zp is the zero point."""
    if dst.dtype != FLOAT32 or dst.shape != src.shape:
        return _of_other_kind("dst", dst, FLOAT32, src.shape)
    scale, zero_point = _parameters(attributes)
    product = (src.astype(np.float64) - zero_point) * scale
    exact = Exact(product, np.zeros_like(product))
    ulp = ulp_at(exact, FLOAT32)
    error = absolute_error(dst, exact, FLOAT32)
    return best_rung("dst", dst, product, error, ulp, {"exact": 0.5 * ulp})


def check_quantize(
    src: np.ndarray, dst: np.ndarray, attributes: Mapping[str, object], dtype: np.dtype
) -> Grade:
    """Judge dst = round(src / scale + zp), saturated to `dtype`."""
    if dst.dtype != dtype or dst.shape != src.shape:
        return _of_other_kind("dst", dst, dtype, src.shape)
    scale, zero_point = _parameters(attributes)
    quotient = src.astype(np.float64) / scale
    exact = quotient + zero_point
    limits = np.iinfo(dtype)
    # The allowed error grows with `magnitude`. Both summands of `magnitude` are capped, so that the
    # allowed error stays below one step of the integers. So if the exact value is beyond the range
    # of `dtype`, only the nearer limit of this range passes.
    most = float(max(abs(limits.min), limits.max) + 1)
    magnitude = np.minimum(np.abs(quotient), 2 * most) + np.minimum(np.abs(exact), most)
    exact = np.clip(exact, limits.min, limits.max)
    error = np.abs(dst.astype(np.float64) - exact)
    allowed = 0.5 + _ROUNDOFF * magnitude
    return best_rung("dst", dst, exact, error, np.ones(()), {"float32": allowed})


def _parameters(attributes: Mapping[str, object]) -> np.ndarray:
    """Return the scale and the zero point as float64."""
    return np.asarray([attributes["scales"], attributes["zps"]], np.float64).reshape(2)


def _of_other_kind(name: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> Grade:
    return refused(f"{name} is {array.dtype} of shape {array.shape}, not {dtype} of {shape}")
