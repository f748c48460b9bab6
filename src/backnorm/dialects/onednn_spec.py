"""oneDNN Graph specification: BatchNormTrainingBackprop-1 and its forward operators.

Three versions of the specification have operators of these names. The operators of the two older
versions have a suffix. The versions differ in the inputs of BatchNormTrainingBackprop, in their
order, and in the element types. Below, ``?`` marks an optional input:

no suffix, the latest version
    input_forward, output_delta, mean, variance, gamma?; one element type T2 for all
    per-channel tensors.
``_2020_21``
    input, output_delta, gamma?, beta?, mean, variance; per-channel tensors in f32; attribute
    is_training.
``_early``
    Like ``_2020_21``, but this version of the specification has no rules for types. Each
    per-channel tensor may be f32, or may have the type of the input.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Annotated

import numpy as np

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._onednn import (
    FORMATS,
    TYPE_RULES,
    Beta,
    DataFormat,
    Dy,
    Epsilon,
    Gamma,
    Mean,
    Momentum,
    RunningMean,
    RunningVariance,
    Variance,
    X,
)
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, channel, data
from backnorm.dialects.schema import Rules, type_rules

__all__ = [
    "BatchNormForwardTraining",
    "BatchNormForwardTraining_2020_21",
    "BatchNormForwardTraining_early",
    "BatchNormInference",
    "BatchNormInference_2020_21",
    "BatchNormInference_early",
    "BatchNormTrainingBackprop",
    "BatchNormTrainingBackprop_2020_21",
    "BatchNormTrainingBackprop_early",
]

LATEST = Rules(
    dialect="onednn_spec",
    source="oneDNN Graph specification, {op}-1 (latest revision)",
    type_rules=TYPE_RULES,
    formats=FORMATS,
)
_2020_21 = replace(
    LATEST,
    source="oneDNN Graph specification (2020-21 revision)",
    type_rules=type_rules(f32="f32", bf16="f32", f16="f32"),
)
_EARLY = replace(
    LATEST,
    source="oneDNN Graph specification (early revision)",
    type_rules=type_rules(f32="f32", bf16="f32 bf16", f16="f32 f16"),
    one_channel_type=False,
)

IsTraining = Annotated[bool, attribute("bool", "training")]

_backward = partial(
    operator,
    input_delta=data("dx", "T1"),
    gamma_delta=channel("dgamma", "T2", required=False),
    beta_delta=channel("dbeta", "T2", required=False),
)
_forward = partial(
    operator,
    output=data("y", "T1"),
    running_mean=channel("running_mean", "T2"),
    running_variance=channel("running_variance", "T2"),
    batch_mean=channel("mean", "T2"),
    batch_variance=channel("variance", "T2"),
)
_inference = partial(operator, output=data("y", "T1"))


@_backward(LATEST, "backward")
def BatchNormTrainingBackprop(
    input_forward: X,
    output_delta: Dy,
    mean: Mean,
    variance: Variance,
    gamma: Gamma | None = None,
    *,
    epsilon: Epsilon,
    data_format: DataFormat = "NXC",
    outputs: int | Collection[str] = 3,
    input_delta: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, ...]:
    """Gradients of batch normalisation in training.

    With M elements per channel, s = 1 / sqrt(variance + epsilon), x the first input and
    c = x - mean::

        beta_delta  = sum output_delta
        gamma_delta = s * sum output_delta*c
        input_delta = gamma*s * (output_delta - beta_delta/M - c*s * gamma_delta/M)

    If not is_training, input_delta = gamma*s * output_delta.

    Parameters
    ----------
    input_forward : array of T1, rank 2 or more
        input of the forward; in the older revisions its name is input
    input : array of T1, rank 2 or more
        input of the forward, in the older revisions
    output_delta : array of the type of the input
        gradient of the output
    mean : array of T2, shape (C,)
        batch mean; running mean if not is_training
    variance : array of T2, shape (C,)
        biased batch variance; running variance if not is_training
    gamma : array of T2, shape (C,), optional
        scale; absent: 1
    beta : array of T2, shape (C,), optional
        offset, in the older revisions; checked, but not used
    epsilon : float, finite and positive, rounded to float32
        added to the variance
    data_format : {"NXC", "NCX"}, default "NXC"
        channel axis: 1 for NCX, the last for NXC; X is any number of spatial axes
    is_training : bool, default True
        False: mean and variance are running statistics and constant; only the older revisions have
        this attribute
    outputs : int or collection of str
        the number of outputs, counted from the first, or their names
    input_delta : numpy.ndarray, optional
        memory for this output; may be output_delta, which is then overwritten
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    input_delta : array of the type of the input
        gradient of the input
    gamma_delta : array of T2, shape (C,)
        gradient of gamma
    beta_delta : array of T2, shape (C,)
        gradient of beta

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f32 with f32, bf16 with f32 or bf16, f16
    with f32; bf16 only with f32 in the revision "2020-21".

    - The revision "early" has no type rules: each per-channel tensor may be f32 or of the
      input's type, independently of the others.
    - A gradient has the type of its parameter. If the parameter is absent, the gradient has
      the type of gamma or, without gamma, the type of mean.
    """


@_backward(_2020_21, "backward", described_by=BatchNormTrainingBackprop)
def BatchNormTrainingBackprop_2020_21(
    input: X,
    output_delta: Dy,
    gamma: Gamma | None,
    beta: Beta | None,
    mean: Mean,
    variance: Variance,
    *,
    epsilon: Epsilon,
    is_training: IsTraining = True,
    data_format: DataFormat = "NXC",
    outputs: int | Collection[str] = 3,
    input_delta: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, ...]:
    """`BatchNormTrainingBackprop` of the 2020-21 version."""


BatchNormTrainingBackprop_early = _backward(
    _EARLY, "backward", name="BatchNormTrainingBackprop_early"
)(BatchNormTrainingBackprop_2020_21)
"""`BatchNormTrainingBackprop` of the early version."""


@_forward(LATEST, "forward")
def BatchNormForwardTraining(
    input: X,
    mean: RunningMean,
    variance: RunningVariance,
    gamma: Gamma | None = None,
    beta: Beta | None = None,
    *,
    epsilon: Epsilon,
    momentum: Momentum = None,
    data_format: DataFormat = "NXC",
    output: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, ...]:
    """Batch normalisation in training, with running statistics.

    The inputs mean and variance are the old running statistics::

        output           = gamma * (input - batch_mean) / sqrt(batch_variance + epsilon) + beta
        running_mean     = momentum * mean + (1 - momentum) * batch_mean
        running_variance = momentum * variance + (1 - momentum) * batch_variance

    Parameters
    ----------
    input : array of T1, rank 2 or more
        input
    mean : array of T2, shape (C,)
        old running mean
    variance : array of T2, shape (C,)
        old running variance
    gamma : array of T2, shape (C,), optional
        scale; absent: 1
    beta : array of T2, shape (C,), optional
        offset; absent: 0
    epsilon : float, finite and positive, rounded to float32
        added to the variance
    momentum : float, finite and positive, rounded to float32, optional
        weight of the old running statistics; not given: 0.5, as in the oneDNN library, and 0.1 in
        the revision "early". The specification's own rule, the average over all batches, would
        need their number, which is no input
    data_format : {"NXC", "NCX"}, default "NXC"
        channel axis: 1 for NCX, the last for NXC; X is any number of spatial axes
    output : numpy.ndarray, optional
        memory for this output; may be input, which is then overwritten
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    output : array of T1
        normalised output
    running_mean : array of T2, shape (C,)
        new running mean
    running_variance : array of T2, shape (C,)
        new running variance
    batch_mean : array of T2, shape (C,)
        mean of the batch
    batch_variance : array of T2, shape (C,)
        biased

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f32 with f32, bf16 with f32 or bf16, f16
    with f32; bf16 only with f32 in the revision "2020-21".

    - The revision "early" has no type rules: each per-channel tensor may be f32 or of the
      input's type, independently of the others.
    - The new running statistics are momentum * old + (1 - momentum) * batch, with the biased
      batch variance, as in oneDNN 3.2. PyTorch's momentum is one minus this momentum. An empty
      batch (M = 0) does not change the running statistics.
    """


@_forward(_2020_21, "forward", described_by=BatchNormForwardTraining)
def BatchNormForwardTraining_2020_21(
    input: X,
    gamma: Gamma | None,
    beta: Beta | None,
    mean: RunningMean,
    variance: RunningVariance,
    *,
    epsilon: Epsilon,
    momentum: Momentum = None,
    data_format: DataFormat = "NXC",
    output: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, ...]:
    """`BatchNormForwardTraining` of the 2020-21 version."""


@_forward(_EARLY, "forward", described_by=BatchNormForwardTraining)
def BatchNormForwardTraining_early(
    input: X,
    gamma: Gamma | None,
    beta: Beta | None,
    mean: RunningMean,
    variance: RunningVariance,
    *,
    epsilon: Epsilon,
    momentum: Momentum = 0.1,
    data_format: DataFormat = "NXC",
    output: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, ...]:
    """`BatchNormForwardTraining` of the early version."""


@_inference(LATEST, "inference")
def BatchNormInference(
    input: X,
    gamma: Gamma,
    beta: Beta,
    mean: Mean,
    variance: Variance,
    *,
    epsilon: Epsilon,
    data_format: DataFormat = "NXC",
    output: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, ...]:
    """Batch normalisation with given statistics.

    ::

        output = gamma * (input - mean) / sqrt(variance + epsilon) + beta

    Parameters
    ----------
    input : array of T1, rank 2 or more
        input
    gamma : array of T2, shape (C,)
        scale
    beta : array of T2, shape (C,)
        offset
    mean : array of T2, shape (C,)
        mean to normalise with
    variance : array of T2, shape (C,)
        variance to normalise with
    epsilon : float, finite and positive, rounded to float32
        added to the variance
    data_format : {"NXC", "NCX"}, default "NXC"
        channel axis: 1 for NCX, the last for NXC; X is any number of spatial axes
    output : numpy.ndarray, optional
        memory for this output; may be input, which is then overwritten
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    output : array of T1
        normalised output

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f32 with f32, bf16 with f32 or bf16, f16
    with f32; bf16 only with f32 in the revision "2020-21".

    - The revision "early" has no type rules: each per-channel tensor may be f32 or of the
      input's type, independently of the others.
    """


BatchNormInference_2020_21 = _inference(_2020_21, "inference", name="BatchNormInference_2020_21")(
    BatchNormInference
)
"""`BatchNormInference` of the 2020-21 version."""

BatchNormInference_early = _inference(_EARLY, "inference", name="BatchNormInference_early")(
    BatchNormInference
)
"""`BatchNormInference` of the early version."""
