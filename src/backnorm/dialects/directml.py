"""DirectML: BATCH_NORMALIZATION_TRAINING_GRAD and BATCH_NORMALIZATION_GRAD.

Source: the documentation of DML_BATCH_NORMALIZATION_TRAINING_GRAD_OPERATOR_DESC and
DML_BATCH_NORMALIZATION_GRAD_OPERATOR_DESC (MicrosoftDocs/sdk-api; the second page as changed by
pull request 1262 of August 2022). Statistics and scale have the rank of the input, and size 1 in
the reduced axes. Any set of axes may be reduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, data, kept
from backnorm.dialects.schema import FormatSpec, Phrases, Rules, type_rules
from backnorm.errors import ArgumentValueError

__all__ = [
    "BATCH_NORMALIZATION_GRAD",
    "BATCH_NORMALIZATION_TRAINING_GRAD",
]


def _channel_axes(
    attributes: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[int, ...]:
    """Return the axes in which the size of Mean is not 1."""
    shape, mean = arrays["Input"].shape, arrays["Mean"].shape
    if len(mean) != len(shape):
        raise ArgumentValueError(
            "Mean",
            "must have the rank of Input",
            came=f"shape {mean}",
            accepted=f"rank {len(shape)}, like Input of shape {shape}",
        )
    if any(own not in (1, size) for own, size in zip(mean, shape, strict=True)):
        raise ArgumentValueError(
            "Mean",
            "must have the size of Input, or 1, in each axis",
            came=f"shape {mean}",
            accepted=f"sizes of {shape}, or 1",
        )
    return tuple(axis for axis, size in enumerate(mean) if size != 1)


RULES = Rules(
    dialect="directml",
    source="DirectML, DML_{op}_OPERATOR_DESC (feature level 4.1)",
    type_rules=type_rules(f32="f32", f16="f16"),
    formats=(FormatSpec("any axes", "NCX", is_any=True),),
    ranks=(1, 8),
    channel_axes=_channel_axes,
    phrases=Phrases(
        channel_rank="must have the rank of {x}", channel_size="must have the shape of Mean"
    ),
)
#: The rules of the operator with constant statistics.
FROZEN = replace(RULES, source="DirectML, DML_{op}_OPERATOR_DESC (feature level 3.1)", frozen=True)

Input = Annotated[ArrayLike, data("x", "T")]
InputGradient = Annotated[ArrayLike, data("dy", "T")]
Mean = Annotated[ArrayLike, kept("mean", "T")]
Variance = Annotated[ArrayLike, kept("variance", "T")]
Scale = Annotated[ArrayLike, kept("gamma", "T")]
Epsilon = Annotated[float, attribute("f32", "epsilon", range="not negative")]


_gradients = partial(
    operator,
    OutputGradient=data("dx", "T"),
    OutputScaleGradient=kept("dgamma", "T"),
    OutputBiasGradient=kept("dbeta", "T"),
)


@_gradients(RULES, "backward")
def BATCH_NORMALIZATION_TRAINING_GRAD(
    Input: Input,
    InputGradient: InputGradient,
    Mean: Mean,
    Variance: Variance,
    Scale: Scale,
    Epsilon: Epsilon,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of batch normalisation in training, with statistics over any set of axes.

    With M elements per channel, s = 1 / sqrt(Variance + Epsilon) and c = Input - Mean::

        OutputBiasGradient  = sum InputGradient
        OutputScaleGradient = s * sum InputGradient*c
        OutputGradient      = Scale*s * (InputGradient - OutputBiasGradient/M
                                         - c*s * OutputScaleGradient/M)

    Parameters
    ----------
    Input : array of T, rank 1 to 8
        input of the forward
    InputGradient : array of T
        gradient of the output
    Mean : array of T, 1 in the axes that are reduced
        mean of the batch; the axes where its size is 1 are reduced
    Variance : array of T, 1 in the axes that are reduced
        biased variance of the batch, of the shape of Mean
    Scale : array of T, 1 in the axes that are reduced
        scale, of the shape of Mean
    Epsilon : float, finite and not negative, rounded to float32
        added to the variance
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    OutputGradient : array of T
        gradient of Input
    OutputScaleGradient : array of T, 1 in the axes that are reduced
        gradient of Scale
    OutputBiasGradient : array of T, 1 in the axes that are reduced
        gradient of the bias

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f32 with f32, f16 with f16.

    - If the axes that are not reduced are adjacent in memory, they are merged into one
      axis without a copy; otherwise Input and InputGradient are copied.
    """


@_gradients(FROZEN, "backward")
def BATCH_NORMALIZATION_GRAD(
    Input: Input,
    InputGradient: InputGradient,
    Mean: Mean,
    Variance: Variance,
    Scale: Scale,
    Epsilon: Epsilon,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of batch normalisation with constant statistics, over any set of axes.

    With s = 1 / sqrt(Variance + Epsilon)::

        OutputBiasGradient  = sum InputGradient
        OutputScaleGradient = s * sum InputGradient*(Input - Mean)
        OutputGradient      = Scale*s * InputGradient

    Parameters
    ----------
    Input : array of T, rank 1 to 8
        input of the forward
    InputGradient : array of T
        gradient of the output
    Mean : array of T, 1 in the axes that are reduced
        mean of the forward; the axes where its size is 1 are reduced
    Variance : array of T, 1 in the axes that are reduced
        variance of the forward, of the shape of Mean
    Scale : array of T, 1 in the axes that are reduced
        scale, of the shape of Mean
    Epsilon : float, finite and not negative, rounded to float32
        added to the variance
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    OutputGradient : array of T
        gradient of Input
    OutputScaleGradient : array of T, 1 in the axes that are reduced
        gradient of Scale
    OutputBiasGradient : array of T, 1 in the axes that are reduced
        gradient of the bias

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f32 with f32, f16 with f16.

    - DirectML broadcasts an axis of size 1 only if the tensor's description has stride 0 for
      this axis. In backnorm, an axis of size 1 is always broadcast; its stride has no effect.
    - If the axes that are not reduced are adjacent in memory, they are merged into one
      axis without a copy; otherwise Input and InputGradient are copied.
    """
