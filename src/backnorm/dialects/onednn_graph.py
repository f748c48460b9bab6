"""oneDNN Graph, as the oneDNN developer guide specifies it.

Source: oneDNN developer guide, operations BatchNormTrainingBackward, BatchNormForwardTraining
and BatchNormInference (oneDNN 3.x).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from backnorm.dialects._call import Call, CanonicalCall
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
from backnorm.dialects.schema import AttributeSpec, Hooks, OperatorSchema, channel, data

__all__ = [
    "OPERATORS",
    "BatchNormForwardTraining",
    "BatchNormInference",
    "BatchNormTrainingBackward",
]

_schema = partial(
    OperatorSchema,
    dialect="onednn_graph",
    source="oneDNN developer guide, {op} (oneDNN 3.x)",
    type_rules=TYPE_RULES,
    formats=FORMATS,
    style="configured",
    takes_memory=True,
)
_EMPTY_NOTE = "Empty N, spatial axes or C succeed, with zeros."


def _single_output(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """Leave gamma out where diff_src is requested alone."""
    if len(call.outputs) > 1:
        return canonical
    inputs = {role: name for role, name in canonical.inputs.items() if role != "gamma"}
    training = call.attributes["single_output"] != "onednn"
    return replace(canonical, inputs=inputs, training=training)


BatchNormTrainingBackward = configured(
    _schema(
        op="BatchNormTrainingBackward",
        operation="backward",
        summary="Gradients of batch normalisation in training.",
        inputs=(
            data("src", "x", "T1", "input of the forward"),
            data("diff_dst", "dy", "T1", "gradient of the output"),
            channel("mean", "mean", "T2", "batch mean"),
            channel("variance", "variance", "T2", "biased batch variance"),
            channel("gamma", "gamma", "T2", "scale; absent: 1", required=False),
        ),
        outputs=(
            data("diff_src", "dx", "T1", "gradient of src"),
            channel("diff_gamma", "dgamma", "T2", "gradient of gamma", required=False),
            channel("diff_beta", "dbeta", "T2", "gradient of beta", required=False),
        ),
        attributes=(
            EPSILON,
            DATA_FORMAT,
            AttributeSpec(
                "single_output",
                "string",
                "specification",
                choices=("specification", "onednn"),
                extension=True,
                keyword=True,
                summary="formula of diff_src when neither diff_gamma nor diff_beta is requested",
            ),
        ),
        outputs_together=(("diff_gamma", "diff_beta"),),
        choice="outputs",
        notes=(
            "diff_src may be the memory of diff_dst, which is then overwritten.",
            "With neither diff_gamma nor diff_beta requested gamma is ignored, i.e. taken as 1. "
            "The oneDNN library computes diff_dst / sqrt(variance + epsilon) there, the formula "
            'with constant statistics; single_output="onednn" does the same.',
            "The library accepts epsilon <= 0, a short gamma and rank 6 (half of it unwritten); "
            "here the first two are errors, and every rank from 2 up works.",
            _EMPTY_NOTE,
        ),
        example="""\
>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> src, diff_dst = rng.normal(size=(2, 8, 5, 5, 3)).astype("float32")
>>> mean, variance = src.mean((0, 1, 2)), src.var((0, 1, 2))
>>> op = BatchNormTrainingBackward(epsilon=1e-5)
>>> diff_src, diff_gamma, diff_beta = op(src, diff_dst, mean, variance)
>>> diff_src.shape, diff_gamma.shape
((8, 5, 5, 3), (3,))""",
        hooks=Hooks(canonical=_single_output),
    )
)

BatchNormForwardTraining = configured(
    _schema(
        op="BatchNormForwardTraining",
        operation="forward",
        summary="Batch normalisation in training, with running statistics.",
        inputs=(
            data("src", "x", "T1", "input"),
            channel("mean", "running_mean", "T2", "old running mean"),
            channel("variance", "running_variance", "T2", "old running variance"),
            channel("gamma", "gamma", "T2", "scale; absent: 1", required=False),
            channel("beta", "beta", "T2", "offset; absent: 0", required=False),
        ),
        outputs=(
            data("dst", "y", "T1", "normalised output"),
            channel("running_mean", "running_mean", "T2"),
            channel("running_variance", "running_variance", "T2"),
            channel("batch_mean", "mean", "T2"),
            channel("batch_variance", "variance", "T2", "biased"),
        ),
        attributes=(EPSILON, MOMENTUM, DATA_FORMAT),
        inputs_together=(("gamma", "beta"),),
        notes=(RUNNING_NOTE, _EMPTY_NOTE),
        hooks=Hooks(canonical=moving),
    )
)

BatchNormInference = configured(
    _schema(
        op="BatchNormInference",
        operation="inference",
        summary="Batch normalisation with given statistics.",
        inputs=(
            data("src", "x", "T1", "input"),
            channel("gamma", "gamma", "T2", "scale"),
            channel("beta", "beta", "T2", "offset"),
            channel("mean", "mean", "T2"),
            channel("variance", "variance", "T2"),
        ),
        outputs=(data("dst", "y", "T1", "normalised output"),),
        attributes=(EPSILON, DATA_FORMAT),
        notes=(_EMPTY_NOTE,),
    )
)

OPERATORS = by_name(BatchNormTrainingBackward, BatchNormForwardTraining, BatchNormInference)
