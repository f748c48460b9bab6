"""ONNX Runtime's training operators: com.microsoft BatchNormalizationGrad and BatchNormInternal.

Source: the schemas and the CPU kernels of these operators in ONNX Runtime. The forward operator
saves the inverse standard deviation, which the gradient operator takes.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._call import Call, CanonicalCall, with_given_statistics
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, channel, data
from backnorm.dialects.schema import FormatSpec, Rules, type_rules
from backnorm.errors import ArgumentValueError

__all__ = ["BatchNormInternal", "BatchNormalizationGrad"]

RULES = Rules(
    dialect="onnxruntime",
    source="ONNX Runtime, com.microsoft.{op} v1",
    type_rules=type_rules(f32="f32", f64="f64", f16="f16 f32", bf16="bf16 f32"),
    one_channel_type=False,
    formats=(FormatSpec("NC...", "NCX"),),
)

X = Annotated[ArrayLike, data("x", "T")]
Scale = Annotated[ArrayLike, channel("gamma", "T1")]
Epsilon = Annotated[float, attribute("f32", "epsilon", range="not negative")]


@operator(
    RULES,
    "backward",
    dX=data("dx", "T"),
    dScale=channel("dgamma", "T1"),
    dBias=channel("dbeta", "T1"),
)
def BatchNormalizationGrad(
    dY: Annotated[ArrayLike, data("dy", "T")],
    X: X,
    scale: Scale,
    saved_mean: Annotated[ArrayLike, channel("mean", "T2")],
    saved_inv_std: Annotated[ArrayLike, channel("inverse_deviation", "T2")],
    epsilon: Epsilon = 1e-05,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of batch normalisation in training.

    With M elements per channel, s = saved_inv_std and c = X - saved_mean::

        dBias  = sum dY
        dScale = s * sum dY*c
        dX     = scale*s * (dY - dBias/M - c*s * dScale/M)

    Parameters
    ----------
    dY : array of T
        gradient of Y
    X : array of T, rank 2 or more
        input, (N, C, ...)
    scale : array of T1, shape (C,)
        scale
    saved_mean : array of T2, shape (C,)
        batch mean
    saved_inv_std : array of T2, shape (C,)
        1 / sqrt(batch variance + epsilon)
    epsilon : float, finite and not negative, rounded to float32, default 1e-05
        checked, but not used, because saved_inv_std includes it
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    dX : array of T
        gradient of X
    dScale : array of T1, shape (C,)
        gradient of scale
    dBias : array of T1, shape (C,)
        gradient of the bias

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f32 with f32, f64 with f64, f16 with
    f16 or f32, bf16 with bf16 or f32.

    - ONNX Runtime's CPU kernel supports only float32 and does not check the shape of dY.
    """


def _translate(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """Return the canonical call: a forward pass in training, or inference."""
    mode = call.attributes["training_mode"]
    if mode not in (0, 1):
        raise ArgumentValueError("training_mode", "unknown mode", came=mode, accepted="0 or 1")
    return canonical if mode else with_given_statistics(call, canonical)


@operator(
    RULES,
    "forward",
    translate=_translate,
    Y=data("y", "T"),
    running_mean=channel("running_mean", "T2"),
    running_var=channel("running_variance", "T2"),
    saved_mean=channel("mean", "T2"),
    saved_inv_std=channel("inverse_deviation", "T2"),
)
def BatchNormInternal(
    X: X,
    scale: Scale,
    B: Annotated[ArrayLike, channel("beta", "T1")],
    input_mean: Annotated[ArrayLike, channel("running_mean", "T2")],
    input_var: Annotated[ArrayLike, channel("running_variance", "T2")],
    epsilon: Epsilon = 1e-05,
    momentum: Annotated[float, attribute("f32", "old_weight")] = 0.9,
    training_mode: Annotated[int, attribute("i64", range="not negative")] = 1,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Batch normalisation in training, also returning the statistics for the gradient.

    ::

        Y = scale * (X - saved_mean) / sqrt(batch variance + epsilon) + B

    Parameters
    ----------
    X : array of T, rank 2 or more
        input, (N, C, ...)
    scale : array of T1, shape (C,)
        scale
    B : array of T1, shape (C,)
        offset
    input_mean : array of T2, shape (C,)
        old running mean
    input_var : array of T2, shape (C,)
        old running variance
    epsilon : float, finite and not negative, rounded to float32, default 1e-05
        added to the variance
    momentum : float, finite, rounded to float32, default 0.9
        weight of the old running statistics
    training_mode : {0, 1}, default 1
        0: normalise with input_mean and input_var
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    Y : array of T
        normalised output
    running_mean : array of T2, shape (C,)
        new running mean
    running_var : array of T2, shape (C,)
        new running variance, biased
    saved_mean : array of T2, shape (C,)
        batch mean
    saved_inv_std : array of T2, shape (C,)
        1 / sqrt(batch variance + epsilon)

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f32 with f32, f64 with f64, f16 with
    f16 or f32, bf16 with bf16 or f32.

    - The new running statistics are momentum * old + (1 - momentum) * batch, with the biased
      batch variance. An empty batch (M = 0) does not change the running statistics.
    - With training_mode=0, the returned running statistics are input_mean and input_var,
      unchanged, and the returned saved statistics are input_mean and 1 / sqrt(input_var +
      epsilon).
    """
