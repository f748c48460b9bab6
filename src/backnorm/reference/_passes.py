"""The oracle's forward, backward and inference passes."""

from __future__ import annotations

from typing import Any

import numpy as np

from backnorm._doubledouble import Exact
from backnorm.reference._blocks import (
    Blocks,
    column,
    empty_exact,
    inverse_deviation,
    load,
    row_sum,
    store,
    store_block,
    zeros,
)
from backnorm.reference._results import ExactGradients, ExactNormalized, ExactOutput

__all__ = ["backward", "forward", "inference"]

# The formulas are written once, and evaluated with Exact or with float64 arrays.
_Value = Any


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
    blocks = Blocks(x.shape, data_format)
    x3, dy3 = blocks.view(x), blocks.view(dy)
    channels, count = blocks.channels, blocks.count
    dx, dx_terms = empty_exact(x3.shape), np.empty(x3.shape)
    dgamma, dbeta = empty_exact((channels,)), empty_exact((channels,))
    dgamma_terms, dbeta_terms = np.empty(channels), np.empty(channels)

    with np.errstate(all="ignore"):
        for part in blocks.channel_parts():
            m = column(mean, part)
            g = 1.0 if gamma is None else column(gamma, part)
            s = inverse_deviation(column(variance, part), epsilon)

            width = part.stop - part.start
            sum_dy, sum_dy_xmu = zeros(width), zeros(width)
            plain_dy, plain_dy_xmu, abs_dy, abs_dy_xmu = np.zeros((4, width, 1))
            for cell in blocks.cells(part):
                d, v = load(dy3, cell), load(x3, cell)
                sum_dy += row_sum(Exact.of(d))
                sum_dy_xmu += row_sum((Exact.of(v) - m) * d)
                plain_dy += d.sum(1, keepdims=True)
                plain_dy_xmu += (d * (v - m)).sum(1, keepdims=True)
                abs_dy += np.abs(d).sum(1, keepdims=True)
                abs_dy_xmu += np.abs(d * (v - m)).sum(1, keepdims=True)
            sum_dy = sum_dy.settled(plain_dy)
            sum_dy_xmu = sum_dy_xmu.settled(plain_dy_xmu)

            store(dbeta, part, sum_dy[:, 0])
            store(dgamma, part, (s * sum_dy_xmu).settled(s.hi * sum_dy_xmu.hi)[:, 0])
            dbeta_terms[part] = abs_dy[:, 0]
            dgamma_terms[part] = (s.hi * abs_dy_xmu)[:, 0]

            for cell in blocks.cells(part):
                d, v = load(dy3, cell), load(x3, cell)
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
                store_block(dx.hi, cell, value.hi)
                store_block(dx.lo, cell, value.lo)
                store_block(dx_terms, cell, terms)

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
    blocks = Blocks(x.shape, data_format)
    x3 = blocks.view(x)
    channels, count = blocks.channels, max(blocks.count, 1)
    y, y_terms = empty_exact(x3.shape), np.empty(x3.shape)
    mean, variance = empty_exact((channels,)), empty_exact((channels,))
    mean_terms, variance_terms = np.empty(channels), np.empty(channels)

    with np.errstate(all="ignore"):
        for part in blocks.channel_parts():
            g = 1.0 if gamma is None else column(gamma, part)
            b = 0.0 if beta is None else column(beta, part)
            width = part.stop - part.start

            total = zeros(width)
            plain, magnitude = np.zeros((2, width, 1))
            for cell in blocks.cells(part):
                v = load(x3, cell)
                total += row_sum(Exact.of(v))
                plain += v.sum(1, keepdims=True)
                magnitude += np.abs(v).sum(1, keepdims=True)
            m = (total / float(count)).settled(plain / count)
            magnitude /= count

            squares = zeros(width)
            plain = np.zeros((width, 1))
            for cell in blocks.cells(part):
                v = load(x3, cell)
                c = Exact.of(v) - m
                squares += row_sum(c * c)
                plain += np.square(v - m.hi).sum(1, keepdims=True)
            w = (squares / float(count)).settled(plain / count)

            store(mean, part, m[:, 0])
            store(variance, part, w[:, 0])
            mean_terms[part] = magnitude[:, 0]
            variance_terms[part] = w.hi[:, 0]

            s = inverse_deviation(w, epsilon)
            for cell in blocks.cells(part):
                v = load(x3, cell)
                value = (g * s * (Exact.of(v) - m) + b).settled(g * s.hi * (v - m.hi) + b)
                store_block(y.hi, cell, value.hi)
                store_block(y.lo, cell, value.lo)
                store_block(y_terms, cell, np.abs(g) * s.hi * (np.abs(v) + magnitude) + np.abs(b))

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
    blocks = Blocks(x.shape, data_format)
    x3 = blocks.view(x)
    y, y_terms = empty_exact(x3.shape), np.empty(x3.shape)
    with np.errstate(all="ignore"):
        for part in blocks.channel_parts():
            m = column(mean, part)
            g = 1.0 if gamma is None else column(gamma, part)
            b = 0.0 if beta is None else column(beta, part)
            s = inverse_deviation(column(variance, part), epsilon)
            for cell in blocks.cells(part):
                v = load(x3, cell)
                plain = g * s.hi * (v - m) + b
                value = (g * s * (Exact.of(v) - m) + b).settled(plain)
                store_block(y.hi, cell, value.hi)
                store_block(y.lo, cell, value.lo)
                store_block(y_terms, cell, np.abs(g * s.hi * (v - m)) + np.abs(b))
    return ExactOutput(
        Exact(y.hi.reshape(x.shape), y.lo.reshape(x.shape)), y_terms.reshape(x.shape)
    )


def _dx(
    dy: _Value, c: _Value, gamma: _Value, s: _Value, sum_dy: _Value, sum_dy_xmu: _Value, count: int
) -> _Value:
    """Return the training formula of dx."""
    return gamma * s * (dy - sum_dy / float(count) - c * (s * s * (sum_dy_xmu / float(count))))
