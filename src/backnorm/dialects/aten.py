"""ATen: PyTorch's native_batch_norm_backward, and the two phases that SyncBatchNorm calls.

Source: PyTorch's operator declarations (native_functions.yaml) and its CPU and CUDA kernels.
Argument lists, defaults and results are PyTorch's; arrays are NumPy's. Importing this module does
not import PyTorch. The channel axis is 1. Saved inverse standard deviations are used unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._aten_phases import (
    RULES,
    GradOut,
    Input,
    Weight,
    batch_norm_backward_elemt,
    batch_norm_backward_reduce,
)
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, channel, data, opaque

__all__ = [
    "batch_norm_backward_elemt",
    "batch_norm_backward_reduce",
    "native_batch_norm_backward",
]

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
