"""oneDNN Graph as specified in the oneDNN developer guide.

Source: oneDNN developer guide, operations BatchNormTrainingBackward, BatchNormForwardTraining
and BatchNormInference (oneDNN 3.x).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._call import Call, CanonicalCall
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
from backnorm.dialects.schema import Rules

__all__ = [
    "BatchNormForwardTraining",
    "BatchNormInference",
    "BatchNormTrainingBackward",
]

RULES = Rules(
    dialect="onednn_graph",
    source="oneDNN developer guide, {op} (oneDNN 3.x)",
    type_rules=TYPE_RULES,
    formats=FORMATS,
)

SingleOutput = Annotated[Literal["specification", "onednn"], attribute("string", extension=True)]


def _translate_backward(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """Return the canonical call, without gamma if only diff_src is requested."""
    if len(call.outputs) > 1:
        return canonical
    inputs = {role: name for role, name in canonical.inputs.items() if role != "gamma"}
    training = call.attributes["single_output"] != "onednn"
    return replace(canonical, inputs=inputs, training=training)


@operator(
    replace(RULES, outputs_together=(("diff_gamma", "diff_beta"),)),
    "backward",
    translate=_translate_backward,
    diff_src=data("dx", "T1"),
    diff_gamma=channel("dgamma", "T2", required=False),
    diff_beta=channel("dbeta", "T2", required=False),
)
def BatchNormTrainingBackward(
    src: X,
    diff_dst: Dy,
    mean: Mean,
    variance: Variance,
    gamma: Gamma | None = None,
    *,
    epsilon: Epsilon,
    data_format: DataFormat = "NXC",
    single_output: SingleOutput = "specification",
    outputs: int | Collection[str] = 3,
    diff_src: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, ...]:
    """Gradients of batch normalisation in training.

    With M elements per channel, s = 1 / sqrt(variance + epsilon) and c = src - mean::

        diff_beta  = sum diff_dst
        diff_gamma = s * sum diff_dst*c
        diff_src   = gamma*s * (diff_dst - diff_beta/M - c*s * diff_gamma/M)

    Parameters
    ----------
    src : array of T1, rank 2 or more
        input of the forward
    diff_dst : array of T1
        gradient of the output
    mean : array of T2, shape (C,)
        batch mean
    variance : array of T2, shape (C,)
        biased batch variance
    gamma : array of T2, shape (C,), optional
        scale; absent: 1
    epsilon : float, finite and positive, rounded to float32
        added to the variance
    data_format : {"NXC", "NCX"}, default "NXC"
        channel axis: 1 for NCX, the last for NXC; X is any number of spatial axes
    single_output : {"specification", "onednn"}, default "specification"
        formula of diff_src when neither diff_gamma nor diff_beta is requested; an extension of
        backnorm
    outputs : int or collection of str
        the number of outputs, counted from the first, or their names
    diff_src : numpy.ndarray, optional
        memory for this output; may be diff_dst, which is then overwritten
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    diff_src : array of T1
        gradient of src
    diff_gamma : array of T2, shape (C,)
        gradient of gamma
    diff_beta : array of T2, shape (C,)
        gradient of beta

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f32 with f32, bf16 with f32 or bf16,
    f16 with f32.

    - diff_src may be the memory of diff_dst, which is then overwritten.
    - The library's op_def.hpp accepts two outputs, diff_src and diff_gamma. The guide says that
      diff_gamma and diff_beta are provided together or not at all. backnorm follows the guide,
      because it is the specification: op_def.hpp does not say what two outputs mean.
    - If neither diff_gamma nor diff_beta is requested, gamma is taken as 1. In this case the
      oneDNN library computes the formula for constant statistics, diff_dst / sqrt(variance +
      epsilon). With single_output="onednn", this operator computes that formula, too.
    - The oneDNN library accepts epsilon <= 0, a gamma that is too short, and rank 6, for which
      the library leaves half of the output unwritten. In backnorm, such an epsilon or gamma is
      an error, and every rank from 2 up works.
    - N, C and spatial sizes may be 0; diff_gamma and diff_beta are then zeros.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> src, diff_dst = rng.normal(size=(2, 8, 5, 5, 3)).astype("float32")
    >>> mean, variance = src.mean((0, 1, 2)), src.var((0, 1, 2))
    >>> diff_src, diff_gamma, diff_beta = BatchNormTrainingBackward(
    ...     src, diff_dst, mean, variance, epsilon=1e-5
    ... )
    >>> diff_src.shape, diff_gamma.shape
    ((8, 5, 5, 3), (3,))
    """


@operator(
    replace(RULES, inputs_together=(("gamma", "beta"),)),
    "forward",
    dst=data("y", "T1"),
    running_mean=channel("running_mean", "T2"),
    running_variance=channel("running_variance", "T2"),
    batch_mean=channel("mean", "T2"),
    batch_variance=channel("variance", "T2"),
)
def BatchNormForwardTraining(
    src: X,
    mean: RunningMean,
    variance: RunningVariance,
    gamma: Gamma | None = None,
    beta: Beta | None = None,
    *,
    epsilon: Epsilon,
    momentum: Momentum = None,
    data_format: DataFormat = "NXC",
    dst: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, ...]:
    """Batch normalisation in training, with running statistics.

    ::

        dst = gamma * (src - batch_mean) / sqrt(batch_variance + epsilon) + beta

    Parameters
    ----------
    src : array of T1, rank 2 or more
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
        weight of the old running statistics; not given: 0.5, as in the oneDNN library (the guide
        has no default)
    data_format : {"NXC", "NCX"}, default "NXC"
        channel axis: 1 for NCX, the last for NXC; X is any number of spatial axes
    dst : numpy.ndarray, optional
        memory for this output; may be src, which is then overwritten
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    dst : array of T1
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
    Element types of data and of per-channel tensors: f32 with f32, bf16 with f32 or bf16,
    f16 with f32.

    - dst may be the memory of src, which is then overwritten. The backward pass needs src.
    - The new running statistics are momentum * old + (1 - momentum) * batch, with the biased
      batch variance, as in oneDNN 3.2. PyTorch's momentum is one minus this momentum. An empty
      batch (M = 0) does not change the running statistics.
    - N, C and spatial sizes may be 0; batch statistics are then zeros.
    """


@operator(RULES, "inference", dst=data("y", "T1"))
def BatchNormInference(
    src: X,
    gamma: Gamma,
    beta: Beta,
    mean: Mean,
    variance: Variance,
    *,
    epsilon: Epsilon,
    data_format: DataFormat = "NXC",
    dst: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, ...]:
    """Batch normalisation with given statistics.

    ::

        dst = gamma * (src - mean) / sqrt(variance + epsilon) + beta

    Parameters
    ----------
    src : array of T1, rank 2 or more
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
    dst : numpy.ndarray, optional
        memory for this output; may be src, which is then overwritten
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    dst : array of T1
        normalised output

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f32 with f32, bf16 with f32 or bf16,
    f16 with f32.

    - dst may be the memory of src, which is then overwritten.
    - N, C and spatial sizes may be 0; dst is then empty.
    """
