"""ATen: PyTorch's native_batch_norm_backward, and the two phases that SyncBatchNorm calls.

Source: PyTorch's operator declarations (native_functions.yaml) and its CPU and CUDA kernels.
Argument lists, defaults and results are PyTorch's; arrays are NumPy's. Importing this module does
not import PyTorch. The channel axis is 1. Saved inverse standard deviations are used unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._call import Call
from backnorm.dialects._statistics import check_inverse, common_type, native
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, channel, data, opaque
from backnorm.dialects.schema import FormatSpec, Phrases, Rules, type_rules
from backnorm.dtypes import FLOAT64, element_type, rounded
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.executable import run
from backnorm.operators import reduce
from backnorm.problem import Problem
from backnorm.scalars import as_array, check_flag

__all__ = [
    "batch_norm_backward_elemt",
    "batch_norm_backward_reduce",
    "native_batch_norm_backward",
]

RULES = Rules(
    dialect="aten",
    source="PyTorch 2.13, native_functions.yaml, {op}",
    type_rules=type_rules(f64="f64", f32="f32", f16="f16 f32", bf16="bf16 f32"),
    formats=(FormatSpec("NC...", "NCX"),),
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


@operator(
    RULES,
    "backward",
    grad_input=data("dx", "T", required=False),
    grad_weight=channel("dgamma", "U", required=False),
    grad_bias=channel("dbeta", "U", required=False),
)
def native_batch_norm_backward(
    grad_out: GradOut,
    input: Input,
    weight: Weight | None,
    running_mean: RunningMean | None,
    running_var: RunningVar | None,
    save_mean: SaveMean | None,
    save_invstd: SaveInvstd | None,
    train: Annotated[bool, attribute("bool", "training")],
    eps: Annotated[float, attribute("f64", "epsilon", range="not negative")],
    output_mask: Sequence[bool] | np.ndarray,
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
    arrays = call.inputs
    check_inverse("invstd", arrays["invstd"])
    x, dy = arrays["input"], arrays["grad_out"]
    sums = tuple(
        _sum(name, value, arrays["mean"])
        for name, value in {"sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu}.items()
    )
    total = _total(count, x)
    common = common_type({n: a for n, a in arrays.items() if n in ("mean", "invstd", "weight")})
    mean, invstd, weight = common["mean"], common["invstd"], common.get("weight")
    problem = Problem(
        "apply",
        x.shape,
        (1,),
        native(x),
        native(mean),
        has_gamma=weight is not None,
        inverse=True,
        arithmetic=call.arithmetic,
    )
    operands = x, dy, None, mean, invstd, weight
    dx: np.ndarray
    dx, _ = run(problem, operands, numbers={"sums": sums, "count": total})
    return dx


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
