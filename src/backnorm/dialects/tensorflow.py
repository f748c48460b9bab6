"""TensorFlow: FusedBatchNormGradV3, its older versions, and their forward operators.

Source: TensorFlow's operator registry and the argument names of ``tf.raw_ops``. Importing this
module does not import TensorFlow.

In the forward operators, batch_mean and batch_variance are the new running statistics;
batch_variance has Bessel's correction. reserve_space_1 and reserve_space_2 are the statistics of
the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects._run import Arrays
from backnorm.dialects.operator import Operator, by_name
from backnorm.dialects.schema import (
    AttributeSpec,
    FormatSpec,
    OperatorSchema,
    Phrases,
    TensorSpec,
    channel,
    data,
    type_rules,
)
from backnorm.dtypes import FLOAT32
from backnorm.errors import ArgumentValueError

__all__ = [
    "OPERATORS",
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

# Making a named tuple by `tuple.__new__` takes half as long as by the method `_make` of the tuple's
# class.
_new = tuple.__new__


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


DataFormat = Literal["NHWC", "NCHW"]
DataFormatV3 = Literal["NHWC", "NCHW", "NDHWC", "NCDHW"]
ReserveSpace2 = Literal["variance", "inverse_standard_deviation"]

_FORMATS_4 = (FormatSpec("NHWC", "NXC", 4), FormatSpec("NCHW", "NCX", 4))
_FORMATS_5 = (FormatSpec("NDHWC", "NXC", 5), FormatSpec("NCDHW", "NCX", 5))

_EPSILON = AttributeSpec("epsilon", "f32", role="epsilon", range="not negative")
_IS_TRAINING = AttributeSpec("is_training", "bool", role="training")
_NAME = AttributeSpec("name", "string")
_FACTOR = AttributeSpec("exponential_avg_factor", "f32")
_RESERVE_SPACE_2_IS = AttributeSpec(
    "reserve_space_2_is",
    "string",
    choices=("variance", "inverse_standard_deviation"),
    extension=True,
)


def _rules(
    version: int, op: str, attributes: Sequence[AttributeSpec], **rules: Any
) -> OperatorSchema:
    """Return the rules of one version of an operator. Version 1 takes only float32. Version 3 takes
    data of rank 4 or 5, the other versions take only rank 4.
    """
    formats = _FORMATS_4 + (_FORMATS_5 if version == 3 else ())
    types = ("float32",) if version == 1 else ("half", "bfloat16", "float32")
    choices = tuple(f.name for f in formats)
    data_format = AttributeSpec("data_format", "string", role="data_format", choices=choices)
    # In TensorFlow's signature of the operator, data_format is immediately before is_training.
    place = attributes.index(_IS_TRAINING)
    ranks = "4 or 5" if version == 3 else "4"
    return OperatorSchema(
        dialect="tensorflow",
        op=op if version == 1 else f"{op}V{version}",
        source="TensorFlow 2.21, tf.raw_ops.{op}",
        attributes=(*attributes[:place], data_format, *attributes[place:]),
        type_rules=type_rules(**dict.fromkeys(types, "float32")),
        formats=formats,
        ranks=(4, 5) if version == 3 else (4, 4),
        phrases=Phrases(
            rank=f"input must be {ranks}-dimensional",
            gradient_shape="x and y_backprop must have same shape",
            gradient_type="x and y_backprop must have the same element type",
            channel_rank="must be 1-dimensional",
            channel_size="must have the same number of elements as the channels of {x}",
        ),
        **rules,
    )


def _empty(name: str, symbol: str) -> TensorSpec:
    return TensorSpec(name, "empty", symbol, "vector")


def _gradient(version: int) -> OperatorSchema:
    symbol = "T" if version == 1 else "U"
    opaque = TensorSpec("reserve_space_3", "ignored", symbol, "opaque")
    first_empty = 4 if version == 3 else 3
    return _rules(
        version,
        op="FusedBatchNormGrad",
        operation="backward",
        inputs=(
            data("y_backprop", "dy", "T"),
            data("x", "x", "T"),
            channel("scale", "gamma", "float32"),
            channel("reserve_space_1", "mean", symbol),
            channel("reserve_space_2", "variance", symbol),
            *((opaque,) if version == 3 else ()),
        ),
        outputs=(
            data("x_backprop", "dx", "T"),
            channel("scale_backprop", "dgamma", symbol),
            channel("offset_backprop", "dbeta", symbol),
            _empty(f"reserve_space_{first_empty}", symbol),
            _empty(f"reserve_space_{first_empty + 1}", symbol),
        ),
        attributes=(_EPSILON, _IS_TRAINING, _NAME, _RESERVE_SPACE_2_IS),
    )


def _forward(version: int) -> OperatorSchema:
    symbol = "T" if version == 1 else "U"
    outputs = (
        data("y", "y", "T"),
        channel("batch_mean", "running_mean", symbol),
        channel("batch_variance", "running_variance", symbol),
        channel("reserve_space_1", "mean", symbol),
        channel("reserve_space_2", "variance", symbol),
        _empty("reserve_space_3", symbol),
    )
    return _rules(
        version,
        op="FusedBatchNorm",
        operation="forward",
        inputs=(
            data("x", "x", "T"),
            channel("scale", "gamma", symbol),
            channel("offset", "beta", symbol),
            TensorSpec("mean", "running_mean", symbol, "vector"),
            TensorSpec("variance", "running_variance", symbol, "vector"),
        ),
        outputs=outputs if version == 3 else outputs[:-1],
        attributes=(_EPSILON, _FACTOR, _IS_TRAINING, _NAME),
        unbiased=True,
    )


class _Gradient(Operator):
    """Base class of all versions of the gradient."""

    @classmethod
    def translate(cls, call: Call) -> CanonicalCall:
        """Return the canonical call.

        If reserve_space_2 holds the inverse standard deviation, epsilon is 0 in the canonical call,
        because the inverse standard deviation already includes epsilon.
        """
        canonical = super().translate(call)
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


class _FusedBatchNormGradV3(_Gradient):
    """FusedBatchNormGradV3 of TensorFlow: gradients of batch normalisation."""

    rules = (_gradient(3),)

    def __call__(
        self,
        *,
        y_backprop: ArrayLike | None = None,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        reserve_space_1: ArrayLike | None = None,
        reserve_space_2: ArrayLike | None = None,
        reserve_space_3: object = None,
        epsilon: float = 0.0001,
        data_format: DataFormatV3 = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        reserve_space_2_is: ReserveSpace2 = "variance",
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
        results = self._run(
            (y_backprop, x, scale, reserve_space_1, reserve_space_2, reserve_space_3),
            (epsilon, data_format, is_training, name, reserve_space_2_is),
            arithmetic=arithmetic,
        )
        return _new(GradientV3, results)


class _FusedBatchNormGrad(_Gradient):
    """FusedBatchNormGrad of TensorFlow: gradients of batch normalisation."""

    rules = (_gradient(1),)

    def __call__(
        self,
        *,
        y_backprop: ArrayLike | None = None,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        reserve_space_1: ArrayLike | None = None,
        reserve_space_2: ArrayLike | None = None,
        epsilon: float = 0.0001,
        data_format: DataFormat = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        reserve_space_2_is: ReserveSpace2 = "variance",
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
        results = self._run(
            (y_backprop, x, scale, reserve_space_1, reserve_space_2),
            (epsilon, data_format, is_training, name, reserve_space_2_is),
            arithmetic=arithmetic,
        )
        return _new(Gradient, results)


class _FusedBatchNormGradV2(_FusedBatchNormGrad):
    """FusedBatchNormGradV2 of TensorFlow: gradients of batch normalisation."""

    rules = (_gradient(2),)


class _Forward(Operator):
    """Base class of all versions of the forward pass."""

    @classmethod
    def translate(cls, call: Call) -> CanonicalCall:
        """Return the canonical call: a forward pass in training, or inference."""
        canonical = super().translate(call)
        _check_statistics(call)
        if call.attributes["is_training"]:
            # For an empty batch, the weight is None, so that the kernel computes no running
            # statistics. `finish` then returns NaN in their place.
            weight = call.number("exponential_avg_factor") if call.count else None
            return replace(canonical, weight=weight)
        inputs = canonical.inputs | {"mean": "mean", "variance": "variance"}
        return replace(canonical, operation="inference", training=False, inputs=inputs)

    @classmethod
    def finish(
        cls, call: Call, arrays: Arrays, results: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Add the statistics that the kernel has not returned. In training, the batch is empty, and
        the running statistics are NaN. In inference, all statistics are those of the inputs.
        """
        for role in ("mean", "variance"):
            if call.attributes["is_training"]:
                results[f"running_{role}"] = np.full_like(results[role], np.nan)
            else:
                results[role] = arrays[role].astype(FLOAT32)
                results[f"running_{role}"] = results[role].copy()
        return results


class _FusedBatchNormV3(_Forward):
    """FusedBatchNormV3 of TensorFlow: batch normalisation."""

    rules = (_forward(3),)

    def __call__(
        self,
        *,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        epsilon: float = 0.0001,
        exponential_avg_factor: float = 1.0,
        data_format: DataFormatV3 = "NHWC",
        is_training: bool = True,
        name: str | None = None,
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
        results = self._run(
            (x, scale, offset, mean, variance),
            (epsilon, exponential_avg_factor, data_format, is_training, name),
            arithmetic=arithmetic,
        )
        return _new(ForwardV3, results)


class _FusedBatchNorm(_Forward):
    """FusedBatchNorm of TensorFlow: batch normalisation."""

    rules = (_forward(1),)

    def __call__(
        self,
        *,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        epsilon: float = 0.0001,
        exponential_avg_factor: float = 1.0,
        data_format: DataFormat = "NHWC",
        is_training: bool = True,
        name: str | None = None,
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
        results = self._run(
            (x, scale, offset, mean, variance),
            (epsilon, exponential_avg_factor, data_format, is_training, name),
            arithmetic=arithmetic,
        )
        return _new(Forward, results)


class _FusedBatchNormV2(_FusedBatchNorm):
    """FusedBatchNormV2 of TensorFlow: batch normalisation."""

    rules = (_forward(2),)


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


FusedBatchNormGradV3 = _FusedBatchNormGradV3()
FusedBatchNormGradV2 = _FusedBatchNormGradV2()
FusedBatchNormGrad = _FusedBatchNormGrad()
FusedBatchNormV3 = _FusedBatchNormV3()
FusedBatchNormV2 = _FusedBatchNormV2()
FusedBatchNorm = _FusedBatchNorm()

OPERATORS = by_name(
    FusedBatchNormGradV3,
    FusedBatchNormGradV2,
    FusedBatchNormGrad,
    FusedBatchNormV3,
    FusedBatchNormV2,
    FusedBatchNorm,
)
