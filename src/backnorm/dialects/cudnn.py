"""cuDNN: BatchNormalizationBackward, whose list of arguments MIOpen's has, too.

Source: the documentation of cudnnBatchNormalizationBackward (cuDNN 8 and 9). Arrays carry their
descriptors; an output that is None is a new array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from backnorm.aliasing import check_apart, check_writable, own
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
from backnorm.dtypes import rounded
from backnorm.errors import ArgumentError, ArgumentTypeError

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


def _weights(call: Call, role: str) -> tuple[float, float]:
    """Return the weights of a gradient and of what its memory holds, alpha and beta."""
    kind = "Data" if role == "dx" else "Param"
    return call.number(f"alpha{kind}Diff"), call.number(f"beta{kind}Diff")


def _blended(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """Return the call; weighted gradients are no results of the canonical operation."""
    if all(_weights(call, role) == (1.0, 0.0) for role in ("dx", "dgamma")):
        return canonical
    return replace(canonical, blended=True, outputs={})


def _in_memory(
    call: Call, arrays: Mapping[str, np.ndarray], results: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Write alpha * gradient + beta * memory to the memory that was given.

    In float64, of gradients that were rounded to their type: so results are rounded twice. What
    memory holds is not read if beta is 0.
    """
    memory = {"dx": "dx", "dgamma": "dBnScale", "dbeta": "dBnBias"}
    for role, name in memory.items():
        # Without weights a kernel has checked the memory of dx, and written to it.
        if name in arrays and arrays[name] is not results[role]:
            _check_apart(name, arrays)
    for role, name in memory.items():
        gradient, target = results[role], arrays.get(name)
        weights = alpha, beta = _weights(call, role)
        if weights != (1.0, 0.0):
            with np.errstate(all="ignore"):
                value = alpha * gradient.astype(np.float64)
                if target is not None and beta != 0.0:
                    value += beta * own(target).astype(np.float64)
            gradient = rounded(value, gradient.dtype)
        if target is None:
            results[role] = gradient
        elif target is not gradient:
            own(target)[...] = gradient
            results[role] = target
    return results


def _check_apart(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise if the memory for an output overlaps other arrays; that of dx may be dy."""
    overwrites = "dy" if name == "dx" else None
    for other, array in arrays.items():
        if other != name and np.may_share_memory(arrays[name], array):
            try:
                check_apart(arrays[name], "dy" if other == "dy" else "other", array, overwrites)
            except ArgumentError as error:
                raise error.in_words({"out": name, "other": other, "dy": "dy"}) from None


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
            "An output becomes alpha * result + beta * what it held, not read if beta is 0; then "
            "the result is rounded to its type first. "
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
