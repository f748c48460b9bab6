"""ATen: PyTorch's operators of batch normalisation, and the two phases that SyncBatchNorm calls.

Source: PyTorch's operator declarations (native_functions.yaml) and its CPU and CUDA kernels.
Argument lists, defaults and results are PyTorch's; arrays are NumPy's. Importing this module does
not import PyTorch. The channel axis is 1. All operators save the inverse standard deviation, those
that call it save_var too. Saved inverse standard deviations are used unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects._parts import gradient_of_sums
from backnorm.dialects._statistics import check_inverse, native
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, channel, data, opaque, vector
from backnorm.dialects.schema import FormatSpec, Phrases, Rules, type_rules
from backnorm.dtypes import FLOAT64, element_type, rounded
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.operators import reduce
from backnorm.scalars import as_array, check_flag

__all__ = [
    "_batch_norm_impl_index_backward",
    "_batch_norm_with_update",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_stats",
    "batch_norm_backward",
    "batch_norm_backward_elemt",
    "batch_norm_backward_reduce",
    "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
    "miopen_batch_norm_backward",
    "native_batch_norm",
    "native_batch_norm_backward",
]

RULES = Rules(
    dialect="aten",
    source="PyTorch 2.13, native_functions.yaml, {op}",
    type_rules=type_rules(f64="f64", f32="f32", f16="f16 f32", bf16="bf16 f32"),
    formats=(FormatSpec("NC...", "NCX"),),
    unbiased=True,
    phrases=Phrases(
        gradient_shape="must have the shape of input",
        gradient_type="must have the element type of input",
        channel_size="must hold one value per channel of input ({channels})",
    ),
)
GradOut = Annotated[ArrayLike, data("dy", "T")]
Input = Annotated[ArrayLike, data("x", "T")]
Weight = Annotated[ArrayLike, channel("gamma", "U")]
# A statistic has two roles: that in training, and that with constant statistics. The shape of the
# one that is not read is not checked, because PyTorch's forward may return an empty tensor for it.
RunningMean = Annotated[object, opaque("running_mean", "U"), channel("mean", "U")]
RunningVar = Annotated[object, opaque("running_variance", "U"), channel("variance", "U")]
SaveMean = Annotated[ArrayLike, channel("mean", "U"), opaque("ignored", "U")]
SaveInvstd = Annotated[ArrayLike, channel("inverse_deviation", "U"), opaque("ignored", "U")]
Train = Annotated[bool, attribute("bool", "training")]
Eps = Annotated[float, attribute("f64", "epsilon", range="not negative")]
OutputMask = Sequence[bool] | np.ndarray
Reserve = Annotated[object, opaque("reserve", "uint8")]

_gradients = partial(
    operator,
    RULES,
    "backward",
    grad_input=data("dx", "T", required=False),
    grad_weight=channel("dgamma", "U", required=False),
    grad_bias=channel("dbeta", "U", required=False),
)


@_gradients()
def native_batch_norm_backward(
    grad_out: GradOut,
    input: Input,
    weight: Weight | None,
    running_mean: RunningMean | None,
    running_var: RunningVar | None,
    save_mean: SaveMean | None,
    save_invstd: SaveInvstd | None,
    train: Train,
    eps: Eps,
    output_mask: OutputMask,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Gradients of batch normalisation.

    With M elements per channel, s = save_invstd and c = input - save_mean::

        grad_bias   = sum grad_out
        grad_weight = s * sum grad_out*c
        grad_input  = weight*s * (grad_out - grad_bias/M - c*s * grad_weight/M)

    If not train, c = input - running_mean, s = 1 / sqrt(running_var + eps), and grad_input is
    weight*s * grad_out.

    Parameters
    ----------
    grad_out : array of T
        gradient of the output
    input : array of T, rank 2 or more
        input of the forward, (N, C, ...)
    weight : array of U, shape (C,), optional
        scale; None: 1
    running_mean : object, optional
        mean if not train
    running_var : object, optional
        variance if not train
    save_mean : array of U, shape (C,)
        batch mean, in training
    save_invstd : array of U, shape (C,)
        1 / sqrt(batch variance + eps), in training
    train : bool
        False: statistics are constants
    eps : float, finite and not negative
        added to running_var; not used in training, but checked
    output_mask : sequence of bool
        which results are requested; others are None
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    grad_input : array of T
        gradient of input
    grad_weight : array of U, shape (C,)
        gradient of weight
    grad_bias : array of U, shape (C,)
        gradient of the bias

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f64 with f64, f32 with f32, f16 with
    f16 or f32, bf16 with bf16 or f32.

    - train=True requires save_mean and save_invstd, and train=False requires running_mean
      and running_var; the other pair is not checked or used. PyTorch's CPU kernel crashes
      the process if a required statistic is missing.
    - A call also takes output_mask, three booleans that say which outputs are requested; the
      other outputs are None.
    - batch_norm_backward_reduce and batch_norm_backward_elemt of the same module are the
      two phases of this operator. Between the two phases, a caller may add up the sums of
      several processes.
    """


def _translate_index(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """Return the canonical call; all implementations have the same one."""
    index = call.attributes["impl_index"]
    if index not in (0, 1, 2):
        raise ArgumentValueError(
            "impl_index", "unknown implementation", came=index, accepted="0, 1 or 2"
        )
    return canonical


@_gradients(translate=_translate_index)
def _batch_norm_impl_index_backward(
    impl_index: Annotated[int, attribute("i64", range="not negative", example=0)],
    input: Input,
    grad_output: GradOut,
    weight: Weight | None,
    running_mean: RunningMean | None,
    running_var: RunningVar | None,
    save_mean: SaveMean | None,
    save_var_transform: SaveInvstd | None,
    train: Train,
    eps: Eps,
    output_mask: OutputMask,
    reservedSpace: Reserve,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Gradients of batch normalisation, by the implementation that the forward pass chose.

    With M elements per channel, s = save_var_transform and c = input - save_mean::

        grad_bias   = sum grad_output
        grad_weight = s * sum grad_output*c
        grad_input  = weight*s * (grad_output - grad_bias/M - c*s * grad_weight/M)

    If not train, c = input - running_mean, s = 1 / sqrt(running_var + eps), and grad_input is
    weight*s * grad_output.

    Parameters
    ----------
    impl_index : {0, 1, 2}
        what PyTorch calls: native_batch_norm_backward (0), or in training
        cudnn_batch_norm_backward (1) or miopen_batch_norm_backward (2); the gradients are the same
    input : array of T, rank 2 or more
        input of the forward, (N, C, ...)
    grad_output : array of T
        gradient of the output
    weight : array of U, shape (C,), optional
        scale; None: 1
    running_mean : object, optional
        mean if not train
    running_var : object, optional
        variance if not train
    save_mean : array of U, shape (C,)
        batch mean, in training
    save_var_transform : array of U, shape (C,)
        1 / sqrt(batch variance + eps), in training
    train : bool
        False: statistics are constants
    eps : float, finite and not negative
        added to running_var; not used in training, but checked
    output_mask : sequence of bool
        which results are requested; others are None
    reservedSpace : object
        the reserve of the forward; ignored
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    grad_input : array of T
        gradient of input
    grad_weight : array of U, shape (C,)
        gradient of weight
    grad_bias : array of U, shape (C,)
        gradient of the bias

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f64 with f64, f32 with f32, f16 with
    f16 or f32, bf16 with bf16 or f32.

    - Every implementation saves the inverse standard deviation. So save_var_transform is the same
      for each impl_index.
    - PyTorch ignores output_mask if it calls cuDNN or MIOpen; backnorm does not.
    """


@_gradients()
def batch_norm_backward(
    grad_out: GradOut,
    input: Input,
    weight: Weight,
    running_mean: RunningMean | None,
    running_var: RunningVar | None,
    save_mean: SaveMean | None,
    save_var: SaveInvstd | None,
    update: Train,
    eps: Eps,
    output_mask: OutputMask,
    reserve: Reserve,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Gradients of `_batch_norm_with_update`.

    With M elements per channel, s = save_var and c = input - save_mean::

        grad_bias   = sum grad_out
        grad_weight = s * sum grad_out*c
        grad_input  = weight*s * (grad_out - grad_bias/M - c*s * grad_weight/M)

    If not update, c = input - running_mean, s = 1 / sqrt(running_var + eps), and grad_input is
    weight*s * grad_out.

    Parameters
    ----------
    grad_out : array of T
        gradient of the output
    input : array of T, rank 2 or more
        input of the forward, (N, C, ...)
    weight : array of U, shape (C,)
        scale
    running_mean : object, optional
        mean if not update
    running_var : object, optional
        variance if not update
    save_mean : array of U, shape (C,)
        batch mean, in training
    save_var : array of U, shape (C,)
        1 / sqrt(batch variance + eps), in training
    update : bool
        True: training; False: statistics are constants
    eps : float, finite and not negative
        added to running_var; not used in training, but checked
    output_mask : sequence of bool
        which results are requested; others are None
    reserve : object
        the reserve of the forward; ignored
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    grad_input : array of T
        gradient of input
    grad_weight : array of U, shape (C,)
        gradient of weight
    grad_bias : array of U, shape (C,)
        gradient of the bias

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f64 with f64, f32 with f32, f16 with
    f16 or f32, bf16 with bf16 or f32.

    - In spite of its name, save_var is an inverse standard deviation: PyTorch's CPU kernel is that
      of native_batch_norm_backward, with save_var as save_invstd.
    """


_of_library = partial(
    operator,
    RULES,
    "backward",
    grad_input=data("dx", "T"),
    grad_weight=channel("dgamma", "U"),
    grad_bias=channel("dbeta", "U"),
)


@_of_library()
def cudnn_batch_norm_backward(
    input: Input,
    grad_output: GradOut,
    weight: Weight,
    running_mean: Annotated[object, opaque("running_mean", "U")] | None,
    running_var: Annotated[object, opaque("running_variance", "U")] | None,
    save_mean: Annotated[ArrayLike, channel("mean", "U")],
    save_var: Annotated[ArrayLike, channel("inverse_deviation", "U")],
    epsilon: Eps,
    reserveSpace: Reserve,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of batch normalisation in training, by a library: cuDNN or MIOpen.

    With M elements per channel, s = save_var and c = input - save_mean::

        grad_bias   = sum grad_output
        grad_weight = s * sum grad_output*c
        grad_input  = weight*s * (grad_output - grad_bias/M - c*s * grad_weight/M)

    Parameters
    ----------
    input : array of T, rank 2 or more
        input of the forward, (N, C, ...)
    grad_output : array of T
        gradient of the output
    weight : array of U, shape (C,)
        scale
    running_mean : object, optional
        ignored
    running_var : object, optional
        ignored
    save_mean : array of U, shape (C,)
        batch mean
    save_var : array of U, shape (C,)
        1 / sqrt(batch variance + epsilon)
    epsilon : float, finite and not negative
        checked, but not used, because save_var includes it
    reserveSpace : object
        the reserve of the forward; ignored
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    grad_input : array of T
        gradient of input
    grad_weight : array of U, shape (C,)
        gradient of weight
    grad_bias : array of U, shape (C,)
        gradient of the bias

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f64 with f64, f32 with f32, f16 with
    f16 or f32, bf16 with bf16 or f32.

    - In spite of its name, save_var is an inverse standard deviation: it is the argument
      savedInvVariance of cudnnBatchNormalizationBackwardEx and of
      miopenBatchNormalizationBackward. PyTorch's decompositions of both operators
      (torch/_decomp/decompositions.py) pass it to native_batch_norm_backward as save_invstd.
    - The operator is for training only: for constant statistics PyTorch calls
      native_batch_norm_backward.
    - cuDNN takes float32 parameters with f16, and MIOpen up to rank 5; backnorm has the types and
      ranks of native_batch_norm_backward.
    """


@_of_library(described_by=cudnn_batch_norm_backward)
def miopen_batch_norm_backward(
    input: Input,
    grad_output: GradOut,
    weight: Weight,
    running_mean: Annotated[object, opaque("running_mean", "U")] | None,
    running_var: Annotated[object, opaque("running_variance", "U")] | None,
    save_mean: Annotated[ArrayLike, channel("mean", "U")],
    save_var: Annotated[ArrayLike, channel("inverse_deviation", "U")],
    epsilon: Eps,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of batch normalisation: `cudnn_batch_norm_backward` without a reserve."""


# The forward passes. PyTorch updates running statistics in place; these functions return the
# updated ones, as `_native_batch_norm_legit_functional` does, and leave their inputs unchanged.

Bias = Annotated[ArrayLike, channel("beta", "U")]
OldMean = Annotated[ArrayLike, channel("running_mean", "U"), channel("mean", "U")]
OldVar = Annotated[ArrayLike, channel("running_variance", "U"), channel("variance", "U")]
Momentum = Annotated[float, attribute("f64", "batch_weight", example=0.1)]
# PyTorch saves no statistics if they are constants.
_SAVED_MEAN = channel("mean", "U", frozen=vector("empty", "f32"))
_SAVED_INVERSE = channel("inverse_deviation", "U", frozen=vector("empty", "f32"))
_TOGETHER = replace(RULES, inputs_together=(("running_mean", "running_var"),))

Saved = tuple[np.ndarray, np.ndarray, np.ndarray]
Functional = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
OptionalFunctional = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]


@operator(
    _TOGETHER,
    "forward",
    out=data("y", "T"),
    save_mean=_SAVED_MEAN,
    save_invstd=_SAVED_INVERSE,
    running_mean_out=channel("running_mean", "U", required=False),
    running_var_out=channel("running_variance", "U", required=False),
)
def native_batch_norm(
    input: Input,
    weight: Weight | None,
    bias: Bias | None,
    running_mean: OldMean | None,
    running_var: OldVar | None,
    training: Train,
    momentum: Momentum,
    eps: Eps,
    *,
    arithmetic: Arithmetic | None = None,
) -> OptionalFunctional:
    """Batch normalisation, in training or with running statistics.

    In training, m and v are the mean and the biased variance of the batch. If training is False, m
    and v are running_mean and running_var::

        out = weight * (input - m) / sqrt(v + eps) + bias

    Parameters
    ----------
    input : array of T, rank 2 or more
        input, (N, C, ...)
    weight : array of U, shape (C,), optional
        scale; None: 1
    bias : array of U, shape (C,), optional
        offset; None: 0
    running_mean : array of U, shape (C,)
        running mean
    running_var : array of U, shape (C,)
        running variance
    training : bool
        False: normalise with the running statistics
    momentum : float, finite
        weight of the batch in the running statistics
    eps : float, finite and not negative
        added to the variance
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    out : array of T
        normalised output
    save_mean : array of U, shape (C,)
        batch mean; shape (0,) if not training
    save_invstd : array of U, shape (C,)
        1 / sqrt(batch variance + eps); shape (0,) if not training
    running_mean_out : array of U, shape (C,)
        new running mean
    running_var_out : array of U, shape (C,)
        new running variance, an average of variances with Bessel's correction

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f64 with f64, f32 with f32, f16 with
    f16 or f32, bf16 with bf16 or f32.

    - PyTorch updates running_mean and running_var in place, and returns only the other results.
      These functions leave their inputs unchanged, and return the new running statistics last, as
      _native_batch_norm_legit_functional does in PyTorch. They are None if none are given.
    - In training, running_mean_out is (1 - momentum) * running_mean + momentum * (the mean of
      input), and running_var_out is the same of variances, the batch's with M - 1 for M. If
      training is False, both are unchanged.
    - If 16-bit data come without per-channel tensors, the saved statistics are float32, as in
      PyTorch on CUDA; on the CPU, they have the type of input.
    - If a channel has one element, running_var_out is (1 - momentum) * running_var; PyTorch divides
      by M - 1 = 0, and returns NaN. PyTorch rejects an empty input; in backnorm, it does not change
      the running statistics.
    """


_legit = partial(
    operator,
    RULES,
    "forward",
    described_by=native_batch_norm,
    out=data("y", "T"),
    save_mean=_SAVED_MEAN,
    save_invstd=_SAVED_INVERSE,
    running_mean_out=channel("running_mean", "U"),
    running_var_out=channel("running_variance", "U"),
)


@_legit()
def _native_batch_norm_legit(
    input: Input,
    weight: Weight | None,
    bias: Bias | None,
    running_mean: OldMean,
    running_var: OldVar,
    training: Train,
    momentum: Momentum,
    eps: Eps,
    *,
    arithmetic: Arithmetic | None = None,
) -> Functional:
    """Batch normalisation: `native_batch_norm`, and the running statistics are required."""


_native_batch_norm_legit_functional = _legit(name="_native_batch_norm_legit_functional")(
    _native_batch_norm_legit
)
"""Batch normalisation: `_native_batch_norm_legit`, whose results are the same here."""


def _translate_without_running(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    if not call.attributes["training"]:
        raise ArgumentValueError(
            "training", "must be True without running statistics", came=False, accepted="True"
        )
    return canonical


@operator(
    replace(RULES, source=RULES.source.replace("{op}", "_native_batch_norm_legit.no_stats")),
    "forward",
    translate=_translate_without_running,
    out=data("y", "T"),
    save_mean=channel("mean", "U"),
    save_invstd=channel("inverse_deviation", "U"),
)
def _native_batch_norm_legit_no_stats(
    input: Input,
    weight: Weight | None,
    bias: Bias | None,
    training: Annotated[bool, attribute("bool", example=True)],
    momentum: Momentum,
    eps: Eps,
    *,
    arithmetic: Arithmetic | None = None,
) -> Saved:
    """Batch normalisation with the statistics of the batch; there are no running ones.

    m and v are the mean and the biased variance of the batch::

        out = weight * (input - m) / sqrt(v + eps) + bias

    Parameters
    ----------
    input : array of T, rank 2 or more
        input, (N, C, ...)
    weight : array of U, shape (C,), optional
        scale; None: 1
    bias : array of U, shape (C,), optional
        offset; None: 0
    training : bool
        must be True
    momentum : float, finite
        ignored
    eps : float, finite and not negative
        added to the variance
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    out : array of T
        normalised output
    save_mean : array of U, shape (C,)
        batch mean
    save_invstd : array of U, shape (C,)
        1 / sqrt(batch variance + eps)

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f64 with f64, f32 with f32, f16 with
    f16 or f32, bf16 with bf16 or f32.

    - The operator is the overload _native_batch_norm_legit.no_stats.
    - If 16-bit data come without per-channel tensors, the saved statistics are float32, as in
      PyTorch on CUDA; on the CPU, they have the type of input.
    """


@operator(
    RULES,
    "forward",
    out=data("y", "T"),
    save_mean=channel("mean", "U"),
    save_invstd=channel("inverse_deviation", "U"),
    reserve=vector("reserve", "uint8"),
    running_mean_out=channel("running_mean", "U"),
    running_var_out=channel("running_variance", "U"),
)
def _batch_norm_with_update(
    input: Input,
    weight: Weight | None,
    bias: Bias | None,
    running_mean: Annotated[ArrayLike, channel("running_mean", "U")],
    running_var: Annotated[ArrayLike, channel("running_variance", "U")],
    momentum: Momentum,
    eps: Eps,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Batch normalisation in training, with an update of the running statistics.

    m and v are the mean and the biased variance of the batch::

        out = weight * (input - m) / sqrt(v + eps) + bias

    Parameters
    ----------
    input : array of T, rank 2 or more
        input, (N, C, ...)
    weight : array of U, shape (C,), optional
        scale; None: 1
    bias : array of U, shape (C,), optional
        offset; None: 0
    running_mean : array of U, shape (C,)
        running mean
    running_var : array of U, shape (C,)
        running variance
    momentum : float, finite
        weight of the batch in the running statistics
    eps : float, finite and not negative
        added to the variance
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    out : array of T
        normalised output
    save_mean : array of U, shape (C,)
        batch mean
    save_invstd : array of U, shape (C,)
        1 / sqrt(batch variance + eps)
    reserve : array of uint8, shape (0,)
        empty, shape (0,)
    running_mean_out : array of U, shape (C,)
        new running mean
    running_var_out : array of U, shape (C,)
        new running variance, an average of variances with Bessel's correction

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f64 with f64, f32 with f32, f16 with
    f16 or f32, bf16 with bf16 or f32.

    - As in native_batch_norm, the new running statistics are the last results.
    - PyTorch writes to reserve what the backward pass of the chosen library reads; it is empty if
      that is PyTorch's own.
    """


@operator(
    _TOGETHER,
    "forward",
    output=data("y", "T"),
    save_mean=_SAVED_MEAN,
    save_var=_SAVED_INVERSE,
    reserve=vector("reserve", "uint8"),
    running_mean_out=channel("running_mean", "U", required=False),
    running_var_out=channel("running_variance", "U", required=False),
)
def cudnn_batch_norm(
    input: Input,
    weight: Weight,
    bias: Bias | None,
    running_mean: OldMean | None,
    running_var: OldVar | None,
    training: Train,
    exponential_average_factor: Momentum,
    epsilon: Eps,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Batch normalisation by cuDNN, in training or with running statistics.

    In training, m and v are the mean and the biased variance of the batch. If training is False, m
    and v are running_mean and running_var::

        output = weight * (input - m) / sqrt(v + epsilon) + bias

    Parameters
    ----------
    input : array of T, rank 2 or more
        input, (N, C, ...)
    weight : array of U, shape (C,)
        scale
    bias : array of U, shape (C,), optional
        offset; None: 0
    running_mean : array of U, shape (C,), optional
        running mean
    running_var : array of U, shape (C,), optional
        running variance
    training : bool
        False: normalise with the running statistics
    exponential_average_factor : float, finite
        weight of the batch in the running statistics
    epsilon : float, finite and not negative
        added to the variance
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    output : array of T
        normalised output
    save_mean : array of U, shape (C,)
        batch mean; shape (0,) if not training
    save_var : array of U, shape (C,)
        1 / sqrt(batch variance + epsilon); shape (0,) if not training
    reserve : array of uint8, shape (0,)
        empty, shape (0,)
    running_mean_out : array of U, shape (C,)
        new running mean
    running_var_out : array of U, shape (C,)
        new running variance, an average of variances with Bessel's correction

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f64 with f64, f32 with f32, f16 with
    f16 or f32, bf16 with bf16 or f32.

    - In spite of its name, save_var is an inverse standard deviation: what cuDNN calls
      resultSaveInvVariance.
    - Running statistics and an empty input are those of native_batch_norm.
    - cuDNN requires bias, and writes bytes to reserve in training, which its backward pass reads.
    """


# The per-channel tensors of one call of a phase may have different types: on a GPU, a model of
# 16-bit numbers has 16-bit weights and float32 statistics.
_PHASE = replace(RULES, one_channel_type=False)

Mean = Annotated[ArrayLike, channel("mean", "V")]
InvStd = Annotated[ArrayLike, channel("inverse_deviation", "V")]


def _reduce(
    call: Call, *, input_g: object, weight_g: object, bias_g: object
) -> tuple[np.ndarray | None, ...]:
    wanted = {"input_g": input_g, "weight_g": weight_g, "bias_g": bias_g}
    for name, flag in wanted.items():
        wanted[name] = check_flag(name, flag)
    arrays = call.inputs
    check_inverse("invstd", arrays["invstd"])
    center = arrays["mean"]
    sums = reduce(arrays["input"], arrays["grad_out"], center, arithmetic=call.arithmetic)
    sum_type, parameter_type = native(center), native(arrays.get("weight", center))
    with np.errstate(all="ignore"):
        grad_weight = sums.sum_dy_xmu * arrays["invstd"].astype(FLOAT64)
    return (
        rounded(sums.sum_dy, sum_type) if wanted["input_g"] else None,
        rounded(sums.sum_dy_xmu, sum_type) if wanted["input_g"] else None,
        rounded(grad_weight, parameter_type) if wanted["weight_g"] else None,
        rounded(sums.sum_dy, parameter_type).copy() if wanted["bias_g"] else None,
    )


@operator(
    _PHASE,
    "reduce",
    compute=_reduce,
    sum_dy=channel("sum_dy", "V", required=False),
    sum_dy_xmu=channel("sum_dy_xmu", "V", required=False),
    grad_weight=channel("dgamma", "V", required=False),
    grad_bias=channel("dbeta", "V", required=False),
)
def batch_norm_backward_reduce(
    grad_out: GradOut,
    input: Input,
    mean: Mean,
    invstd: InvStd,
    weight: Weight | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Return sum_dy, sum_dy_xmu, grad_weight and grad_bias of one part of a batch.

    ::

        sum_dy = grad_bias = sum grad_out
        sum_dy_xmu         = sum grad_out * (input - mean)
        grad_weight        = invstd * sum_dy_xmu

    Parameters
    ----------
    grad_out, input : array of rank 2 or more
        Arrays of one shape (N, C, ...) and one element type (f64, f32, f16 or bf16).
    mean, invstd : array of shape (C,)
        Statistics of the whole batch, in the type of `input`; if that has 16 bits, float32 also
        works.
    weight : array of shape (C,), optional
        Only the type is used, for grad_weight and grad_bias; None: the type of `mean`.
    input_g, weight_g, bias_g : bool
        Whether to return both sums, grad_weight, grad_bias; results not requested are None.
    arithmetic : {"float32", "float64"}, optional
        An extension of backnorm: the compute type of elements; see `backnorm.arithmetic`.

    Returns
    -------
    tuple of numpy.ndarray or None
        sum_dy and sum_dy_xmu have the type of `mean`. All results are summed in a wider type and
        rounded once.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an argument does not match its description; the error names the argument.
    """


def _apply(
    call: Call, *, sum_dy: ArrayLike | None, sum_dy_xmu: ArrayLike | None, count: ArrayLike | None
) -> np.ndarray:
    mean = call.inputs["mean"]
    sums = _sum("sum_dy", sum_dy, mean), _sum("sum_dy_xmu", sum_dy_xmu, mean)
    return gradient_of_sums(call, sums, _total(count, call.inputs["input"]))


@operator(_PHASE, "apply", compute=_apply, grad_input=data("dx", "T"))
def batch_norm_backward_elemt(
    grad_out: GradOut,
    input: Input,
    mean: Mean,
    invstd: InvStd,
    weight: Weight | None,
    sum_dy: ArrayLike,
    sum_dy_xmu: ArrayLike,
    count: ArrayLike,
    *,
    arithmetic: Arithmetic | None = None,
) -> np.ndarray:
    """Return grad_input of one part of a batch, from sums over the whole batch.

    M, the number of elements per channel in the whole batch, is the sum of `count`. If `weight` is
    None, it counts as 1. The result is ::

        weight*invstd * (grad_out - sum_dy/M - (input - mean) * invstd**2 * sum_dy_xmu/M)

    Parameters
    ----------
    grad_out, input, mean, invstd, weight, arithmetic
        As in `batch_norm_backward_reduce`, but the values of `weight` are used.
    sum_dy, sum_dy_xmu : array of shape (C,)
        The results of `batch_norm_backward_reduce`, added up over all parts; of the type of `mean`
        or float64.
    count : array of integers
        Elements per channel of each part, in any shape. Their sum is M.

    Returns
    -------
    numpy.ndarray
        grad_input, with the shape, type and memory order of `input`.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an argument does not match its description; the error names the argument.
    """


def _sum(name: str, value: ArrayLike | None, mean: np.ndarray) -> np.ndarray:
    array = as_array(name, value)
    own, expected = element_type(array.dtype), native(mean)
    if own is None or own not in (expected, FLOAT64):
        raise ArgumentTypeError(
            name, "unsupported element type", came=array.dtype, accepted=f"{expected} or float64"
        )
    if array.shape != mean.shape:
        raise ArgumentValueError(
            name,
            "must hold one value per channel of input",
            came=f"shape {array.shape}",
            accepted=f"shape {mean.shape}",
        )
    return array.astype(FLOAT64)


def _total(count: ArrayLike | None, x: np.ndarray) -> int:
    array = as_array("count", count)
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(
            "count", "must hold integers", came=array.dtype, accepted="an array of integers"
        )
    counts = [int(value) for value in array.ravel()]
    own = x.size // x.shape[1] if x.size else 0
    if any(value < 0 for value in counts) or not own <= sum(counts) <= sys.maxsize:
        raise ArgumentValueError(
            "count",
            "must be the number of elements per channel of each part, including input",
            came=counts,
            accepted=f"non-negative numbers whose sum is from {own} to {sys.maxsize}",
        )
    return sum(counts)
