"""The oracle of normalisations whose parameters differ within a row of statistics.

With M elements in a row, c = x - mean, s = 1/sqrt(variance + epsilon) and g = dy*gamma::

    dx     = s * (g - sum(g)/M - c * s**2 * sum(g * c)/M)
    dgamma = sum(dy * c * s),   dbeta = sum(dy)      over the elements of a parameter
    y      = gamma * s * c + beta
"""

from __future__ import annotations

import numpy as np

from backnorm.reference._doubledouble import Exact
from backnorm.reference._results import ExactGradients, ExactNormalized
from backnorm.reference._terms import Term, inverse_deviation


def backward_of_rows(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray,
    parameters: np.ndarray,
    *,
    epsilon: float,
    is_centred: bool,
) -> ExactGradients:
    """Return the exact gradients of a normalisation of rows.

    Parameters
    ----------
    x, dy : numpy.ndarray
        Shape (R, M).
    mean, variance : numpy.ndarray
        Shape (R,), used unchanged.
    gamma : numpy.ndarray
        gamma of each element, of shape (R, M).
    parameters : numpy.ndarray
        The elements of each parameter: indices into the flat x, of shape (C, R*M/C).
    epsilon : float
    is_centred : bool
        Whether the mean depends on x. If not, dx lacks the term sum(g)/M.

    Returns
    -------
    ExactGradients
        dx has x's shape; dgamma and dbeta have shape (C,). T of dx is ``s (|g| + sum|g|/M +
        |c| s**2 sum|g c|/M)``, of dgamma ``sum|dy c s|``.
    """
    count = float(max(x.shape[1], 1))
    with np.errstate(all="ignore"):
        s, d = inverse_deviation(_column(variance), epsilon), _wide(dy)
        c = (_wide(x) - _column(mean)).single()
        g = d * _wide(gamma)
        sum_g, sum_gc = _total(g), _total(g * c)
        centred = g - sum_g / count if is_centred else g
        dx = (s * (centred - c * (s * s * (sum_gc / count)))).settled()
        dgamma = _of_parameters(d * (s * c).single(), parameters)
        dbeta = _of_parameters(d, parameters)
    return ExactGradients(dx.exact, dgamma.exact, dbeta.exact, dx.size, dgamma.size, dbeta.size)


def forward_of_rows(x: np.ndarray, *, epsilon: float, is_centred: bool) -> ExactNormalized:
    """Return the exact normalisation of rows without gamma and beta.

    Parameters
    ----------
    x : numpy.ndarray
        Shape (R, M).
    epsilon : float
    is_centred : bool
        Whether the mean is subtracted. If not, it is 0, and the variance is the mean of x**2.

    Returns
    -------
    ExactNormalized
        As of :func:`forward`; statistics have shape (R,).
    """
    count = float(max(x.shape[1], 1))
    with np.errstate(all="ignore"):
        v, nothing = _wide(x), _column(np.zeros(len(x)))
        m = (_total(v) / count).settled() if is_centred else nothing
        c = (v - m).single()
        w = (_total(c * c) / count).settled().single()
        s = inverse_deviation(w, epsilon)
        y = (s * (v - m)).settled()
    fields = {"y": y, "mean": m, "variance": w, "inverse_deviation": s}
    record = {n: t.exact if n == "y" else t.exact[:, 0] for n, t in fields.items()}
    terms = {f"{n}_terms": t.size if n == "y" else t.size[:, 0] for n, t in fields.items()}
    return ExactNormalized(**record, **terms)  # type: ignore[arg-type]


def _wide(values: np.ndarray) -> Term:
    return Term.of(values.astype(np.float64))


def _column(values: np.ndarray) -> Term:
    return _wide(values.reshape(-1, 1))


def _total(terms: Term) -> Term:
    return terms.sum().settled()


def _of_parameters(terms: Term, parameters: np.ndarray) -> Term:
    """Return the sum of the terms of each parameter, of shape (C,)."""
    exact = Exact(*(part.reshape(-1)[parameters] for part in (terms.exact.hi, terms.exact.lo)))
    plain, size = (part.reshape(-1)[parameters] for part in (terms.plain, terms.size))
    total = _total(Term(exact, plain, size))
    return Term(total.exact[:, 0], total.plain[:, 0], total.size[:, 0])
