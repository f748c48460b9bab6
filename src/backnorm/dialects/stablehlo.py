"""StableHLO: batch_norm_grad, batch_norm_training, batch_norm_inference.

Source: the StableHLO specification, v1. All tensors have one element type. The rank is 1 or more,
and any axis can be the feature axis. An operand of rank 1 is a batch of one sample, with one
element for each feature.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects.operator import Operator, by_name
from backnorm.dialects.schema import (
    REQUIRED,
    AttributeSpec,
    FormatSpec,
    OperatorSchema,
    Phrases,
    Required,
    channel,
    data,
    type_rules,
)

__all__ = ["OPERATORS", "batch_norm_grad", "batch_norm_inference", "batch_norm_training"]

_rules = partial(
    OperatorSchema,
    dialect="stablehlo",
    source="the StableHLO specification, {op}",
    attributes=(
        AttributeSpec("epsilon", "f32", role="epsilon", range="not negative"),
        AttributeSpec("feature_index", "i64", role="channel_axis", range="not negative"),
    ),
    type_rules=type_rules(f64="f64", f32="f32", f16="f16", bf16="bf16"),
    formats=(FormatSpec("any axis", "NCX", is_any=True),),
    ranks=(1, 0),
    phrases=Phrases(channel_size="must have as many elements as operand has features ({channels})"),
)
_OPERAND = data("operand", "x", "T")
_SCALE, _OFFSET = channel("scale", "gamma", "T"), channel("offset", "beta", "T")
_MEAN, _VARIANCE = channel("mean", "mean", "T"), channel("variance", "variance", "T")


class _BatchNormGrad(Operator):
    """batch_norm_grad of StableHLO: gradients of batch normalisation in training."""

    rules = (
        _rules(
            op="batch_norm_grad",
            operation="backward",
            inputs=(_OPERAND, _SCALE, _MEAN, _VARIANCE, data("grad_output", "dy", "T")),
            outputs=(
                data("grad_operand", "dx", "T"),
                channel("grad_scale", "dgamma", "T"),
                channel("grad_offset", "dbeta", "T"),
            ),
        ),
    )

    def __call__(
        self,
        operand: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        grad_output: ArrayLike | None = None,
        epsilon: float | Required = REQUIRED,
        feature_index: int | Required = REQUIRED,
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
        grad_operand, grad_scale, grad_offset = self._run(
            (operand, scale, mean, variance, grad_output),
            (epsilon, feature_index),
            arithmetic=arithmetic,
        )
        return grad_operand, grad_scale, grad_offset


class _BatchNormTraining(Operator):
    """batch_norm_training of StableHLO: batch normalisation in training."""

    rules = (
        _rules(
            op="batch_norm_training",
            operation="forward",
            inputs=(_OPERAND, _SCALE, _OFFSET),
            outputs=(
                data("output", "y", "T"),
                channel("batch_mean", "mean", "T"),
                channel("batch_var", "variance", "T"),
            ),
        ),
    )

    def __call__(
        self,
        operand: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        epsilon: float | Required = REQUIRED,
        feature_index: int | Required = REQUIRED,
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
        output, batch_mean, batch_var = self._run(
            (operand, scale, offset), (epsilon, feature_index), arithmetic=arithmetic
        )
        return output, batch_mean, batch_var


class _BatchNormInference(Operator):
    """batch_norm_inference of StableHLO: batch normalisation with given statistics."""

    rules = (
        _rules(
            op="batch_norm_inference",
            operation="inference",
            inputs=(_OPERAND, _SCALE, _OFFSET, _MEAN, _VARIANCE),
            outputs=(data("result", "y", "T"),),
        ),
    )

    def __call__(
        self,
        operand: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        epsilon: float | Required = REQUIRED,
        feature_index: int | Required = REQUIRED,
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
        (result,) = self._run(
            (operand, scale, offset, mean, variance),
            (epsilon, feature_index),
            arithmetic=arithmetic,
        )
        return result


batch_norm_grad = _BatchNormGrad()
batch_norm_training = _BatchNormTraining()
batch_norm_inference = _BatchNormInference()

OPERATORS = by_name(batch_norm_grad, batch_norm_training, batch_norm_inference)
