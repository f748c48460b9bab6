"""Verdicts on the forward, backward and inference passes."""

from __future__ import annotations

import numpy as np

from backnorm import reference
from backnorm.arithmetics import Arithmetic
from backnorm.conformance.judge._verdict import Verdict, judge_statistics, judge_typed
from backnorm.results import Gradients, Normalized

__all__ = ["check_backward", "check_forward", "check_inference"]


def check_backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    gradients: Gradients | tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    epsilon: float,
    data_format: str = "NCX",
    training: bool = True,
    arithmetic: Arithmetic | None = None,
) -> dict[str, Verdict]:
    """Judge `gradients` (dx, dgamma, dbeta) of the given inputs; see :func:`reference.backward`.

    dx must have x's type and shape, dgamma and dbeta mean's. `arithmetic` is what they were
    computed in, for :func:`budget`.
    """
    exact = reference.backward(
        x, dy, mean, variance, gamma, epsilon=epsilon, data_format=data_format, training=training
    )
    dx, dgamma, dbeta = gradients
    return {
        "dx": judge_typed(
            "dx", dx, exact.dx, exact.dx_terms, x.dtype, x.dtype, arithmetic=arithmetic
        ),
        "dgamma": judge_typed(
            "dgamma",
            dgamma,
            exact.dgamma,
            exact.dgamma_terms,
            x.dtype,
            mean.dtype,
            arithmetic=arithmetic,
        ),
        "dbeta": judge_typed(
            "dbeta",
            dbeta,
            exact.dbeta,
            exact.dbeta_terms,
            x.dtype,
            mean.dtype,
            arithmetic=arithmetic,
        ),
    }


def check_forward(
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    normalized: Normalized | tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    epsilon: float,
    data_format: str = "NCX",
    arithmetic: Arithmetic | None = None,
) -> dict[str, Verdict]:
    """Judge `normalized` (y, mean, variance) of the given inputs; see :func:`reference.forward`."""
    exact = reference.forward(x, gamma, beta, epsilon=epsilon, data_format=data_format)
    y, mean, variance = normalized
    return {
        "y": judge_typed("y", y, exact.y, exact.y_terms, x.dtype, x.dtype, arithmetic=arithmetic),
        **judge_statistics(mean, variance, exact, x.dtype, arithmetic),
    }


def check_inference(
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    y: np.ndarray,
    *,
    epsilon: float,
    data_format: str = "NCX",
    arithmetic: Arithmetic | None = None,
) -> dict[str, Verdict]:
    """Judge `y`, the normalisation of x by given statistics; see :func:`reference.inference`."""
    exact = reference.inference(
        x, mean, variance, gamma, beta, epsilon=epsilon, data_format=data_format
    )
    return {
        "y": judge_typed("y", y, exact.y, exact.y_terms, x.dtype, x.dtype, arithmetic=arithmetic)
    }
