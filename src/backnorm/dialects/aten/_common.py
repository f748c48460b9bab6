"""What the operators of ATen have in common."""

from __future__ import annotations

from backnorm.dialects.schema import FormatSpec, Phrases, TensorSpec, TypeRule

__all__ = ["FORMATS", "GRAD_OUT", "INPUT", "PHRASES", "SOURCE", "TYPE_RULES", "WEIGHT"]

SOURCE = "PyTorch 2.13, native_functions.yaml, {op}"
FORMATS = (FormatSpec("NC...", "NCX"),)
TYPE_RULES = (
    TypeRule("f64", ("f64",)),
    TypeRule("f32", ("f32",)),
    TypeRule("f16", ("f16", "f32")),
    TypeRule("bf16", ("bf16", "f32")),
)
PHRASES = Phrases(
    gradient_shape="must have the shape of input",
    gradient_type="must have the element type of input",
    channel_size="must hold one value per channel of input ({channels})",
)
GRAD_OUT = TensorSpec("grad_out", "dy", "T", "data", summary="gradient of the output")
INPUT = TensorSpec("input", "x", "T", "data", summary="input of the forward, (N, C, ...)")
WEIGHT = TensorSpec("weight", "gamma", "U", "channel", required=False, summary="scale; None: 1")
