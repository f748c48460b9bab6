"""oneDNN Graph specification: BatchNormTrainingBackprop-1 and its partners.

Three texts went by these names; ``revision`` chooses one:

``"latest"``
    input_forward, output_delta, mean, variance, gamma?; one element type T2 for all
    per-channel tensors.
``"2020-21"``
    input, output_delta, gamma?, beta?, mean, variance; per-channel tensors in f32; attribute
    is_training.
``"early"``
    As 2020-21, without type rules: each per-channel tensor may be f32 or of the input's type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from backnorm.dialects._onednn import (
    DATA_FORMAT,
    EPSILON,
    FORMATS,
    MOMENTUM,
    RUNNING_NOTE,
    TYPE_RULES,
    moving,
)
from backnorm.dialects.operator import by_name, configured
from backnorm.dialects.schema import (
    AttributeSpec,
    Hooks,
    OperatorSchema,
    TensorSpec,
    channel,
    data,
    type_rules,
)

__all__ = [
    "OPERATORS",
    "REVISIONS",
    "BatchNormForwardTraining",
    "BatchNormInference",
    "BatchNormTrainingBackprop",
]

REVISIONS = ("latest", "2020-21", "early")

_REVISION = AttributeSpec(
    "revision",
    "string",
    "latest",
    choices=REVISIONS,
    extension=True,
    summary="which of the texts that went by this name",
)
_IS_TRAINING = AttributeSpec(
    "is_training",
    "bool",
    True,
    role="training",
    summary="False: mean and variance are running statistics, constants to the gradient",
)
# The symbols of data and parameters, and which types they stand for.
_TYPES = {
    "latest": ("T1", "T2", TYPE_RULES),
    "2020-21": ("T", "f32", type_rules(f32="f32", bf16="f32", f16="f32")),
    "early": ("any", "any", type_rules(f32="f32", bf16="f32 bf16", f16="f32 f16")),
}
_EARLY_NOTE = (
    "The text has no type rules: each per-channel tensor is f32 or of the input's type on its "
    "own, and a gradient has the type of its parameter (of gamma, then mean, where the "
    "parameter is absent)."
)


def _schema(
    revision: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    attributes: Sequence[AttributeSpec],
    notes: tuple[str, ...] = (),
    **texts: Any,
) -> OperatorSchema:
    """Return one revision's schema: the type symbols and rules are the revision's."""
    of_data, of_channels, rules = _TYPES[revision]

    def typed(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(replace(t, type=of_data if t.kind == "data" else of_channels) for t in tensors)

    return OperatorSchema(
        dialect="onednn_spec",
        revision=revision,
        source=f"oneDNN Graph specification, {{op}}-1 ({revision} revision)",
        inputs=typed(inputs),
        outputs=typed(outputs),
        attributes=(*attributes, _REVISION),
        type_rules=rules,
        formats=FORMATS,
        one_channel_type=revision != "early",
        style="configured",
        takes_memory=True,
        notes=notes + ((_EARLY_NOTE,) if revision == "early" else ()),
        **texts,
    )


_GAMMA = channel("gamma", "gamma", "", "scale; absent: 1", required=False)
_BETA = channel("beta", "beta", "", "offset; absent: 0", required=False)


def _backprop(revision: str) -> OperatorSchema:
    delta = data("output_delta", "dy", "", "gradient of the output")
    inputs: tuple[TensorSpec, ...] = (
        data("input", "x", "", "input of the forward"),
        delta,
        _GAMMA,
        channel("beta", "beta", "", "offset; checked, enters no result", required=False),
        channel("mean", "mean", "", "batch mean; running mean if not is_training"),
        channel("variance", "variance", "", "batch variance; running variance if not is_training"),
    )
    attributes: tuple[AttributeSpec, ...] = (EPSILON, _IS_TRAINING, DATA_FORMAT)
    if revision == "latest":
        inputs = (
            data("input_forward", "x", "", "input of the forward"),
            delta,
            channel("mean", "mean", "", "batch mean"),
            channel("variance", "variance", "", "biased batch variance"),
            _GAMMA,
        )
        attributes = (EPSILON, DATA_FORMAT)
    return _schema(
        revision,
        inputs,
        (
            data("input_delta", "dx", "", "gradient of the input"),
            channel("gamma_delta", "dgamma", "", "gradient of gamma", required=False),
            channel("beta_delta", "dbeta", "", "gradient of beta", required=False),
        ),
        attributes,
        op="BatchNormTrainingBackprop",
        operation="backward",
        summary="Gradients of batch normalisation in training.",
        choice="outputs",
    )


def _forward(revision: str) -> OperatorSchema:
    x = data("input", "x", "", "input")
    old = (
        channel("mean", "running_mean", "", "old running mean"),
        channel("variance", "running_variance", "", "old running variance"),
    )
    affine = (_GAMMA, _BETA)
    momentum = (
        replace(MOMENTUM, default=0.1, nullable=False, summary="weight of the old statistics")
        if revision == "early"
        else MOMENTUM
    )
    return _schema(
        revision,
        (x, *old, *affine) if revision == "latest" else (x, *affine, *old),
        (
            data("output", "y", "", "normalised output"),
            channel("running_mean", "running_mean", ""),
            channel("running_variance", "running_variance", ""),
            channel("batch_mean", "mean", ""),
            channel("batch_variance", "variance", "", "biased"),
        ),
        (EPSILON, momentum, DATA_FORMAT),
        (RUNNING_NOTE,),
        op="BatchNormForwardTraining",
        operation="forward",
        summary="Batch normalisation in training, with running statistics.",
        hooks=Hooks(canonical=moving),
    )


def _inference(revision: str) -> OperatorSchema:
    return _schema(
        revision,
        (
            data("input", "x", "", "input"),
            channel("gamma", "gamma", "", "scale"),
            channel("beta", "beta", "", "offset"),
            channel("mean", "mean", ""),
            channel("variance", "variance", ""),
        ),
        (data("output", "y", "", "normalised output"),),
        (EPSILON, DATA_FORMAT),
        op="BatchNormInference",
        operation="inference",
        summary="Batch normalisation with given statistics.",
    )


BatchNormTrainingBackprop = configured(*map(_backprop, REVISIONS))
BatchNormForwardTraining = configured(*map(_forward, REVISIONS))
BatchNormInference = configured(*map(_inference, REVISIONS))

OPERATORS = by_name(BatchNormTrainingBackprop, BatchNormForwardTraining, BatchNormInference)
