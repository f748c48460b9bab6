"""cuDNN: BatchNormalizationBackward. MIOpen's function for this operation has the same
arguments.

Source: the documentation of cudnnBatchNormalizationBackward (cuDNN 8 and 9). Arrays take the place
of tensor descriptors and pointers. If an output argument is None, the output is a new array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from backnorm.aliasing import check_apart, check_writable, own
from backnorm.arithmetics import Arithmetic
from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects._run import Arrays
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, data, kept
from backnorm.dialects.schema import FormatSpec, Phrases, Rules, type_rules
from backnorm.dtypes import rounded
from backnorm.errors import ArgumentError, ArgumentTypeError

__all__ = ["BatchNormalizationBackward"]


def _channel_axes(
    attributes: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[int, ...]:
    return (1,) if attributes["mode"] == "SPATIAL" else tuple(range(1, arrays["x"].ndim))


RULES = Rules(
    dialect="cudnn",
    source="cuDNN, cudnn{op}",
    type_rules=type_rules(f32="f32", f64="f64", f16="f32", bf16="f32"),
    formats=(FormatSpec("NC...", "NCX"),),
    ranks=(3, 0),
    inputs_together=(("savedMean", "savedInvVariance"),),
    channel_axes=_channel_axes,
    phrases=Phrases(
        channel_rank="must have the rank of {x}",
        channel_size="must have the shape that mode requires",
    ),
)

Mode = Literal["SPATIAL", "PER_ACTIVATION"]
Weight = Annotated[float, attribute("f64", example=1.0)]
OldWeight = Annotated[float, attribute("f64", example=0.0)]


def _translate(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """Return the canonical call. Each output is alpha * gradient + beta * old contents of the
    output. If an alpha is not 1 or a beta is not 0, the gradients that the canonical call
    returns are not yet the outputs: `finish` computes the outputs from them.

    Raise an error if an output has a scaling factor beta (such as `betaDataDiff`) that is not
    0, but no array with old contents is passed for it. Raise an error also if an array for an
    output is not writable.
    """
    shares = {"dx": "betaDataDiff", "dBnScale": "betaParamDiff", "dBnBias": "betaParamDiff"}
    for name, beta in shares.items():
        memory = call.inputs.get(name)
        if memory is None and call.number(beta) != 0.0:
            problem = (
                f"is required if {beta} is not 0, because the result includes its old contents"
            )
            raise ArgumentTypeError(name, problem, came="None", accepted="an array")
        if memory is not None:
            check_writable(name, memory)
    if all(_weights(call, role) == (1.0, 0.0) for role in ("dx", "dgamma")):
        return canonical
    return replace(canonical, blended=True, outputs={})


def _finish(call: Call, arrays: Arrays, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """For each output, write alpha * gradient + beta * old to the output's memory, where old is
    the content of this memory before the call.

    The sum is computed in float64 from gradients that were already rounded to their type, so
    results are rounded twice. If beta is 0, the old contents of the memory are not read.
    """
    memory = {"dx": "dx", "dgamma": "dBnScale", "dbeta": "dBnBias"}
    for role, name in memory.items():
        # If alpha is 1 and beta is 0 for all outputs, the executable has already checked the
        # memory of dx and written to it.
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


def _weights(call: Call, role: str) -> tuple[float, float]:
    """Return alpha and beta: the weights of a gradient and of the old contents of its memory."""
    kind = "Data" if role == "dx" else "Param"
    return call.number(f"alpha{kind}Diff"), call.number(f"beta{kind}Diff")


def _check_apart(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise if an output overlaps another array in memory; dx may use exactly the memory of dy."""
    overwrites = "dy" if name == "dx" else None
    for other, array in arrays.items():
        if other != name and np.may_share_memory(arrays[name], array):
            try:
                check_apart(arrays[name], "dy" if other == "dy" else "other", array, overwrites)
            except ArgumentError as error:
                raise error.in_words({"out": name, "other": other, "dy": "dy"}) from None


@operator(
    RULES,
    "backward",
    translate=_translate,
    finish=_finish,
    dx=data("dx", "T"),
    dBnScale=kept("dgamma", "U"),
    dBnBias=kept("dbeta", "U"),
)
def BatchNormalizationBackward(
    mode: Annotated[Mode, attribute("string", example="SPATIAL")],
    alphaDataDiff: Weight,
    betaDataDiff: OldWeight,
    alphaParamDiff: Weight,
    betaParamDiff: OldWeight,
    x: Annotated[ArrayLike, data("x", "T")],
    dy: Annotated[ArrayLike, data("dy", "T")],
    dx: Annotated[np.ndarray, data("memory_dx", "T")] | None,
    bnScale: Annotated[ArrayLike, kept("gamma", "U")],
    dBnScale: Annotated[np.ndarray, kept("memory_dgamma", "U")] | None,
    dBnBias: Annotated[np.ndarray, kept("memory_dbeta", "U")] | None,
    epsilon: Annotated[float, attribute("f64", "epsilon", range="not negative")],
    savedMean: Annotated[ArrayLike, kept("mean", "U")] | None = None,
    savedInvVariance: Annotated[ArrayLike, kept("inverse_deviation", "U")] | None = None,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of batch normalisation in training.

    With M elements per channel, s = savedInvVariance and c = x - savedMean::

        dBnBias  = sum dy
        dBnScale = s * sum dy*c
        dx       = bnScale*s * (dy - dBnBias/M - c*s * dBnScale/M)

    Parameters
    ----------
    mode : {"SPATIAL", "PER_ACTIVATION"}
        statistics per channel, or per element of a sample
    alphaDataDiff : float, finite
        weight of the result in dx
    betaDataDiff : float, finite
        weight of the old contents of dx
    alphaParamDiff : float, finite
        weight of the result in dBnScale and dBnBias
    betaParamDiff : float, finite
        weight of the old contents of dBnScale and dBnBias
    x : array of T, rank 3 or more
        input of the forward
    dy : array of T
        gradient of the output
    dx : numpy.ndarray, optional
        memory for dx; may be dy
    bnScale : array of U, 1 in the axes that are reduced
        scale
    dBnScale : numpy.ndarray, optional
        memory for dBnScale
    dBnBias : numpy.ndarray, optional
        memory for dBnBias
    epsilon : float, finite and not negative
        added to the variance of x; not used with saved statistics, but checked
    savedMean : array of U, 1 in the axes that are reduced, optional
        batch mean
    savedInvVariance : array of U, 1 in the axes that are reduced, optional
        1 / sqrt(batch variance + epsilon), despite the argument's name
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    dx : array of T
        gradient of x
    dBnScale : array of U, 1 in the axes that are reduced
        gradient of bnScale
    dBnBias : array of U, 1 in the axes that are reduced
        gradient of the bias

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f32 with f32, f64 with f64, f16 with
    f32, bf16 with f32.

    - Per-channel tensors have the rank of x: 1 x C x 1 x 1 in mode SPATIAL, 1 x C x H x W
      in mode PER_ACTIVATION. The layout (NCHW or NHWC) is given by the strides.
    - dx becomes alphaDataDiff * gradient + betaDataDiff * old, where old is what the memory of
      dx contains before the call. dBnScale and dBnBias are computed in the same way, with
      alphaParamDiff and betaParamDiff. A gradient is rounded to the output's type before it is
      multiplied by its factor. If betaDataDiff is 0, the old contents of dx are not read;
      likewise for betaParamDiff, dBnScale and dBnBias.
    - Without savedMean and savedInvVariance, both are computed from x and epsilon.
    """
