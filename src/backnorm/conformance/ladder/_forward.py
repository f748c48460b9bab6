"""The ladder (error bounds of each rung) for the forward pass in training: y, mean and variance,
and the inverse deviation and running statistics that operators of specifications return.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Unpack

import numpy as np

from backnorm import reference
from backnorm.conformance._grade import BoundKind, Grade, Rung
from backnorm.conformance.data import LayerData
from backnorm.conformance.judge import FORWARD_RESULTS, MORE_FORWARD_RESULTS, Quantity
from backnorm.conformance.ladder._arguments import read_operands
from backnorm.conformance.ladder._ladder import Ladder
from backnorm.conformance.ladder._sums import (
    BLOCKS,
    DEVIATIONS,
    INVERSE_DEVIATION,
    ROUNDOFF,
    RUN,
    SUMS,
    additions_of,
    in_a_row,
    in_any_order,
)
from backnorm.dtypes import FLOAT32, FLOAT64, is_16_bit
from backnorm.reference import FloatArray, ForwardOptions
from backnorm.results import Normalized

# How many roundings the mean, the variance and an element of y have: those of one term of the sum,
# and those after the sum. The roundings of the additions are not counted here.
_MEAN, _VARIANCE, _ELEMENT = 4, 8, 16
# If data are float64, sums are compensated (see `judge.budget`). The mean, and also the variance,
# then has this number of roundings.
_COMPENSATED = 32
# How many roundings follow the additions of a sum. After the additions for the mean, only the
# division rounds. After those for the variance, three operations round: the division, the square of
# the shifted mean, and the subtraction of this square.
_AFTER_MEAN, _AFTER_VARIANCE = 1, 3
# The factor 0.05 in the term 0.05 (2 u M)^1.5 v of docs/tolerance.md. A serial sum of squares drops
# every square that is below half a unit in the last place of the sum. The term bounds the sum of
# the squares that are lost in this way.
_SMALL_SQUARES = 0.05
# A kernel may subtract a number from x before it adds up (the shifted-data algorithm). The expected
# bounds hold if this number is at most `_SHIFT` standard deviations away from the mean.
_SHIFT = 2.0
# How many roundings follow the statistic of the batch: in an inverse deviation, those of the sum,
# of the reciprocal root and of its approximation; in a running statistic, those of Bessel's
# correction, of the two weights, of their products and of the sum.
_AFTER_STATISTIC = 8


class _Channels(NamedTuple):
    """Magnitudes of each channel. Each attribute is a float64 array of shape (C,).

    Attributes
    ----------
    mean, terms, root : numpy.ndarray
        |mean|, sum|x|/M and sqrt(sum(x**2))/M.
    variance, deviation : numpy.ndarray
    furthest : numpy.ndarray
        The largest abs(x - mean).
    square_root : numpy.ndarray
        sqrt(sum((abs(x - mean) + 2 deviations)**4))/M.
    gain : numpy.ndarray
        abs(gamma)/sqrt(variance + epsilon).
    """

    mean: FloatArray
    terms: FloatArray
    root: FloatArray
    variance: FloatArray
    deviation: FloatArray
    furthest: FloatArray
    square_root: FloatArray
    gain: FloatArray


class _Errors(NamedTuple):
    """Bounds of the errors of a channel's statistics before they are rounded to the output's type.

    A kernel subtracts its computed mean from x. `used` bounds the error of this mean. The square of
    this error adds to the variance, so it can only enlarge the variance. The computed variance also
    has other errors, which can enlarge or reduce it; `variance` bounds them.
    """

    mean: FloatArray
    used: FloatArray
    variance: FloatArray

    def of_s(self, variance: FloatArray, epsilon: float) -> FloatArray:
        """Return a bound of the relative error of s = 1/sqrt(variance + epsilon). The bound holds
        if the computed variance is not negative.
        """
        total = variance + epsilon
        least = np.maximum(variance - self.variance, 0.0) + epsilon
        most = total + self.variance + np.square(self.used)
        result: FloatArray = np.maximum(np.sqrt(total / least) - 1.0, 1.0 - np.sqrt(total / most))
        return result


class Running(NamedTuple):
    """The old running statistics, the weight of the batch in the new ones, and whether the running
    variance averages variances with Bessel's correction.
    """

    mean: np.ndarray
    variance: np.ndarray
    momentum: float
    unbiased: bool


@dataclass(frozen=True, slots=True, eq=False)
class ForwardLadder(Ladder):
    """The exact results of a forward pass in training, and the bounds of their errors.

    Attributes
    ----------
    channels : tuple
        Magnitudes of each channel.
    epsilon : float
    direct, centred : numpy.ndarray
        ``|gamma s| (|x| + |mean|) + |beta|`` and ``|gamma s (x - mean)|`` of each element.
    axis : int
        The channel axis of x.
    running : Running or None
        None: running statistics have no value.
    """

    results: ClassVar[tuple[Quantity, ...]] = FORWARD_RESULTS
    more: ClassVar[tuple[Quantity, ...]] = MORE_FORWARD_RESULTS
    needs_elements: ClassVar[bool] = True

    values: reference.ExactNormalized
    channels: _Channels
    epsilon: float
    direct: FloatArray
    centred: FloatArray
    axis: int
    running: Running | None = None

    @classmethod
    def of(
        cls,
        x: np.ndarray,
        gamma: np.ndarray | None,
        beta: np.ndarray | None,
        **options: Unpack[ForwardOptions],
    ) -> ForwardLadder:
        """Return the ladder of these inputs; :func:`reference.forward` gives its exact results."""
        return cls.of_values(
            reference.forward(x, gamma, beta, **options), x, gamma, beta, **options
        )

    @classmethod
    def of_values(
        cls,
        values: reference.ExactNormalized,
        x: np.ndarray,
        gamma: np.ndarray | None,
        beta: np.ndarray | None,
        **options: Unpack[ForwardOptions],
    ) -> ForwardLadder:
        """Return the ladder of these inputs and their exact results."""
        axis = 1 if options.get("data_format", "NCX") == "NCX" else x.ndim - 1
        others = tuple(k for k in range(x.ndim) if k != axis)
        shape = [size if k == axis else 1 for k, size in enumerate(x.shape)]
        epsilon, count = options["epsilon"], math.prod(x.shape[k] for k in others)
        scale = 1.0 if gamma is None else np.abs(gamma.astype(FLOAT64))
        offset = np.zeros(shape) if beta is None else np.abs(beta.astype(FLOAT64)).reshape(shape)
        with np.errstate(all="ignore"):
            wide, mean = np.abs(x.astype(FLOAT64)), np.abs(values.mean.hi)
            gain = np.broadcast_to(scale / np.sqrt(values.variance.hi + epsilon), mean.shape)
            direct = gain.reshape(shape) * (wide + mean.reshape(shape)) + offset
            peak = wide.max(others, initial=0.0)
            root = _norm(wide, peak.reshape(shape), others, 2) / max(count, 1)
            wide = np.abs(x.astype(FLOAT64) - values.mean.hi.reshape(shape))
            furthest, deviation = wide.max(others, initial=0.0), np.sqrt(values.variance.hi)
            far = (furthest + _SHIFT * deviation).reshape(shape)
            moved = wide + (_SHIFT * deviation).reshape(shape)
            square_root = np.square(_norm(moved, far, others, 4)) / max(count, 1)
            centred = gain.reshape(shape) * wide
        channels = _Channels(
            mean, values.mean_terms, root, values.variance.hi, deviation, furthest, square_root,
            gain,
        )  # fmt: skip
        return cls(values, x.dtype, count, channels, epsilon, direct, centred, axis)

    @classmethod
    def of_layer(cls, data: LayerData, *, scaled: bool = True) -> ForwardLadder:
        """Return the ladder of a layer, with running statistics if the layer has them."""
        operands = (data.gamma, data.beta) if scaled else (None, None)
        running = Running(data.mean, data.variance, data.momentum or 0.0, data.unbiased)
        return replace(cls.of(data.x, *operands, **data.options), running=running)

    def value(self, name: Quantity) -> reference.Exact:
        """Return the exact value of a result."""
        if not name.startswith("running_"):
            return Ladder.value(self, name)
        old, share, factor = self._of_running(name)
        batch = Ladder.value(self, _of_batch(name)) * factor[0] / factor[1]
        return (batch - reference.Exact.of(old)) * share + old

    def terms(self, name: Quantity) -> FloatArray:
        """Return T of each element of a result: the sum of the magnitudes of its terms."""
        if not name.startswith("running_"):
            return Ladder.terms(self, name)
        old, share, factor = self._of_running(name)
        batch = Ladder.terms(self, _of_batch(name)) * factor[0] / factor[1]
        return abs(1.0 - share) * np.abs(old) + abs(share) * batch

    def _of_running(self, name: Quantity) -> tuple[FloatArray, float, tuple[float, float]]:
        """Return the old running statistic, the weight of the batch, and numerator and denominator
        of the correction of the batch's statistic.
        """
        known = self.running
        assert known is not None
        old = known.mean if name == "running_mean" else known.variance
        is_corrected = known.unbiased and name == "running_variance"
        factor = (float(self.count), max(self.count - 1.0, 1.0)) if is_corrected else (1.0, 1.0)
        return old.astype(FLOAT64), known.momentum, factor

    def element_type(self, name: Quantity) -> np.dtype | None:
        """Return the element type that a result has to have; None: any."""
        return self.data if name == "y" else None

    def slack(
        self, name: Quantity, rung: Rung, kind: BoundKind, output: np.dtype, below: np.ndarray
    ) -> FloatArray:
        """Return the bound of each element's error before the last rounding."""
        errors = self._errors(rung, kind, output)
        if name == "mean":
            return errors.mean
        if name == "variance":
            added: FloatArray = errors.variance + np.where(below, 0.0, np.square(errors.used))
            return added
        if name in self.more:
            return self._of_more(name, rung, kind, output)
        of_s = self._over_elements(errors.of_s(self.channels.variance, self.epsilon))
        of_mean = self._over_elements(self.channels.gain * errors.used)
        elements = self._of_elements(rung, kind)
        slack: FloatArray = elements + of_mean * (1.0 + of_s) + self.centred * of_s
        return slack

    def _of_more(self, name: Quantity, rung: Rung, kind: BoundKind, output: np.dtype) -> FloatArray:
        """Return bounds of the errors of inverse deviations and of running statistics."""
        is_wide = rung == "float64" and self.data != FLOAT64
        roundings = DEVIATIONS * math.sqrt(_AFTER_STATISTIC)
        if kind == "guaranteed":
            roundings = _AFTER_STATISTIC
        lost: FloatArray = roundings * (2.0**-45 if is_wide else self._unit) * self.terms(name)
        if name == "inverse_deviation":
            _, relative = self.errors(rung, kind, output)
            return lost + self.terms(name) * relative
        _, share, factor = self._of_running(name)
        batch = self.slack(_of_batch(name), rung, kind, output, np.asarray(False))
        if is_16_bit(output):
            # The statistic of the batch may be rounded to the type in which it is returned.
            batch = batch + ROUNDOFF[output] * Ladder.terms(self, _of_batch(name))
        return lost + share * factor[0] / factor[1] * batch

    def errors(
        self, rung: Rung, kind: BoundKind, output: np.dtype
    ) -> tuple[FloatArray, FloatArray]:
        """Return the bounds, for each channel, of the error of the mean that is subtracted from x,
        and of the relative error of 1/sqrt(variance + epsilon).
        """
        found = self._errors(rung, kind, output)
        return found.used, found.of_s(self.channels.variance, self.epsilon)

    def _of_elements(self, rung: Rung, kind: BoundKind) -> FloatArray:
        """Return bounds of the rounding errors of the operations that compute elements of y."""
        is_direct = kind == "expected" and (rung != "float64" or self.data == FLOAT64)
        return self.share(rung, kind) * (self.direct if is_direct else self.values.y_terms)

    def share(self, rung: Rung, kind: BoundKind) -> float:
        """Return the bound of the errors of these operations, as a multiple of magnitudes."""
        if rung == "float64" and self.data != FLOAT64:
            return 2.0**-40
        roundings = _ELEMENT + INVERSE_DEVIATION * (rung in SUMS)
        factor = roundings if kind == "guaranteed" else DEVIATIONS * math.sqrt(roundings)
        return factor * self._unit

    def _errors(self, rung: Rung, kind: BoundKind, output: np.dtype) -> _Errors:
        """Return the errors of the statistics on a rung; ``docs/tolerance.md`` derives them."""
        if rung == "float64" and self.data != FLOAT64:
            return self._wide()
        return (self._guaranteed if kind == "guaranteed" else self._expected)(rung, output)

    def _wide(self) -> _Errors:
        known = self.channels
        mean = 2.0**-45 * (known.terms + known.furthest)
        squares = known.variance + np.square(known.furthest)
        first = 2.0 * known.deviation * mean
        return _Errors(mean, mean, 2.0**-45 * squares + first)

    def _guaranteed(self, rung: Rung, output: np.dtype) -> _Errors:
        known, unit, levels = self.channels, self._unit, 1.0 + math.log2(max(self.count, 1))
        of_mean, of_variance = (each * unit for each in self._roundings(output))
        terms, squares = known.terms + known.furthest, known.variance + known.furthest**2
        if rung not in SUMS:
            mean = of_mean * terms
            used = mean + unit * known.terms
            return _Errors(mean, used, of_variance * (squares + np.square(used)))
        height = additions_of(rung, self.count).height
        # A kernel may update a mean m with each element x, by m + (x - m)/i, where i counts the
        # elements. Such an update has three roundings more than an addition to a sum (see
        # ``docs/tolerance.md``).
        updated = in_a_row(height + 3.0 * (1.0 + levels), unit)
        mean = (of_mean + (1.0 + of_mean) * updated) * terms
        used = mean + unit * known.terms
        # If a kernel updates a mean m in this way, `partial` bounds the error of m after every
        # update.
        partial = levels * mean + unit * known.terms
        moved = 4.0 * (known.furthest * partial + np.square(partial))
        lost = of_variance + (1.0 + of_variance) * in_a_row(height, unit)
        return _Errors(mean, used, lost * (squares + moved) + moved)

    def _expected(self, rung: Rung, output: np.dtype) -> _Errors:
        known, unit, narrow = self.channels, self._unit, float(is_16_bit(output))
        of_mean, of_variance = self._roundings(output)
        squares = known.variance * (1.0 + _SHIFT * _SHIFT)
        additions, loss = additions_of(rung, self.count), DEVIATIONS * unit
        if additions.height * unit >= 1.0:
            nothing = np.full(known.mean.shape, math.inf)
            return _Errors(nothing, nothing, nothing)
        # If a rung computes the sum in a type that is wider than the elements' type, the rung also
        # divides the sum by the count in this wider type. So this division adds no rounding in the
        # elements' type.
        after = narrow + (_AFTER_MEAN if rung in SUMS or self.data == FLOAT64 else 0.0)
        sums, of_serial = math.sqrt(additions.sums), in_any_order(additions, unit)
        of_terms, of_squares = (math.sqrt(additions.root + n) for n in (of_mean, of_variance))
        mean = (
            loss * math.sqrt(after) * known.mean
            + loss * np.hypot(sums * known.mean, of_terms * known.root)
            + of_serial * (known.terms + _SHIFT * known.deviation)
            + unit * known.mean * self._drift(rung)
        )
        used = mean + unit * known.mean
        # Two kinds of rounding errors can keep one sign over many terms, so that they do not
        # average out. The first are those of x - mean, which count twice in its square. The second
        # occur in serial sums of 16-bit data: a square is often exactly half of the sum's last
        # place (a tie), and ties are often rounded in one direction.
        halves = 2.0 * ROUNDOFF[self.data] ** 2 if rung == "serial" and is_16_bit(self.data) else 0
        one_sign = 2.0 * unit + halves
        small = (2.0 * unit * self.count) ** 1.5 if rung == "serial" else 0.0
        partial = loss * math.sqrt(additions.height / max(self.count, 1)) * known.terms
        variance = (
            (one_sign + loss * math.sqrt(_AFTER_VARIANCE + narrow) + of_serial) * squares
            + loss * np.hypot(sums * squares, of_squares * known.square_root)
            + _SMALL_SQUARES * small * known.variance
            + 2.0 * known.deviation * partial
        )
        return _Errors(mean, used, variance)

    def _drift(self, rung: Rung) -> FloatArray:
        """Return the error, in roundoffs, of additions that are all rounded in one direction.

        Additions of nearly equal terms are all rounded in one direction from a certain length of
        the partial sum on. This length is reached when the unit in the last place of the partial
        sum exceeds the standard deviation of the terms.
        """
        # After `start` elements have been added up, the unit in the last place of the partial sum
        # is as large as the standard deviation of the elements.
        with np.errstate(all="ignore"):
            start = self.channels.deviation / (2.0 * self._unit * self.channels.mean)
        start = np.where(np.isnan(start), np.inf, start)
        if rung == "serial":
            return _in_one_direction(self.count, start)
        if rung == "blocked":
            small, large = BLOCKS
            within = _in_one_direction(min(self.count, large), start)
            return within + _in_one_direction(self.count / small, start / math.sqrt(small))
        if rung == "pairwise":
            within = _in_one_direction(min(self.count, RUN), start)
            levels = np.log2(np.maximum(self.count / np.maximum(np.square(start), RUN), 1.0))
            return within + np.asarray(levels, np.float64)
        return np.zeros_like(start)

    def _roundings(self, output: np.dtype) -> tuple[int, int]:
        """Return how many roundings the mean has, and how many the variance has.

        The roundings in the additions of their sums are not counted.
        """
        if self.data == FLOAT64:
            return _COMPENSATED, _COMPENSATED
        narrow = int(is_16_bit(output))
        return _MEAN + narrow, _VARIANCE + narrow

    @property
    def _unit(self) -> float:
        return ROUNDOFF[FLOAT64 if self.data == FLOAT64 else FLOAT32]

    def _over_elements(self, values: FloatArray) -> FloatArray:
        """Return values, one for each channel, in a shape that broadcasts over elements."""
        shape = [1] * self.direct.ndim
        shape[self.axis] = -1
        return values.reshape(shape)


def _of_batch(name: Quantity) -> Quantity:
    """Return the name of the statistic of the batch that a running statistic averages."""
    return "mean" if name == "running_mean" else "variance"


def grade_forward(
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    normalized: Normalized | tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    epsilon: float,
    data_format: str = "NCX",
    kind: BoundKind = "expected",
) -> dict[Quantity, Grade]:
    """Grade y, mean and variance of a forward pass, which `normalized` has in this order.

    x, gamma, beta, epsilon and data_format are the arguments with which :func:`reference.forward`
    computes the exact results. The variance is the biased one. y must have x's shape and type.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        The error names the argument or the result.
    """
    options: ForwardOptions = {"epsilon": epsilon, "data_format": data_format}
    operands = read_operands("forward", {"x": x, "gamma": gamma, "beta": beta}, **options)
    return ForwardLadder.of(**operands, **options).grades("normalized", normalized, kind)


def _in_one_direction(terms: float, start: FloatArray) -> FloatArray:
    """Return the relative error, in roundoffs, of a serial sum if all additions after the first
    `start` terms are rounded in one direction.
    """
    first = np.minimum(start, terms)
    result: FloatArray = 0.5 * (terms - first * first / max(terms, 1.0))
    return result


def _norm(values: FloatArray, peak: FloatArray, axes: tuple[int, ...], power: int) -> FloatArray:
    """Return the norm of order `power` over `axes`.

    The values are first divided by `peak`, the largest of their magnitudes, so that their powers do
    not overflow and the largest power does not underflow.
    """
    share = np.where(peak > 0, values / peak, 0.0)
    total: FloatArray = (share**power).sum(axes, keepdims=True) ** (1.0 / power) * peak
    return total.reshape(-1)
