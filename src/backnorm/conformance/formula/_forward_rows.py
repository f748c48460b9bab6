"""The forward pass of normalisations with parameters that differ within a row of statistics.

y is ``gamma*s*(x - mean) + beta``, with gamma and beta of each element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from backnorm.conformance.axes import BATCH_NORM, Normalization
from backnorm.conformance.data import LayerData
from backnorm.conformance.formula._channels import Channels
from backnorm.conformance.formula._formula import Mistake, Values
from backnorm.conformance.formula._forward import FORWARD, ForwardFormula
from backnorm.conformance.formula._rows import Rows, worded
from backnorm.conformance.judge import Quantity

Array = np.ndarray

# The mistakes of a forward pass that are none of these normalisations': they have no running
# statistics, and gamma and beta differ within a row.
_NONE_OF_FORWARD = "running", "neighbour", "momentum", "image"
_NONE_WITHOUT_MEAN = "mean", "second-moment", "beta", "offset", "statistics-swapped"
_RMS_FORWARD_MISTAKES = tuple(
    Mistake(name, says, "statistics", statistics)
    for name, says, statistics in (
        ("mean-subtracted", "the mean of x is subtracted", lambda b: (b.x.mean(1), b.of_x[1])),
        ("variance-centred", "the variance of x is used for the mean of x**2",
         lambda b: (b.of_x[0], b.x.var(1))),
        ("statistics-of-layer-norm", "the mean and the variance of x are used",
         lambda b: (b.x.mean(1), b.x.var(1))),
    )
)  # fmt: skip
_GAMMA_PLUS_ONE = Mistake(
    "gamma-plus-one", "y is multiplied by 1 + gamma", "gain", lambda b, s: (1.0 + b.gamma) * s
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowForwardFormula(ForwardFormula):
    """The formula of a forward pass. Its channels are :class:`Rows`."""

    words: ClassVar[Mapping[str, str]] = {
        **ForwardFormula.words,
        "": "gamma*(x - mean), x - mean, beta, gamma and 1",
        "gain": "the factor of gamma*(x - mean) in y",
        "offset": "the factor of beta in y",
        "no_gamma": "the factor of x - mean without gamma in y",
        "gamma": "the factor of gamma in y",
        "constant": "the constant term of y",
    }

    def inputs(self, data: LayerData, **options: Any) -> Rows:
        """Return the inputs of a call, as :meth:`Rows.of` does."""
        return Rows.of(data, **options)

    def known_mistakes(self, channels: Channels) -> list[Mistake]:
        """Return the mistakes of forward passes that a normalisation of rows can have."""
        assert isinstance(channels, Rows)
        kind = channels.axes.normalization
        absent = _NONE_OF_FORWARD + (() if kind.is_centred else _NONE_WITHOUT_MEAN)
        known = [
            replace(each, says=worded(each.says, kind))
            for each in self.mistakes
            if not any(word in each.name for word in absent)
        ]
        return [*known, _GAMMA_PLUS_ONE, *(() if kind.is_centred else _RMS_FORWARD_MISTAKES)]

    def functions(self, channels: Channels) -> Values:
        """Return gamma*(x - mean), x - mean, beta, gamma and 1."""
        assert isinstance(channels, Rows)
        centred, weights = channels.x - channels.of_x[0][:, None], channels.weights
        found = {"gain": centred * weights, "constant": np.ones_like(centred)}
        if (weights != 1.0).any():
            found |= {"no_gamma": centred, "gamma": weights}
        return found | ({"offset": channels.offsets} if channels.offsets.any() else {})

    def numbers(self, channels: Channels) -> Values:
        """Return y itself, the right coefficients, and the statistics."""
        found = dict(self.rows(channels))
        s, one = found["inverse_deviation"], np.ones_like(found["inverse_deviation"])
        coefficients = {"gain": s, "offset": one, "no_gamma": 0.0 * one, "gamma": 0.0 * one}
        return {**coefficients, "constant": 0.0 * one, **found}

    def rows(self, channels: Channels) -> Iterator[tuple[Quantity, Array]]:
        """Yield the statistics and y."""
        assert isinstance(channels, Rows)
        with np.errstate(all="ignore"):
            mean, variance = self.statistics(channels)
            s = self.inverse_deviation(variance, channels.epsilon, channels)
            if channels.axes.normalization.is_centred:
                yield "mean", self.mean(channels, mean)
            yield "variance", self.variance(channels, variance, s)
            yield "inverse_deviation", self.inverse(channels, variance, s)
            each = replace(channels, gamma=channels.weights, beta=channels.offsets)
            column = s[:, None]
            gain, offset = self.gain(each, column), self.offset(each, column)
            yield "y", gain * (channels.x - mean[:, None]) + offset


_FORWARD = RowForwardFormula()


def forward_formula(normalization: Normalization) -> ForwardFormula:
    """Return the correct formula of the forward pass of a normalisation."""
    return FORWARD if normalization == BATCH_NORM else _FORWARD
