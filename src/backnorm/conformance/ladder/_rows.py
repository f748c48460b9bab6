"""The ladders (error bounds of each rung) of normalisations whose parameters differ within a row of
statistics, such as layer normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from backnorm import reference
from backnorm.conformance._grade import BoundKind, Rung
from backnorm.conformance.axes import BATCH_NORM, Axes
from backnorm.conformance.data import LayerData
from backnorm.conformance.judge import FORWARD_RESULTS, Quantity
from backnorm.conformance.ladder._forward import ForwardLadder
from backnorm.conformance.ladder._gradients import Bound, GradientLadder, bound
from backnorm.conformance.ladder._ladder import Ladder
from backnorm.conformance.ladder._sums import ROUNDOFF
from backnorm.dtypes import FLOAT32, FLOAT64
from backnorm.reference import Exact, FloatArray, GradientScales, Scale

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
        gamma = axes.over_rows(data.gamma if scaled else np.ones_like(data.gamma))
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
        found = bound(rung, name, output, self.data, count, kind=kind)
        if name == "dbeta" or (rung == "float64" and self.data != FLOAT64):
            return found
        roundoff = ROUNDOFF[FLOAT64 if self.data == FLOAT64 else FLOAT32]
        return found.with_roundings(_MORE, roundoff, kind)


def _scales(
    data: LayerData, axes: Axes, gamma: np.ndarray, parameters: np.ndarray
) -> GradientScales:
    """Return the magnitudes of :class:`.Bound`, by those of batch normalisation. `gamma` is that of
    each element.

    The magnitude `value` of dgamma also has the sums within each row, because errors of s are equal
    in a row.
    """
    x, dy = (axes.rows(each, np.float64) for each in (data.x, data.dy))
    mean, variance = (each.reshape(-1, 1).astype(np.float64) for each in (data.mean, data.variance))
    count = max(x.shape[1], 1)
    with np.errstate(all="ignore"):
        c, s = x - mean, 1.0 / np.sqrt(variance + data.epsilon)
        g = dy * gamma.astype(np.float64)
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


@dataclass(frozen=True, slots=True, eq=False)
class RowForwardLadder(Ladder):
    """The exact results of a forward pass of rows, and the bounds of their errors.

    Attributes
    ----------
    values : mapping
        The exact results by name, and T by the name with `_terms`.
    flat : ForwardLadder
        The ladder without gamma and beta, of a batch of one image whose channels are the rows.
    gamma, beta : numpy.ndarray
        The magnitudes of the parameters of each element, of x's shape.
    axes : Axes
    """

    results: ClassVar[tuple[Quantity, ...]] = FORWARD_RESULTS
    more: ClassVar[tuple[Quantity, ...]] = ("inverse_deviation",)
    needs_elements: ClassVar[bool] = True

    flat: ForwardLadder
    gamma: FloatArray
    beta: FloatArray
    axes: Axes

    @classmethod
    def of_rows(cls, data: LayerData, *, scaled: bool = True) -> Self:
        """Return the ladder of a layer; if `scaled` is False, gamma is 1 and beta 0."""
        axes, kind = data.axes, data.normalization
        x, ones = axes.rows(data.x), np.ones_like(data.gamma)
        known = reference.forward_of_rows(x, epsilon=data.epsilon, is_centred=kind.is_centred)
        y = Exact(known.y.hi[None], known.y.lo[None])
        flat = ForwardLadder.of_values(
            replace(known, y=y, y_terms=known.y_terms[None]), x[None], None, None,
            epsilon=data.epsilon,
        )  # fmt: skip
        # RMS normalisation has no beta.
        gamma = data.gamma if scaled else ones
        beta = data.beta if scaled and kind.is_centred else 0 * ones
        wide = [axes.over_rows(each.astype(FLOAT64)) for each in (gamma, beta)]
        result = known.y * wide[0] + wide[1]
        terms = known.y_terms * np.abs(wide[0]) + np.abs(wide[1])
        values = {
            "y": Exact(axes.tensor(result.hi), axes.tensor(result.lo)),
            "y_terms": axes.tensor(terms),
        }
        for name in ("mean", "variance", "inverse_deviation"):
            exact, size = getattr(known, name), getattr(known, f"{name}_terms")
            parts = (part.reshape(axes.statistics) for part in (exact.hi, exact.lo))
            values |= {name: Exact(*parts), f"{name}_terms": size.reshape(axes.statistics)}
        scale, offset = (axes.tensor(np.abs(each)) for each in wide)
        return cls(values, data.x.dtype, x.shape[1], flat, scale, offset, axes)

    def value(self, name: Quantity) -> Exact:
        """Return the exact value of a result."""
        value: Exact = self.values[name]
        return value

    def terms(self, name: Quantity) -> FloatArray:
        """Return T of each element of a result."""
        terms: FloatArray = self.values[f"{name}_terms"]
        return terms

    def element_type(self, name: Quantity) -> np.dtype | None:
        """Return the element type that a result has to have; None: any."""
        return self.flat.element_type(name)

    def slack(
        self, name: Quantity, rung: Rung, kind: BoundKind, output: np.dtype, below: np.ndarray
    ) -> FloatArray:
        """Return the bound of each element's error before the last rounding."""
        if name != "y":
            found = self.flat.slack(name, rung, kind, output, below.reshape(-1))
            return found.reshape(self.axes.statistics)
        normalized = self.axes.tensor(self.flat.slack(name, rung, kind, output, below)[0])
        slack: FloatArray = self.gamma * normalized + self.flat.share(rung, kind) * self.beta
        return slack


def forward_ladder(data: LayerData, *, scaled: bool = True) -> Ladder:
    """Return the ladder of the forward pass of any normalisation; without `scaled`, gamma is 1 and
    beta 0.
    """
    if data.normalization != BATCH_NORM:
        return RowForwardLadder.of_rows(data, scaled=scaled)
    return ForwardLadder.of_layer(data, scaled=scaled)
