"""The oracle's second order: the chain rule through the backward pass, step by step.

A channel has M elements. c = x - mean and s = 1/sqrt(variance + epsilon). ddx, ddgamma and ddbeta
are the cotangents of dx, dgamma and dbeta, the results of the backward pass. The sums of a channel
are D = sum(dy), Q = sum(dy * c), I = sum(ddx), P = sum(ddx * c) and R = sum(ddx * dy). Each result
of the backward pass is multiplied by its cotangent, and all these products are added up. The part
of this sum that belongs to one channel is ::

    L = gamma*s*(R - I*D/M - s**2*P*Q/M) + ddgamma*s*Q + ddbeta*D       training
    L = gamma*s*R                        + ddgamma*s*Q + ddbeta*D       statistics are constants

The second-order gradients are the derivatives of L. In training, L depends on x through c in P and
Q, through the mean in c, and through the variance in s. The derivatives of mean and variance with
respect to an element of x are 1/M and 2*c/M.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from backnorm.reference._blocks import Blocks, Outputs, sums
from backnorm.reference._results import ExactSecondGradients
from backnorm.reference._terms import Term, inverse_deviation


class _Channel(NamedTuple):
    """Values of a channel: its parameters, M, and the five sums of the module's docstring."""

    gamma: Term
    s: Term
    ddgamma: Term
    ddbeta: Term
    elements: float
    d: Term
    q: Term
    i: Term
    p: Term
    r: Term


def double_backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None = None,
    *,
    ddx: np.ndarray | None = None,
    ddgamma: np.ndarray | None = None,
    ddbeta: np.ndarray | None = None,
    epsilon: float,
    data_format: str = "NCX",
    training: bool = True,
) -> ExactSecondGradients:
    """Return the exact gradients of <ddx, dx> + <ddgamma, dgamma> + <ddbeta, dbeta>.

    dx, dgamma and dbeta are the results of the backward pass. <a, b> is the sum of the products of
    the elements of a and b. The gradients are those with respect to x, dy and gamma.

    Parameters
    ----------
    x, dy, mean, variance, gamma, epsilon, data_format, training
        As in :func:`backward`.
    ddx : numpy.ndarray, optional
        An array of x's shape; zero if absent.
    ddgamma, ddbeta : numpy.ndarray, optional
        Shape (C,); zero if absent.

    Returns
    -------
    ExactSecondGradients
        Gradients with respect to x, dy and gamma. T is the formula in which magnitudes replace
        terms, sums of magnitudes replace sums, and plus replaces minus. M = 0 gives zeros.
    """
    blocks = Blocks(x.shape, data_format)
    outputs = Outputs(blocks, ("x", "dy"), ("gamma",))
    ddx = np.broadcast_to(0.0, x.shape) if ddx is None else ddx
    xs, dys, ddxs = map(blocks.view, (x, dy, ddx))
    by_gamma, by_dy, by_x = (
        (_gamma, _dy, _x) if training else (_frozen_gamma, _frozen_dy, _frozen_x)
    )
    with np.errstate(all="ignore"):
        for part in blocks.parts():
            m, s = part.channel(mean), inverse_deviation(part.channel(variance), epsilon)
            loaded = (
                (part.load(dys, cell), part.load(ddxs, cell), (part.load(xs, cell) - m).single())
                for cell in part.cells()
            )
            totals = sums(part, 5, ((d, d * c, e, e * c, d * e) for d, e, c in loaded))
            parameters = part.channel(gamma, 1.0), s, part.channel(ddgamma), part.channel(ddbeta)
            k = _Channel(*parameters, blocks.count, *totals)
            outputs.write("gamma", part.cell, by_gamma(k))
            for cell in part.cells():
                d, e = part.load(dys, cell), part.load(ddxs, cell)
                c = (part.load(xs, cell) - m).single()
                outputs.write("x", cell, by_x(d, e, c, k))
                outputs.write("dy", cell, by_dy(d, e, c, k))
    return outputs.as_record(ExactSecondGradients)


def _gamma(k: _Channel) -> Term:
    """Return dL/dgamma."""
    return k.s * (k.r - (k.i * k.d / k.elements + k.s * k.p * (k.s * k.q) / k.elements))


def _by_q(k: _Channel) -> Term:
    """Return dL/d(s*Q); the module's docstring defines L, P and Q.

    A term of the result has the factor s*s*P. It is computed as s*(s*P), because s*s can overflow.
    """
    return k.ddgamma - k.gamma * k.s * (k.s * k.p) / k.elements


def _dy(d: Term, e: Term, c: Term, k: _Channel) -> Term:
    """Return dL/d(dy). L depends on dy through the sums R, Q and D.

    The argument `d` is dy, and `e` is ddx.
    """
    by_d = k.ddbeta - k.gamma * k.s * k.i / k.elements
    return k.gamma * k.s * e + _by_q(k) * (k.s * c) + by_d


def _x(d: Term, e: Term, c: Term, k: _Channel) -> Term:
    """Return dL/dx, where L, Q, P and c are those of the module's docstring.

    L depends on x in three ways: through c in the sums Q and P, through the mean, and through the
    variance. The argument `d` is dy, and `e` is ddx.
    """
    by_q, by_p = _by_q(k), k.gamma * k.s * (k.s * k.q) / k.elements
    by_c, by_mean = by_q * d - by_p * e, by_p * k.i - by_q * k.d
    # s = (variance + epsilon)**(-1/2), so dL/dvariance is -s**3/2 times dL/ds.
    products = k.i * k.d / k.elements + 3.0 * (k.s * k.p * (k.s * k.q)) / k.elements
    by_s_times_s = k.gamma * k.s * (k.r - products) + k.ddgamma * (k.s * k.q)
    return k.s * (by_c + by_mean / k.elements - by_s_times_s * (k.s * c) / k.elements)


def _frozen_gamma(k: _Channel) -> Term:
    return k.s * k.r


def _frozen_dy(d: Term, e: Term, c: Term, k: _Channel) -> Term:
    return k.gamma * k.s * e + k.ddgamma * k.s * c + k.ddbeta


def _frozen_x(d: Term, e: Term, c: Term, k: _Channel) -> Term:
    return k.ddgamma * k.s * d
