"""StableHLO: batch_norm_grad, batch_norm_training, batch_norm_inference.

Source: the StableHLO specification, v1. One element type for everything, any rank from 1 up, and
any axis for the features. An operand of rank 1 has one element per feature: a batch of one.
"""

from __future__ import annotations

from functools import partial

from backnorm.dialects.operator import by_name, function
from backnorm.dialects.schema import (
    AttributeSpec,
    FormatSpec,
    OperatorSchema,
    Phrases,
    channel,
    data,
    type_rules,
)

__all__ = ["OPERATORS", "batch_norm_grad", "batch_norm_inference", "batch_norm_training"]

_schema = partial(
    OperatorSchema,
    dialect="stablehlo",
    source="the StableHLO specification, {op}",
    attributes=(
        AttributeSpec(
            "epsilon", "f32", role="epsilon", range="not negative", summary="added to the variance"
        ),
        AttributeSpec(
            "feature_index",
            "i64",
            role="channel_axis",
            range="not negative",
            summary="the axis of the features, less than the rank of operand",
        ),
    ),
    type_rules=type_rules(f64="f64", f32="f32", f16="f16", bf16="bf16"),
    formats=(FormatSpec("any axis", "NCX", is_any=True),),
    ranks=(1, 0),
    phrases=Phrases(channel_size="must have as many elements as operand has features ({channels})"),
)
_OPERAND = data("operand", "x", "T", "input")
_SCALE = channel("scale", "gamma", "T", "scale")
_OFFSET = channel("offset", "beta", "T", "offset")
_MEAN = channel("mean", "mean", "T")
_VARIANCE = channel("variance", "variance", "T", "biased")

batch_norm_grad = function(
    _schema(
        op="batch_norm_grad",
        operation="backward",
        summary="Gradients of batch normalisation in training.",
        inputs=(
            _OPERAND,
            _SCALE,
            _MEAN,
            _VARIANCE,
            data("grad_output", "dy", "T", "gradient of the output"),
        ),
        outputs=(
            data("grad_operand", "dx", "T", "gradient of operand"),
            channel("grad_scale", "dgamma", "T", "gradient of scale"),
            channel("grad_offset", "dbeta", "T", "gradient of offset"),
        ),
        notes=(
            "XLA's CPU code multiplies f16 gradients by the number of elements in f16, and gives "
            "infinity from 65,504 / |grad_output| elements on; here sums are wide.",
            "An empty operand gives zeros for the parameters.",
        ),
    )
)

batch_norm_training = function(
    _schema(
        op="batch_norm_training",
        operation="forward",
        summary="Batch normalisation in training.",
        inputs=(_OPERAND, _SCALE, _OFFSET),
        outputs=(
            data("output", "y", "T", "normalised output"),
            channel("batch_mean", "mean", "T"),
            channel("batch_var", "variance", "T", "biased"),
        ),
    )
)

batch_norm_inference = function(
    _schema(
        op="batch_norm_inference",
        operation="inference",
        summary="Batch normalisation with given statistics.",
        inputs=(_OPERAND, _SCALE, _OFFSET, _MEAN, _VARIANCE),
        outputs=(data("result", "y", "T", "normalised output"),),
        result="array",
    )
)

OPERATORS = by_name(batch_norm_grad, batch_norm_training, batch_norm_inference)
