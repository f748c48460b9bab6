"""Verdicts on the operators with an addition and a ReLU."""

from __future__ import annotations

from typing import Any

import numpy as np

from backnorm import reference
from backnorm.activations import RELU, Activation
from backnorm.arithmetics import Arithmetic
from backnorm.conformance.judge._passes import check_backward
from backnorm.conformance.judge._verdict import Verdict, judge_statistics, judge_typed, refused
from backnorm.layout import mask_size

__all__ = ["check_relu_backward", "check_relu_forward", "check_relu_inference"]


def check_relu_forward(
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    result: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None],
    *,
    residual: np.ndarray | None = None,
    activation: Activation = RELU,
    epsilon: float,
    data_format: str = "NCX",
    arithmetic: Arithmetic | None = None,
) -> dict[str, Verdict]:
    """Judge `result` (y, mean, variance, mask); see :func:`reference.relu_forward`.

    The mask is judged by the y that came, not by the exact one: a bit is set exactly where y > 0,
    and less than the ceiling of `activation`, a ReLU.
    """
    ceiling = activation.ceiling
    added: Any = {"residual": residual, "ceiling": ceiling}
    options: Any = {"epsilon": epsilon, "data_format": data_format}
    exact = reference.relu_forward(x, gamma, beta, **added, **options)
    y, mean, variance, mask = result
    return {
        "y": _judge_y(y, exact, x, ceiling, arithmetic),
        **judge_statistics(mean, variance, exact, x.dtype, arithmetic),
        "mask": _judge_mask(mask, y, x, ceiling),
    }


def check_relu_inference(
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    y: np.ndarray,
    *,
    residual: np.ndarray | None = None,
    activation: Activation = RELU,
    epsilon: float,
    data_format: str = "NCX",
    arithmetic: Arithmetic | None = None,
) -> dict[str, Verdict]:
    """Judge `y` = relu(batch norm + residual); see :func:`reference.relu_inference`."""
    ceiling = activation.ceiling
    added: Any = {"residual": residual, "ceiling": ceiling}
    options: Any = {"epsilon": epsilon, "data_format": data_format}
    exact = reference.relu_inference(x, mean, variance, gamma, beta, **added, **options)
    return {"y": _judge_y(y, exact, x, ceiling, arithmetic)}


def check_relu_backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    gradients: tuple[np.ndarray | None, ...],
    *,
    mask: np.ndarray,
    residual: bool = False,
    epsilon: float,
    data_format: str = "NCX",
    training: bool = True,
    arithmetic: Arithmetic | None = None,
) -> dict[str, Verdict]:
    """Judge `gradients` (dx, dgamma, dbeta, dresidual); see :func:`reference.relu_backward`.

    dresidual must be dy itself where the mask is set and 0 elsewhere, or absent (or None) unless
    `residual`.
    """
    dx, dgamma, dbeta, *rest = gradients
    assert dx is not None
    assert dgamma is not None
    assert dbeta is not None
    dresidual = rest[0] if rest else None
    gradient = reference.masked(dy, mask, x)
    verdicts = check_backward(
        x,
        gradient,
        mean,
        variance,
        gamma,
        (dx, dgamma, dbeta),
        epsilon=epsilon,
        data_format=data_format,
        training=training,
        arithmetic=arithmetic,
    )
    return verdicts | {"dresidual": _judge_dresidual(dresidual, gradient if residual else None)}


def _judge_y(
    y: np.ndarray,
    exact: reference.ExactNormalized | reference.ExactOutput,
    x: np.ndarray,
    ceiling: float | None,
    arithmetic: Arithmetic | None,
) -> Verdict:
    verdict = judge_typed("y", y, exact.y, exact.y_terms, x.dtype, x.dtype, arithmetic=arithmetic)
    if not verdict.passed:
        return verdict
    # Beside a bound the budget has room on both sides; a result of ReLU has none beyond it.
    values = y.astype(np.float64)
    if (values < 0).any():
        return refused(f"y is negative {int((values < 0).sum())} times")
    if ceiling is not None and (values > ceiling).any():
        return refused(f"y is more than {ceiling} {int((values > ceiling).sum())} times")
    return verdict


def _judge_mask(
    mask: np.ndarray | None, y: np.ndarray, x: np.ndarray, ceiling: float | None
) -> Verdict:
    if mask is None:
        return refused("mask is absent")
    if mask.dtype != np.uint8 or mask.ndim != 1 or mask.size < mask_size(x.size):
        return refused(
            f"mask is {mask.dtype} of shape {mask.shape}, not uint8 of at least "
            f"{mask_size(x.size)} elements"
        )
    if y.shape != x.shape:
        return refused(f"y has shape {y.shape}, not {x.shape}")
    return _judge_equal("mask", reference.unpack_mask(mask, x), reference.counting(y, ceiling))


def _judge_dresidual(actual: np.ndarray | None, expected: np.ndarray | None) -> Verdict:
    if actual is None or expected is None:
        if actual is expected:
            return Verdict(0.0, 0.0, True, (), "dresidual is not wanted")
        return refused(f"dresidual is {'absent' if actual is None else 'not wanted'}")
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return refused(
            f"dresidual is {actual.dtype} of shape {actual.shape}, "
            f"not {expected.dtype} of shape {expected.shape}"
        )
    return _judge_equal("dresidual", actual.astype(np.float64), expected.astype(np.float64))


def _judge_equal(quantity: str, actual: np.ndarray, expected: np.ndarray) -> Verdict:
    """Judge an output that leaves no room: equal values, and NaN where NaN is expected."""
    different = (actual != expected) & ~((actual != actual) & (expected != expected))
    if not different.any():
        return Verdict(0.0, 0.0, True, (), f"{quantity} is as it must be")
    where = tuple(int(i) for i in np.argwhere(different)[0])
    return refused(
        f"{quantity}[{', '.join(map(str, where))}] = {actual[where]!s}, not {expected[where]!s}; "
        f"wrong in {int(different.sum())} of {different.size} elements"
    )
