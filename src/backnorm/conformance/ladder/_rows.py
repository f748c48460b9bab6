"""The ladder (error bounds of each rung) for the gradients of normalisations with parameters that
differ within a row of statistics, such as layer normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from backnorm import reference
from backnorm.conformance._grade import BoundKind, Rung
from backnorm.conformance.axes import BATCH_NORM, Axes
from backnorm.conformance.data import LayerData
from backnorm.conformance.judge import Quantity
from backnorm.conformance.ladder._gradients import Bound, GradientLadder
from backnorm.conformance.ladder._sums import ROUNDOFF
from backnorm.dtypes import FLOAT32, FLOAT64
from backnorm.reference import Exact, GradientScales, Scale

# How many roundings a term has more than in batch normalisation: that of its product with gamma or
# with s, and the three of s, which are others in each row.
_MORE = 4


@dataclass(frozen=True, slots=True, eq=False)
class RowLadder(GradientLadder):
    """The exact gradients of a normalisation of rows, and the bounds of their errors.

    Attributes
    ----------
    elements : int
        The number of elements of a parameter. `count` is that of a row.
    """

    elements: int

    @classmethod
    def of_rows(cls, data: LayerData, *, scaled: bool = True) -> Self:
        """Return the ladder of a layer; if `scaled` is False, gamma is 1."""
        axes = data.axes
        gamma = data.gamma if scaled else np.ones_like(data.gamma)
        x, dy = axes.rows(data.x), axes.rows(data.dy)
        statistics = data.mean.reshape(-1), data.variance.reshape(-1)
        parameters = axes.parameters
        values = reference.backward_of_rows(
            x, dy, *statistics, gamma, parameters,
            epsilon=data.epsilon, is_centred=axes.normalization.is_centred,
        )  # fmt: skip
        dx = Exact(axes.tensor(values.dx.hi), axes.tensor(values.dx.lo))
        values = replace(values, dx=dx, dx_terms=axes.tensor(values.dx_terms))
        scales = _scales(data, axes, gamma, parameters)
        types = data.x.dtype, data.gamma.dtype
        return cls(values, types[0], x.shape[1], scales, types[1], parameters.shape[1])

    def bound(self, name: Quantity, rung: Rung, kind: BoundKind, output: np.dtype) -> Bound:
        """Return the bound of a rung for a gradient."""
        count = self.count if name == "dx" else self.elements
        found = GradientLadder.bound(replace(self, count=count), name, rung, kind, output)
        if name == "dbeta" or (rung == "float64" and self.data != FLOAT64):
            return found
        roundoff = ROUNDOFF[FLOAT64 if self.data == FLOAT64 else FLOAT32]
        return found.with_roundings(_MORE, roundoff, kind)


def _scales(
    data: LayerData, axes: Axes, gamma: np.ndarray, parameters: np.ndarray
) -> GradientScales:
    """Return the magnitudes of :class:`.Bound`, by those of batch normalisation.

    The magnitude `value` of dgamma also has the sums within each row, because errors of s are equal
    in a row.
    """
    x, dy = (axes.rows(each, np.float64) for each in (data.x, data.dy))
    mean, variance = (each.reshape(-1, 1).astype(np.float64) for each in (data.mean, data.variance))
    count = max(x.shape[1], 1)
    with np.errstate(all="ignore"):
        c, s = x - mean, 1.0 / np.sqrt(variance + data.epsilon)
        g = dy * axes.over_rows(gamma.astype(np.float64))
        of_g, of_gc = (_of_sums(each)[:, :, None] for each in (g, g * c))
        sums, root = s * (of_g * axes.normalization.is_centred + np.abs(c) * s * s * of_gc) / count
        terms, dys = ((dy * each).reshape(-1)[parameters] for each in (c * s, 1.0))
        (total, norm), of_dys = _of_sums(terms), _of_sums(dys)
        # The elements of a parameter in a row follow each other.
        rows = len(set((parameters[:1] // count).flat))
        within = terms.reshape(len(terms), rows, -1).sum(2) if terms.size else terms
        value = np.maximum(total, np.linalg.norm(within, axis=1))
        dx = (axes.tensor(each) for each in (s * np.abs(g) + sums, sums, root))
    return GradientScales(Scale(*dx), Scale(value, total, norm), Scale(of_dys[0], *of_dys))


def _of_sums(terms: np.ndarray) -> np.ndarray:
    """Return the magnitude of the sum of each row, and the norm of its terms."""
    return np.stack([np.abs(terms.sum(1)), np.linalg.norm(terms, axis=1)])


def gradient_ladder(
    data: LayerData, *, training: bool = True, scaled: bool = True
) -> GradientLadder:
    """Return the ladder of the gradients of any normalisation; if `scaled` is False, gamma is 1."""
    if data.normalization != BATCH_NORM:
        return RowLadder.of_rows(data, scaled=scaled)
    x, dy, mean, variance, gamma = data.backward_inputs
    operands = x, dy, mean, variance, gamma if scaled else None
    return GradientLadder.of(*operands, training=training, **data.options)
