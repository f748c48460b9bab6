"""Results of the oracle: exact values, each with T, the sum of the magnitudes of its terms."""

from __future__ import annotations

from dataclasses import dataclass

from backnorm.reference._doubledouble import Exact, FloatArray


@dataclass(frozen=True, slots=True)
class ExactGradients:
    """Exact gradients and the magnitudes of their terms.

    Attributes
    ----------
    dx, dgamma, dbeta : Exact
        dx has x's shape; dgamma and dbeta have shape (C,).
    dx_terms, dgamma_terms, dbeta_terms : numpy.ndarray
        T of each element of these gradients, float64.
    """

    dx: Exact
    dgamma: Exact
    dbeta: Exact
    dx_terms: FloatArray
    dgamma_terms: FloatArray
    dbeta_terms: FloatArray


@dataclass(frozen=True, slots=True)
class ExactNormalized:
    """Exact y, batch mean, biased variance and inverse deviation ``1/sqrt(variance + epsilon)`` in
    training, with the magnitudes of their terms.
    """

    y: Exact
    mean: Exact
    variance: Exact
    inverse_deviation: Exact
    y_terms: FloatArray
    mean_terms: FloatArray
    variance_terms: FloatArray
    inverse_deviation_terms: FloatArray


@dataclass(frozen=True, slots=True)
class ExactOutput:
    """The exact result of inference.

    `y_terms` has T of each element of y, which is the sum of the magnitudes of the element's terms.
    """

    y: Exact
    y_terms: FloatArray


@dataclass(frozen=True, slots=True)
class ExactSecondGradients:
    """Exact second-order gradients, with respect to x, dy and gamma.

    `x_terms`, `dy_terms` and `gamma_terms` have T of each element of these gradients, which is the
    sum of the magnitudes of the element's terms.
    """

    x: Exact
    dy: Exact
    gamma: Exact
    x_terms: FloatArray
    dy_terms: FloatArray
    gamma_terms: FloatArray
