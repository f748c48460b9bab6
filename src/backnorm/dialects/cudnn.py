"""cuDNN: BatchNormalizationBackward, whose list of arguments MIOpen's has, too.

Source: the documentation of cudnnBatchNormalizationBackward (cuDNN 8 and 9). Arrays carry their
descriptors; an output that is None is a new array.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from backnorm.aliasing import check_writable
from backnorm.dialects._call import Call, CanonicalCall
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
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.results import Blend

__all__ = ["OPERATORS", "BatchNormalizationBackward"]


_ORDER = (
    "mode", "alphaDataDiff", "betaDataDiff", "alphaParamDiff", "betaParamDiff", "x", "dy", "dx",
    "bnScale", "dBnScale", "dBnBias", "epsilon", "savedMean", "savedInvVariance",
)  # fmt: skip
_SAVED = "1 / sqrt(batch variance + epsilon), in spite of its name"


def _channel_axes(
    attributes: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[int, ...]:
    return (1,) if attributes["mode"] == "SPATIAL" else tuple(range(1, arrays["x"].ndim))


def _check_memory(call: Call) -> None:
    """Check that memory is there to blend into, and can be written to."""
    shares = {"dx": "betaDataDiff", "dBnScale": "betaParamDiff", "dBnBias": "betaParamDiff"}
    for name, beta in shares.items():
        memory = call.inputs.get(name)
        if memory is None and call.number(beta) != 0.0:
            problem = f"is required where {beta} is not 0: it is what the result is blended into"
            raise ArgumentTypeError(name, problem, came="None", accepted="an array")
        if memory is not None:
            check_writable(name, memory)


def _blended(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """Return the call with what its results are blended with, if there is anything."""
    blend = Blend(
        (call.number("alphaDataDiff"), call.number("betaDataDiff")),
        (call.number("alphaParamDiff"), call.number("betaParamDiff")),
    )
    # What is blended is no result of the canonical operation.
    return canonical if blend == Blend() else replace(canonical, blend=blend, outputs={})


def _in_memory(
    call: Call, arrays: Mapping[str, np.ndarray], results: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Write the gradients of parameters to the memory that was given."""
    memory = {"dgamma": "dBnScale", "dbeta": "dBnBias"}
    given = {role: name for role, name in memory.items() if name in arrays}
    for name, other in itertools.product(given.values(), arrays):
        if other != name and np.may_share_memory(arrays[name], arrays[other]):
            problem = f"overlaps {other} in memory"
            raise ArgumentValueError(name, problem, accepted="separate memory")
    for role, name in given.items():
        arrays[name][...] = results[role]
        results[role] = arrays[name]
    return results


BatchNormalizationBackward = function(
    OperatorSchema(
        dialect="cudnn",
        op="BatchNormalizationBackward",
        operation="backward",
        summary="Gradients of batch normalisation in training.",
        source="cuDNN, cudnn{op}",
        inputs=(
            data("x", "x", "T", "input of the forward"),
            data("dy", "dy", "T", "gradient of the output"),
            data("dx", "memory_dx", "T", "memory for dx; may be dy", required=False),
            kept("bnScale", "gamma", "U", "scale"),
            kept("dBnScale", "memory_dgamma", "U", "memory for dBnScale", required=False),
            kept("dBnBias", "memory_dbeta", "U", "memory for dBnBias", required=False),
            kept("savedMean", "mean", "U", "batch mean", required=False),
            kept("savedInvVariance", "inverse_deviation", "U", _SAVED, required=False),
        ),
        outputs=(
            data("dx", "dx", "T", "gradient of x"),
            kept("dBnScale", "dgamma", "U", "gradient of bnScale"),
            kept("dBnBias", "dbeta", "U", "gradient of the bias"),
        ),
        attributes=(
            AttributeSpec(
                "mode",
                "string",
                choices=("SPATIAL", "PER_ACTIVATION"),
                usual="SPATIAL",
                summary="statistics per channel, or per element of a sample",
            ),
            AttributeSpec("alphaDataDiff", "f64", usual=1.0, summary="weight of the result in dx"),
            AttributeSpec("betaDataDiff", "f64", usual=0.0, summary="weight of what dx holds"),
            AttributeSpec("alphaParamDiff", "f64", usual=1.0, summary="the same of the others"),
            AttributeSpec("betaParamDiff", "f64", usual=0.0, summary="the same of the others"),
            AttributeSpec(
                "epsilon",
                "f64",
                role="epsilon",
                range="not negative",
                summary="added to the variance of x; not used with saved statistics, but checked",
            ),
        ),
        order=_ORDER,
        type_rules=type_rules(f32="f32", f64="f64", f16="f32", bf16="f32"),
        formats=(FormatSpec("NC...", "NCX"),),
        ranks=(3, 0),
        inputs_together=(("savedMean", "savedInvVariance"),),
        notes=(
            "Per-channel tensors have the rank of x: 1 x C x 1 x 1 in mode SPATIAL, 1 x C x H x W "
            "in mode PER_ACTIVATION. NHWC is a matter of strides.",
            "An output becomes alpha * result + beta * what it held, not read if beta is 0. "
            "MIOpen's call has the same arguments and takes alpha 1 and beta 0 alone.",
            "Without saved statistics those of x are computed again, with epsilon.",
        ),
        phrases=Phrases(
            channel_rank="must have the rank of {x}",
            channel_size="must have the shape that the mode says",
        ),
        hooks=Hooks(
            channel_axes=_channel_axes, check=_check_memory, canonical=_blended, finish=_in_memory
        ),
    )
)

OPERATORS = by_name(BatchNormalizationBackward)
