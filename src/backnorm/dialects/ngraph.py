"""nGraph, opset v0.

Source: the nGraph documentation of BatchNormTrainingBackprop, BatchNormTraining and
BatchNormInference, and the checks of their nodes.

The documented order of the arguments starts with input; the nodes, and with them serialised
graphs, have gamma and beta first. The operators here take the documented order;
``from_node_order`` takes the other.

===============================  =====================================================
here                             canonical
===============================  =====================================================
input, delta, input_delta        x, dy, dx
gamma, beta, mean, variance      the same; beta is checked, and enters no gradient
gamma_delta, beta_delta          dgamma, dbeta
epsilon (double)                 the same; the channel axis is always 1 (NCX)
===============================  =====================================================
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from backnorm.dialects._operator import DialectOperator
from backnorm.dialects.schema import (
    REQUIRED,
    AttributeSpec,
    FormatSpec,
    OperatorSchema,
    Phrases,
    Required,
    TensorSpec,
    TypeRule,
)

__all__ = ["OPERATORS", "BatchNormInference", "BatchNormTraining", "BatchNormTrainingBackprop"]

_SOURCE = "nGraph 0.x documentation, {op} v0"
_EPSILON = AttributeSpec(
    "epsilon",
    "f64",
    REQUIRED,
    role="epsilon",
    range="not negative",
    summary="added to the variance; a double",
)
_TYPE_RULES = tuple(TypeRule(name, (name,)) for name in ("f16", "bf16", "f32", "f64"))
_FORMATS = (FormatSpec("NC...", "NCX"),)
_PHRASES = Phrases(
    rank="must have rank of at least 2",
    gradient_shape="shape of delta does not match the shape of the input data",
    gradient_type="element type for input does not match element type for delta",
    channel_rank="shape for gamma/beta/mean/variance does not have rank 1",
    channel_size=(
        "input channel dimension ({channels}) does not match shape for "
        "gamma/beta/mean/variance {shape}"
    ),
    channel_shapes="shapes for gamma/beta/mean/variance do not match",
)
_INPUT = TensorSpec("input", "x", "T", "data", summary="input data, (•, C, …)")
_GAMMA = TensorSpec("gamma", "gamma", "T", "channel", summary="scale")
_BETA = TensorSpec("beta", "beta", "T", "channel", summary="offset")
_MEAN = TensorSpec("mean", "mean", "T", "channel")
_VARIANCE = TensorSpec("variance", "variance", "T", "channel", summary="biased")
_NODE_ORDER_NOTE = "The node's own order of arguments: {order}; see from_node_order."


class _BatchNormTrainingBackprop(DialectOperator):
    """Gradients of batch normalisation in training (nGraph BatchNormTrainingBackprop v0)."""

    schema = OperatorSchema(
        dialect="ngraph",
        op="BatchNormTrainingBackprop",
        operation="backward",
        summary="Gradients of batch normalisation in training.",
        source=_SOURCE.format(op="BatchNormTrainingBackprop"),
        inputs=(
            _INPUT,
            _GAMMA,
            TensorSpec("beta", "beta", "T", "channel", summary="offset; checked, enters no result"),
            _MEAN,
            _VARIANCE,
            TensorSpec(
                "delta",
                "dy",
                "T",
                "data",
                summary="gradient of the output; normalized_delta in the documentation",
            ),
        ),
        outputs=(
            TensorSpec("input_delta", "dx", "T", "data", summary="gradient of input"),
            TensorSpec("gamma_delta", "dgamma", "T", "channel", summary="gradient of gamma"),
            TensorSpec("beta_delta", "dbeta", "T", "channel", summary="gradient of beta"),
        ),
        attributes=(_EPSILON,),
        type_rules=_TYPE_RULES,
        formats=_FORMATS,
        min_channels=1,
        notes=(
            _NODE_ORDER_NOTE.format(order="gamma, beta, input, mean, variance, delta"),
            "N = 0 gives zeros.",
        ),
        phrases=_PHRASES,
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
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return input_delta, gamma_delta, beta_delta.

        Parameters
        ----------
        input, delta : array
            Of one shape (N, C, ...) and element type (f16, bf16, f32 or f64).
        gamma, beta, mean, variance : array of shape (C,)
            Of the element type of `input`; C is at least 1.
        epsilon : float
        input_delta : numpy.ndarray, optional
            Memory for the first output; may be `delta`.
        """
        inputs = {
            "input": input,
            "gamma": gamma,
            "beta": beta,
            "mean": mean,
            "variance": variance,
            "delta": delta,
        }
        results = self.invoke(inputs, {"epsilon": epsilon}, out=input_delta)
        return results["input_delta"], results["gamma_delta"], results["beta_delta"]

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
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Call in the order of the node's arguments, as serialised graphs have it."""
        return self(input, gamma, beta, mean, variance, delta, epsilon, input_delta=input_delta)


class _BatchNormTraining(DialectOperator):
    """Batch normalisation in training (nGraph BatchNormTraining v0)."""

    schema = OperatorSchema(
        dialect="ngraph",
        op="BatchNormTraining",
        operation="forward",
        summary="Batch normalisation in training.",
        source=_SOURCE.format(op="BatchNormTraining"),
        inputs=(_INPUT, _GAMMA, _BETA),
        outputs=(
            TensorSpec("normalized", "y", "T", "data", summary="normalised output"),
            TensorSpec("batch_mean", "mean", "T", "channel"),
            TensorSpec("batch_variance", "variance", "T", "channel", summary="biased"),
        ),
        attributes=(_EPSILON,),
        type_rules=_TYPE_RULES,
        formats=_FORMATS,
        min_channels=1,
        notes=(_NODE_ORDER_NOTE.format(order="gamma, beta, input"),),
        phrases=_PHRASES,
    )

    def __call__(
        self,
        input: ArrayLike | None = None,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        epsilon: float | Required = REQUIRED,
        *,
        normalized: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return normalized, batch_mean, batch_variance (biased).

        Parameters
        ----------
        input : array of shape (N, C, ...)
            f16, bf16, f32 or f64.
        gamma, beta : array of shape (C,)
            Of the element type of `input`; C is at least 1.
        epsilon : float
        normalized : numpy.ndarray, optional
            Memory for the first output.
        """
        inputs = {"input": input, "gamma": gamma, "beta": beta}
        results = self.invoke(inputs, {"epsilon": epsilon}, out=normalized)
        return results["normalized"], results["batch_mean"], results["batch_variance"]

    def from_node_order(
        self,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        input: ArrayLike | None = None,
        epsilon: float | Required = REQUIRED,
        *,
        normalized: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Call in the order of the node's arguments, as serialised graphs have it."""
        return self(input, gamma, beta, epsilon, normalized=normalized)


class _BatchNormInference(DialectOperator):
    """Batch normalisation with given statistics (nGraph BatchNormInference v0)."""

    schema = OperatorSchema(
        dialect="ngraph",
        op="BatchNormInference",
        operation="inference",
        summary="Batch normalisation with given statistics.",
        source=_SOURCE.format(op="BatchNormInference"),
        inputs=(_INPUT, _GAMMA, _BETA, _MEAN, _VARIANCE),
        outputs=(TensorSpec("normalized", "y", "T", "data", summary="normalised output"),),
        attributes=(_EPSILON,),
        type_rules=_TYPE_RULES,
        formats=_FORMATS,
        min_channels=1,
        notes=(_NODE_ORDER_NOTE.format(order="gamma, beta, input, mean, variance"),),
        phrases=_PHRASES,
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
    ) -> np.ndarray:
        """Return the one output, normalized.

        Parameters
        ----------
        input : array of shape (N, C, ...)
            f16, bf16, f32 or f64.
        gamma, beta, mean, variance : array of shape (C,)
            Of the element type of `input`; C is at least 1.
        epsilon : float
        normalized : numpy.ndarray, optional
            Memory for the output.
        """
        inputs = {
            "input": input,
            "gamma": gamma,
            "beta": beta,
            "mean": mean,
            "variance": variance,
        }
        return self.invoke(inputs, {"epsilon": epsilon}, out=normalized)["normalized"]

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
    ) -> np.ndarray:
        """Call in the order of the node's arguments, as serialised graphs have it."""
        return self(input, gamma, beta, mean, variance, epsilon, normalized=normalized)


BatchNormTrainingBackprop = _BatchNormTrainingBackprop()
BatchNormTraining = _BatchNormTraining()
BatchNormInference = _BatchNormInference()

OPERATORS: dict[str, DialectOperator] = {
    op.schema.op: op for op in (BatchNormTrainingBackprop, BatchNormTraining, BatchNormInference)
}
