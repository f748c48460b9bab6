"""StableHLO: batch_norm_grad, batch_norm_training, batch_norm_inference.

Source: the StableHLO specification, v1. All tensors have one element type. The rank is 1 or more,
and any axis can be the feature axis. An operand of rank 1 is a batch of one sample, with one
element for each feature.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, channel, data
from backnorm.dialects.schema import FormatSpec, Phrases, Rules, type_rules

__all__ = ["batch_norm_grad", "batch_norm_inference", "batch_norm_training"]

RULES = Rules(
    dialect="stablehlo",
    source="the StableHLO specification, {op}",
    type_rules=type_rules(f64="f64", f32="f32", f16="f16", bf16="bf16"),
    formats=(FormatSpec("any axis", "NCX", is_any=True),),
    ranks=(1, 0),
    phrases=Phrases(channel_size="must have as many elements as operand has features ({channels})"),
)

Operand = Annotated[ArrayLike, data("x", "T")]
Scale = Annotated[ArrayLike, channel("gamma", "T")]
Offset = Annotated[ArrayLike, channel("beta", "T")]
Mean = Annotated[ArrayLike, channel("mean", "T")]
Variance = Annotated[ArrayLike, channel("variance", "T")]
Epsilon = Annotated[float, attribute("f32", "epsilon", range="not negative")]
FeatureIndex = Annotated[int, attribute("i64", "channel_axis", range="not negative")]


@operator(
    RULES,
    "backward",
    grad_operand=data("dx", "T"),
    grad_scale=channel("dgamma", "T"),
    grad_offset=channel("dbeta", "T"),
)
def batch_norm_grad(
    operand: Operand,
    scale: Scale,
    mean: Mean,
    variance: Variance,
    grad_output: Annotated[ArrayLike, data("dy", "T")],
    epsilon: Epsilon,
    feature_index: FeatureIndex,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of batch normalisation in training.

    With M elements per feature, s = 1 / sqrt(variance + epsilon) and c = operand - mean::

        grad_offset  = sum grad_output
        grad_scale   = s * sum grad_output*c
        grad_operand = scale*s * (grad_output - grad_offset/M - c*s * grad_scale/M)

    Parameters
    ----------
    operand : array of T, rank 1 or more
        input
    scale : array of T, shape (C,)
        scale
    mean : array of T, shape (C,)
        mean of the batch
    variance : array of T, shape (C,)
        biased
    grad_output : array of T, the shape of operand
        gradient of the output
    epsilon : float, finite and not negative, rounded to float32
        added to the variance
    feature_index : int, not negative
        the axis of the features, less than the rank of operand
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    grad_operand : array of T
        gradient of operand
    grad_scale : array of T, shape (C,)
        gradient of scale
    grad_offset : array of T, shape (C,)
        gradient of offset

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f64 with f64, f32 with f32, f16 with
    f16, bf16 with bf16.

    - XLA's CPU code multiplies f16 gradients by the number of elements, in f16. The product
      overflows if a channel has more than 65,504 / |grad_output| elements. backnorm computes
      sums in a wider type, in which they do not overflow.
    - An empty operand gives zeros for grad_scale and grad_offset.
    """


@operator(
    RULES,
    "forward",
    output=data("y", "T"),
    batch_mean=channel("mean", "T"),
    batch_var=channel("variance", "T"),
)
def batch_norm_training(
    operand: Operand,
    scale: Scale,
    offset: Offset,
    epsilon: Epsilon,
    feature_index: FeatureIndex,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Batch normalisation in training.

    ::

        output = scale * (operand - batch_mean) / sqrt(batch_var + epsilon) + offset

    Parameters
    ----------
    operand : array of T, rank 1 or more
        input
    scale : array of T, shape (C,)
        scale
    offset : array of T, shape (C,)
        offset
    epsilon : float, finite and not negative, rounded to float32
        added to the variance
    feature_index : int, not negative
        the axis of the features, less than the rank of operand
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    output : array of T
        normalised output
    batch_mean : array of T, shape (C,)
        mean of the batch
    batch_var : array of T, shape (C,)
        biased

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f64 with f64, f32 with f32, f16 with
    f16, bf16 with bf16.
    """


@operator(RULES, "inference", result=data("y", "T"))
def batch_norm_inference(
    operand: Operand,
    scale: Scale,
    offset: Offset,
    mean: Mean,
    variance: Variance,
    epsilon: Epsilon,
    feature_index: FeatureIndex,
    *,
    arithmetic: Arithmetic | None = None,
) -> np.ndarray:
    """Batch normalisation with given statistics.

    ::

        result = scale * (operand - mean) / sqrt(variance + epsilon) + offset

    Parameters
    ----------
    operand : array of T, rank 1 or more
        input
    scale : array of T, shape (C,)
        scale
    offset : array of T, shape (C,)
        offset
    mean : array of T, shape (C,)
        mean to normalise with
    variance : array of T, shape (C,)
        biased variance to normalise with
    epsilon : float, finite and not negative, rounded to float32
        added to the variance
    feature_index : int, not negative
        the axis of the features, less than the rank of operand
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    result : array of T
        normalised output

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f64 with f64, f32 with f32, f16 with
    f16, bf16 with bf16.
    """
