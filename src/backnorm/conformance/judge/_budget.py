"""The allowed error of each result, and its derivation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from backnorm.arithmetics import Arithmetic, own_arithmetic, resolved
from backnorm.dtypes import ELEMENT_TYPES, FLOAT64, is_16_bit
from backnorm.errors import ArgumentTypeError, ArgumentValueError

Quantity = Literal[
    "dx", "dgamma", "dbeta", "y", "mean", "variance", "second_x", "second_dy", "second_gamma",
    "inverse_deviation", "running_mean", "running_variance",
]  # fmt: skip

#: The results of the backward pass, in the order in which functions return them.
GRADIENTS: tuple[Quantity, ...] = "dx", "dgamma", "dbeta"
#: The results of the forward pass in training, in the order in which functions return them.
FORWARD_RESULTS: tuple[Quantity, ...] = "y", "mean", "variance"
#: The results that only operators of specifications have.
MORE_FORWARD_RESULTS: tuple[Quantity, ...] = "inverse_deviation", "running_mean", "running_variance"
_BUDGETED = tuple(name for name in get_args(Quantity) if name not in MORE_FORWARD_RESULTS)
#: The results of a layer: of its forward pass, of the update of its state, of its backward pass.
LAYER_RESULTS: tuple[Quantity, ...] = "y", "running_mean", "running_variance", *GRADIENTS


@dataclass(frozen=True, slots=True)
class Budget:
    """The allowed error of an element: ``ulps`` units in the last place of the element, plus
    ``terms`` times T. T is the sum of the magnitudes of the element's terms (see `budget`).
    """

    ulps: float
    terms: float


def budget(
    quantity: Quantity,
    output: np.dtype,
    data: np.dtype,
    arithmetic: Arithmetic | None = None,
) -> Budget:
    """Return the error allowed in `quantity` of type `output`, computed from data of type `data`.

    Parameters
    ----------
    quantity : {"dx", "dgamma", "dbeta", "y", "mean", "variance", "second_x", "second_dy", \
"second_gamma"}
        A result of the forward pass, of the backward pass, or of the second order (gradients of the
        backward pass).
    output : numpy.dtype
        Element type of the quantity.
    data : numpy.dtype
        Element type of x.
    arithmetic : {"float32", "float64"}, optional
        The type in which elements are computed and short runs of sums are added up; None: float32
        for data of 16 bits, float64 for others. It has no effect on the second order.

    Notes
    -----
    Half an ulp is the one rounding to the output's type. T is the sum of the magnitudes of the
    terms of the element's formula (see :mod:`backnorm.reference`). The coefficient of T is the
    error of the arithmetic before that rounding:

    - float64 arithmetic (unit roundoff 2**-53) on narrower data: if a sum of up to 2**30 elements
      is computed in blocks, its error is a few dozen unit roundoffs, times the sum of the
      magnitudes of its terms. So the error of a parameter gradient is at most 2**-45 T. To compute
      an element of dx, two such sums are divided by M (the number of elements of a channel), and
      about eight more operations follow. The budget of dx, 2**-40 T, is larger than the error of
      these operations, so that other orders of summation also pass. For a float32 result, 2**-40 T
      is at most 2**-16 of the float32 ulp of T. A 16-bit element is then rounded correctly unless
      its exact value is within 2**-40 T of the midpoint between two neighbours.
    - float64 data: there is no wider type, so sums are compensated. The error of a parameter
      gradient is at most 2**-48 T. This bound includes the roundings of s = 1/sqrt(variance +
      epsilon) and of the product of s and a sum. An element of dx takes a dozen float64 operations,
      with an error of at most 2**-49 T.
    - float32 arithmetic (unit roundoff u = 2**-24) on float32 or 16-bit data: a term of a parameter
      gradient is rounded four times before it is added up in float64. Two of
      these roundings are those of x - mean and of its product with dy. The other two are those of
      additions: at most four terms are added in float32, in pairs. Together, the four roundings are
      4 u T = 2**-22 T. The coefficients of dx are computed from these sums. An element of dx is
      gain * (dy - shift - slope * (x - mean)). The last operation, the product with the gain, is
      rounded to the half ulp that every float32 output is allowed. This rounding is covered by the
      half ulp, so it is not counted in the coefficient of T. Before this product, the term dy takes
      part in three roundings: that of the subtraction of the shift, that of the subtraction of
      slope * (x - mean), and that of the gain. The term of the shift, sum(dy)/M, has six roundings:
      two in the sum, one of the shift itself, and the same three as the term dy. The term slope *
      (x - mean) has eight roundings: four in the sum from which the slope is computed, and one each
      of the slope, of x - mean, of the subtraction and of the gain. If the last product is larger
      than the exact value, and a power of two lies between them, an ulp of the product is twice an
      ulp of the exact value. In this case the rounding error of the product can exceed half an ulp
      of the exact value by up to half of u T. With 16-bit data the last product is rounded to
      float32 before it is rounded to 16 bits, which makes nine roundings. So the roundings of an
      element add up to less than the budget, which is 16 u T = 2**-20 T. The budget is larger than
      this sum of roundings, so that kernels that add up longer runs in float32 also pass.
    - mean and variance are sums that are rounded once. The budget of the mean, and that of the
      variance, is a whole ulp plus T times the coefficient that a parameter gradient has above. The
      second part matters only if the terms of the mean cancel. The terms of the variance are all
      positive, so its T is the variance itself.
    - The coefficient of T is the same for y as for dx, but the T of y is that of the formula for y.
      In float32 arithmetic, three values are rounded once each: x - mean, the gain, and the
      constant (beta and the low part of the mean). Adding a residual rounds once more. With all
      these roundings, the error of y is at most 2**-21 T. A ReLU does not enlarge an error.
    - A term of the second order has up to two sums and s**5 as factors. For float64 data, sums are
      compensated. No term goes through more than 32 roundings of at most 2**-53 each, which add up
      to 2**-48. So an error of 2**-48 T is allowed. For float32 data, the error of a sum is a few
      dozen times 2**-53 of the sum of the magnitudes of its terms. The second-order gradient with
      respect to gamma has an error of the same size, a few dozen times 2**-53 T. Its budget is
      2**-44 T. For the second-order gradients with respect to x and dy, 2**-40 T is allowed, as for
      dx. For 16-bit data, the error of a sum is at most 2**-22 T, and that of a product of two sums
      is at most 2**-21 T. The budget of every second-order result is then 2**-20 T. A bfloat16
      result is rounded to float32 before it is rounded to bfloat16, which adds an error of less
      than 2**-25 T.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        For an element type or a quantity without a budget, and for float64 data in float32
        arithmetic.
    """
    for name, dtype in (("output", output), ("data", data)):
        if dtype not in ELEMENT_TYPES:
            accepted = ", ".join(map(str, ELEMENT_TYPES))
            raise ArgumentTypeError(
                name, "no budget for this element type", came=dtype, accepted=accepted
            )
    if quantity not in _BUDGETED:
        raise ArgumentValueError(
            "quantity", "unknown", came=repr(quantity), accepted=", ".join(_BUDGETED)
        )
    compute_dtype = own_arithmetic(data) if arithmetic is None else resolved(data, arithmetic)
    second = quantity.startswith("second_")
    elementwise = quantity in ("dx", "y", "second_x", "second_dy")
    if second and is_16_bit(data):
        terms = 2.0**-20
    elif compute_dtype == "float32" and not second:
        terms = 2.0**-20 if elementwise or is_16_bit(output) else 2.0**-22
    elif data == FLOAT64:
        terms = 2.0**-49 if elementwise and not second else 2.0**-48
    elif elementwise:
        terms = 2.0**-40
    else:
        terms = 2.0**-44 if second else 2.0**-45
    return Budget(1.0 if quantity in ("mean", "variance") else 0.5, terms)
