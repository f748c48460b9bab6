"""Batch normalisation with a ReLU behind it, and an addition between: one pass each way.

::

    y = max(0, batch_norm(x) + residual)

The backward pass needs to know where y is more than zero: the forward pass leaves a bit for each
element, a 32nd of y in float32, and so neither y nor a copy of it is read again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backnorm import execute
from backnorm.execute import planned
from backnorm.layout import mask_size
from backnorm.problem import (
    Problem,
    as_array,
    as_optional_array,
    backward_problem,
    check_flag,
    check_like,
    check_mask,
    forward_problem,
    inference_problem,
    with_relu,
)
from backnorm.results import Rectified, RectifiedGradients

__all__ = ["batch_norm_relu_backward", "batch_norm_relu_forward", "batch_norm_relu_inference"]


def batch_norm_relu_forward(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    residual: Any = None,
    epsilon: float,
    data_format: str = "NCX",
) -> Rectified:
    """Return y = max(0, batch_norm(x) + residual), normalised with the statistics of the batch.

    Parameters
    ----------
    x, gamma, beta, epsilon, data_format
        As `batch_norm_forward`.
    residual : array, optional
        What is added before the ReLU, of x's shape and type; 0 if absent.

    Returns
    -------
    Rectified
        y, of x's shape, type and memory order, each element rounded once; NaN stays NaN. mean and
        variance, as `batch_norm_forward`. mask, one-dimensional uint8: bit ``i % 8`` of byte
        ``i // 8`` says whether element i of y, in the order of memory, is more than zero; for
        `batch_norm_relu_backward`.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_forward`, and for a residual of another shape or type.
    """
    x, gamma, beta = (
        as_array("x", x),
        as_optional_array("gamma", gamma),
        as_optional_array("beta", beta),
    )
    residual = as_optional_array("residual", residual)
    problem = forward_problem(x, gamma, beta, epsilon=epsilon, data_format=data_format)
    call = planned(_with_relu(problem, x, residual), x)
    return Rectified(*execute.forward(call, x, gamma, beta, residual=residual))


def batch_norm_relu_inference(
    x: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    residual: Any = None,
    epsilon: float,
    data_format: str = "NCX",
) -> np.ndarray:
    """Return y = max(0, batch_norm(x) + residual), normalised with given statistics.

    Parameters
    ----------
    x, mean, variance, gamma, beta, epsilon, data_format
        As `batch_norm_inference`.
    residual : array, optional
        What is added before the ReLU, of x's shape and type; 0 if absent.

    Returns
    -------
    numpy.ndarray
        y, of x's shape and type.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_inference`, and for a residual of another shape or type.
    """
    x, mean, variance = as_array("x", x), as_array("mean", mean), as_array("variance", variance)
    gamma, beta = as_optional_array("gamma", gamma), as_optional_array("beta", beta)
    residual = as_optional_array("residual", residual)
    problem = inference_problem(
        x, mean, variance, gamma, beta, epsilon=epsilon, data_format=data_format
    )
    call = planned(_with_relu(problem, x, residual), x)
    return execute.inference(call, x, mean, variance, gamma, beta, residual=residual)


def batch_norm_relu_backward(
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    *,
    mask: Any,
    residual: bool = False,
    epsilon: float,
    data_format: str = "NCX",
    training: bool = True,
) -> RectifiedGradients:
    """Return the gradients of y = max(0, batch_norm(x) + residual).

    They are those of `batch_norm_backward` for a dy that is zero where y is not more than zero,
    and this dy itself is the gradient of the residual.

    Parameters
    ----------
    x, dy, mean, variance, gamma, epsilon, data_format, training
        As `batch_norm_backward`; x in the memory order that it had in the forward pass.
    mask : uint8 array
        From `batch_norm_relu_forward`.
    residual : bool
        Whether there was a residual: its gradient is wanted.

    Returns
    -------
    RectifiedGradients
        dx, dgamma and dbeta, as `batch_norm_backward`; dresidual, of x's shape and type, or None.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_backward`, and for a mask of another size or type.
    """
    x, dy = as_array("x", x), as_array("dy", dy)
    mean, variance = as_array("mean", mean), as_array("variance", variance)
    gamma = as_optional_array("gamma", gamma)
    problem = backward_problem(
        x, dy, mean, variance, gamma, epsilon=epsilon, data_format=data_format, training=training
    )
    mask = check_mask(mask, mask_size(problem.size))
    has_residual = check_flag("residual", residual)
    call = planned(with_relu(problem, residual=has_residual), x)
    return RectifiedGradients(*execute.backward(call, x, dy, mean, variance, gamma, mask=mask))


def _with_relu(problem: Problem, x: np.ndarray, residual: np.ndarray | None) -> Problem:
    if residual is not None:
        check_like("residual", residual, x)
    return with_relu(problem, residual=residual is not None)
