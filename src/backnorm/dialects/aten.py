"""ATen: PyTorch's native_batch_norm_backward, and the two phases that SyncBatchNorm calls.

Source: PyTorch's operator declarations (native_functions.yaml) and its CPU and CUDA kernels.
Argument lists, defaults and results are PyTorch's; arrays are NumPy's. Importing this module does
not import PyTorch. The channel axis is 1. Saved inverse standard deviations are used unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._aten_phases import (
    GRAD_OUT,
    INPUT,
    PARTS,
    WEIGHT,
    batch_norm_backward_elemt,
    batch_norm_backward_reduce,
    common_rules,
)
from backnorm.dialects._check import check_mask
from backnorm.dialects.operator import Operator, by_name
from backnorm.dialects.schema import (
    REQUIRED,
    AttributeSpec,
    OperatorSchema,
    Required,
    TensorRole,
    TensorSpec,
    channel,
    data,
)

__all__ = [
    "OPERATORS",
    "PARTS",
    "batch_norm_backward_elemt",
    "batch_norm_backward_reduce",
    "native_batch_norm_backward",
]


def _unread(name: str, role: TensorRole) -> TensorSpec:
    """Return the rule of a statistic that the operator does not read. Its shape is not checked
    ("opaque"), because PyTorch's forward may return an empty tensor for it.
    """
    return TensorSpec(name, role, "U", "opaque", required=False)


_OPERANDS = (GRAD_OUT, INPUT, WEIGHT)
_TRAINING = (
    _unread("running_mean", "running_mean"),
    _unread("running_var", "running_variance"),
    channel("save_mean", "mean", "U"),
    channel("save_invstd", "inverse_deviation", "U"),
)
_FROZEN = (
    channel("running_mean", "mean", "U"),
    channel("running_var", "variance", "U"),
    _unread("save_mean", "ignored"),
    _unread("save_invstd", "ignored"),
)


class _NativeBatchNormBackward(Operator):
    """native_batch_norm_backward of ATen: gradients of batch normalisation."""

    rules = (
        common_rules(
            op="native_batch_norm_backward",
            operation="backward",
            inputs=(*_OPERANDS, *_TRAINING),
            outputs=(
                data("grad_input", "dx", "T", required=False),
                channel("grad_weight", "dgamma", "U", required=False),
                channel("grad_bias", "dbeta", "U", required=False),
            ),
            attributes=(
                AttributeSpec("train", "bool", role="training"),
                AttributeSpec("eps", "f64", role="epsilon", range="not negative"),
            ),
        ),
    )

    def __call__(
        self,
        grad_out: ArrayLike | None = None,
        input: ArrayLike | None = None,
        weight: ArrayLike | None = None,
        running_mean: object = None,
        running_var: object = None,
        save_mean: ArrayLike | None = None,
        save_invstd: ArrayLike | None = None,
        train: bool | Required = REQUIRED,
        eps: float | Required = REQUIRED,
        output_mask: Sequence[bool] | np.ndarray | Required = REQUIRED,
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
        wants_input, wants_weight, wants_bias = check_mask(self.schema, output_mask)
        grad_input, grad_weight, grad_bias = self._run(
            (grad_out, input, weight, running_mean, running_var, save_mean, save_invstd),
            (train, eps),
            arithmetic=arithmetic,
        )
        return (
            grad_input if wants_input else None,
            grad_weight if wants_weight else None,
            grad_bias if wants_bias else None,
        )

    @classmethod
    def schema_for(cls, attributes: Mapping[str, object]) -> OperatorSchema:
        """Return the schema; `train` determines which statistics it requires."""
        train = attributes.get("train", True)
        is_false = type(train) in (bool, np.bool_) and not train
        return replace(cls.schema, inputs=(*_OPERANDS, *_FROZEN)) if is_false else cls.schema


native_batch_norm_backward = _NativeBatchNormBackward()

OPERATORS = by_name(native_batch_norm_backward)
