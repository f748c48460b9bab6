"""What the gradient and the forward operators have in common."""

from __future__ import annotations

import numpy as np

from backnorm.dialects._call import Call
from backnorm.dialects.schema import AttributeSpec, FormatSpec, Phrases, TypeRule
from backnorm.dtypes import FLOAT32

__all__ = [
    "EPSILON",
    "IS_TRAINING",
    "NAME",
    "SOURCE",
    "data_format_attribute",
    "empty_outputs",
    "phrases",
    "versions",
]

SOURCE = "TensorFlow 2.21, tf.raw_ops.{op}"
FORMATS_4 = (FormatSpec("NHWC", "NXC", 4), FormatSpec("NCHW", "NCX", 4))
FORMATS_5 = (FormatSpec("NDHWC", "NXC", 5), FormatSpec("NCDHW", "NCX", 5))
_T = ("half", "bfloat16", "float32")

EPSILON = AttributeSpec(
    "epsilon", "f32", 0.0001, role="epsilon", range="not negative", summary="added to the variance"
)
IS_TRAINING = AttributeSpec(
    "is_training", "bool", True, role="training", summary="False: statistics are constants"
)
NAME = AttributeSpec(
    "name", "string", None, nullable=True, summary="name of the operation; ignored"
)


def phrases(ranks: str) -> Phrases:
    """Return how TensorFlow words its errors."""
    return Phrases(
        rank=f"input must be {ranks}-dimensional",
        gradient_shape="x and y_backprop must have same shape",
        gradient_type="x and y_backprop must have the same element type",
        channel_rank="must be 1-dimensional",
        channel_size="must have the same number of elements as the channels of {x}",
    )


def data_format_attribute(formats: tuple[FormatSpec, ...]) -> AttributeSpec:
    """Return the attribute that chooses among `formats`."""
    return AttributeSpec(
        "data_format",
        "string",
        "NHWC",
        role="data_format",
        choices=tuple(f.name for f in formats),
        summary="the axes of x; as many letters as x has axes",
    )


def versions(version: int) -> tuple[tuple[FormatSpec, ...], tuple[TypeRule, ...], str, str]:
    """Return formats, type rules and the symbols of data and parameters of V1, V2 or V3."""
    formats = FORMATS_4 + (FORMATS_5 if version == 3 else ())
    names = ("float32",) if version == 1 else _T
    rules = tuple(TypeRule(name, ("float32",)) for name in names)
    return formats, rules, "T", "T" if version == 1 else "U"


def empty_outputs(call: Call) -> dict[str, np.ndarray]:
    """Return the reserve outputs that hold nothing, of shape (0,)."""
    return {
        tensor.name: np.empty(0, FLOAT32)
        for tensor in call.schema.outputs
        if tensor.role == "empty"
    }
