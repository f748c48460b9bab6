"""Verdicts on the second order."""

from __future__ import annotations

import numpy as np

from backnorm import reference
from backnorm._doubledouble import Exact
from backnorm.conformance.judge._ulps import ulp_at
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
    wide: bool = True,
    in_parts: bool = False,
) -> dict[str, Verdict]:
    """Judge the gradients of the backward pass; see :func:`reference.double_backward`.

    Those with respect to x and dy must have x's type and shape, that of gamma mean's.

    Parameters
    ----------
    x, dy, mean, variance, gamma, ddx, ddgamma, ddbeta, epsilon, data_format, training
        What was given.
    gradients : tuple of arrays
        What came: with respect to x, dy and gamma.
    wide : bool
        Whether the arithmetic is float64's.
    in_parts : bool
        Whether the gradient of x is the sum of two, each rounded to x's type.

    Notes
    -----
    The formulas (:mod:`backnorm.second_order.formulas`) are the same everywhere; what differs is
    how sums are computed, in which type, and how often a result is rounded:

    - NumPy, PyTorch on a CPU, TensorFlow: float64, and the engine's sums. :func:`budget` is for
      them.
    - PyTorch on a GPU: float64, and PyTorch's sums, which are not compensated but added up in
      trees: log2(M) roundings for blocks of 2**20 elements, and one for each block. Up to some
      2**23 elements per channel that is within the 32 roundings of the budget; channels of 2**17
      elements of float64 lose 2**-51 T.
    - JAX with `jax_enable_x64`: float64, and XLA's sums, as accurate. But JAX adds what x owes to
      itself and what it owes to its statistics as two arrays of x's type (`in_parts`). Each is no
      more than T, so their roundings are u*T in all, u being half the distance from 1 to the next
      number of that type; 2*u*T leaves room for what float32 loses beside it.
    - JAX without: float32 from the first to the last operation (not `wide`), sums included. The
      argument is that for 16-bit data, 2**-20 T, now also beside float32 data, whose budget is
      2**20 times smaller in float64. Channels of 2**18 elements were seen to lose 2**-23 T.
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
    dtype = x.dtype
    more = 0.0 if wide else 2.0**-20
    parts = float(ulp_at(Exact.of(np.ones(())), dtype)) if in_parts else 0.0
    return {
        "x": judge_typed("second_x", by_x, exact.x, exact.x_terms, dtype, dtype, more=more + parts),
        "dy": judge_typed("second_dy", by_dy, exact.dy, exact.dy_terms, dtype, dtype, more=more),
        "gamma": judge_typed(
            "second_gamma", by_gamma, exact.gamma, exact.gamma_terms, dtype, mean.dtype, more=more
        ),
    }
