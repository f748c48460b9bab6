"""DirectML: BATCH_NORMALIZATION_TRAINING_GRAD.

Source: the documentation of DML_BATCH_NORMALIZATION_TRAINING_GRAD_OPERATOR_DESC. Statistics and
scale have the rank of the input, and the axes in which they are of size 1 are reduced: any set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from backnorm.dialects.operator import by_name, function
from backnorm.dialects.schema import (
    AttributeSpec,
    FormatSpec,
    Hooks,
    OperatorSchema,
    Phrases,
    data,
    kept,
    type_rules,
)
from backnorm.errors import ArgumentValueError

__all__ = ["BATCH_NORMALIZATION_TRAINING_GRAD", "OPERATORS"]


def _channel_axes(
    attributes: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[int, ...]:
    """Return the axes in which Mean has more than one element, or none."""
    shape, mean = arrays["Input"].shape, arrays["Mean"].shape
    if len(mean) != len(shape):
        raise ArgumentValueError(
            "Mean",
            "must have the rank of Input",
            came=f"shape {mean}",
            accepted=f"rank {len(shape)}, as Input of shape {shape}",
        )
    if any(own not in (1, size) for own, size in zip(mean, shape, strict=True)):
        raise ArgumentValueError(
            "Mean",
            "must have in each axis the size of Input, or 1",
            came=f"shape {mean}",
            accepted=f"sizes of {shape}, or 1",
        )
    return tuple(axis for axis, size in enumerate(mean) if size != 1)


BATCH_NORMALIZATION_TRAINING_GRAD = function(
    OperatorSchema(
        dialect="directml",
        op="BATCH_NORMALIZATION_TRAINING_GRAD",
        operation="backward",
        summary="Gradients of batch normalisation in training, over any set of axes.",
        source="DirectML, DML_{op}_OPERATOR_DESC (feature level 4.1)",
        inputs=(
            data("Input", "x", "T", "input of the forward"),
            data("InputGradient", "dy", "T", "gradient of the output"),
            kept(
                "Mean", "mean", "T", "mean of the batch; the axes where its size is 1 are reduced"
            ),
            kept("Variance", "variance", "T", "biased variance of the batch, of the shape of Mean"),
            kept("Scale", "gamma", "T", "scale, of the shape of Mean"),
        ),
        outputs=(
            data("OutputGradient", "dx", "T", "gradient of Input"),
            kept("OutputScaleGradient", "dgamma", "T", "gradient of Scale"),
            kept("OutputBiasGradient", "dbeta", "T", "gradient of the bias"),
        ),
        attributes=(
            AttributeSpec(
                "Epsilon",
                "f32",
                role="epsilon",
                range="not negative",
                summary="added to the variance",
            ),
        ),
        type_rules=type_rules(f32="f32", f16="f16"),
        formats=(FormatSpec("any axes", "NCX", is_any=True),),
        ranks=(1, 8),
        notes=(
            "Axes that are not reduced and adjacent in memory are one, without a copy; others cost "
            "a copy of Input and of InputGradient.",
        ),
        phrases=Phrases(
            channel_rank="must have the rank of {x}", channel_size="must have the shape of Mean"
        ),
        hooks=Hooks(channel_axes=_channel_axes),
    )
)

OPERATORS = by_name(BATCH_NORMALIZATION_TRAINING_GRAD)
