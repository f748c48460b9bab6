"""ONNX Runtime's training operators: com.microsoft BatchNormalizationGrad and BatchNormInternal.

Source: the schemas and the CPU kernels of ONNX Runtime's training. What the forward saves and the
gradient takes is the inverse standard deviation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects._statistics import native
from backnorm.dialects.operator import by_name, function
from backnorm.dialects.schema import (
    AttributeSpec,
    FormatSpec,
    Hooks,
    OperatorSchema,
    channel,
    data,
    type_rules,
)
from backnorm.dtypes import FLOAT64, rounded
from backnorm.errors import ArgumentValueError

__all__ = ["OPERATORS", "BatchNormInternal", "BatchNormalizationGrad"]

_EPSILON = AttributeSpec(
    "epsilon", "f32", 1e-5, role="epsilon", range="not negative", summary="added to the variance"
)
_schema = partial(
    OperatorSchema,
    dialect="onnxruntime",
    source="ONNX Runtime, com.microsoft.{op} v1",
    type_rules=type_rules(f32="f32", f64="f64", f16="f16 f32", bf16="bf16 f32"),
    one_channel_type=False,
    formats=(FormatSpec("NC...", "NCX"),),
)
_X = data("X", "x", "T", "input, (N, C, ...)")
_SAVED_INV_STD = channel(
    "saved_inv_std", "inverse_deviation", "T2", "1 / sqrt(batch variance + epsilon)"
)
_SCALE = channel("scale", "gamma", "T1", "scale")

BatchNormalizationGrad = function(
    _schema(
        op="BatchNormalizationGrad",
        operation="backward",
        summary="Gradients of batch normalisation in training.",
        inputs=(
            data("dY", "dy", "T", "gradient of Y"),
            _X,
            _SCALE,
            channel("saved_mean", "mean", "T2", "batch mean"),
            _SAVED_INV_STD,
        ),
        outputs=(
            data("dX", "dx", "T", "gradient of X"),
            channel("dScale", "dgamma", "T1", "gradient of scale"),
            channel("dBias", "dbeta", "T1", "gradient of the bias"),
        ),
        attributes=(replace(_EPSILON, summary="not used: saved_inv_std holds it; checked"),),
        notes=(
            "ONNX Runtime's CPU kernel knows float32 alone and does not check the shape of dY.",
            "The element types of scale, saved_mean and saved_inv_std may differ.",
            "An older contributed schema saved the variance; this is the one with saved_inv_std.",
        ),
    )
)


def _check_mode(call: Call) -> None:
    mode = call.attributes["training_mode"]
    if mode not in (0, 1):
        raise ArgumentValueError("training_mode", "unknown mode", came=mode, accepted="0 or 1")


def _as_mode_says(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """In training the saved_inv_std is that of the variance before its rounding."""
    if call.attributes["training_mode"]:
        weight = 1.0 - call.number("momentum") if call.count else 0.0
        return replace(canonical, inverse_std=True, weight=weight)
    inputs = canonical.inputs | {"mean": "input_mean", "variance": "input_var"}
    return replace(canonical, operation="inference", training=False, inputs=inputs)


def _as_given(
    call: Call, arrays: Mapping[str, np.ndarray], results: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add the given statistics, as running and as saved ones."""
    mean, variance = arrays["input_mean"], arrays["input_var"]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = 1.0 / np.sqrt(np.add(variance, call.number("epsilon"), dtype=FLOAT64))
        results["inverse_deviation"] = rounded(inverse, native(variance))
    results["mean"], results["running_mean"] = (mean.astype(native(mean)) for _ in range(2))
    results["running_variance"] = variance.astype(native(variance))
    return results


BatchNormInternal = function(
    _schema(
        op="BatchNormInternal",
        operation="forward",
        summary="Batch normalisation in training, with what its gradient needs.",
        inputs=(
            _X,
            _SCALE,
            channel("B", "beta", "T1", "offset"),
            channel("input_mean", "running_mean", "T2", "old running mean"),
            channel("input_var", "running_variance", "T2", "old running variance"),
        ),
        outputs=(
            data("Y", "y", "T", "normalised output"),
            channel("running_mean", "running_mean", "T2", "new running mean"),
            channel("running_var", "running_variance", "T2", "new running variance, biased"),
            channel("saved_mean", "mean", "T2", "batch mean"),
            _SAVED_INV_STD,
        ),
        attributes=(
            _EPSILON,
            AttributeSpec("momentum", "f32", 0.9, summary="weight of the old running statistics"),
            AttributeSpec(
                "training_mode",
                "i64",
                1,
                range="not negative",
                summary="0: normalise with input_mean and input_var",
            ),
        ),
        notes=(
            "running = momentum * old + (1 - momentum) * batch, of the biased variance. No batch "
            "(M = 0) leaves the running statistics as they are.",
            "training_mode=0 returns input_mean and input_var as they are, as running and as saved "
            "statistics, the latter as mean and inverse standard deviation.",
        ),
        hooks=Hooks(check=_check_mode, canonical=_as_mode_says, finish=_as_given),
    )
)

OPERATORS = by_name(BatchNormalizationGrad, BatchNormInternal)
