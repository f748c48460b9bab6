"""The oracle's second order: the chain rule through the backward pass, step by step.

With the sums of a channel D = sum(dy), Q = sum(dy * c), I = sum(ddx), P = sum(ddx * c) and
R = sum(ddx * dy), the backward pass's results weighted by their cotangents come to ::

    L = gamma*s*(R - I*D/M - s**2*P*Q/M) + ddgamma*s*Q + ddbeta*D       training
    L = gamma*s*R                        + ddgamma*s*Q + ddbeta*D       statistics are constants

and what is returned are the derivatives of L. In training L depends on x through c in P and Q,
through the mean in c, and through the variance in s; their derivatives by an element of x are 1/M
and 2*c/M.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from backnorm._doubledouble import Exact, FloatArray
from backnorm.reference._blocks import (
    Blocks,
    Cell,
    column,
    empty_exact,
    inverse_deviation,
    load,
    row_sum,
    store,
    store_block,
    zeros,
)
from backnorm.reference._results import ExactSecondGradients

__all__ = ["double_backward"]

# The formulas are written once, and evaluated with Exact, with float64, and with magnitudes.
_Value = Any


class _Sums(NamedTuple):
    """The five sums of a channel, as in the module's docstring."""

    d: _Value
    q: _Value
    i: _Value
    p: _Value
    r: _Value


class _Channel(NamedTuple):
    """Values of a channel; `minus` is -1, or 1 where magnitudes are added up."""

    gamma: _Value
    s: _Value
    ddgamma: _Value
    ddbeta: _Value
    elements: float
    minus: float


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

    Parameters
    ----------
    x, dy, mean, variance, gamma, epsilon, data_format, training
        As in :func:`backward`.
    ddx : numpy.ndarray, optional
        Of x's shape; absent, zero.
    ddgamma, ddbeta : numpy.ndarray, optional
        Shape (C,); absent, zero.

    Returns
    -------
    ExactSecondGradients
        Gradients with respect to x, dy and gamma. T is the formula with magnitudes for its terms,
        sums of magnitudes for its sums, and plus for minus. M = 0 gives zeros.
    """
    blocks = Blocks(x.shape, data_format)
    x3, dy3 = blocks.view(x), blocks.view(dy)
    ddx3 = None if ddx is None else blocks.view(ddx)
    results = {name: empty_exact(x3.shape) for name in ("x", "dy")}
    terms = {name: np.empty(x3.shape) for name in ("x", "dy")}
    gradient, gradient_terms = empty_exact((blocks.channels,)), np.empty(blocks.channels)
    by_gamma, by_dy, by_x = (
        (_gamma, _dy, _x) if training else (_frozen_gamma, _frozen_dy, _frozen_x)
    )

    def elements(part: slice) -> Iterator[tuple[Cell, FloatArray, FloatArray, FloatArray]]:
        for cell in blocks.cells(part):
            d = load(dy3, cell)
            yield cell, load(x3, cell), d, np.zeros_like(d) if ddx3 is None else load(ddx3, cell)

    with np.errstate(all="ignore"):
        for part in blocks.channel_parts():
            m = column(mean, part)
            s = inverse_deviation(column(variance, part), epsilon)
            g, dg, db = (
                np.full_like(m, absent) if values is None else column(values, part)
                for values, absent in ((gamma, 1.0), (ddgamma, 0.0), (ddbeta, 0.0))
            )
            count = float(max(blocks.count, 1))
            exact = _Channel(g, s, dg, db, count, -1.0)
            plain = _Channel(g, s.hi, dg, db, count, -1.0)
            sizes = _Channel(np.abs(g), s.hi, np.abs(dg), np.abs(db), count, 1.0)

            width = part.stop - part.start
            total = [zeros(width) for _ in _Sums._fields]
            rough, magnitude = np.zeros((2, len(_Sums._fields), width, 1))
            for _, v, d, e in elements(part):
                c = Exact.of(v) - m
                for k, term in enumerate(_summands(Exact.of(d), Exact.of(e), c)):
                    total[k] += row_sum(term)
                for k, term in enumerate(_summands(d, e, v - m)):
                    rough[k] += term.sum(1, keepdims=True)
                    magnitude[k] += np.abs(term).sum(1, keepdims=True)
            sums = _Sums(*(t.settled(r) for t, r in zip(total, rough, strict=True)))
            hi, absolute = _Sums(*(t.hi for t in sums)), _Sums(*magnitude)

            store(gradient, part, by_gamma(sums, exact).settled(by_gamma(hi, plain))[:, 0])
            gradient_terms[part] = by_gamma(absolute, sizes)[:, 0]
            for cell, v, d, e in elements(part):
                c, size = Exact.of(v) - m, (np.abs(d), np.abs(e), np.abs(v - m))
                for name, element in (("x", by_x), ("dy", by_dy)):
                    value = element(Exact.of(d), Exact.of(e), c, sums, exact)
                    value = value.settled(element(d, e, v - m, hi, plain))
                    store_block(results[name].hi, cell, value.hi)
                    store_block(results[name].lo, cell, value.lo)
                    store_block(terms[name], cell, element(*size, absolute, sizes))

    by_input = {n: Exact(r.hi.reshape(x.shape), r.lo.reshape(x.shape)) for n, r in results.items()}
    return ExactSecondGradients(
        by_input["x"],
        by_input["dy"],
        gradient,
        terms["x"].reshape(x.shape),
        terms["dy"].reshape(x.shape),
        gradient_terms,
    )


def _summands(d: _Value, e: _Value, c: _Value) -> _Sums:
    """Return what is added up in each sum; d and e stand for dy and ddx, here and below."""
    return _Sums(d, d * c, e, e * c, d * e)


def _gamma(sums: _Sums, k: _Channel) -> _Value:
    """Return dL/dgamma."""
    products = sums.i * sums.d / k.elements + k.s * sums.p * (k.s * sums.q) / k.elements
    return k.s * (sums.r + k.minus * products)


def _by_q(sums: _Sums, k: _Channel) -> _Value:
    """Return dL/d(s*Q). Two factors s can be no number, so the other one comes last."""
    return k.ddgamma + k.minus * (k.gamma * k.s * (k.s * sums.p) / k.elements)


def _dy(d: _Value, e: _Value, c: _Value, sums: _Sums, k: _Channel) -> _Value:
    """Return dL/d(dy): directly, through Q, and through D."""
    by_d = k.ddbeta + k.minus * (k.gamma * k.s * sums.i / k.elements)
    return k.gamma * k.s * e + _by_q(sums, k) * (k.s * c) + by_d


def _x(d: _Value, e: _Value, c: _Value, sums: _Sums, k: _Channel) -> _Value:
    """Return dL/dx: through c in Q and in P, and through the mean and the variance."""
    by_q = _by_q(sums, k)
    by_p = k.minus * (k.gamma * k.s * (k.s * sums.q) / k.elements)
    by_c = by_q * d + by_p * e
    by_mean = k.minus * (by_q * sums.d + by_p * sums.i)
    # s = (variance + epsilon)**(-1/2), so dL/dvariance is -s**3/2 times dL/ds.
    products = sums.i * sums.d / k.elements + 3.0 * (k.s * sums.p * (k.s * sums.q)) / k.elements
    by_s_times_s = k.gamma * k.s * (sums.r + k.minus * products) + k.ddgamma * (k.s * sums.q)
    by_variance = k.minus * (by_s_times_s * (k.s * c))
    return k.s * (by_c + by_mean / k.elements + by_variance / k.elements)


def _frozen_gamma(sums: _Sums, k: _Channel) -> _Value:
    return k.s * sums.r


def _frozen_dy(d: _Value, e: _Value, c: _Value, sums: _Sums, k: _Channel) -> _Value:
    return k.gamma * k.s * e + k.ddgamma * k.s * c + k.ddbeta


def _frozen_x(d: _Value, e: _Value, c: _Value, sums: _Sums, k: _Channel) -> _Value:
    return k.ddgamma * k.s * d
