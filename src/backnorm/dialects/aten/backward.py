"""native_batch_norm_backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from backnorm.dialects._call import Call, CanonicalCall, canonical_call
from backnorm.dialects._operator import DialectOperator
from backnorm.dialects._statistics import check_inverse
from backnorm.dialects.aten._common import (
    FORMATS,
    GRAD_OUT,
    INPUT,
    PHRASES,
    SOURCE,
    TYPE_RULES,
    WEIGHT,
)
from backnorm.dialects.schema import (
    REQUIRED,
    AttributeSpec,
    OperatorSchema,
    Required,
    TensorKind,
    TensorSpec,
)
from backnorm.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["native_batch_norm_backward"]


def _inputs(*, train: bool) -> tuple[TensorSpec, ...]:
    """Return the inputs, among which `train` says which statistics are used."""

    def statistic(name: str, role: str, used: bool, summary: str) -> TensorSpec:
        # PyTorch's own forward returns empty ones for those that are not used: nothing looks at
        # them.
        kind: TensorKind = "channel" if used else "opaque"
        return TensorSpec(name, role, "U", kind, required=used, summary=summary)

    mean, variance = "batch mean, in training", "1 / sqrt(batch variance + eps), in training"
    running_mean, running_var = "mean if not train", "biased variance if not train"
    return (
        GRAD_OUT,
        INPUT,
        WEIGHT,
        statistic("running_mean", "running_mean" if train else "mean", not train, running_mean),
        statistic(
            "running_var", "running_variance" if train else "variance", not train, running_var
        ),
        statistic("save_mean", "mean" if train else "ignored", train, mean),
        statistic("save_invstd", "inverse_deviation" if train else "ignored", train, variance),
    )


_SCHEMA = OperatorSchema(
    dialect="aten",
    op="native_batch_norm_backward",
    operation="backward",
    summary="Gradients of batch normalisation.",
    source=SOURCE.format(op="native_batch_norm_backward"),
    inputs=_inputs(train=True),
    outputs=(
        TensorSpec("grad_input", "dx", "T", "data", False, summary="gradient of input"),
        TensorSpec("grad_weight", "dgamma", "U", "channel", False, summary="gradient of weight"),
        TensorSpec("grad_bias", "dbeta", "U", "channel", False, summary="gradient of the bias"),
    ),
    attributes=(
        AttributeSpec(
            "train", "bool", REQUIRED, role="training", summary="False: statistics are constants"
        ),
        AttributeSpec(
            "eps",
            "f64",
            REQUIRED,
            role="epsilon",
            range="not negative",
            summary="added to running_var; not used in training, but checked",
        ),
    ),
    type_rules=TYPE_RULES,
    formats=FORMATS,
    notes=(
        "train=True uses save_mean and save_invstd, which are then required, and train=False "
        "running_mean and running_var; the others are not looked at. PyTorch's CPU kernel ends "
        "the process where those it uses are missing.",
        "A call also takes output_mask, three booleans: an output that is not wanted is None.",
        "save_invstd stands for the float64 variance 1 / save_invstd**2, with epsilon 0.",
        "batch_norm_backward_reduce and batch_norm_backward_elemt of the same module are the two "
        "phases of this operator, for which PyTorch has no CPU kernel. Their sums may be added up "
        "over processes in between.",
    ),
    phrases=PHRASES,
)
_FROZEN_SCHEMA = replace(_SCHEMA, inputs=_inputs(train=False))


class _NativeBatchNormBackward(DialectOperator):
    """Gradients of batch normalisation (aten::native_batch_norm_backward)."""

    schema = _SCHEMA

    @classmethod
    def schema_for(cls, attributes: Mapping[str, object]) -> OperatorSchema:
        """Return the schema, in which `train` says which statistics are used."""
        train = attributes.get("train", True)
        is_false = isinstance(train, bool | np.bool_) and not train
        return _FROZEN_SCHEMA if is_false else _SCHEMA

    @classmethod
    def check(cls, call: Call) -> None:
        """Check an inverse standard deviation."""
        if call.attributes["train"]:
            check_inverse("save_invstd", call.inputs["save_invstd"])

    @classmethod
    def canonical_call(cls, call: Call) -> CanonicalCall:
        """Return which canonical call this is."""
        canonical = canonical_call(call)
        if not call.attributes["train"]:
            return canonical
        inputs = canonical.inputs | {"variance": "save_invstd"}
        return replace(canonical, inputs=inputs, epsilon=0.0, inverse_std=True)

    def __call__(
        self,
        grad_out: ArrayLike | None = None,
        input: ArrayLike | None = None,
        weight: ArrayLike | None = None,
        running_mean: ArrayLike | None = None,
        running_var: ArrayLike | None = None,
        save_mean: ArrayLike | None = None,
        save_invstd: ArrayLike | None = None,
        train: bool | Required = REQUIRED,
        eps: float | Required = REQUIRED,
        output_mask: Sequence[bool] | Required = REQUIRED,
    ) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """Return grad_input, grad_weight, grad_bias; None for those that are not wanted.

        Parameters
        ----------
        grad_out, input : array of rank 2 or more
            Of one shape (N, C, ...) and element type (f64, f32, f16 or bf16).
        weight : array of shape (C,), optional
            Of the type of `input`, or float32 beside a 16-bit one.
        running_mean, running_var : array of shape (C,), optional
            Required if not `train`, else not looked at; of the type of `weight`.
        save_mean, save_invstd : array of shape (C,), optional
            Required if `train`, else not looked at; of the type of `weight`. save_invstd is
            1 / sqrt(variance + eps), the variance being the biased one.
        train : bool
            False: the statistics are constants.
        eps : float
            Not negative. Not used if `train`.
        output_mask : sequence of three booleans
            Which of the results are wanted.

        Returns
        -------
        tuple of numpy.ndarray or None
            grad_input lies in memory like `input`; grad_weight and grad_bias are of the type of
            `weight`, or of the statistics if it is None.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            For an argument that is not as described, by its name here.
        """
        inputs = {
            "grad_out": grad_out,
            "input": input,
            "weight": weight,
            "running_mean": running_mean,
            "running_var": running_var,
            "save_mean": save_mean,
            "save_invstd": save_invstd,
        }
        names = [tensor.name for tensor in self.schema.outputs]
        wanted = _wanted(output_mask, names)
        results = self.invoke(inputs, {"train": train, "eps": eps}, wanted)
        grad_input, grad_weight, grad_bias = (results.get(name) for name in names)
        return grad_input, grad_weight, grad_bias


def _wanted(output_mask: object, names: Sequence[str]) -> list[str]:
    accepted = "a sequence of three booleans"
    if isinstance(output_mask, str) or not isinstance(output_mask, Sequence | np.ndarray):
        raise ArgumentTypeError(
            "output_mask",
            "says which results are wanted",
            came=type(output_mask).__name__,
            accepted=accepted,
        )
    if len(output_mask) != len(names):
        raise ArgumentValueError(
            "output_mask",
            "must have an element for each of grad_input, grad_weight and grad_bias",
            came=f"{len(output_mask)} elements",
            accepted=accepted,
        )
    for flag in output_mask:
        if not isinstance(flag, bool | np.bool_):
            raise ArgumentTypeError(
                "output_mask", "must hold booleans", came=repr(flag), accepted=accepted
            )
    return [name for name, flag in zip(names, output_mask, strict=True) if flag]


native_batch_norm_backward = _NativeBatchNormBackward()
