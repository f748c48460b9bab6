"""TensorFlow: FusedBatchNormGradV3, its older versions, and their forward operators.

Source: TensorFlow's operator registry and the argument names of ``tf.raw_ops``. Importing this
module imports no TensorFlow.

In the forward, batch_mean and batch_variance are the new running statistics, the latter with
Bessel's correction; reserve_space_1 and reserve_space_2 are the batch's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects.operator import by_name, function
from backnorm.dialects.schema import (
    AttributeSpec,
    FormatSpec,
    Hooks,
    OperatorSchema,
    Phrases,
    TensorKind,
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

_FORMATS_4 = (FormatSpec("NHWC", "NXC", 4), FormatSpec("NCHW", "NCX", 4))
_FORMATS_5 = (FormatSpec("NDHWC", "NXC", 5), FormatSpec("NCDHW", "NCX", 5))

_EPSILON = AttributeSpec(
    "epsilon", "f32", 0.0001, role="epsilon", range="not negative", summary="added to the variance"
)
_IS_TRAINING = AttributeSpec(
    "is_training", "bool", True, role="training", summary="False: statistics are constants"
)
_NAME = AttributeSpec(
    "name", "string", None, nullable=True, summary="name of the operation; ignored"
)
_FACTOR = AttributeSpec(
    "exponential_avg_factor",
    "f32",
    1.0,
    summary="weight of the batch in the running statistics; 1: the batch alone",
)
_RESERVE_SPACE_2_IS = AttributeSpec(
    "reserve_space_2_is",
    "string",
    "variance",
    choices=("variance", "inverse_standard_deviation"),
    extension=True,
    summary=(
        "what reserve_space_2 holds in training: the biased variance (CPU) or "
        "1 / sqrt(variance + epsilon) (cuDNN), where epsilon is not used again"
    ),
)


def _schema(version: int, **tables: Any) -> OperatorSchema:
    """Return the schema of an operator's version: V1 is for float32, V3 also for rank 5."""
    formats = _FORMATS_4 + (_FORMATS_5 if version == 3 else ())
    types = ("float32",) if version == 1 else ("half", "bfloat16", "float32")
    tables["op"] += "" if version == 1 else f"V{version}"
    data_format = AttributeSpec(
        "data_format",
        "string",
        "NHWC",
        role="data_format",
        choices=tuple(f.name for f in formats),
        summary="the axes of x; as many letters as x has axes",
    )
    tables["attributes"] = tuple(spec or data_format for spec in tables["attributes"])
    ranks = "4 or 5" if version == 3 else "4"
    return OperatorSchema(
        dialect="tensorflow",
        source="TensorFlow 2.21, tf.raw_ops.{op}",
        type_rules=type_rules(**dict.fromkeys(types, "float32")),
        formats=formats,
        ranks=(4, 5) if version == 3 else (4, 4),
        style="keywords",
        phrases=Phrases(
            rank=f"input must be {ranks}-dimensional",
            gradient_shape="x and y_backprop must have same shape",
            gradient_type="x and y_backprop must have the same element type",
            channel_rank="must be 1-dimensional",
            channel_size="must have the same number of elements as the channels of {x}",
        ),
        **tables,
    )


def _check_encoding(call: Call) -> None:
    if not (_is_variance(call) or call.attributes["is_training"]):
        raise ArgumentValueError(
            "reserve_space_2_is",
            "is_training=False takes the population variance",
            came="'inverse_standard_deviation'",
            accepted="'variance'",
        )


def _encoded(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """An inverse standard deviation has epsilon inside."""
    inverse = replace(canonical, epsilon=0.0, inverse_std=True)
    return canonical if _is_variance(call) else inverse


def _is_variance(call: Call) -> bool:
    return call.attributes["reserve_space_2_is"] == "variance"


def _gradient(version: int) -> OperatorSchema:
    symbol = "T" if version == 1 else "U"
    opaque = TensorSpec(
        "reserve_space_3", "ignored", symbol, "opaque", summary="opaque; required and ignored"
    )
    first_empty = 4 if version == 3 else 3
    return _schema(
        version,
        op="FusedBatchNormGrad",
        operation="backward",
        summary="Gradients of batch normalisation.",
        inputs=(
            data("y_backprop", "dy", "T", "gradient of y"),
            data("x", "x", "T", "input of the forward"),
            channel("scale", "gamma", "float32", "scale"),
            channel(
                "reserve_space_1", "mean", symbol, "batch mean; population mean if not is_training"
            ),
            channel(
                "reserve_space_2",
                "variance",
                symbol,
                "biased batch variance; population variance if not is_training",
            ),
            *((opaque,) if version == 3 else ()),
        ),
        outputs=(
            data("x_backprop", "dx", "T", "gradient of x"),
            channel("scale_backprop", "dgamma", symbol, "of scale"),
            channel("offset_backprop", "dbeta", symbol, "of offset"),
            *(
                TensorSpec(
                    f"reserve_space_{first_empty + k}",
                    "empty",
                    symbol,
                    "vector",
                    summary="empty, shape (0,)",
                )
                for k in (0, 1)
            ),
        ),
        # None: data_format, which is the version's.
        attributes=(_EPSILON, None, _IS_TRAINING, _NAME, _RESERVE_SPACE_2_IS),
        result="GradientV3" if version == 3 else "Gradient",
        notes=(
            "TensorFlow's eager mode lets a data_format whose length is not the rank of x "
            "through; here it is an error.",
            "TensorFlow's CPU kernel refuses NCHW with is_training=False; here it works.",
            "An empty x gives an empty x_backprop and zeros for the parameters.",
        ),
        hooks=Hooks(check=_check_encoding, canonical=_encoded),
    )


def _check_statistics(call: Call) -> None:
    """Check mean and variance where they are read."""
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


def _by_mode(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """In training running statistics move, but not by no elements; else it is inference."""
    if call.attributes["is_training"]:
        weight = call.number("exponential_avg_factor") if call.count else None
        return replace(canonical, weight=weight)
    inputs = canonical.inputs | {"mean": "mean", "variance": "variance"}
    return replace(canonical, operation="inference", training=False, inputs=inputs)


def _with_statistics(
    call: Call, old: Mapping[str, np.ndarray], results: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add the statistics of no elements, NaN; not in training, the given ones four times over."""
    for role in ("mean", "variance"):
        if call.attributes["is_training"]:
            results[f"running_{role}"] = np.full_like(results[role], np.nan)
        else:
            results[role] = old[role].astype(FLOAT32)
            results[f"running_{role}"] = results[role].copy()
    return results


def _forward(version: int) -> OperatorSchema:
    symbol = "T" if version == 1 else "U"

    def statistic(name: str, role: str, summary: str, *, given: bool = False) -> TensorSpec:
        kind: TensorKind = "vector" if given or role == "empty" else "channel"
        return TensorSpec(name, role, symbol, kind, summary=summary)

    outputs = (
        data("y", "y", "T", "normalised output"),
        statistic("batch_mean", "running_mean", "running mean"),
        statistic(
            "batch_variance",
            "running_variance",
            "running variance, of variances with Bessel's correction",
        ),
        statistic("reserve_space_1", "mean", "batch mean"),
        statistic("reserve_space_2", "variance", "biased batch variance"),
        statistic("reserve_space_3", "empty", "empty, shape (0,)"),
    )
    return _schema(
        version,
        op="FusedBatchNorm",
        operation="forward",
        summary="Batch normalisation, in training or with population statistics.",
        inputs=(
            data("x", "x", "T", "input"),
            statistic("scale", "gamma", "scale"),
            statistic("offset", "beta", "offset"),
            statistic("mean", "running_mean", "population mean", given=True),
            statistic("variance", "running_variance", "population variance", given=True),
        ),
        outputs=outputs if version == 3 else outputs[:-1],
        attributes=(_EPSILON, _FACTOR, None, _IS_TRAINING, _NAME),
        result="ForwardV3" if version == 3 else "Forward",
        notes=(
            "mean and variance are read if is_training is False or exponential_avg_factor is "
            "not 1, and then have one value per channel; else they may be empty and are ignored.",
            "running = (1 - exponential_avg_factor) * old + exponential_avg_factor * batch.",
            "is_training=False returns mean and variance as given, four times over.",
            "In training an empty x gives NaN for batch_mean and batch_variance, as TensorFlow "
            "does, and zeros for the reserved statistics.",
        ),
        unbiased=True,
        hooks=Hooks(check=_check_statistics, canonical=_by_mode, finish=_with_statistics),
    )


FusedBatchNormGradV3 = function(_gradient(3))
FusedBatchNormGradV2 = function(_gradient(2))
FusedBatchNormGrad = function(_gradient(1))
FusedBatchNormV3 = function(_forward(3))
FusedBatchNormV2 = function(_forward(2))
FusedBatchNorm = function(_forward(1))

GradientV3, Gradient = FusedBatchNormGradV3.returned, FusedBatchNormGrad.returned
ForwardV3, Forward = FusedBatchNormV3.returned, FusedBatchNorm.returned

OPERATORS = by_name(
    FusedBatchNormGradV3,
    FusedBatchNormGradV2,
    FusedBatchNormGrad,
    FusedBatchNormV3,
    FusedBatchNormV2,
    FusedBatchNorm,
)
