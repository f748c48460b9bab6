"""How far a result may be from the exact one, and whether it is.

Errors are counted in units in the last place (ulp) of the output's type at the exact value. The
one statement of what is allowed is :func:`budget`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from backnorm import reference
from backnorm._doubledouble import Exact, FloatArray
from backnorm.dtypes import (
    BFLOAT16,
    ELEMENT_TYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    element_type,
    is_16_bit,
)
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.results import Gradients, Normalized

__all__ = [
    "Budget",
    "Quantity",
    "Verdict",
    "budget",
    "check_backward",
    "check_forward",
    "check_inference",
    "judge",
    "ulp_error",
]

# Significant bits, exponent of the least normal number, exponent of the largest finite number.
_FORMATS = {
    FLOAT64: (53, -1022, 1023),
    FLOAT32: (24, -126, 127),
    FLOAT16: (11, -14, 15),
    BFLOAT16: (8, -126, 127),
}

Quantity = Literal["dx", "dgamma", "dbeta", "y", "mean", "variance"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Allowed error of an element: ``ulps`` units in the last place plus ``terms`` times T."""

    ulps: float
    terms: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of comparing one output with the exact one.

    Attributes
    ----------
    worst_ulp : float
        Largest error, in ulps of the output's type at the exact value.
    worst_excess : float
        Largest error as a multiple of what :func:`budget` allows for that element.
    passed : bool
        True when every element is within its budget (``worst_excess <= 1``) and NaN and infinity
        stand where they must, and nowhere else.
    where : tuple of int
        Index of the element that `worst_excess` was seen at; empty for an empty output.
    detail : str
        That element: what came, what is exact, error and allowance.
    """

    worst_ulp: float
    worst_excess: float
    passed: bool
    where: tuple[int, ...]
    detail: str


def budget(quantity: Quantity, output: np.dtype, data: np.dtype) -> Budget:
    """Return the error allowed in `quantity` of type `output`, computed from data of type `data`.

    Parameters
    ----------
    quantity : {"dx", "dgamma", "dbeta", "y", "mean", "variance"}
    output : numpy.dtype
        Element type of the quantity.
    data : numpy.dtype
        Element type of x.

    Notes
    -----
    Half an ulp is the one rounding to the output's type; it is all that is allowed where nothing
    cancels. T is the sum of the magnitudes of the terms of the element's formula (see
    :mod:`backnorm.reference`), and the coefficient beside it is what the arithmetic before that
    rounding may lose:

    - float32 data is summed and evaluated in float64, whose unit roundoff is 2**-53. Blocked
      sums of up to 2**30 elements lose a few dozen roundoffs of sum|terms|, so parameter
      gradients stay within 2**-45 T. dx divides two such sums by M and takes about eight more
      operations; 2**-40 T leaves room for other orders of summation, and is still 2**-16 ulp
      of T.
    - float64 data has no wider type to fall back on. Sums are compensated (2**-48 T holds for
      parameter gradients, with the rounding of s and of the product), and the dozen float64
      operations of the element leave 2**-49 T.
    - 16-bit data is evaluated in float32, whose unit roundoff is 2**-24, before the one rounding
      to 8 or 11 bits. A term of a parameter gradient is rounded four times before it is added up
      in float64: 2**-22 T. dx has those sums as coefficients, and with five more roundings no
      more than nine of a term: 2**-20 T.
    - mean and variance are themselves sums that are rounded once; they get a whole ulp, beside
      the coefficient of a parameter gradient, which counts only for a mean that cancels. The
      terms of the variance are all positive, so its T is itself.
    - y is like dx, with the T of its own formula.
    """
    if output not in ELEMENT_TYPES or data not in ELEMENT_TYPES:
        raise ArgumentTypeError(
            "output" if output not in ELEMENT_TYPES else "data",
            "no budget for this element type",
            came=output if output not in ELEMENT_TYPES else data,
            accepted=", ".join(str(t) for t in ELEMENT_TYPES),
        )
    if quantity not in get_args(Quantity):
        raise ArgumentValueError(
            "quantity", "unknown", came=repr(quantity), accepted=", ".join(get_args(Quantity))
        )
    elementwise = quantity in ("dx", "y")
    if is_16_bit(data):
        terms = 2.0**-20 if is_16_bit(output) else 2.0**-22
    elif data == FLOAT64:
        terms = 2.0**-49 if elementwise else 2.0**-48
    else:
        terms = 2.0**-40 if elementwise else 2.0**-45
    return Budget(1.0 if quantity in ("mean", "variance") else 0.5, terms)


def ulp_error(actual: np.ndarray, exact: Exact, dtype: np.dtype) -> FloatArray:
    """Return ``|actual - exact|`` in units in the last place of `dtype` at the exact value.

    Parameters
    ----------
    actual : numpy.ndarray
        Values representable in `dtype`.
    exact : Exact
        Exact values, of the same shape.
    dtype : numpy.dtype
        float64, float32, float16 or bfloat16.

    Returns
    -------
    numpy.ndarray
        float64. The ulp at a value of exponent e is ``2**(e - precision + 1)``, and the smallest
        subnormal below the normal range. Infinity counts as the power of two after the largest
        finite number, which is where rounding to nearest takes it from; so overflow where the
        exact value overflows is no error. Equal infinities and NaN facing NaN are no error; any
        other non-finite disagreement is an infinite one.
    """
    with np.errstate(over="ignore"):
        ulps: FloatArray = _error(actual, exact, dtype) / _ulp(exact, dtype)
    return ulps


def judge(
    quantity: Quantity,
    actual: np.ndarray,
    exact: Exact,
    terms: FloatArray,
    dtype: np.dtype,
) -> Verdict:
    """Return whether every element of `actual` is within its budget of the exact value.

    Parameters
    ----------
    quantity : str
        What it is, for :func:`budget`.
    actual : numpy.ndarray
        The output that is judged; its own type is the one it was rounded to.
    exact : Exact
        Exact values.
    terms : numpy.ndarray
        float64: T of each element.
    dtype : numpy.dtype
        Element type of the data (x) it was computed from.
    """
    output, data = element_type(actual.dtype), element_type(dtype)
    if output is None or data is None:
        return _refused(f"{quantity} has element type {actual.dtype}, which is none of ours")
    if actual.shape != exact.shape:
        return _refused(f"{quantity} has shape {actual.shape}, not {exact.shape}")
    if actual.size == 0:
        return Verdict(0.0, 0.0, True, (), f"{quantity} is empty")
    allowance = budget(quantity, output, data)
    error, ulp = _error(actual, exact, output), _ulp(exact, output)
    with np.errstate(all="ignore"):
        # Where T is not finite although the result is, T says nothing and half an ulp has to do.
        slack = np.where(np.isfinite(terms), terms, 0.0) * allowance.terms
        # No float64 pair holds a part below 2**-1074, so the oracle itself may be off by that.
        allowed = allowance.ulps * ulp + slack + (2.0**-1074 if output == FLOAT64 else 0.0)
        excess = error / allowed
        ulps, allowed_ulps = error / ulp, allowed / ulp
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    where = tuple(int(i) for i in worst)
    worst_excess = float(excess[where])
    detail = (
        f"{quantity}[{', '.join(map(str, where))}] = {actual[where]!s}, "
        f"exact {exact.hi[where]:.17g}, error {ulps[where]:.4g} ulp, "
        f"allowed {allowed_ulps[where]:.4g} ulp"
    )
    return Verdict(float(ulps.max()), worst_excess, bool(worst_excess <= 1.0), where, detail)


def check_backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    gradients: Gradients | tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    epsilon: float,
    data_format: str = "NCX",
    training: bool = True,
) -> dict[str, Verdict]:
    """Judge `gradients` (dx, dgamma, dbeta) of the given inputs; see :func:`reference.backward`.

    dx must have x's type and shape, dgamma and dbeta mean's.
    """
    exact = reference.backward(
        x, dy, mean, variance, gamma, epsilon=epsilon, data_format=data_format, training=training
    )
    dx, dgamma, dbeta = gradients
    return {
        "dx": _judge_typed("dx", dx, exact.dx, exact.dx_terms, x.dtype, x.dtype),
        "dgamma": _judge_typed(
            "dgamma", dgamma, exact.dgamma, exact.dgamma_terms, x.dtype, mean.dtype
        ),
        "dbeta": _judge_typed("dbeta", dbeta, exact.dbeta, exact.dbeta_terms, x.dtype, mean.dtype),
    }


def check_forward(
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    normalized: Normalized | tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    epsilon: float,
    data_format: str = "NCX",
) -> dict[str, Verdict]:
    """Judge `normalized` (y, mean, variance) of the given inputs; see :func:`reference.forward`."""
    exact = reference.forward(x, gamma, beta, epsilon=epsilon, data_format=data_format)
    y, mean, variance = normalized
    return {
        "y": _judge_typed("y", y, exact.y, exact.y_terms, x.dtype, x.dtype),
        "mean": judge("mean", mean, exact.mean, exact.mean_terms, x.dtype),
        "variance": judge("variance", variance, exact.variance, exact.variance_terms, x.dtype),
    }


def check_inference(
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    y: np.ndarray,
    *,
    epsilon: float,
    data_format: str = "NCX",
) -> dict[str, Verdict]:
    """Judge `y`, the normalisation of x by given statistics; see :func:`reference.inference`."""
    exact = reference.inference(
        x, mean, variance, gamma, beta, epsilon=epsilon, data_format=data_format
    )
    return {"y": _judge_typed("y", y, exact.y, exact.y_terms, x.dtype, x.dtype)}


def _judge_typed(
    quantity: Quantity,
    actual: np.ndarray,
    exact: Exact,
    terms: FloatArray,
    data: np.dtype,
    expected: np.dtype,
) -> Verdict:
    """Judge an output whose element type is prescribed."""
    if element_type(actual.dtype) != element_type(expected):
        return _refused(f"{quantity} has element type {actual.dtype}, not {expected}")
    return judge(quantity, actual, exact, terms, data)


def _refused(detail: str) -> Verdict:
    return Verdict(math.inf, math.inf, False, (), detail)


def _ulp(exact: Exact, dtype: np.dtype) -> FloatArray:
    bits, least, largest = _FORMATS[dtype]
    fraction, exponent = np.frexp(exact.hi)
    exponent = exponent.astype(np.int64) - 1
    # A power of two in hi with a part of the other sign below it lies in the binade beneath.
    exponent -= (np.abs(fraction) == 0.5) & (exact.lo * np.sign(exact.hi) < 0)
    exponent = np.where(exact.hi == 0, least, exponent)
    result: FloatArray = np.ldexp(1.0, np.clip(exponent, least, largest) - bits + 1)
    return result


def _error(actual: np.ndarray, exact: Exact, dtype: np.dtype) -> FloatArray:
    """Return the absolute difference, with the rules for overflow of :func:`ulp_error`."""
    _, _, largest = _FORMATS[dtype]
    hi, lo = exact.hi, exact.lo
    with np.errstate(all="ignore"):
        value = np.asarray(actual, np.float64)
        same = (value == hi) & ~np.isfinite(hi) | np.isnan(value) & np.isnan(hi)
        if dtype != FLOAT64:
            beyond = 2.0 ** (largest + 1)
            overflowed = np.isinf(value) & np.isfinite(hi)
            value = np.where(overflowed, np.copysign(beyond, value), value)
            outside = np.isfinite(hi) & (np.abs(hi) >= beyond)
            hi = np.where(outside, np.copysign(beyond, hi), hi)
            lo = np.where(outside, 0.0, lo)
        error = np.abs((value - hi) - lo)
    result: FloatArray = np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))
    return result
