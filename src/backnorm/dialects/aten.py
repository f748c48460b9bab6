"""ATen: PyTorch's native_batch_norm_backward, and the two halves that SyncBatchNorm calls.

Source: PyTorch's operator declarations (native_functions.yaml) and its CPU and CUDA kernels.
Argument lists, defaults and results are PyTorch's, on NumPy arrays. Importing this module imports
no PyTorch. The channel axis is 1; saved inverse deviations are used as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from backnorm.dialects._aten_phases import (
    FORMATS,
    GRAD_OUT,
    INPUT,
    PHRASES,
    SOURCE,
    TYPE_RULES,
    WEIGHT,
    batch_norm_backward_elemt,
    batch_norm_backward_reduce,
)
from backnorm.dialects.operator import by_name, function
from backnorm.dialects.schema import (
    AttributeSpec,
    Hooks,
    OperatorSchema,
    TensorKind,
    TensorSpec,
    channel,
    data,
)

__all__ = [
    "OPERATORS",
    "batch_norm_backward_elemt",
    "batch_norm_backward_reduce",
    "native_batch_norm_backward",
]


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


def _by_train(attributes: Mapping[str, object]) -> OperatorSchema:
    """Return the schema, in which `train` says which statistics are used."""
    train = attributes.get("train", True)
    is_false = type(train) in (bool, np.bool_) and not train
    return _FROZEN_SCHEMA if is_false else _SCHEMA


_SCHEMA = OperatorSchema(
    dialect="aten",
    op="native_batch_norm_backward",
    operation="backward",
    summary="Gradients of batch normalisation.",
    source=SOURCE,
    inputs=_inputs(train=True),
    outputs=(
        data("grad_input", "dx", "T", "gradient of input", required=False),
        channel("grad_weight", "dgamma", "U", "gradient of weight", required=False),
        channel("grad_bias", "dbeta", "U", "gradient of the bias", required=False),
    ),
    attributes=(
        AttributeSpec("train", "bool", role="training", summary="False: statistics are constants"),
        AttributeSpec(
            "eps",
            "f64",
            role="epsilon",
            range="not negative",
            summary="added to running_var; not used in training, but checked",
        ),
    ),
    type_rules=TYPE_RULES,
    formats=FORMATS,
    choice="output_mask",
    notes=(
        "train=True uses save_mean and save_invstd, which are then required, and train=False "
        "running_mean and running_var; the others are not looked at. PyTorch's CPU kernel ends "
        "the process where those it uses are missing.",
        "A call also takes output_mask, three booleans: an output that is not wanted is None.",
        "batch_norm_backward_reduce and batch_norm_backward_elemt of the same module are the two "
        "phases of this operator, for which PyTorch has no CPU kernel. Their sums may be added up "
        "over processes in between.",
    ),
    phrases=PHRASES,
    hooks=Hooks(variant=_by_train),
)
_FROZEN_SCHEMA = replace(_SCHEMA, inputs=_inputs(train=False))

native_batch_norm_backward = function(_SCHEMA)

OPERATORS = by_name(native_batch_norm_backward)
