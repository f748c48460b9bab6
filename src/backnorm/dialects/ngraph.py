"""nGraph, opset v0.

Source: the nGraph documentation of BatchNormTrainingBackprop, BatchNormTraining and
BatchNormInference, and the checks of their nodes.

The documented order of the arguments starts with input; the nodes, and with them serialised
graphs, have gamma and beta first. The operators here take the documented order;
``from_node_order`` takes the other.
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

__all__ = ["OPERATORS", "BatchNormInference", "BatchNormTraining", "BatchNormTrainingBackprop"]

_schema = partial(
    OperatorSchema,
    dialect="ngraph",
    source="nGraph 0.x documentation, {op} v0",
    attributes=(
        AttributeSpec(
            "epsilon",
            "f64",
            role="epsilon",
            range="not negative",
            summary="added to the variance; a double",
        ),
    ),
    type_rules=type_rules(f16="f16", bf16="bf16", f32="f32", f64="f64"),
    formats=(FormatSpec("NC...", "NCX"),),
    min_channels=1,
    takes_memory=True,
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
_INPUT = data("input", "x", "T", "input data, (•, C, …)")
_GAMMA = channel("gamma", "gamma", "T", "scale")
_BETA = channel("beta", "beta", "T", "offset")
_MEAN = channel("mean", "mean", "T")
_VARIANCE = channel("variance", "variance", "T", "biased")
_NODE_ORDER_NOTE = "The node's own order of arguments: {}; see from_node_order."

BatchNormTrainingBackprop = function(
    _schema(
        op="BatchNormTrainingBackprop",
        operation="backward",
        summary="Gradients of batch normalisation in training.",
        inputs=(
            _INPUT,
            _GAMMA,
            channel("beta", "beta", "T", "offset; checked, enters no result"),
            _MEAN,
            _VARIANCE,
            data(
                "delta", "dy", "T", "gradient of the output; normalized_delta in the documentation"
            ),
        ),
        outputs=(
            data("input_delta", "dx", "T", "gradient of input"),
            channel("gamma_delta", "dgamma", "T", "gradient of gamma"),
            channel("beta_delta", "dbeta", "T", "gradient of beta"),
        ),
        other_orders={"from_node_order": ("gamma", "beta", "input", "mean", "variance", "delta")},
        notes=(
            _NODE_ORDER_NOTE.format("gamma, beta, input, mean, variance, delta"),
            "N = 0 gives zeros.",
        ),
    )
)

BatchNormTraining = function(
    _schema(
        op="BatchNormTraining",
        operation="forward",
        summary="Batch normalisation in training.",
        inputs=(_INPUT, _GAMMA, _BETA),
        outputs=(
            data("normalized", "y", "T", "normalised output"),
            channel("batch_mean", "mean", "T"),
            channel("batch_variance", "variance", "T", "biased"),
        ),
        other_orders={"from_node_order": ("gamma", "beta", "input")},
        notes=(_NODE_ORDER_NOTE.format("gamma, beta, input"),),
    )
)

BatchNormInference = function(
    _schema(
        op="BatchNormInference",
        operation="inference",
        summary="Batch normalisation with given statistics.",
        inputs=(_INPUT, _GAMMA, _BETA, _MEAN, _VARIANCE),
        outputs=(data("normalized", "y", "T", "normalised output"),),
        other_orders={"from_node_order": ("gamma", "beta", "input", "mean", "variance")},
        result="array",
        notes=(_NODE_ORDER_NOTE.format("gamma, beta, input, mean, variance"),),
    )
)

OPERATORS = by_name(BatchNormTrainingBackprop, BatchNormTraining, BatchNormInference)
