"""TensorFlow: FusedBatchNormGradV3, its older versions, and their forward operators.

Source: TensorFlow's operator registry and the argument names of ``tf.raw_ops``. Importing this
module does not import TensorFlow.

In the forward operators, batch_mean and batch_variance are the new running statistics;
batch_variance has Bessel's correction. reserve_space_1 and reserve_space_2 are the statistics of
the batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects._run import Arrays
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, channel, data, opaque, vector
from backnorm.dialects.schema import FormatSpec, Phrases, Rules, type_rules
from backnorm.errors import ArgumentValueError

__all__ = [
    "Forward",
    "ForwardV3",
    "FusedBatchNorm",
    "FusedBatchNormGrad",
    "FusedBatchNormGradV2",
    "FusedBatchNormGradV3",
    "FusedBatchNormV2",
    "FusedBatchNormV3",
    "Gradient",
    "GradientV3",
]


class Gradient(NamedTuple):
    """The outputs of FusedBatchNormGrad and FusedBatchNormGradV2."""

    x_backprop: np.ndarray
    scale_backprop: np.ndarray
    offset_backprop: np.ndarray
    reserve_space_3: np.ndarray
    reserve_space_4: np.ndarray


class GradientV3(NamedTuple):
    """The outputs of FusedBatchNormGradV3."""

    x_backprop: np.ndarray
    scale_backprop: np.ndarray
    offset_backprop: np.ndarray
    reserve_space_4: np.ndarray
    reserve_space_5: np.ndarray


class Forward(NamedTuple):
    """The outputs of FusedBatchNorm and FusedBatchNormV2."""

    y: np.ndarray
    batch_mean: np.ndarray
    batch_variance: np.ndarray
    reserve_space_1: np.ndarray
    reserve_space_2: np.ndarray


class ForwardV3(NamedTuple):
    """The outputs of FusedBatchNormV3."""

    y: np.ndarray
    batch_mean: np.ndarray
    batch_variance: np.ndarray
    reserve_space_1: np.ndarray
    reserve_space_2: np.ndarray
    reserve_space_3: np.ndarray


_V3 = Rules(
    dialect="tensorflow",
    source="TensorFlow 2.21, tf.raw_ops.{op}",
    type_rules=type_rules(half="float32", bfloat16="float32", float32="float32"),
    formats=(
        FormatSpec("NHWC", "NXC", 4),
        FormatSpec("NCHW", "NCX", 4),
        FormatSpec("NDHWC", "NXC", 5),
        FormatSpec("NCDHW", "NCX", 5),
    ),
    ranks=(4, 5),
    unbiased=True,
    phrases=Phrases(
        rank="input must be 4 or 5-dimensional",
        gradient_shape="x and y_backprop must have same shape",
        gradient_type="x and y_backprop must have the same element type",
        channel_rank="must be 1-dimensional",
        channel_size="must have the same number of elements as the channels of {x}",
    ),
)
_V2 = replace(_V3, ranks=(4, 4), phrases=replace(_V3.phrases, rank="input must be 4-dimensional"))
_V1 = replace(_V2, type_rules=type_rules(float32="float32"))

X = Annotated[ArrayLike, data("x", "T")]
YBackprop = Annotated[ArrayLike, data("dy", "T")]
Scale = Annotated[ArrayLike, channel("gamma", "float32")]
Epsilon = Annotated[float, attribute("f32", "epsilon", range="not negative")]
AverageFactor = Annotated[float, attribute("f32", "batch_weight", example=0.25)]
DataFormat = Annotated[Literal["NHWC", "NCHW"], attribute("string", "data_format")]
DataFormatV3 = Annotated[
    Literal["NHWC", "NCHW", "NDHWC", "NCDHW"], attribute("string", "data_format")
]
IsTraining = Annotated[bool, attribute("bool", "training")]
Name = Annotated[str | None, attribute("string")]
ReserveSpace2Is = Annotated[
    Literal["variance", "inverse_standard_deviation"], attribute("string", extension=True)
]


def _translate_gradient(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """Return the canonical call.

    If reserve_space_2 holds the inverse standard deviation, epsilon is 0 in the canonical call,
    because the inverse standard deviation already includes epsilon.
    """
    if call.attributes["reserve_space_2_is"] == "variance":
        return canonical
    if not call.attributes["is_training"]:
        raise ArgumentValueError(
            "reserve_space_2_is",
            "is_training=False takes the population variance",
            came="'inverse_standard_deviation'",
            accepted="'variance'",
        )
    return replace(canonical, epsilon=0.0, inverse_std=True)


@operator(
    _V3,
    "backward",
    translate=_translate_gradient,
    x_backprop=data("dx", "T"),
    scale_backprop=channel("dgamma", "U"),
    offset_backprop=channel("dbeta", "U"),
    reserve_space_4=vector("empty", "U"),
    reserve_space_5=vector("empty", "U"),
)
def FusedBatchNormGradV3(
    *,
    y_backprop: YBackprop,
    x: X,
    scale: Scale,
    reserve_space_1: Annotated[ArrayLike, channel("mean", "U")],
    reserve_space_2: Annotated[ArrayLike, channel("variance", "U")],
    reserve_space_3: Annotated[object, opaque("ignored", "U")],
    epsilon: Epsilon = 0.0001,
    data_format: DataFormatV3 = "NHWC",
    is_training: IsTraining = True,
    name: Name = None,
    reserve_space_2_is: ReserveSpace2Is = "variance",
    arithmetic: Arithmetic | None = None,
) -> GradientV3:
    """Gradients of batch normalisation.

    A channel has M elements, and c is x - reserve_space_1. If reserve_space_2 is the variance,
    s is 1 / sqrt(reserve_space_2 + epsilon). If reserve_space_2 is the inverse standard
    deviation, s is reserve_space_2 itself::

        offset_backprop = sum y_backprop
        scale_backprop  = s * sum y_backprop*c
        x_backprop      = scale*s * (y_backprop - offset_backprop/M - c*s * scale_backprop/M)

    If not is_training, x_backprop is scale*s * y_backprop.

    Parameters
    ----------
    y_backprop : array of T
        gradient of y
    x : array of T, rank 4 or 5
        input of the forward
    scale : array of float32, shape (C,)
        scale
    reserve_space_1 : array of U, shape (C,)
        batch mean; population mean if not is_training
    reserve_space_2 : array of U, shape (C,)
        biased batch variance; population variance if not is_training
    reserve_space_3 : object
        opaque; required and ignored
    epsilon : float, finite and not negative, rounded to float32, default 0.0001
        added to the variance
    data_format : {"NHWC", "NCHW", "NDHWC", "NCDHW"}, default "NHWC"
        the axes of x; as many letters as x has axes
    is_training : bool, default True
        False: statistics are constants
    name : str, optional
        name of the operation; ignored
    reserve_space_2_is : {"variance", "inverse_standard_deviation"}, default "variance"
        what reserve_space_2 holds in training: the biased variance (CPU) or 1 /
        sqrt(variance + epsilon) (cuDNN), where epsilon is not used again; an extension of
        backnorm
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    x_backprop : array of T
        gradient of x
    scale_backprop : array of U, shape (C,)
        gradient of scale
    offset_backprop : array of U, shape (C,)
        gradient of offset
    reserve_space_4 : array of U, shape (0,)
        empty, shape (0,)
    reserve_space_5 : array of U, shape (0,)
        empty, shape (0,)

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: half with float32, bfloat16 with
    float32, float32 with float32.

    - TensorFlow's eager mode accepts a data_format whose length is not the rank of x; in
      backnorm, such a data_format is an error.
    - TensorFlow's CPU kernel rejects NCHW with is_training=False; backnorm accepts it.
    - An empty x gives an empty x_backprop and zeros for scale_backprop and offset_backprop.
    """


_gradients = partial(
    operator,
    translate=_translate_gradient,
    x_backprop=data("dx", "T"),
    scale_backprop=channel("dgamma", "U"),
    offset_backprop=channel("dbeta", "U"),
    reserve_space_3=vector("empty", "U"),
    reserve_space_4=vector("empty", "U"),
)


@_gradients(_V2, "backward")
def FusedBatchNormGradV2(
    *,
    y_backprop: YBackprop,
    x: X,
    scale: Scale,
    reserve_space_1: Annotated[ArrayLike, channel("mean", "U")],
    reserve_space_2: Annotated[ArrayLike, channel("variance", "U")],
    epsilon: Epsilon = 0.0001,
    data_format: DataFormat = "NHWC",
    is_training: IsTraining = True,
    name: Name = None,
    reserve_space_2_is: ReserveSpace2Is = "variance",
    arithmetic: Arithmetic | None = None,
) -> Gradient:
    """Gradients of batch normalisation.

    A channel has M elements, and c is x - reserve_space_1. If reserve_space_2 is the variance,
    s is 1 / sqrt(reserve_space_2 + epsilon). If reserve_space_2 is the inverse standard
    deviation, s is reserve_space_2 itself::

        offset_backprop = sum y_backprop
        scale_backprop  = s * sum y_backprop*c
        x_backprop      = scale*s * (y_backprop - offset_backprop/M - c*s * scale_backprop/M)

    If not is_training, x_backprop is scale*s * y_backprop.

    Parameters
    ----------
    y_backprop : array of T
        gradient of y
    x : array of T, rank 4
        input of the forward
    scale : array of float32, shape (C,)
        scale
    reserve_space_1 : array of U, shape (C,)
        batch mean; population mean if not is_training
    reserve_space_2 : array of U, shape (C,)
        biased batch variance; population variance if not is_training
    epsilon : float, finite and not negative, rounded to float32, default 0.0001
        added to the variance
    data_format : {"NHWC", "NCHW"}, default "NHWC"
        the axes of x; as many letters as x has axes
    is_training : bool, default True
        False: statistics are constants
    name : str, optional
        name of the operation; ignored
    reserve_space_2_is : {"variance", "inverse_standard_deviation"}, default "variance"
        what reserve_space_2 holds in training: the biased variance (CPU) or 1 /
        sqrt(variance + epsilon) (cuDNN), where epsilon is not used again; an extension of
        backnorm
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    x_backprop : array of T
        gradient of x
    scale_backprop : array of U, shape (C,)
        gradient of scale
    offset_backprop : array of U, shape (C,)
        gradient of offset
    reserve_space_3 : array of U, shape (0,)
        empty, shape (0,)
    reserve_space_4 : array of U, shape (0,)
        empty, shape (0,)

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: half with float32, bfloat16 with
    float32, float32 with float32; FusedBatchNormGrad takes only float32.

    - TensorFlow's eager mode accepts a data_format whose length is not the rank of x; in
      backnorm, such a data_format is an error.
    - TensorFlow's CPU kernel rejects NCHW with is_training=False; backnorm accepts it.
    - An empty x gives an empty x_backprop and zeros for scale_backprop and offset_backprop.
    """


FusedBatchNormGrad = _gradients(_V1, "backward", name="FusedBatchNormGrad")(FusedBatchNormGradV2)
"""Gradients of batch normalisation: `FusedBatchNormGradV2` for float32 alone."""


def _translate_forward(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """Return the canonical call, which has no running statistics if the batch is empty."""
    _check_statistics(call)
    return canonical if call.count else replace(canonical, weight=None)


def _finish_forward(
    call: Call, arrays: Arrays, results: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add the running statistics of an empty batch, which are NaN."""
    nan = {f"running_{role}": np.full_like(results[role], np.nan) for role in ("mean", "variance")}
    return nan | results


def _check_statistics(call: Call) -> None:
    """Raise if the call reads mean and variance, and the size of one is not that of scale."""
    training = call.attributes["is_training"]
    if training and call.number("exponential_avg_factor") == 1.0:
        return
    case = "exponential_avg_factor != 1" if training else "is_training=False"
    channels = call.inputs["scale"].shape[0]
    for name in ("mean", "variance"):
        size = call.inputs[name].shape[0]
        if size != channels:
            raise ArgumentValueError(
                name,
                f"with {case} must have the same number of elements as the channels of x",
                came=f"{size} and {channels}",
                accepted=f"shape ({channels},)",
            )


@operator(
    _V3,
    "forward",
    translate=_translate_forward,
    finish=_finish_forward,
    y=data("y", "T"),
    batch_mean=channel("running_mean", "U"),
    batch_variance=channel("running_variance", "U"),
    reserve_space_1=channel("mean", "U"),
    reserve_space_2=channel("variance", "U"),
    reserve_space_3=vector("empty", "U"),
)
def FusedBatchNormV3(
    *,
    x: X,
    scale: Annotated[ArrayLike, channel("gamma", "U")],
    offset: Annotated[ArrayLike, channel("beta", "U")],
    mean: Annotated[ArrayLike, vector("running_mean", "U")],
    variance: Annotated[ArrayLike, vector("running_variance", "U")],
    epsilon: Epsilon = 0.0001,
    exponential_avg_factor: AverageFactor = 1.0,
    data_format: DataFormatV3 = "NHWC",
    is_training: IsTraining = True,
    name: Name = None,
    arithmetic: Arithmetic | None = None,
) -> ForwardV3:
    """Batch normalisation, in training or with population statistics.

    In training, m and v are the mean and the biased variance of the batch. If is_training is
    False, m and v are the inputs mean and variance::

        y = scale * (x - m) / sqrt(v + epsilon) + offset

    Parameters
    ----------
    x : array of T, rank 4 or 5
        input
    scale : array of U, shape (C,)
        scale
    offset : array of U, shape (C,)
        offset
    mean : array of U, shape (C,) or (0,)
        population mean
    variance : array of U, shape (C,) or (0,)
        population variance
    epsilon : float, finite and not negative, rounded to float32, default 0.0001
        added to the variance
    exponential_avg_factor : float, finite, rounded to float32, default 1.0
        weight of the batch in the running statistics; 1: the batch alone
    data_format : {"NHWC", "NCHW", "NDHWC", "NCDHW"}, default "NHWC"
        the axes of x; as many letters as x has axes
    is_training : bool, default True
        False: statistics are constants
    name : str, optional
        name of the operation; ignored
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    y : array of T
        normalised output
    batch_mean : array of U, shape (C,)
        running mean
    batch_variance : array of U, shape (C,)
        running variance, an average of variances with Bessel's correction
    reserve_space_1 : array of U, shape (C,)
        batch mean
    reserve_space_2 : array of U, shape (C,)
        biased batch variance
    reserve_space_3 : array of U, shape (0,)
        empty, shape (0,)

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: half with float32, bfloat16 with
    float32, float32 with float32.

    - If is_training is False or exponential_avg_factor is not 1, mean and variance are read,
      and must have one value per channel. Otherwise mean and variance are ignored, and may be
      empty.
    - In training, with w = exponential_avg_factor, batch_mean is (1 - w) * mean + w * (the
      mean of x), and batch_variance is (1 - w) * variance + w * (the unbiased variance of x).
    - is_training=False returns the given mean and variance as batch_mean and batch_variance,
      and again as reserve_space_1 and reserve_space_2.
    - In training, an empty x gives NaN for batch_mean and batch_variance, as in TensorFlow,
      and zeros for reserve_space_1 and reserve_space_2.
    """


_forward = partial(
    operator,
    translate=_translate_forward,
    finish=_finish_forward,
    y=data("y", "T"),
    batch_mean=channel("running_mean", "U"),
    batch_variance=channel("running_variance", "U"),
    reserve_space_1=channel("mean", "U"),
    reserve_space_2=channel("variance", "U"),
)


@_forward(_V2, "forward")
def FusedBatchNormV2(
    *,
    x: X,
    scale: Annotated[ArrayLike, channel("gamma", "U")],
    offset: Annotated[ArrayLike, channel("beta", "U")],
    mean: Annotated[ArrayLike, vector("running_mean", "U")],
    variance: Annotated[ArrayLike, vector("running_variance", "U")],
    epsilon: Epsilon = 0.0001,
    exponential_avg_factor: AverageFactor = 1.0,
    data_format: DataFormat = "NHWC",
    is_training: IsTraining = True,
    name: Name = None,
    arithmetic: Arithmetic | None = None,
) -> Forward:
    """Batch normalisation, in training or with population statistics.

    In training, m and v are the mean and the biased variance of the batch. If is_training is
    False, m and v are the inputs mean and variance::

        y = scale * (x - m) / sqrt(v + epsilon) + offset

    Parameters
    ----------
    x : array of T, rank 4
        input
    scale : array of U, shape (C,)
        scale
    offset : array of U, shape (C,)
        offset
    mean : array of U, shape (C,) or (0,)
        population mean
    variance : array of U, shape (C,) or (0,)
        population variance
    epsilon : float, finite and not negative, rounded to float32, default 0.0001
        added to the variance
    exponential_avg_factor : float, finite, rounded to float32, default 1.0
        weight of the batch in the running statistics; 1: the batch alone
    data_format : {"NHWC", "NCHW"}, default "NHWC"
        the axes of x; as many letters as x has axes
    is_training : bool, default True
        False: statistics are constants
    name : str, optional
        name of the operation; ignored
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    y : array of T
        normalised output
    batch_mean : array of U, shape (C,)
        running mean
    batch_variance : array of U, shape (C,)
        running variance, an average of variances with Bessel's correction
    reserve_space_1 : array of U, shape (C,)
        batch mean
    reserve_space_2 : array of U, shape (C,)
        biased batch variance

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: half with float32, bfloat16 with
    float32, float32 with float32; FusedBatchNorm takes only float32.

    - If is_training is False or exponential_avg_factor is not 1, mean and variance are read,
      and must have one value per channel. Otherwise mean and variance are ignored, and may be
      empty.
    - In training, with w = exponential_avg_factor, batch_mean is (1 - w) * mean + w * (the
      mean of x), and batch_variance is (1 - w) * variance + w * (the unbiased variance of x).
    - is_training=False returns the given mean and variance as batch_mean and batch_variance,
      and again as reserve_space_1 and reserve_space_2.
    - In training, an empty x gives NaN for batch_mean and batch_variance, as in TensorFlow,
      and zeros for reserve_space_1 and reserve_space_2.
    """


FusedBatchNorm = _forward(_V1, "forward", name="FusedBatchNorm")(FusedBatchNormV2)
"""Batch normalisation: `FusedBatchNormV2` for float32 alone."""
