"""Grades of the forward, backward and inference passes, and on second-order gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from backnorm import reference
from backnorm.arithmetics import Arithmetic
from backnorm.conformance._grade import Grade
from backnorm.conformance._ulps import ulp_at
from backnorm.conformance.judge._budget import FORWARD_RESULTS, GRADIENTS, Quantity
from backnorm.conformance.judge._judge import judge_all
from backnorm.conformance.judge._relu import judge_dresidual, judge_mask, within_range
from backnorm.reference import BackwardOptions, Exact, ForwardOptions, SecondOptions
from backnorm.results import SecondGradients


def check_backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    gradients: tuple[Any, ...],
    *,
    mask: np.ndarray | None = None,
    residual: bool = False,
    arithmetic: Arithmetic | None = None,
    weights: np.ndarray | None = None,
    **options: Unpack[BackwardOptions],
) -> dict[str, Grade]:
    """Judge `gradients` (dx, dgamma, dbeta) of the given inputs; see :func:`reference.backward`.

    dx must have the type and shape of x. dgamma and dbeta must have the type and shape of mean.
    `arithmetic` is the type in which elements were computed, on which the allowed error
    (:func:`budget`) depends. `options` are epsilon, data_format and training.

    With the `mask` of a ReLU, the fourth of `gradients` is judged, too: dresidual. If `residual` is
    True, it must be dy where the mask is set, and 0 elsewhere; otherwise it must be absent or None.
    If dx is that of dy without the mask, or with the inverted mask, `detail` says so.
    """
    dx, dgamma, dbeta, *rest = gradients
    masked = dy if mask is None else reference.masked(dy, mask, x)
    exact = reference.backward(x, masked, mean, variance, gamma, weights=weights, **options)
    types = x.dtype, mean.dtype, mean.dtype
    grades = judge_all(exact, GRADIENTS, (dx, dgamma, dbeta), types, x.dtype, arithmetic)
    if mask is not None and not grades["dx"].passed:
        for word, used in (("ignored", dy), ("inverted", reference.masked(dy, ~mask, x))):
            other = reference.backward(x, used, mean, variance, gamma, weights=weights, **options)
            if judge_all(other, ("dx",), (dx,), types[:1], x.dtype, arithmetic)["dx"].passed:
                says = f"the mask is {word}; {grades['dx'].detail}"
                grades["dx"] = replace(grades["dx"], detail=says)
    if mask is not None or rest:
        actual = rest[0] if rest else None
        grades["dresidual"] = judge_dresidual(actual, masked if residual else None)
    return grades


def check_forward(
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    results: tuple[Any, ...],
    *,
    arithmetic: Arithmetic | None = None,
    weights: np.ndarray | None = None,
    **options: Unpack[ForwardOptions],
) -> dict[str, Grade]:
    """Judge y, mean and variance of a forward pass, which `results` has in this order.

    y must have the type of x. x, gamma, beta, `weights` and `options` are the arguments with which
    :func:`reference.forward` computes the exact results.

    If `activation` is a ReLU, y must be in its range. Its mask may be the fourth result. The mask
    is compared with the given y, not with the exact y: a bit must be set if and only if the given y
    is more than 0 and less than the ceiling.
    """
    activation = options.get("activation")
    y, mean, variance, *mask = results
    exact = reference.forward(x, gamma, beta, weights=weights, **options)
    types = x.dtype, None, None
    grades = judge_all(exact, FORWARD_RESULTS, (y, mean, variance), types, x.dtype, arithmetic)
    grades["y"] = within_range(grades["y"], y, activation)
    if mask and activation is not None:
        grades["mask"] = judge_mask(mask[0], y, x, activation.ceiling)
    return grades


def check_inference(
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    y: np.ndarray,
    *,
    arithmetic: Arithmetic | None = None,
    **options: Unpack[ForwardOptions],
) -> dict[str, Grade]:
    """Judge `y`, the normalisation of x by given statistics; see :func:`reference.inference`.

    y must have x's type, and be in the range of `activation` if that is a ReLU. `options` are those
    of `reference.inference`.
    """
    exact = reference.inference(x, mean, variance, gamma, beta, **options)
    grades = judge_all(exact, ("y",), (y,), (x.dtype,), x.dtype, arithmetic)
    return {"y": within_range(grades["y"], y, options.get("activation"))}


def check_double_backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    gradients: SecondGradients | tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    wide: bool = True,
    in_parts: bool = False,
    **options: Unpack[SecondOptions],
) -> dict[str, Grade]:
    """Judge second-order gradients: see :func:`reference.double_backward`.

    The gradients with respect to x and dy must have x's type and shape. The gradient with respect
    to gamma must have mean's type and shape.

    Parameters
    ----------
    x, dy, mean, variance, gamma
        The inputs of the backward pass.
    gradients : tuple of arrays
        The gradients with respect to x, dy and gamma.
    wide : bool
        Whether all operations are float64.
    in_parts : bool
        Whether the gradient of x is the sum of two gradients that were rounded to x's type.
    **options
        epsilon, data_format, training, ddx, ddgamma and ddbeta, as in the oracle.

    Notes
    -----
    The formulas (:mod:`backnorm.second_order.formulas`) are the same for all frameworks. The sums,
    their type and the number of roundings differ:

    - NumPy, PyTorch on a CPU, TensorFlow: float64 and the engine's sums, as :func:`budget` assumes.
    - PyTorch on a GPU: float64 and PyTorch's sums, which are not compensated. PyTorch adds up each
      block of 2**20 elements as a tree, which rounds at most 20 times, and adds the block's sum to
      the total, which rounds once more. The budget allows 32 roundings of a sum, which is enough
      for channels of up to about 2**23 elements. For channels of 2**17 float64 elements, the
      measured error is 2**-51 T (`budget` defines T).
    - JAX with `jax_enable_x64`: float64 and XLA's sums, which are as accurate as PyTorch's. But JAX
      adds the direct gradient of x and the gradient through the statistics as two arrays of x's
      type (`in_parts`). The magnitude of each element of these arrays is at most T. So rounding an
      array adds an error of at most u*T, where u is half the distance from 1 to the next number of
      x's type. Therefore 2*u*T is added to the budget.
    - JAX without `jax_enable_x64`: all operations and sums are float32 (``wide=False``). But
      :func:`budget` assumes that float32 data is computed in float64, and allows an error of only
      2**-40 T (2**-44 T for the gradient of gamma). Therefore 2**-20 T is added to the budget. This
      number is derived in the same way as the budget of 16-bit data (:func:`budget`). With 2**18
      elements per channel, the measured error is 2**-23 T.
    """
    exact = reference.double_backward(x, dy, mean, variance, gamma, **options)
    more = 0.0 if wide else 2.0**-20
    parts = float(ulp_at(Exact.of(np.ones(())), x.dtype)) if in_parts else 0.0
    quantities: tuple[Quantity, ...] = "second_x", "second_dy", "second_gamma"
    types, more_of_each = (x.dtype, x.dtype, mean.dtype), (more + parts, more, more)
    return judge_all(exact, quantities, gradients, types, x.dtype, more=more_of_each)
