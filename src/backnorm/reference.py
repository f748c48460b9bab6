"""The oracle: batch normalisation's formulas in double-double arithmetic, slow and obvious.

With M elements per channel, c = x - mean and s = 1 / sqrt(variance + epsilon)::

    dbeta  = sum(dy)
    dgamma = s * sum(dy * c)
    dx     = gamma * s * (dy - sum(dy)/M - c * s**2 * sum(dy * c)/M)      training
    dx     = gamma * s * dy                                               statistics are constants

    y      = gamma * s * c + beta

Beside each result stands T, the sum of the magnitudes of the terms of that element's formula: the
yardstick of what rounding may cost where terms cancel (:mod:`backnorm.conformance.judge`).

The arithmetic carries about 106 bits, so it can judge float64. Work proceeds in small blocks:
besides the results, memory does not grow with the problem. Where a result is not finite, plain
float64 evaluation of the same formula decides between infinity and NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from backnorm._doubledouble import Exact, FloatArray
from backnorm.problem import channel_axis_of

__all__ = [
    "Exact",
    "ExactGradients",
    "ExactNormalized",
    "ExactOutput",
    "backward",
    "forward",
    "inference",
]

# Elements in one block: a score of float64 temporaries of this size stay in the second-level cache.
_BLOCK = 1 << 14
# Channels taken together at the least, so that channels-last data is read in whole cache lines.
_BLOCK_CHANNELS = 16

# The formulas below are written once, and evaluated with Exact or with float64 arrays.
_Value = Any


@dataclass(frozen=True, slots=True)
class ExactGradients:
    """Exact gradients and the magnitudes of their terms.

    Attributes
    ----------
    dx, dgamma, dbeta : Exact
        Of x's shape; (C,); (C,).
    dx_terms, dgamma_terms, dbeta_terms : numpy.ndarray
        float64: T of each element of the gradient of that name.
    """

    dx: Exact
    dgamma: Exact
    dbeta: Exact
    dx_terms: FloatArray
    dgamma_terms: FloatArray
    dbeta_terms: FloatArray


@dataclass(frozen=True, slots=True)
class ExactNormalized:
    """Exact training forward: y, the batch mean and the biased variance, with their terms."""

    y: Exact
    mean: Exact
    variance: Exact
    y_terms: FloatArray
    mean_terms: FloatArray
    variance_terms: FloatArray


@dataclass(frozen=True, slots=True)
class ExactOutput:
    """Exact inference: y and the magnitudes of its terms."""

    y: Exact
    y_terms: FloatArray


def backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None = None,
    *,
    epsilon: float,
    data_format: str = "NCX",
    training: bool = True,
) -> ExactGradients:
    """Return the exact gradients of batch normalisation for the given inputs.

    Parameters
    ----------
    x, dy : numpy.ndarray
        Input of the layer and gradient of its output; equal shapes, rank >= 2, any supported type.
    mean, variance : numpy.ndarray
        Statistics, shape (C,), used as supplied.
    gamma : numpy.ndarray, optional
        Scale, shape (C,); absent, 1.
    epsilon : float
        Added to the variance.
    data_format : {"NCX", "NXC"}
        Channel axis 1, or last.
    training : bool
        True: mean and variance are functions of x; False: constants.

    Returns
    -------
    ExactGradients
        With T of dx: ``|gamma s| (|dy| + sum|dy|/M + |c| s**2 sum|dy c|/M)``, frozen
        ``|gamma s dy|``; of dgamma ``s sum|dy c|``; of dbeta ``sum|dy|``. M = 0 gives an empty dx
        and zeros.
    """
    blocks = _Blocks(x.shape, data_format)
    x3, dy3 = blocks.view(x), blocks.view(dy)
    channels, count = blocks.channels, blocks.count
    dx, dx_terms = _empty_exact(x3.shape), np.empty(x3.shape)
    dgamma, dbeta = _empty_exact((channels,)), _empty_exact((channels,))
    dgamma_terms, dbeta_terms = np.empty(channels), np.empty(channels)

    with np.errstate(all="ignore"):
        for part in blocks.channel_parts():
            m = _column(mean, part)
            g = 1.0 if gamma is None else _column(gamma, part)
            s = _inverse_deviation(_column(variance, part), epsilon)

            width = part.stop - part.start
            sum_dy, sum_dy_xmu = _zeros(width), _zeros(width)
            plain_dy, plain_dy_xmu, abs_dy, abs_dy_xmu = np.zeros((4, width, 1))
            for cell in blocks.cells(part):
                d, v = _load(dy3, cell), _load(x3, cell)
                sum_dy += _row_sum(Exact.of(d))
                sum_dy_xmu += _row_sum((Exact.of(v) - m) * d)
                plain_dy += d.sum(1, keepdims=True)
                plain_dy_xmu += (d * (v - m)).sum(1, keepdims=True)
                abs_dy += np.abs(d).sum(1, keepdims=True)
                abs_dy_xmu += np.abs(d * (v - m)).sum(1, keepdims=True)
            sum_dy = sum_dy.settled(plain_dy)
            sum_dy_xmu = sum_dy_xmu.settled(plain_dy_xmu)

            _store(dbeta, part, sum_dy[:, 0])
            _store(dgamma, part, (s * sum_dy_xmu).settled(s.hi * sum_dy_xmu.hi)[:, 0])
            dbeta_terms[part] = abs_dy[:, 0]
            dgamma_terms[part] = (s.hi * abs_dy_xmu)[:, 0]

            for cell in blocks.cells(part):
                d, v = _load(dy3, cell), _load(x3, cell)
                if training:
                    value = _dx(d, Exact.of(v) - m, g, s, sum_dy, sum_dy_xmu, count)
                    plain = _dx(d, v - m, g, s.hi, sum_dy.hi, sum_dy_xmu.hi, count)
                    terms = -_dx(
                        -np.abs(d), np.abs(v - m), np.abs(g), s.hi, abs_dy, abs_dy_xmu, count
                    )
                else:
                    value, plain = g * s * d, g * s.hi * d
                    terms = np.abs(plain)
                value = value.settled(plain)
                _store_block(dx.hi, cell, value.hi)
                _store_block(dx.lo, cell, value.lo)
                _store_block(dx_terms, cell, terms)

    return ExactGradients(
        Exact(dx.hi.reshape(x.shape), dx.lo.reshape(x.shape)),
        dgamma,
        dbeta,
        dx_terms.reshape(x.shape),
        dgamma_terms,
        dbeta_terms,
    )


def forward(
    x: np.ndarray,
    gamma: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    *,
    epsilon: float,
    data_format: str = "NCX",
) -> ExactNormalized:
    """Return the exact training forward; y is computed from the unrounded statistics.

    Parameters
    ----------
    x, gamma, beta, epsilon, data_format
        As in :func:`backward`; beta absent is 0.

    Returns
    -------
    ExactNormalized
        With T of mean: ``sum|x|/M``; of variance: itself, ``sum(c**2)/M``; of y:
        ``|gamma s| (|x| + sum|x|/M) + |beta|``, because the mean is itself a rounded sum of x here.
        M = 0 gives an empty y and zeros.
    """
    blocks = _Blocks(x.shape, data_format)
    x3 = blocks.view(x)
    channels, count = blocks.channels, max(blocks.count, 1)
    y, y_terms = _empty_exact(x3.shape), np.empty(x3.shape)
    mean, variance = _empty_exact((channels,)), _empty_exact((channels,))
    mean_terms, variance_terms = np.empty(channels), np.empty(channels)

    with np.errstate(all="ignore"):
        for part in blocks.channel_parts():
            g = 1.0 if gamma is None else _column(gamma, part)
            b = 0.0 if beta is None else _column(beta, part)
            width = part.stop - part.start

            total = _zeros(width)
            plain, magnitude = np.zeros((2, width, 1))
            for cell in blocks.cells(part):
                v = _load(x3, cell)
                total += _row_sum(Exact.of(v))
                plain += v.sum(1, keepdims=True)
                magnitude += np.abs(v).sum(1, keepdims=True)
            m = (total / float(count)).settled(plain / count)
            magnitude /= count

            squares = _zeros(width)
            plain = np.zeros((width, 1))
            for cell in blocks.cells(part):
                v = _load(x3, cell)
                c = Exact.of(v) - m
                squares += _row_sum(c * c)
                plain += np.square(v - m.hi).sum(1, keepdims=True)
            w = (squares / float(count)).settled(plain / count)

            _store(mean, part, m[:, 0])
            _store(variance, part, w[:, 0])
            mean_terms[part] = magnitude[:, 0]
            variance_terms[part] = w.hi[:, 0]

            s = _inverse_deviation(w, epsilon)
            for cell in blocks.cells(part):
                v = _load(x3, cell)
                value = (g * s * (Exact.of(v) - m) + b).settled(g * s.hi * (v - m.hi) + b)
                _store_block(y.hi, cell, value.hi)
                _store_block(y.lo, cell, value.lo)
                _store_block(y_terms, cell, np.abs(g) * s.hi * (np.abs(v) + magnitude) + np.abs(b))

    return ExactNormalized(
        Exact(y.hi.reshape(x.shape), y.lo.reshape(x.shape)),
        mean,
        variance,
        y_terms.reshape(x.shape),
        mean_terms,
        variance_terms,
    )


def inference(
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    *,
    epsilon: float,
    data_format: str = "NCX",
) -> ExactOutput:
    """Return the exact normalisation of x by given statistics.

    Parameters
    ----------
    x, mean, variance, gamma, beta, epsilon, data_format
        As in :func:`backward`; beta absent is 0.

    Returns
    -------
    ExactOutput
        With T of y: ``|gamma s c| + |beta|``.
    """
    blocks = _Blocks(x.shape, data_format)
    x3 = blocks.view(x)
    y, y_terms = _empty_exact(x3.shape), np.empty(x3.shape)
    with np.errstate(all="ignore"):
        for part in blocks.channel_parts():
            m = _column(mean, part)
            g = 1.0 if gamma is None else _column(gamma, part)
            b = 0.0 if beta is None else _column(beta, part)
            s = _inverse_deviation(_column(variance, part), epsilon)
            for cell in blocks.cells(part):
                v = _load(x3, cell)
                plain = g * s.hi * (v - m) + b
                value = (g * s * (Exact.of(v) - m) + b).settled(plain)
                _store_block(y.hi, cell, value.hi)
                _store_block(y.lo, cell, value.lo)
                _store_block(y_terms, cell, np.abs(g * s.hi * (v - m)) + np.abs(b))
    return ExactOutput(
        Exact(y.hi.reshape(x.shape), y.lo.reshape(x.shape)), y_terms.reshape(x.shape)
    )


def _dx(
    dy: _Value, c: _Value, gamma: _Value, s: _Value, sum_dy: _Value, sum_dy_xmu: _Value, count: int
) -> _Value:
    """Return the training formula of dx."""
    return gamma * s * (dy - sum_dy / float(count) - c * (s * s * (sum_dy_xmu / float(count))))


def _inverse_deviation(variance: Exact | FloatArray, epsilon: float) -> Exact:
    """Return ``1 / sqrt(variance + epsilon)``."""
    exact = variance if isinstance(variance, Exact) else Exact.of(variance)
    total = exact + epsilon
    return (1.0 / total.sqrt()).settled(1.0 / np.sqrt(exact.hi + epsilon))


class _Blocks:
    """A tensor seen as (outer, channel, inner), and the small blocks it is worked through in."""

    def __init__(self, shape: tuple[int, ...], data_format: str) -> None:
        axis = channel_axis_of(data_format) % len(shape)
        self.channels = shape[axis]
        self.outer = math.prod(shape[:axis])
        self.inner = math.prod(shape[axis + 1 :])
        self.count = self.outer * self.inner

    def view(self, array: np.ndarray) -> np.ndarray:
        """Return `array` in shape (outer, channel, inner)."""
        return array.reshape(self.outer, self.channels, self.inner)

    def channel_parts(self) -> Iterator[slice]:
        """Yield ranges of channels."""
        step = max(_BLOCK_CHANNELS, _BLOCK // max(self.count, 1))
        for start in range(0, self.channels, step):
            yield slice(start, min(start + step, self.channels))

    def cells(self, part: slice) -> Iterator[tuple[slice, slice, slice]]:
        """Yield blocks (outer, channel, inner) that together cover the channels of `part`."""
        room = max(1, _BLOCK // (part.stop - part.start))
        inner_step = max(1, min(self.inner, room))
        outer_step = max(1, room // inner_step)
        for outer in range(0, self.outer, outer_step):
            for inner in range(0, self.inner, inner_step):
                yield slice(outer, outer + outer_step), part, slice(inner, inner + inner_step)


def _load(view: np.ndarray, cell: tuple[slice, slice, slice]) -> FloatArray:
    """Return a block as float64, shape (channels, elements)."""
    block = np.moveaxis(view[cell], 1, 0)
    return block.astype(np.float64, order="C").reshape(block.shape[0], -1)


def _store_block(view: FloatArray, cell: tuple[slice, slice, slice], value: FloatArray) -> None:
    """Write a block of shape (channels, elements) back into its place."""
    target = np.moveaxis(view[cell], 1, 0)
    target[...] = value.reshape(target.shape)


def _column(values: np.ndarray, part: slice) -> FloatArray:
    return np.asarray(values[part], np.float64)[:, None]


def _row_sum(value: Exact) -> Exact:
    return value.sum()[:, None]


def _zeros(channels: int) -> Exact:
    return Exact.of(np.zeros((channels, 1)))


def _empty_exact(shape: tuple[int, ...]) -> Exact:
    return Exact(np.empty(shape), np.empty(shape))


def _store(target: Exact, part: slice, value: Exact) -> None:
    target.hi[part], target.lo[part] = value.hi, value.lo
