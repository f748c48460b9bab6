"""The ladder (error bounds of each rung) for the gradients of the backward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Unpack

import numpy as np

from backnorm import reference
from backnorm.conformance._grade import KINDS, RUNGS, BoundKind, Grade, Rung, check_word
from backnorm.conformance.judge import GRADIENTS, Quantity, budget
from backnorm.conformance.ladder._arguments import read_operands
from backnorm.conformance.ladder._ladder import Ladder
from backnorm.conformance.ladder._sums import (
    DEVIATIONS,
    INVERSE_DEVIATION,
    ROUNDOFF,
    SUMS,
    Additions,
    additions_of,
    in_a_row,
    in_any_order,
)
from backnorm.dtypes import FLOAT32, FLOAT64, is_16_bit
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.reference import BackwardOptions, FloatArray, Scale
from backnorm.results import Gradients


@dataclass(frozen=True, slots=True)
class Bound:
    """The factors in the formula of an element's allowed error.

    The bound is ``ulps * ulp + terms * T + value * V + sqrt((sums * S)**2 + (root * R)**2)``. Here
    `ulp` is the unit in the last place of the output's type at the exact value. T is the sum of the
    magnitudes of the terms of the element's formula. V, S and R are the fields `value`, `sums` and
    `root` of :class:`backnorm.reference.Scale`.

    Attributes
    ----------
    ulps, terms, value, sums, root : float
    """

    ulps: float
    terms: float = 0.0
    value: float = 0.0
    sums: float = 0.0
    root: float = 0.0

    def allowance(self, ulp: FloatArray, terms: FloatArray, scale: Scale) -> FloatArray:
        """Return the allowed absolute error of each element.

        Parameters
        ----------
        ulp : numpy.ndarray
            Unit in the last place of the output's type at the exact values.
        terms : numpy.ndarray
            T of each element.
        scale : backnorm.reference.Scale

        Returns
        -------
        numpy.ndarray
            float64. Magnitudes that are not finite count as 0.
        """
        with np.errstate(all="ignore"):
            sums = np.hypot(_multiple(self.sums, scale.sums), _multiple(self.root, scale.root))
            slack = _multiple(self.terms, terms) + _multiple(self.value, scale.value) + sums
        result: FloatArray = self.ulps * ulp + slack
        return result

    def with_roundings(self, number: float, unit: float, kind: BoundKind) -> Bound:
        """Return the bound if each term has this number of roundings more, of up to `unit`."""
        if kind == "guaranteed":
            return replace(self, terms=self.terms + number * unit * (1.0 + self.terms))
        more = DEVIATIONS * unit * math.sqrt(number)
        return replace(self, value=math.hypot(self.value, more), root=math.hypot(self.root, more))

    def in_units(self, unit: float) -> str:
        """Return the bound as text, such as "0.5 ulp + 4 u T".

        In the text, u stands for the unit roundoff `unit`. The docstring of the class explains the
        other letters.
        """
        parts = [f"{self.ulps:g} ulp"]
        parts += [
            f"{value / unit:.3g} u {name}"
            for name, value in (("T", self.terms), ("V", self.value))
            if value
        ]
        of_sums = [
            f"{value / unit:.3g} u {name}"
            for name, value in (("S", self.sums), ("R", self.root))
            if value
        ]
        if len(of_sums) == 2:
            of_sums = [f"hypot({', '.join(of_sums)})"]
        return " + ".join(parts + of_sums)


def bound(
    rung: Rung,
    quantity: Quantity,
    output: np.dtype,
    data: np.dtype,
    count: int,
    *,
    kind: BoundKind = "expected",
    accumulator: np.dtype | None = None,
) -> Bound:
    """Return the bound of a rung.

    Parameters
    ----------
    rung : {"exact", "float64", "float32", "pairwise", "blocked", "serial"}
        exact: results are rounded once. float64: computed in float64; for float64 data with
        compensated sums. float32: elements in float32, sums in float64 or compensated. The other
        rungs compute elements and sums in float32 (float64 for float64 data). pairwise: pairwise
        sums of runs of up to 16 terms. blocked: serial sums in blocks of 128 to 512 terms, and a
        serial sum of the blocks. serial: one term after the other, in any order; also atomic
        additions.
    quantity : {"dx", "dgamma", "dbeta"}
    output : numpy.dtype
        Element type of the quantity.
    data : numpy.dtype
        Element type of x and dy.
    count : int
        M, the elements of a channel.
    kind : {"expected", "guaranteed"}
        guaranteed: holds for all data and all orders unless a number over- or underflows. expected:
        assumes that rounding errors have independent signs, except for those of x - mean and of
        serial sums of products of 16-bit values. For the rungs other than serial it also assumes
        that the order of the elements is unrelated to their values.
    accumulator : numpy.dtype, optional
        Type in which the sums of the rungs pairwise, blocked and serial are computed; by default
        that of the elements.

    Returns
    -------
    Bound
        Coefficients are infinite where the derivation does not hold: from 2**24 serial additions on
        in float32, from 256 on in bfloat16.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an argument is unknown, or `data` is float64 and the rung float32.
    """
    check_word("rung", rung, RUNGS)
    check_word("quantity", quantity, GRADIENTS)
    check_word("kind", kind, KINDS)
    if accumulator is not None and accumulator not in ROUNDOFF:
        accepted = ", ".join(map(str, ROUNDOFF))
        raise ArgumentTypeError("accumulator", "unknown", came=accumulator, accepted=accepted)
    if count < 0:
        raise ArgumentValueError("count", "must not be negative", came=count)
    wide = budget(quantity, output, data, "float64")
    if rung == "exact":
        return Bound(wide.ulps)
    if rung == "float64" and data != FLOAT64:
        return Bound(wide.ulps, wide.terms)
    # On all other rungs, elements are computed in float64 if the data are float64, and in float32
    # otherwise. If the rung is float32 and the data are float64, `budget` raises an error.
    narrow = data != FLOAT64 or rung == "float32"
    elements = budget(quantity, output, data, "float32") if narrow else wide
    roundoff = ROUNDOFF[FLOAT32 if narrow else FLOAT64]
    roundings = elements.terms / roundoff
    unit = roundoff if accumulator is None else ROUNDOFF[accumulator]
    additions = additions_of(rung, count)
    if kind == "guaranteed":
        lost = elements.terms + (INVERSE_DEVIATION * roundoff if rung in SUMS else 0.0)
        return Bound(elements.ulps, lost + (1.0 + lost) * in_a_row(additions.height, unit))
    found = _expected(quantity, output, elements.ulps, roundings, roundoff, additions, unit)
    return replace(found, terms=found.terms + _of_one_sign(rung, quantity, data, roundoff))


def grade_backward(
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
    kind: BoundKind = "expected",
) -> dict[Quantity, Grade]:
    """Grade `gradients` (dx, dgamma, dbeta) of the given inputs; see :func:`reference.backward`.

    dx must have the shape and type of x. dgamma and dbeta must have the shape and type of mean. A
    mapping with these names is also accepted.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        The error names the argument or the gradient.
    """
    operands = {"x": x, "dy": dy, "mean": mean, "variance": variance, "gamma": gamma}
    options: BackwardOptions = {
        "epsilon": epsilon,
        "data_format": data_format,
        "training": training,
    }
    ladder = GradientLadder.of(**read_operands("backward", operands, **options), **options)
    return ladder.grades("gradients", gradients, kind)


@dataclass(frozen=True, slots=True, eq=False)
class GradientLadder(Ladder):
    """The exact gradients of a call, and the bounds of their errors.

    Attributes
    ----------
    scales : backnorm.reference.GradientScales
        The magnitudes of :class:`Bound`.
    statistics : numpy.dtype
        Element type of mean.
    """

    results: ClassVar[tuple[Quantity, ...]] = GRADIENTS

    scales: reference.GradientScales
    statistics: np.dtype

    @classmethod
    def of(
        cls,
        x: np.ndarray,
        dy: np.ndarray,
        mean: np.ndarray,
        variance: np.ndarray,
        gamma: np.ndarray | None,
        **options: Unpack[BackwardOptions],
    ) -> GradientLadder:
        """Return the ladder of the given inputs; see :func:`reference.backward`."""
        operands = x, dy, mean, variance, gamma
        values = reference.backward(*operands, **options)
        scales = reference.gradient_scales(*operands, **options)
        return cls(values, x.dtype, x.size // max(mean.size, 1), scales, mean.dtype)

    def bound(self, name: Quantity, rung: Rung, kind: BoundKind, output: np.dtype) -> Bound:
        """Return the bound of a rung for a gradient."""
        return bound(rung, name, output, self.data, self.count, kind=kind)

    def element_type(self, name: Quantity) -> np.dtype:
        """Return the element type that a gradient has to have."""
        return self.data if name == "dx" else self.statistics

    def slack(
        self, name: Quantity, rung: Rung, kind: BoundKind, output: np.dtype, below: np.ndarray
    ) -> FloatArray:
        """Return the bound of each element's error before the last rounding."""
        limit, terms = self.bound(name, rung, kind, output), self.terms(name)
        if math.isinf(limit.terms):
            return np.full(terms.shape, math.inf)
        return replace(limit, ulps=0.0).allowance(terms, terms, getattr(self.scales, name))


def _expected(
    quantity: Quantity,
    output: np.dtype,
    ulps: float,
    roundings: float,
    roundoff: float,
    additions: Additions,
    unit: float,
) -> Bound:
    """Return the bound of the kind "expected" for the error of an element of `quantity`.

    The formula of an element has `roundings` roundings, each of at most `roundoff`. `additions`
    describes the additions in the sums of the formula, and `unit` bounds the rounding of each
    addition.
    """
    if additions.height * unit >= 1.0:
        return Bound(ulps, math.inf)
    loss = DEVIATIONS * roundoff
    terms = in_any_order(additions, unit)
    sums = DEVIATIONS * unit * math.sqrt(additions.sums)
    # `root` is the factor of R (see `Bound`). The terms of a sum are rounded independently of each
    # other, so the squares of their errors add up.
    root = math.hypot(loss * math.sqrt(roundings), DEVIATIONS * unit * math.sqrt(additions.root))
    # A gradient of 16 bits is first rounded to float32 and then to 16 bits. The rounding to float32
    # is counted here.
    after = 1.0 if is_16_bit(output) else 0.0
    if quantity == "dx":
        after = roundings + (INVERSE_DEVIATION if additions.height else 0.0)
    elif quantity == "dgamma":
        after += INVERSE_DEVIATION
    return Bound(ulps, terms, loss * math.sqrt(after), sums, root)


def _of_one_sign(rung: Rung, quantity: Quantity, data: np.dtype, roundoff: float) -> float:
    """Return the expected error of roundings in one direction, as a multiple of T.

    T is the sum of the magnitudes of the terms. The roundings that are meant here err in the same
    direction in many terms of a sum, so that their errors do not average out.
    """
    if quantity == "dbeta":
        return 0.0
    # If an ulp of x is larger than an ulp of the mean, the last bits of the mean are lost when x -
    # mean is rounded. This error is the same for every element. A 16-bit value has p significant
    # bits, where u = 2**-p is its unit roundoff. So the product of two such values has at most 2p
    # significant bits, and the last of these bits is worth more than u**2 times the product. The
    # terms dy * (x - mean) are about such products. (x - mean is treated as a 16-bit value here,
    # although the mean can have more bits.) So when a term is added to a long sum, the exact result
    # is often a tie: it lies exactly halfway between two neighbouring numbers. Ties are often
    # rounded in one direction.
    halves = 2.0 * ROUNDOFF[data] ** 2 if rung == "serial" and is_16_bit(data) else 0.0
    return roundoff + halves


def _multiple(coefficient: float, magnitude: FloatArray) -> FloatArray | float:
    """Return coefficient * magnitude, with 0 in place of each magnitude that is not finite."""
    if coefficient == 0.0:
        return 0.0
    result: FloatArray = coefficient * np.where(np.isfinite(magnitude), magnitude, 0.0)
    return np.where(np.isnan(result), 0.0, result)
