"""The oracle's forward, inference and backward passes."""

from __future__ import annotations

import numpy as np

from backnorm.activations import Activation
from backnorm.reference._blocks import Blocks, Outputs, Weights, sums
from backnorm.reference._masks import masked
from backnorm.reference._results import ExactGradients, ExactNormalized, ExactOutput
from backnorm.reference._terms import Term, inverse_deviation, rectified


def backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None = None,
    *,
    mask: np.ndarray | None = None,
    weights: np.ndarray | None = None,
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
        Statistics, shape (C,), used unchanged.
    gamma : numpy.ndarray, optional
        Scale, shape (C,); 1 if absent.
    mask : numpy.ndarray, optional
        Mask of a ReLU after the layer, uint8; dy is replaced by 0 where the bit is not set.
    weights : numpy.ndarray, optional
        How often each element counts in mean and variance, in a shape that broadcasts with x: in
        training, w/W takes the place of 1/M, where W is the sum of a channel's weights w.
    epsilon : float
        Added to the variance.
    data_format : {"NCX", "NXC"}
        Channel axis 1, or last.
    training : bool
        True: mean and variance are functions of x; False: constants.

    Returns
    -------
    ExactGradients
        T of dx is ``|gamma s| (|dy| + sum|dy|/M + |c| s**2 sum|dy c|/M)``, with frozen statistics
        ``|gamma s dy|``. T of dgamma is ``s sum|dy c|``, of dbeta ``sum|dy|``. If M = 0, dx is
        empty and the others are 0.
    """
    blocks = Blocks(x.shape, data_format)
    outputs = Outputs(blocks, ("dx",), ("dgamma", "dbeta"))
    xs, dys = blocks.view(x), blocks.view(dy if mask is None else masked(dy, mask, x))
    counting = Weights(blocks, x, weights)
    with np.errstate(all="ignore"):
        for part in blocks.parts():
            m, g = part.channel(mean), part.channel(gamma, 1.0)
            s = inverse_deviation(part.channel(variance), epsilon)
            loaded = ((part.load(dys, cell), part.load(xs, cell)) for cell in part.cells())
            sum_dy, sum_dy_c = sums(part, 2, ((d, (v - m).single() * d) for d, v in loaded))
            outputs.write("dbeta", part.cell, sum_dy)
            outputs.write("dgamma", part.cell, s * sum_dy_c)
            count = counting.total(part)
            by_mean, by_square = sum_dy / count, s * s * (sum_dy_c / count)
            for cell in part.cells():
                d, c = part.load(dys, cell), (part.load(xs, cell) - m).single()
                if training:
                    d = d - counting.times(by_mean + c * by_square, part, cell)
                outputs.write("dx", cell, g * s * d)
    return outputs.as_record(ExactGradients)


def forward(
    x: np.ndarray,
    gamma: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    *,
    epsilon: float,
    data_format: str = "NCX",
    activation: Activation | None = None,
    residual: np.ndarray | None = None,
    weights: np.ndarray | None = None,
) -> ExactNormalized:
    """Return the exact training forward pass; y is computed from the unrounded statistics.

    Parameters
    ----------
    x, gamma, beta, epsilon, data_format, weights
        As in :func:`backward`; beta is 0 if absent.
    activation : Activation, optional
        A ReLU, whose ceiling is a number of x's type.
    residual : numpy.ndarray, optional
        Added before the ReLU; of x's shape.

    Returns
    -------
    ExactNormalized
        T of mean is ``sum|x|/M``, of variance ``sum(c**2)/M``, the variance itself. T of y is
        ``|gamma s| (|x| + sum|x|/M) + |beta| + |residual|``: here the mean is a rounded sum of x.
        If M = 0, y is empty, and mean and variance are 0.
    """
    blocks = Blocks(x.shape, data_format)
    outputs = Outputs(blocks, ("y",), ("mean", "variance", "inverse_deviation"))
    xs, added = blocks.view(x), [] if residual is None else [blocks.view(residual)]
    counting = Weights(blocks, x, weights)
    with np.errstate(all="ignore"):
        for part in blocks.parts():
            g, b = part.channel(gamma, 1.0), part.channel(beta)
            count = counting.total(part)
            loaded = ((part.load(counting.counted, cell), cell) for cell in part.cells())
            (total,) = sums(part, 1, ((counting.times(v, part, cell),) for v, cell in loaded))
            m = (total / count).settled()
            squares = (
                ((part.load(counting.counted, cell) - m).single(), cell) for cell in part.cells()
            )
            (square,) = sums(part, 1, ((counting.times(c * c, part, cell),) for c, cell in squares))
            w = (square / count).settled()
            outputs.write("mean", part.cell, m)
            outputs.write("variance", part.cell, w.single())
            s = inverse_deviation(w, epsilon)
            outputs.write("inverse_deviation", part.cell, s)
            for cell in part.cells():
                y = g * s * (part.load(xs, cell) - m) + b
                terms = [part.load(array, cell) for array in added]
                outputs.write("y", cell, _followed(y, terms, activation))
    return outputs.as_record(ExactNormalized)


def inference(
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    *,
    epsilon: float,
    data_format: str = "NCX",
    activation: Activation | None = None,
    residual: np.ndarray | None = None,
) -> ExactOutput:
    """Return the exact normalisation of x by given statistics.

    Parameters
    ----------
    x, mean, variance, gamma, beta, epsilon, data_format, activation, residual
        As in :func:`backward` and :func:`forward`.

    Returns
    -------
    ExactOutput
        T of y is ``|gamma s c| + |beta| + |residual|``.
    """
    blocks = Blocks(x.shape, data_format)
    outputs = Outputs(blocks, ("y",))
    xs, added = blocks.view(x), [] if residual is None else [blocks.view(residual)]
    with np.errstate(all="ignore"):
        for part in blocks.parts():
            m, g, b = part.channel(mean), part.channel(gamma, 1.0), part.channel(beta)
            s = inverse_deviation(part.channel(variance), epsilon)
            for cell in part.cells():
                y = g * s * (part.load(xs, cell) - m).single() + b
                terms = [part.load(array, cell) for array in added]
                outputs.write("y", cell, _followed(y, terms, activation))
    return outputs.as_record(ExactOutput)


def _followed(y: Term, added: list[Term], activation: Activation | None) -> Term:
    """Return activation(y + residual)."""
    y = y.settled()
    for term in added:
        y = (y + term).settled()
    return y if activation is None else rectified(y, activation.ceiling)
