"""StableHLO: batch_norm_grad, batch_norm_training, batch_norm_inference.

Source: the StableHLO specification, v1. One element type for everything, any rank from 1 up, and
any axis for the features.

=================================  ===========================================
here                               canonical
=================================  ===========================================
operand, grad_output               x, dy
scale, offset, mean, variance      gamma, beta, mean, variance (biased)
grad_operand                       dx
grad_scale, grad_offset            dgamma, dbeta
output, result                     y
batch_mean, batch_var              mean, variance
epsilon (f32)                      epsilon
feature_index                      the channel axis; seen as axis 1, without a copy
=================================  ===========================================

An operand of rank 1 has one element per feature, and is taken for a batch of one.
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

__all__ = ["OPERATORS", "batch_norm_grad", "batch_norm_inference", "batch_norm_training"]

_SOURCE = "the StableHLO specification, {op}"
_EPSILON = AttributeSpec(
    "epsilon",
    "f32",
    REQUIRED,
    role="epsilon",
    range="not negative",
    summary="added to the variance",
)
_FEATURE_INDEX = AttributeSpec(
    "feature_index",
    "i64",
    REQUIRED,
    role="channel_axis",
    range="not negative",
    summary="the axis of the features, less than the rank of operand",
)
_ATTRIBUTES = (_EPSILON, _FEATURE_INDEX)
_TYPE_RULES = tuple(TypeRule(name, (name,)) for name in ("f64", "f32", "f16", "bf16"))
_FORMATS = (FormatSpec("any axis", "NCX"),)
_PHRASES = Phrases(
    channel_size="must have as many elements as operand has features ({channels})",
)
_OPERAND = TensorSpec("operand", "x", "T", "data", summary="input")
_SCALE = TensorSpec("scale", "gamma", "T", "channel", summary="scale")
_OFFSET = TensorSpec("offset", "beta", "T", "channel", summary="offset")
_MEAN = TensorSpec("mean", "mean", "T", "channel")
_VARIANCE = TensorSpec("variance", "variance", "T", "channel", summary="biased")


class _BatchNormGrad(DialectOperator):
    """Gradients of batch normalisation in training (StableHLO batch_norm_grad)."""

    schema = OperatorSchema(
        dialect="stablehlo",
        op="batch_norm_grad",
        operation="backward",
        summary="Gradients of batch normalisation in training.",
        source=_SOURCE.format(op="batch_norm_grad"),
        inputs=(
            _OPERAND,
            _SCALE,
            _MEAN,
            _VARIANCE,
            TensorSpec("grad_output", "dy", "T", "data", summary="gradient of the output"),
        ),
        outputs=(
            TensorSpec("grad_operand", "dx", "T", "data", summary="gradient of operand"),
            TensorSpec("grad_scale", "dgamma", "T", "channel", summary="gradient of scale"),
            TensorSpec("grad_offset", "dbeta", "T", "channel", summary="gradient of offset"),
        ),
        attributes=_ATTRIBUTES,
        type_rules=_TYPE_RULES,
        formats=_FORMATS,
        ranks=(1, 0),
        notes=(
            "XLA's CPU code multiplies f16 gradients by the number of elements in f16, and gives "
            "infinity from 65,504 / |grad_output| elements on; here sums are wide.",
            "An empty operand gives zeros for the parameters.",
        ),
        phrases=_PHRASES,
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
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return grad_operand, grad_scale, grad_offset.

        Parameters
        ----------
        operand, grad_output : array of rank 1 or more
            Of one shape and element type (f64, f32, f16 or bf16).
        scale, mean, variance : array of shape (C,)
            Of the element type of `operand`; C is the length of its axis `feature_index`.
        epsilon : float
            Not negative; rounded to float32.
        feature_index : int
            The axis of the features, 0 to rank - 1.

        Returns
        -------
        tuple of numpy.ndarray
            grad_operand lies in memory like `operand`.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            For an argument that is not as described, by its name here.
        """
        inputs = {
            "operand": operand,
            "scale": scale,
            "mean": mean,
            "variance": variance,
            "grad_output": grad_output,
        }
        results = self.invoke(inputs, {"epsilon": epsilon, "feature_index": feature_index})
        return results["grad_operand"], results["grad_scale"], results["grad_offset"]


class _BatchNormTraining(DialectOperator):
    """Batch normalisation in training (StableHLO batch_norm_training)."""

    schema = OperatorSchema(
        dialect="stablehlo",
        op="batch_norm_training",
        operation="forward",
        summary="Batch normalisation in training.",
        source=_SOURCE.format(op="batch_norm_training"),
        inputs=(_OPERAND, _SCALE, _OFFSET),
        outputs=(
            TensorSpec("output", "y", "T", "data", summary="normalised output"),
            TensorSpec("batch_mean", "mean", "T", "channel"),
            TensorSpec("batch_var", "variance", "T", "channel", summary="biased"),
        ),
        attributes=_ATTRIBUTES,
        type_rules=_TYPE_RULES,
        formats=_FORMATS,
        ranks=(1, 0),
        phrases=_PHRASES,
    )

    def __call__(
        self,
        operand: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        epsilon: float | Required = REQUIRED,
        feature_index: int | Required = REQUIRED,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return output, batch_mean, batch_var (biased).

        Parameters
        ----------
        operand : array of rank 1 or more
            f64, f32, f16 or bf16.
        scale, offset : array of shape (C,)
            Of the element type of `operand`; C is the length of its axis `feature_index`.
        epsilon : float
            Not negative; rounded to float32.
        feature_index : int
            The axis of the features, 0 to rank - 1.
        """
        inputs = {"operand": operand, "scale": scale, "offset": offset}
        results = self.invoke(inputs, {"epsilon": epsilon, "feature_index": feature_index})
        return results["output"], results["batch_mean"], results["batch_var"]


class _BatchNormInference(DialectOperator):
    """Batch normalisation with given statistics (StableHLO batch_norm_inference)."""

    schema = OperatorSchema(
        dialect="stablehlo",
        op="batch_norm_inference",
        operation="inference",
        summary="Batch normalisation with given statistics.",
        source=_SOURCE.format(op="batch_norm_inference"),
        inputs=(_OPERAND, _SCALE, _OFFSET, _MEAN, _VARIANCE),
        outputs=(TensorSpec("result", "y", "T", "data", summary="normalised output"),),
        attributes=_ATTRIBUTES,
        type_rules=_TYPE_RULES,
        formats=_FORMATS,
        ranks=(1, 0),
        phrases=_PHRASES,
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
    ) -> np.ndarray:
        """Return the one output, result.

        Parameters
        ----------
        operand : array of rank 1 or more
            f64, f32, f16 or bf16.
        scale, offset, mean, variance : array of shape (C,)
            Of the element type of `operand`; C is the length of its axis `feature_index`.
        epsilon : float
            Not negative; rounded to float32.
        feature_index : int
            The axis of the features, 0 to rank - 1.
        """
        inputs = {
            "operand": operand,
            "scale": scale,
            "offset": offset,
            "mean": mean,
            "variance": variance,
        }
        attributes = {"epsilon": epsilon, "feature_index": feature_index}
        return self.invoke(inputs, attributes)["result"]


batch_norm_grad = _BatchNormGrad()
batch_norm_training = _BatchNormTraining()
batch_norm_inference = _BatchNormInference()

OPERATORS: dict[str, DialectOperator] = {
    op.schema.op: op for op in (batch_norm_grad, batch_norm_training, batch_norm_inference)
}
