"""Judge the results of a contestant before it is timed, on a few of the cell's channels.

Channels are independent of each other, so the oracle needs only the examined channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from backnorm import reference
from backnorm.arithmetics import Arithmetic
from backnorm.conformance.judge import FORWARD_RESULTS, GRADIENTS, Quantity, judge
from backnorm.dtypes import FLOAT64, element_type
from backnorm.reference import Exact, FloatArray
from benchmarks.cells import OF_OURS, OURS_IN_FLOAT32, Cell
from benchmarks.peers.base import Data

__all__ = ["Examiner", "Truth", "float32_loss", "sampled_channels", "truth_of"]

# The most channels and elements to examine. The oracle takes about 0.2 microseconds an element.
_MOST_CHANNELS = 4
_MOST_ELEMENTS = 1 << 18

_ELEMENTWISE = ("dx", "y")

#: Exact results, and the magnitudes of their terms.
Truth = Mapping[Quantity, tuple[Exact, FloatArray]]


def sampled_channels(channels: int, count: int) -> list[int]:
    """Return the channels to examine: first, last and others at random, at least one.

    Parameters
    ----------
    channels : int
    count : int
        Elements of a channel.
    """
    most = min(channels, _MOST_CHANNELS, max(1, _MOST_ELEMENTS // max(1, count)))
    others = np.random.default_rng(channels).permutation(np.arange(1, max(1, channels - 1)))
    # The last channel has priority, because remainder loops of kernels compute it.
    return sorted([channels - 1, 0, *map(int, others)][:most]) if channels > 1 else [0]


def float32_loss(count: int, spread: float) -> float:
    """Return the error that a float32 implementation may have, relative to its terms' magnitude.

    A sum of `count` terms has at most `count` roundings, each of at most 2**-24 of a partial sum,
    which is at most the sum of magnitudes. Roundings add up like a random walk, to about the square
    root of their number, and in practice never to more than four times this root. x - mean, the
    product, s (a rounded root and a rounded quotient, used three times), the divisions by M and the
    operations of the element add at most 16 more. Peers that combine the mean with a constant, or
    compute the variance as the mean square less the squared mean, round x and mean separately.
    Their error is `spread`**2 times as large, where `spread` = 1 + 2 |mean|/deviation.

    This bound is generous, and still small compared to a wrong formula: with M = 10**6 and mean =
    deviation it is 0.2 % of the terms. A missing term or a wrong power of s is an error of 100 %.
    The divisor M - 1 instead of M is not detected if M is above some thousands.
    """
    return float((4.0 * np.sqrt(count) + 16.0) * spread**2 * 2.0**-24)


class Examiner:
    """Compares results of one cell with the oracle, which is computed once."""

    def __init__(self, cell: Cell, data: Data) -> None:
        self._axis = 1 if cell.layout == "NCX" else data.x.ndim - 1
        self._dtype = data.x.dtype
        self._count = cell.size // cell.shape[1]
        self._channels = sampled_channels(cell.shape[1], self._count)
        self._spread = _spread(data)
        self._exact = self._consult(cell, data)

    def error(self, contestant: str, results: Mapping[str, np.ndarray]) -> str:
        """Return what is wrong with the results, or an empty text.

        Our results must be within the budget of `judge`. The error of a peer's results may be at
        most `float32_loss` (scaled to float64 for float64 data) plus one ulp of their type.
        """
        for name, (exact, terms) in self._exact.items():
            if name not in results:
                if contestant in OF_OURS or name in _ELEMENTWISE:
                    return f"{name} is missing"
                continue
            actual = self._sample(results[name])
            if actual.shape != exact.shape or element_type(actual.dtype) is None:
                return f"{name} is {actual.dtype} of shape {actual.shape}"
            if contestant in OF_OURS:
                arithmetic: Arithmetic | None = "float32" if contestant == OURS_IN_FLOAT32 else None
                verdict = judge(name, actual, exact, terms, self._dtype, arithmetic=arithmetic)
                detail = "" if verdict.passed else verdict.detail
            else:
                detail = self._far_off(name, actual, exact, terms)
            if detail:
                return detail
        return ""

    def _far_off(self, name: str, actual: np.ndarray, exact: Exact, terms: FloatArray) -> str:
        unit = 2.0**-29 if self._dtype == FLOAT64 else 1.0
        share = float32_loss(self._count, self._spread) * unit
        if name in _ELEMENTWISE:
            # A small error of the mean is large relative to small elements, so all elements of a
            # channel get the same allowance.
            axes = tuple(i for i in range(terms.ndim) if i != self._axis)
            terms = np.broadcast_to(terms.max(axes, keepdims=True), terms.shape)
        error = np.abs((actual.astype(np.float64) - exact.hi) - exact.lo)
        # The rounding to the output's type adds to the error of the arithmetic.
        allowed = share * terms + np.abs(np.spacing(actual)).astype(np.float64)
        # NaN must fail, and would pass `error > allowed`.
        fine = error <= allowed
        if fine.all():
            return ""
        where = tuple(int(i) for i in np.argwhere(~fine)[0])
        return (
            f"{name}: {actual[where]!s} instead of {exact.hi[where]:.9g}, "
            f"{error[where] / allowed[where]:.3g} times the loss of float32"
        )

    def _sample(self, array: np.ndarray) -> np.ndarray:
        """Return the examined channels of an array of x's rank or of rank 1."""
        return np.take(array, self._channels, axis=self._axis if array.ndim > 1 else 0)

    def _consult(self, cell: Cell, data: Data) -> Truth:
        x, dy, mean, variance, gamma, beta = map(
            self._sample, (data.x, data.dy, data.mean, data.variance, data.gamma, data.beta)
        )
        if cell.op == "backward":
            gradients = reference.backward(x, dy, mean, variance, gamma, **data.options)
            return truth_of(gradients, GRADIENTS)
        if cell.op == "forward":
            return truth_of(reference.forward(x, gamma, beta, **data.options), FORWARD_RESULTS)
        return truth_of(reference.inference(x, mean, variance, gamma, beta, **data.options), ["y"])


def truth_of(exact: object, names: Iterable[Quantity]) -> Truth:
    """Return exact results with the magnitudes of their terms, by name."""
    return {name: (getattr(exact, name), getattr(exact, f"{name}_terms")) for name in names}


def _spread(data: Data) -> float:
    """Return 1 + 2 |mean|/deviation of the worst channel."""
    deviation = np.sqrt(data.variance.astype(np.float64) + data.epsilon)
    return float(1.0 + 2.0 * np.max(np.abs(data.mean) / deviation))
