"""Verdicts on the second order."""

from __future__ import annotations

import numpy as np

from backnorm import reference
from backnorm.conformance.judge._verdict import Verdict, judge_typed
from backnorm.results import SecondGradients

__all__ = ["check_double_backward"]


def check_double_backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    gradients: SecondGradients | tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    ddx: np.ndarray | None = None,
    ddgamma: np.ndarray | None = None,
    ddbeta: np.ndarray | None = None,
    epsilon: float,
    data_format: str = "NCX",
    training: bool = True,
) -> dict[str, Verdict]:
    """Judge the gradients of the backward pass; see :func:`reference.double_backward`.

    Those with respect to x and dy must have x's type and shape, that of gamma mean's.
    """
    exact = reference.double_backward(
        x,
        dy,
        mean,
        variance,
        gamma,
        ddx=ddx,
        ddgamma=ddgamma,
        ddbeta=ddbeta,
        epsilon=epsilon,
        data_format=data_format,
        training=training,
    )
    by_x, by_dy, by_gamma = gradients
    return {
        "x": judge_typed("second_x", by_x, exact.x, exact.x_terms, x.dtype, x.dtype),
        "dy": judge_typed("second_dy", by_dy, exact.dy, exact.dy_terms, x.dtype, x.dtype),
        "gamma": judge_typed(
            "second_gamma", by_gamma, exact.gamma, exact.gamma_terms, x.dtype, mean.dtype
        ),
    }
