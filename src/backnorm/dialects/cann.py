"""CANN (Ascend): BNTrainingUpdateGrad and BNTrainingReduceGrad, which each compute a part of the
gradient.

Source: hicann/ops-nn of 2026, norm/bn_training_update_grad (commit 3838a30) and
norm/bn_training_reduce_grad (commit 06b6ec6). README.md and op_graph/*_proto.h describe the
operators; tests/assets/golden.py has the formulas. The formats NC1HWC0 and NDC1HWC0 are those of
the older implementations for TBE (Tensor Boost Engine), impl/bn_training_reduce_grad.py and
impl/dynamic/bn_training_update_grad.py. A NumPy array has no format, so the format is an argument
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._call import Call
from backnorm.dialects._parts import input_gradient, parameter_gradients
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, channel, data
from backnorm.dialects.schema import FormatSpec, Rules, type_rules
from backnorm.errors import ArgumentValueError

__all__ = ["BNTrainingReduceGrad", "BNTrainingUpdateGrad"]

# The formats with two channel axes, C1 and C0, and the positions of these axes. Channel c1 * C0 +
# c0 has index c1 in axis C1, and c0 in axis C0.
_SPLIT = {"NC1HWC0": (1, 4), "NDC1HWC0": (2, 5)}
_C0 = 16


def _channel_axes(
    attributes: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[int, ...]:
    last = arrays["x"].ndim - 1
    return _SPLIT.get(attributes["format"], (last if attributes["format"] == "NHWC" else 1,))


RULES = Rules(
    dialect="cann",
    source="CANN, {op} (hicann/ops-nn, 2026)",
    type_rules=type_rules(f32="f32", f16="f32", bf16="f32"),
    formats=(
        FormatSpec("ND", "NCX"),
        FormatSpec("NCHW", "NCX", 4),
        FormatSpec("NHWC", "NXC", 4),
        FormatSpec("NCDHW", "NCX", 5),
        FormatSpec("NC1HWC0", "NCX", 5),
        FormatSpec("NDC1HWC0", "NCX", 6),
    ),
    min_channels=1,
    channel_axes=_channel_axes,
)

Grads = Annotated[ArrayLike, data("dy", "T")]
X = Annotated[ArrayLike, data("x", "T")]
BatchMean = Annotated[ArrayLike, channel("mean", "float32")]
BatchVariance = Annotated[ArrayLike, channel("variance", "float32")]
Epsilon = Annotated[float, attribute("f32", "epsilon", range="not negative")]
Format = Annotated[
    Literal["ND", "NCHW", "NHWC", "NCDHW", "NC1HWC0", "NDC1HWC0"],
    attribute("string", "data_format", extension=True),
]


def _check(call: Call) -> Call:
    """Return the call; raise if a tensor is empty, or if the size of axis C0 is not 16."""
    shape = call.by_role("x").shape
    if 0 in shape:
        raise ArgumentValueError("grads", "must not be empty", came=f"shape {shape}")
    if call.attributes["format"] in _SPLIT and shape[-1] != _C0:
        raise ArgumentValueError(
            "grads", f"must have {_C0} channels in the last axis, C0", came=f"shape {shape}"
        )
    return call


def _update(call: Call) -> tuple[np.ndarray, np.ndarray]:
    return parameter_gradients(_check(call))


def _reduce(call: Call) -> np.ndarray:
    return input_gradient(_check(call))


@operator(
    RULES,
    "reduce",
    compute=_update,
    diff_scale=channel("dgamma", "float32"),
    diff_offset=channel("dbeta", "float32"),
)
def BNTrainingUpdateGrad(
    grads: Grads,
    x: X,
    batch_mean: BatchMean,
    batch_variance: BatchVariance,
    epsilon: Epsilon = 0.0001,
    *,
    format: Format = "ND",
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return diff_scale and diff_offset, the gradients of the scale and of the offset.

    ::

        diff_scale  = sum grads * (x - batch_mean) / sqrt(batch_variance + epsilon)
        diff_offset = sum grads

    Parameters
    ----------
    grads, x : array of rank 2 or more
        Gradient of the output, and input of the forward: of one shape and element type (f32, f16
        or bf16), not empty.
    batch_mean, batch_variance : array of float32
        Mean and biased variance of `x`: of shape (C,), but of shape (1, C1, 1, 1, 16) with
        NC1HWC0, and (1, 1, C1, 1, 1, 16) with NDC1HWC0.
    epsilon : float, finite and not negative, rounded to float32
        Added to the variance.
    format : {"ND", "NCHW", "NHWC", "NCDHW", "NC1HWC0", "NDC1HWC0"}
        The format of `grads` and `x`, in CANN a part of their descriptions. ND means any rank, with
        the channels in axis 1.
    arithmetic : {"float32", "float64"}, optional
        An extension of backnorm: the compute type of elements; see `backnorm.arithmetic`.

    Returns
    -------
    tuple of numpy.ndarray
        float32, with the shape of `batch_mean`; summed in a wider type and rounded once.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an argument does not match its description, or the sum of a variance and epsilon is not
        positive; the error names the argument.
    """


@operator(RULES, "apply", compute=_reduce, y=data("dx", "T"))
def BNTrainingReduceGrad(
    grads: Grads,
    x: X,
    diff_scale: Annotated[ArrayLike, channel("dgamma", "float32")],
    diff_offset: Annotated[ArrayLike, channel("dbeta", "float32")],
    scale: Annotated[ArrayLike, channel("gamma", "float32")],
    batch_mean: BatchMean,
    batch_variance: BatchVariance,
    epsilon: Epsilon = 0.0001,
    *,
    format: Format = "ND",
    arithmetic: Arithmetic | None = None,
) -> np.ndarray:
    """Return the gradient of x in training (the specification's output y).

    With M elements per channel, s = 1 / sqrt(batch_variance + epsilon) and c = x - batch_mean::

        scale*s * (grads - diff_offset/M - c*s * diff_scale/M)

    Parameters
    ----------
    grads, x, batch_mean, batch_variance, epsilon, format, arithmetic
        As `BNTrainingUpdateGrad`.
    diff_scale, diff_offset : array of float32, the shape of batch_mean
        The results of `BNTrainingUpdateGrad`.
    scale : array of float32, the shape of batch_mean
        Scale.

    Returns
    -------
    numpy.ndarray
        The shape, type and memory order are those of `x`.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `BNTrainingUpdateGrad`.

    Notes
    -----
    CANN computes ``(grads + a*x + b) * scale*s`` in float32, where `b` includes `batch_mean`. This
    loses digits if the mean is many standard deviations from 0. Here, the mean is subtracted from
    `x` first.
    """
