"""Judge the results of a contestant before it is timed, on a few of the cell's channels.

Channels are independent of each other, so the oracle is exact on those that are examined.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from backnorm import reference
from backnorm._doubledouble import Exact, FloatArray
from backnorm.arithmetics import Arithmetic
from backnorm.conformance.judge import Quantity, judge
from backnorm.dtypes import FLOAT64, element_type
from benchmarks.cells import OF_OURS, OURS_IN_FLOAT32, Cell
from benchmarks.peers.base import Data

__all__ = ["Examiner", "float32_loss", "sampled_channels"]

# Channels that are examined, and elements: the oracle takes about 0.2 microseconds for each.
_MOST_CHANNELS = 4
_MOST_ELEMENTS = 1 << 18

_ELEMENTWISE = ("dx", "y")


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
    # The last channel first: it is where a kernel's remainders are.
    return sorted([channels - 1, 0, *map(int, others)][:most]) if channels > 1 else [0]


def float32_loss(count: int, spread: float) -> float:
    """Return what part of the magnitude of its terms a float32 implementation may lose.

    A sum of `count` terms goes through as many roundings of 2**-24 at most, of partial sums that
    are at most the sum of magnitudes, and these add up like a random walk: to the square root of
    their number, and to more than four times that never. x - mean, the product, s (a rounded
    root and a rounded quotient, which enters three times), the divisions by M and the
    operations of the element add at most 16 more. Peers that gather the mean into a constant,
    or take the variance as the mean square less the squared mean, pay for x and mean apart:
    `spread` = 1 + 2 |mean|/deviation, squared, times as much.

    That is generous, and still small compared to a wrong formula: with M = 10**6 and mean =
    deviation it is 0.2 % of the terms, and a term that is left out or a wrong power of s is all of
    one. Only M - 1 in the place of M is not noticed above some thousands.
    """
    return float((4.0 * np.sqrt(count) + 16.0) * spread**2 * 2.0**-24)


class Examiner:
    """Compares results on one cell with the oracle, which is consulted once."""

    def __init__(self, cell: Cell, data: Data) -> None:
        self._axis = 1 if cell.layout == "NCX" else data.x.ndim - 1
        self._dtype = data.x.dtype
        self._count = cell.size // cell.shape[1]
        self._channels = sampled_channels(cell.shape[1], self._count)
        self._spread = _spread(data)
        self._exact = self._consult(cell, data)

    def error(self, contestant: str, results: Mapping[str, np.ndarray]) -> str:
        """Return what is wrong with the results, or an empty text.

        Ours must be within the budget of `judge`; a peer's within the loss of a float32
        implementation (float64 for float64 data, `float32_loss`), and one rounding to its type.
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
            # A mean that is a little off shows in elements that are small themselves.
            axes = tuple(i for i in range(terms.ndim) if i != self._axis)
            terms = np.broadcast_to(terms.max(axes, keepdims=True), terms.shape)
        error = np.abs((actual.astype(np.float64) - exact.hi) - exact.lo)
        # Rounding to the output's type comes on top of the arithmetic before it.
        allowed = share * terms + np.abs(np.spacing(actual)).astype(np.float64)
        # Not "error > allowed", which NaN would pass.
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

    def _consult(self, cell: Cell, data: Data) -> dict[Quantity, tuple[Exact, FloatArray]]:
        x, dy, mean, variance, gamma, beta = map(
            self._sample, (data.x, data.dy, data.mean, data.variance, data.gamma, data.beta)
        )
        if cell.op == "backward":
            g = reference.backward(x, dy, mean, variance, gamma, **data.options)
            return {
                "dx": (g.dx, g.dx_terms),
                "dgamma": (g.dgamma, g.dgamma_terms),
                "dbeta": (g.dbeta, g.dbeta_terms),
            }
        if cell.op == "forward":
            n = reference.forward(x, gamma, beta, **data.options)
            return {
                "y": (n.y, n.y_terms),
                "mean": (n.mean, n.mean_terms),
                "variance": (n.variance, n.variance_terms),
            }
        o = reference.inference(x, mean, variance, gamma, beta, **data.options)
        return {"y": (o.y, o.y_terms)}


def _spread(data: Data) -> float:
    """Return 1 + 2 |mean|/deviation of the worst channel."""
    deviation = np.sqrt(data.variance.astype(np.float64) + data.epsilon)
    return float(1.0 + 2.0 * np.max(np.abs(data.mean) / deviation))
