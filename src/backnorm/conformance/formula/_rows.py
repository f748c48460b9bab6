"""The gradients of normalisations with parameters that differ within a row of statistics.

dx is that of batch normalisation with rows for channels, dy*gamma for dy, and a gamma of 1. So the
catalogue of batch normalisation has most mistakes; those of gamma, and those of sums over the
elements of a parameter, are here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np

from backnorm.conformance.axes import BATCH_NORM, Axes, Normalization
from backnorm.conformance.data import LayerData
from backnorm.conformance.formula._backward import BACKWARD, MISTAKES, BackwardFormula
from backnorm.conformance.formula._channels import WIDE, Channels
from backnorm.conformance.formula._formula import Mistake, Values
from backnorm.conformance.formula._known import Known
from backnorm.conformance.formula._variations import of_vectors
from backnorm.conformance.judge import Quantity
from backnorm.dtypes import FLOAT64

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Rows(Channels):
    """The inputs of a call, arranged by row. In place of channels, there are rows; `images` is the
    number of channels of a row if it has groups of them; `gamma` is 1, and `dy` is dy*gamma.

    Attributes
    ----------
    plain : numpy.ndarray
        dy.
    weights : numpy.ndarray
        gamma of each element.
    parameters : numpy.ndarray
        As :attr:`.axes.Axes.parameters`.
    outer : tuple of int
        The axes of the elements of a parameter: N and those of space.
    scale : numpy.ndarray
        gamma, of shape (C,).
    offsets : numpy.ndarray
        beta of each element.
    axes : Axes
    """

    plain: Array = field(kw_only=True)
    weights: Array = field(kw_only=True)
    parameters: Array = field(kw_only=True)
    outer: tuple[int, ...] = field(kw_only=True)
    scale: Array = field(kw_only=True)
    offsets: Array = field(kw_only=True)
    axes: Axes = field(kw_only=True)

    @classmethod
    def of(
        cls, data: LayerData, *, training: bool = True, scaled: bool = True, wide: bool = False
    ) -> Self:
        """Return the inputs of a call, as :meth:`Channels.of` does."""
        dtype, axes = WIDE if wide else FLOAT64, data.axes
        x, dy = axes.rows(data.x, dtype), axes.rows(data.dy, dtype)
        mean, variance = (each.reshape(-1).astype(dtype) for each in (data.mean, data.variance))
        scale = data.gamma.astype(dtype) if scaled else np.ones(data.gamma.shape, dtype)
        weights, ones = axes.over_rows(scale), np.ones_like(mean)
        outer = data.x.shape[: data.channel_axis] + data.x.shape[data.channel_axis + 1 :]
        kind = data.normalization
        has_beta = scaled and kind.is_centred
        images = data.gamma.size // kind.groups if kind.has_groups else 1
        row = outer[-1] if kind.has_groups and len(outer) > 1 else x.shape[1]
        return cls(
            x, dy * weights, mean, variance, ones, 0.0 * ones, data.epsilon, images, row, training,
            None, False, plain=dy, weights=weights, parameters=axes.parameters, outer=outer,
            scale=scale, offsets=axes.over_rows(data.beta.astype(dtype)) * has_beta,
            axes=axes,
        )  # fmt: skip

    def of_first(self, count: int) -> tuple[Array, Array]:
        """As :meth:`Channels.of_first`; if not centred, 0 and the mean of x**2."""
        mean, variance = super().of_first(count)
        if self.axes.normalization.is_centred:
            return mean, variance
        return 0.0 * mean, variance + mean * mean

    def of_parameters(self, elements: Array) -> Array:
        """Return the elements of each parameter, of shape (C, N*S)."""
        if elements.ndim == 1:
            elements = np.broadcast_to(elements[:, None], self.x.shape)
        chosen: Array = elements.reshape(-1)[self.parameters]
        return chosen


class _OfParameters(Known):
    """The numbers of each element of a parameter; its sums have this element alone."""

    channels: Rows

    def s_of(self, epsilon: float = 0.0, bessel: bool = False) -> Any:
        return self.channels.of_parameters(super().s_of(epsilon, bessel))


def _again(*which: str) -> Callable[..., Array]:
    """Return a dx of which some terms are multiplied by gamma again: dy, mean or projection."""

    def dx(rows: Rows, c: Array, gain: Array, mean_dy: Array, projection: Array) -> Array:
        terms = {"dy": rows.dy, "mean": -mean_dy[:, None], "projection": -c * projection[:, None]}
        weighted = (terms[name] * (rows.weights if name in which else 1.0) for name in terms)
        total: Array = gain[:, None] * sum(weighted)
        return total

    return dx


def _no_gamma(rows: Rows, c: Array, gain: Array, mean_dy: Array, projection: Array) -> Array:
    dx: Array = gain[:, None] * (rows.plain - mean_dy[:, None] - c * projection[:, None])
    return dx


def _outside(rows: Rows, c: Array, gain: Array, mean_dy: Array, projection: Array) -> Array:
    sums = rows.plain.mean(1), (rows.plain * c).mean(1)
    share = projection * rows.count / (rows.dy * c).sum(1)
    dx: Array = (gain[:, None] * rows.weights) * (
        rows.plain - sums[0][:, None] - c * (share * sums[1])[:, None]
    )
    return dx


def _sums(first: str, second: str) -> Callable[..., tuple[Array, Array]]:
    """Return sums of dy and of dy*(x - mean), each with gamma to a power: 0, 1 or 2."""

    def of(rows: Rows, power: str) -> Array:
        terms: Array = {"0": rows.plain, "1": rows.dy, "2": rows.dy * rows.weights}[power]
        return terms

    return lambda rows, mean, c: (of(rows, first).sum(1), (of(rows, second) * c).sum(1))


def _weights(change: Callable[[Array, Rows], Array]) -> Callable[[Rows], Array]:
    """Return gamma of each element if each channel has another gamma."""

    def weights(rows: Rows) -> Array:
        return rows.axes.over_rows(change(rows.scale, rows))

    return weights


def _of_last_axis(rows: Rows, terms: Array) -> Array:
    last = terms.reshape(len(terms), *rows.outer)
    total: Array = last.sum(tuple(range(last.ndim - 1)))
    return total if total.shape == terms.shape[:1] else terms.sum(1)


def _of_images(first: int | None, last: int | None) -> Callable[[Rows, Array], Array]:
    def parameters(rows: Rows, terms: Array) -> Array:
        images = terms.reshape(len(terms), rows.outer[0], -1)
        total: Array = images[:, first:last].sum((1, 2))
        return total

    return parameters


#: The mistakes in which these normalisations differ from batch normalisation.
ROW_MISTAKES = tuple(
    Mistake(*row)
    for row in (
        ("mean-dy-no-gamma", "the mean of dy lacks gamma: sum(dy) is used for sum(dy*gamma)",
         "sums", _sums("0", "1")),
        ("projection-no-gamma", "the sum along x - mean lacks gamma: it is of dy*(x - mean)",
         "sums", _sums("1", "0")),
        ("sums-no-gamma", "dy is multiplied by gamma in dx, but not in its two sums", "sums",
         _sums("0", "0")),
        ("mean-dy-gamma-twice", "the mean of dy is multiplied by gamma twice in its sum", "sums",
         _sums("2", "1")),
        ("projection-gamma-twice", "the sum along x - mean is multiplied by gamma twice", "sums",
         _sums("1", "2")),
        ("sums-gamma-twice", "both sums of dx are multiplied by gamma twice", "sums",
         _sums("2", "2")),
        ("mean-dy-gamma-again", "the mean of dy*gamma is multiplied by gamma again, outside of "
         "its sum", "dx", _again("mean")),
        ("projection-gamma-again", "the term along x - mean is multiplied by gamma again, outside "
         "of its sum", "dx", _again("projection")),
        ("sums-gamma-again", "both terms with sums are multiplied by gamma again, outside of "
         "their sums", "dx", _again("mean", "projection")),
        ("gamma-twice", "dx is multiplied by gamma again", "dx",
         _again("dy", "mean", "projection")),
        ("factor-gamma-twice", "dy is multiplied by gamma twice in dx, the sums once", "dx",
         _again("dy")),
        ("factor-no-gamma", "dy is not multiplied by gamma in dx, but both sums are", "dx",
         _no_gamma),
        ("gamma-outside", "dx is multiplied by gamma after its sums, as in batch normalisation",
         "dx", _outside),
        ("no-gamma", "dx is not multiplied by gamma", "weight",
         _weights(lambda gamma, rows: np.ones_like(gamma))),
        ("gamma-absolute", "dx has |gamma| for gamma", "weight",
         _weights(lambda gamma, rows: np.abs(gamma))),
        ("gamma-squared", "dx has gamma**2 for gamma", "weight",
         _weights(lambda gamma, rows: np.square(gamma))),
        ("gamma-plus-one", "dx has 1 + gamma for gamma", "weight",
         _weights(lambda gamma, rows: 1.0 + gamma)),
        ("gamma-of-neighbour", "the gamma of the next channel is used", "weight",
         _weights(lambda gamma, rows: np.roll(gamma, -1))),
        ("gamma-of-channel-before", "the gamma of the channel before is used", "weight",
         _weights(lambda gamma, rows: np.roll(gamma, 1))),
        ("gamma-of-channel-0", "the gamma of channel 0 is used in each channel", "weight",
         _weights(lambda gamma, rows: np.full_like(gamma, gamma[0]))),
        ("gamma-of-first-group", "the gamma of the first group is used in each group", "weight",
         _weights(lambda gamma, rows: np.resize(gamma[: rows.images], gamma.shape))),
        ("parameters-last-left-out", "the sums of dgamma and dbeta lack their last term",
         "parameters", lambda rows, terms: terms[:, :-1].sum(1)),
        ("parameters-first-left-out", "the sums of dgamma and dbeta lack their first term",
         "parameters", lambda rows, terms: terms[:, 1:].sum(1)),
        ("parameters-first-alone", "dgamma and dbeta are their first term alone",
         "parameters", lambda rows, terms: terms[:, 0]),
        ("parameters-first-image-alone", "dgamma and dbeta are those of the first image alone",
         "parameters", _of_images(None, 1)),
        ("parameters-last-image-alone", "dgamma and dbeta are those of the last image alone",
         "parameters", _of_images(-1, None)),
        ("parameters-first-image-left-out", "dgamma and dbeta lack the first image",
         "parameters", _of_images(1, None)),
        ("parameters-last-image-left-out", "dgamma and dbeta lack the last image",
         "parameters", _of_images(None, -1)),
        ("parameters-mean", "dgamma and dbeta are divided by their number of terms",
         "parameters", lambda rows, terms: terms.mean(1)),
        ("parameters-wrong-axis", "dgamma and dbeta are summed over the channels, and have a "
         "number for each place of the last other axis", "parameters", _of_last_axis),
        ("parameters-of-neighbour", "dgamma and dbeta are those of the next channel",
         "parameters", lambda rows, terms: np.roll(terms.sum(1), -1)),
    )
)  # fmt: skip

#: The mistakes of RMS normalisation, whose formula has no mean.
_RMS_MISTAKES = tuple(
    Mistake(*row)
    for row in (
        ("mean-of-x", "the mean of x is subtracted", "statistics",
         lambda rows: (rows.x.mean(1), rows.variance)),
        ("variance-centred", "the variance of x is used for the mean of x**2", "statistics",
         lambda rows: (rows.mean, rows.x.var(1))),
        ("statistics-of-layer-norm", "the mean and the variance of x are used", "statistics",
         lambda rows: (rows.x.mean(1), rows.x.var(1))),
        ("mean-dy", "dx has the mean of dy*gamma, as in layer normalisation", "mean_dy",
         lambda k: k.mean_dy),
    )
)  # fmt: skip

# Mistakes that are none in a normalisation, or the same as others.
_NONE = {"not-frozen", "dgamma-bessel", "dy-added", "dgamma-of-dx", "dbeta-of-dx"}
_NONE_IN = {
    "rms-norm": {
        "statistics-of-x", "mean-of-x", "statistics-swapped", "mean-ignored", "mean-of-neighbour",
        "mean-of-channel-before", "mean-of-channel-0", "statistics-of-neighbour", "not-centred",
        "frozen", "all-twice", "projection-less-one", "dgamma-mean", "second-moment",
        "mean-of-all-channels", "along-x",
    },
    # gamma is the same number in all elements of a row.
    "instance-norm": {
        "mean-dy-gamma-again", "projection-gamma-again", "sums-gamma-again", "gamma-outside",
        "gamma-squared",
    },
}  # fmt: skip


@cache
def _mistakes(normalization: Normalization) -> tuple[Mistake, ...]:
    """Return the catalogue of a normalisation."""
    absent = _NONE | _NONE_IN.get(normalization.name, set())
    has_groups = normalization.has_groups
    of_batch = [
        replace(each, says=worded(each.says, normalization))
        for each in MISTAKES
        if ("gamma" not in each.name or each.step in ("dgamma", "dbeta"))
        and (has_groups or "image" not in each.name)
    ]
    rows = [m for m in ROW_MISTAKES if has_groups or "group" not in m.name]
    if not normalization.is_centred:
        of_batch = [m for m in of_batch if m.step not in ("mean_dy", "dbeta")]
        words = ("x - mean", "x"), ("dgamma and dbeta", "dgamma")
        for word, other in words:
            rows = [replace(m, says=m.says.replace(word, other)) for m in rows]
        rows = [m for m in rows if "mean-dy" not in m.name and not m.name.startswith("sums")]
    every = [m for m in (*of_batch, *rows) if m.name not in absent]
    return (*every, *(() if normalization.is_centred else _RMS_MISTAKES))


def worded(says: str, normalization: Normalization) -> str:
    """Return a sentence about batch normalisation with the words of another normalisation."""
    words = {"channel": normalization.row, "sum(dy)": "sum(dy*gamma)", "image": "channel"}
    words["x - mean"] = "x - mean" if normalization.is_centred else "x"
    pattern = "|".join(map(re.escape, words))
    return re.sub(pattern, lambda match: words[match[0]], says)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowFormula(BackwardFormula):
    """The formula of the gradients. Its channels are :class:`Rows`.

    Attributes
    ----------
    weight : callable
        Takes the rows; returns gamma of each element.
    parameters : callable
        Takes the rows and the terms of each parameter, of shape (C, N*S); returns their sums.
    """

    words: ClassVar[Mapping[str, str]] = {
        **BackwardFormula.words,
        "": "dy and gamma*dy, each alone or with gamma, 1, gamma, x - mean and gamma*(x - mean)",
        "gain": "the factor of dy*gamma in dx",
        "offset": "the term sum(dy*gamma)/M of dx",
        "no_gamma": "the factor of dy without gamma in dx",
        "gamma_twice": "the factor of dy*gamma**2 in dx",
        "offset_gamma": "the factor of gamma in dx",
        "slope_gamma": "the factor of gamma*(x - mean) in dx",
    }

    weight: Callable[[Rows], Array] = lambda rows: rows.weights
    parameters: Callable[[Rows, Array], Array] = lambda rows, terms: terms.sum(1)

    def inputs(self, data: LayerData, **options: Any) -> Rows:
        """Return the inputs of a call, as :meth:`Rows.of` does."""
        return Rows.of(data, **options)

    def known_mistakes(self, channels: Channels) -> list[Mistake]:
        """Return the catalogue of the normalisation, and what vectorised loops do wrong."""
        assert isinstance(channels, Rows)
        kind = channels.axes.normalization
        vectors = [replace(m, says=worded(m.says, kind)) for m in of_vectors(channels)]
        return [*_mistakes(kind), *vectors]

    def partial_mistakes(self, channels: Channels) -> list[Mistake]:
        """Return no mistakes: the sums of dx and those of the parameters have other elements."""
        return []

    def fitted_mistakes(self, channels: Channels, own: Values) -> Iterator[Mistake]:
        """Yield another epsilon and another M: numbers of parameters say nothing about rows."""
        yield from self.other_constants(channels, own)

    def functions(self, channels: Channels) -> Values:
        """Return dy*gamma, 1, x - mean, and these with other powers of gamma."""
        assert isinstance(channels, Rows)
        found = dict(BackwardFormula.functions(self, channels))
        weights = channels.weights
        if (weights != 1.0).any():
            found |= {"no_gamma": channels.plain, "gamma_twice": channels.dy * weights}
            found |= {"offset_gamma": weights, "slope_gamma": found["slope"] * weights}
        return found

    def numbers(self, channels: Channels) -> Values:
        """Return dx itself, the coefficients that the catalogue of batch normalisation changes,
        zeros for the others, and dgamma and dbeta.
        """
        assert isinstance(channels, Rows)
        found = dict(BackwardFormula.numbers(self, self._weighted(channels)))
        found |= {name: 0.0 * found["gain"] for name in self.words if name.endswith("gamma")}
        return found | {"gamma_twice": 0.0 * found["gain"]} | dict(self.rows(channels))

    def rows(self, channels: Channels) -> Iterator[tuple[Quantity, Array]]:
        """Yield dbeta, dgamma and dx."""
        assert isinstance(channels, Rows)
        rows = self._weighted(channels)
        with np.errstate(all="ignore"):
            mean, variance = self.statistics(rows)
            s = self.inverse_deviation(variance, rows.epsilon, rows)
            terms = rows.plain, rows.plain * self.deviation(rows.x, mean[:, None])
            elements = map(rows.of_parameters, (s, *terms))
            count = rows.parameters.shape[1]
            known = _OfParameters(rows, count, rows.scale[:, None], *elements)
            if rows.axes.normalization.is_centred:
                yield "dbeta", self.parameters(rows, self.dbeta(known))
            yield "dgamma", self.parameters(rows, self.dgamma(known))
        yield "dx", dict(BackwardFormula.rows(self, rows))["dx"]

    def _weighted(self, rows: Rows) -> Rows:
        return replace(rows, dy=rows.plain * self.weight(rows))


# The correct formulas, with and without a mean.
_CENTRED = RowFormula()
_UNCENTRED = RowFormula(mean_dy=lambda k: 0.0 * k.mean_dy)


def backward_formula(normalization: Normalization) -> BackwardFormula:
    """Return the correct formula of the gradients of a normalisation."""
    if normalization == BATCH_NORM:
        return BACKWARD
    return _CENTRED if normalization.is_centred else _UNCENTRED
