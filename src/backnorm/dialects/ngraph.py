"""nGraph, opset v0.

Source: the nGraph documentation of BatchNormTrainingBackprop, BatchNormTraining and
BatchNormInference, and the checks in the code of nGraph's nodes of these names.

In the documentation, input is the first argument; in the nodes, and therefore in serialised graphs,
gamma and beta come first. The operators here take the inputs in the documented order; their method
``from_node_order`` takes the inputs in the order of the nodes.
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

__all__ = ["OPERATORS", "BatchNormInference", "BatchNormTraining", "BatchNormTrainingBackprop"]

_rules = partial(
    OperatorSchema,
    dialect="ngraph",
    source="nGraph 0.x documentation, {op} v0",
    attributes=(AttributeSpec("epsilon", "f64", role="epsilon", range="not negative"),),
    type_rules=type_rules(f16="f16", bf16="bf16", f32="f32", f64="f64"),
    formats=(FormatSpec("NC...", "NCX"),),
    min_channels=1,
    phrases=Phrases(
        rank="must have rank of at least 2",
        gradient_shape="shape of delta does not match the shape of the input data",
        gradient_type="element type for input does not match element type for delta",
        channel_rank="shape for gamma/beta/mean/variance does not have rank 1",
        channel_size=(
            "input channel dimension ({channels}) does not match shape for "
            "gamma/beta/mean/variance {shape}"
        ),
        channel_shapes="shapes for gamma/beta/mean/variance do not match",
    ),
)
_INPUT = data("input", "x", "T")
_GAMMA, _BETA = channel("gamma", "gamma", "T"), channel("beta", "beta", "T")
_MEAN, _VARIANCE = channel("mean", "mean", "T"), channel("variance", "variance", "T")


class _BatchNormTrainingBackprop(Operator):
    """BatchNormTrainingBackprop of nGraph: gradients of batch normalisation in training."""

    rules = (
        _rules(
            op="BatchNormTrainingBackprop",
            operation="backward",
            inputs=(_INPUT, _GAMMA, _BETA, _MEAN, _VARIANCE, data("delta", "dy", "T")),
            outputs=(
                data("input_delta", "dx", "T"),
                channel("gamma_delta", "dgamma", "T"),
                channel("beta_delta", "dbeta", "T"),
            ),
        ),
    )

    def __call__(
        self,
        input: ArrayLike | None = None,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        delta: ArrayLike | None = None,
        epsilon: float | Required = REQUIRED,
        *,
        input_delta: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gradients of batch normalisation in training.

        With M elements per channel, s = 1 / sqrt(variance + epsilon) and c = input - mean::

            beta_delta  = sum delta
            gamma_delta = s * sum delta*c
            input_delta = gamma*s * (delta - beta_delta/M - c*s * gamma_delta/M)

        Parameters
        ----------
        input : array of T, rank 2 or more
            input data, (•, C, …)
        gamma : array of T, shape (C,)
            scale
        beta : array of T, shape (C,)
            offset; checked, but not used
        mean : array of T, shape (C,)
            mean of the batch
        variance : array of T, shape (C,)
            biased
        delta : array of T
            gradient of the output; the documentation also calls it normalized_delta
        epsilon : float, finite and not negative
            added to the variance, as a double
        input_delta : numpy.ndarray, optional
            memory for this output; may be delta, which is then overwritten
        arithmetic : {"float32", "float64"}, optional
            an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

        Returns
        -------
        input_delta : array of T
            gradient of input
        gamma_delta : array of T, shape (C,)
            gradient of gamma
        beta_delta : array of T, shape (C,)
            gradient of beta

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            if an argument does not match its description; the error names the argument

        Notes
        -----
        Element types of data and of per-channel tensors: f16 with f16, bf16 with bf16, f32 with
        f32, f64 with f64.

        - The method from_node_order takes arguments in the order of nGraph's node: gamma, beta,
          input, mean, variance, delta.
        - An empty batch (N = 0) gives zeros for gamma_delta and beta_delta.
        """
        input_delta, gamma_delta, beta_delta = self._run(
            (input, gamma, beta, mean, variance, delta),
            (epsilon,),
            memory=input_delta,
            arithmetic=arithmetic,
        )
        return input_delta, gamma_delta, beta_delta

    def from_node_order(
        self,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        input: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        delta: ArrayLike | None = None,
        epsilon: float | Required = REQUIRED,
        *,
        input_delta: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Call the operator with the inputs in the order of nGraph's node."""
        return self(
            input,
            gamma,
            beta,
            mean,
            variance,
            delta,
            epsilon,
            input_delta=input_delta,
            arithmetic=arithmetic,
        )


class _BatchNormTraining(Operator):
    """BatchNormTraining of nGraph: batch normalisation in training."""

    rules = (
        _rules(
            op="BatchNormTraining",
            operation="forward",
            inputs=(_INPUT, _GAMMA, _BETA),
            outputs=(
                data("normalized", "y", "T"),
                channel("batch_mean", "mean", "T"),
                channel("batch_variance", "variance", "T"),
            ),
        ),
    )

    def __call__(
        self,
        input: ArrayLike | None = None,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        epsilon: float | Required = REQUIRED,
        *,
        normalized: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Batch normalisation in training.

        ::

            normalized = gamma * (input - batch_mean) / sqrt(batch_variance + epsilon) + beta

        Parameters
        ----------
        input : array of T, rank 2 or more
            input data, (•, C, …)
        gamma : array of T, shape (C,)
            scale
        beta : array of T, shape (C,)
            offset
        epsilon : float, finite and not negative
            added to the variance, as a double
        normalized : numpy.ndarray, optional
            memory for this output; may be input, which is then overwritten
        arithmetic : {"float32", "float64"}, optional
            an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

        Returns
        -------
        normalized : array of T
            normalised output
        batch_mean : array of T, shape (C,)
            mean of the batch
        batch_variance : array of T, shape (C,)
            biased

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            if an argument does not match its description; the error names the argument

        Notes
        -----
        Element types of data and of per-channel tensors: f16 with f16, bf16 with bf16, f32 with
        f32, f64 with f64.

        - The method from_node_order takes arguments in the order of nGraph's node: gamma, beta,
          input.
        """
        normalized, batch_mean, batch_variance = self._run(
            (input, gamma, beta), (epsilon,), memory=normalized, arithmetic=arithmetic
        )
        return normalized, batch_mean, batch_variance

    def from_node_order(
        self,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        input: ArrayLike | None = None,
        epsilon: float | Required = REQUIRED,
        *,
        normalized: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Call the operator with the inputs in the order of nGraph's node."""
        return self(input, gamma, beta, epsilon, normalized=normalized, arithmetic=arithmetic)


class _BatchNormInference(Operator):
    """BatchNormInference of nGraph: batch normalisation with given statistics."""

    rules = (
        _rules(
            op="BatchNormInference",
            operation="inference",
            inputs=(_INPUT, _GAMMA, _BETA, _MEAN, _VARIANCE),
            outputs=(data("normalized", "y", "T"),),
        ),
    )

    def __call__(
        self,
        input: ArrayLike | None = None,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        epsilon: float | Required = REQUIRED,
        *,
        normalized: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> np.ndarray:
        """Batch normalisation with given statistics.

        ::

            normalized = gamma * (input - mean) / sqrt(variance + epsilon) + beta

        Parameters
        ----------
        input : array of T, rank 2 or more
            input data, (•, C, …)
        gamma : array of T, shape (C,)
            scale
        beta : array of T, shape (C,)
            offset
        mean : array of T, shape (C,)
            mean to normalise with
        variance : array of T, shape (C,)
            biased variance to normalise with
        epsilon : float, finite and not negative
            added to the variance, as a double
        normalized : numpy.ndarray, optional
            memory for this output; may be input, which is then overwritten
        arithmetic : {"float32", "float64"}, optional
            an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

        Returns
        -------
        normalized : array of T
            normalised output

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            if an argument does not match its description; the error names the argument

        Notes
        -----
        Element types of data and of per-channel tensors: f16 with f16, bf16 with bf16, f32 with
        f32, f64 with f64.

        - The method from_node_order takes arguments in the order of nGraph's node: gamma, beta,
          input, mean, variance.
        """
        (normalized,) = self._run(
            (input, gamma, beta, mean, variance),
            (epsilon,),
            memory=normalized,
            arithmetic=arithmetic,
        )
        return normalized

    def from_node_order(
        self,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        input: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        epsilon: float | Required = REQUIRED,
        *,
        normalized: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> np.ndarray:
        """Call the operator with the inputs in the order of nGraph's node."""
        return self(
            input,
            gamma,
            beta,
            mean,
            variance,
            epsilon,
            normalized=normalized,
            arithmetic=arithmetic,
        )


BatchNormTrainingBackprop = _BatchNormTrainingBackprop()
BatchNormTraining = _BatchNormTraining()
BatchNormInference = _BatchNormInference()

OPERATORS = by_name(BatchNormTrainingBackprop, BatchNormTraining, BatchNormInference)
