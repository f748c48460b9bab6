"""Our operators as Inductor compiles them: kernels for the sums, formulas for the elements.

A compiler cannot fuse anything with an opaque operator: the tensors before and after it go to
memory and back. So Inductor replaces each operator on float32 and 16-bit elements in a CPU's memory
by two parts: an operator that sums and returns the four coefficients of every channel, and the
formula of an element (see `cpu.kernels.formulas`), which Inductor fuses with the activation and the
addition behind it, and may compute again in the backward pass.

Elements are computed in the arithmetic of the call, by default in float32: Inductor's code in
float64 takes twice as long, and in float32 results are nearer to the exact ones than those that it
computes for PyTorch's layers (measured in `docs/explanation/exactness.md`). Our kernels compute
in float64 where the range of float32 does not suffice; Inductor's code does not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backnorm.torch import cpu, operations
from backnorm.torch.registry import register

__all__ = ["lower"]


def _fake_inference_coefficients(
    mean: Tensor, _variance: Any, _weight: Any, _bias: Any, _eps: float, arithmetic: str
) -> Tensor:
    return mean.new_empty((4, mean.shape[0]), dtype=getattr(torch, arithmetic))


_forward_coefficients = register(
    "forward_coefficients",
    cpu.forward_coefficients,
    ("statistics", "statistics", "coefficients"),
    # It accepts x in any layout.
    tags=(torch.Tag.flexible_layout,),
)
_backward_coefficients = register(
    "backward_coefficients", cpu.backward_coefficients, ("parameter", "parameter", "coefficients")
)
# Of constants alone, so that Inductor's freezing computes it once.
_inference_coefficients = register(
    "inference_coefficients", cpu.inference_coefficients, _fake_inference_coefficients
)


def _is_lowered(x: Tensor) -> bool:
    """Whether Inductor computes elements in the place of the kernels."""
    return x.device.type == "cpu" and x.dtype != torch.float64


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    arithmetic: str | None = None,
) -> Any:
    if not _is_lowered(x):
        return NotImplemented
    mean, variance, coefficients = _forward_coefficients(
        x, weight, bias, eps, arithmetic or "float32"
    )
    return _normalised(x, coefficients), mean, variance


def _inference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    arithmetic: str | None = None,
) -> Any:
    if not _is_lowered(x):
        return NotImplemented
    coefficients = _inference_coefficients(
        mean, variance, weight, bias, eps, arithmetic or "float32"
    )
    return _normalised(x, coefficients)


def _backward(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
    arithmetic: str | None = None,
) -> Any:
    if not _is_lowered(x):
        return NotImplemented
    dweight, dbias, coefficients = _backward_coefficients(
        x, dy, mean, variance, weight, eps, training, arithmetic or "float32"
    )
    center, shift, slope, gain = _of_channels(coefficients, x)
    dx = dy.to(gain.dtype)
    if training:
        dx = (dx - shift) - (x.to(gain.dtype) - center) * slope
    dx = (gain * dx).to(x.dtype)
    return dx, dweight, dbias


def _normalised(x: Tensor, coefficients: Tensor) -> Tensor:
    center, shift, slope, gain = _of_channels(coefficients, x)
    y = x - center
    if gain.dtype == torch.float64:
        y = y - shift
    return (y * gain + slope).to(x.dtype)


def _of_channels(coefficients: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Return the four coefficients in a shape that x's broadcasts with."""
    shape = (-1, *[1] * (x.ndim - 2))
    return tuple(each.view(shape) for each in coefficients.unbind(0))


_FORMULAS: dict[Any, Callable[..., Any]] = {
    operations.batch_norm: _forward,
    operations.batch_norm_inference: _inference,
    operations.batch_norm_backward: _backward,
}


def _cache_tag() -> str:
    """Return a digest of these formulas and schemas."""
    schemas = "".join(str(operator._schema) for operator in _FORMULAS)
    return f"backnorm-{zlib.crc32(schemas.encode() + Path(__file__).read_bytes()):08x}"


def _with_dy_as_x(_node: Any, x: Any, dy: Any, *others: Any) -> tuple[Any, Any]:
    """Let Inductor lay dy out as it does x, so that the kernel does not copy dy.

    In a model of contiguous tensors Inductor moves convolutions to channels_last, and x with them,
    but not the tensors that it computes itself: copying dy took up to four times as long as its
    sums.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    x.realize()
    order = ir.get_stride_order(x.get_stride(), V.graph.sizevars.shape_env)
    return (x, ir.ExternKernel.require_stride_order(dy, order), *others), {}


def lower() -> None:
    """Give Inductor our formulas; Dynamo calls it while it traces a graph with our operators."""
    from torch._inductor import decomposition

    # Dynamo does not call a cached function.
    if operations.batch_norm in decomposition.decompositions:
        return
    from torch._inductor.lowering import constrain_to_fx_strides, make_fallback

    make_fallback(_backward_coefficients, layout_constraint=_with_dy_as_x, warn=False)
    for operator, formula in _FORMULAS.items():
        # What Inductor calls for other elements.
        make_fallback(operator, layout_constraint=constrain_to_fx_strides, warn=False)
        decomposition.register_decomposition([operator])(formula)
    # A copy of the table, made when the first graph is compiled.
    decomposition.fast_random_decomps.cache_clear()
    # PyTorch's caches on disk know a graph by the names of its operators, and would return code
    # with the formulas of another version.
    torch.compiler.config.cache_key_tag += _cache_tag()


lower._dynamo_marked_constant = True  # type: ignore[attr-defined]
