"""Our operators as Inductor compiles them: sums of ours, and formulas that it joins with others.

An operator that a compiler cannot look into is a wall: what stands before and after it goes to
memory and back. So Inductor gets, in the place of each operator on float32 and 16-bit elements in a
CPU's memory, one that sums, and returns the four coefficients of every channel; and the formula of
an element (see `cpu.kernels.formulas`), which it computes where it computes a ReLU or an addition.
A ReLU and a residual are its own operators then, and its partitioner may compute y again.

Elements are computed in the arithmetic that was asked for, and else in float32: Inductor's code in
float64 takes twice as long, and in float32 results are nearer to the exact ones than those that it
computes for PyTorch's layers, wherever it was measured (`docs/explanation/exactness.md`). It is the
formula alone: where the range of float32 does not suffice our kernels take float64, and Inductor's
do not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backnorm.torch import cpu
from backnorm.torch.arithmetics import own
from backnorm.torch.operations import (
    BatchNorm,
    BatchNormBackward,
    BatchNormInference,
    define,
    like_parameter,
    like_statistics,
)
from backnorm.torch.rectifiers import rectified, settled

__all__ = ["register"]


def _coefficients(x: Tensor, arithmetic: str | None) -> Tensor:
    return x.new_empty((4, x.shape[1]), dtype=getattr(torch, own(x.dtype, arithmetic)))


def _fake_forward(
    x: Tensor, _weight: Any, _bias: Any, _eps: float, arithmetic: str | None = None
) -> Any:
    return like_statistics(x), like_statistics(x), _coefficients(x, arithmetic)


def _fake_backward(
    x: Tensor, _dy: Any, _mean: Any, _variance: Any, weight: Tensor | None,
    _eps: float, _training: bool, arithmetic: str | None = None,
) -> Any:  # fmt: skip
    dweight, dbias = like_parameter(x, weight), like_parameter(x, weight)
    return dweight, dbias, _coefficients(x, arithmetic)


def _fake_inference(
    mean: Tensor, _variance: Any, _weight: Any, _bias: Any, _eps: float, arithmetic: str
) -> Tensor:
    return mean.new_empty((4, mean.shape[0]), dtype=getattr(torch, arithmetic))


define(
    "forward_coefficients(Tensor x, Tensor? weight, Tensor? bias, float eps, str? arithmetic=None)"
    " -> (Tensor mean, Tensor variance, Tensor coefficients)",
    cpu.forward_coefficients,
    _fake_forward,
    # It takes x as it lies.
    torch.Tag.flexible_layout,
)
define(
    "backward_coefficients(Tensor x, Tensor dy, Tensor mean, Tensor variance, Tensor? weight,"
    " float eps, bool training, str? arithmetic=None)"
    " -> (Tensor dweight, Tensor dbias, Tensor coefficients)",
    cpu.backward_coefficients,
    _fake_backward,
)
# Inductor's freezing computes the operator once: it takes nothing but constants then.
define(
    "inference_coefficients(Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, float eps,"
    " str arithmetic) -> Tensor",
    cpu.inference_coefficients,
    _fake_inference,
    reference="mean",
)


def _whole(operation: type[Any]) -> Any:
    """Define an operator that is never anything else: what an operation does, in one call.

    Inductor refuses to call an operator that it has another form of.
    """
    name, _, signature = str(operation.operator._schema).removeprefix("backnorm::").partition("(")
    return define(f"{name}_whole({signature}", operation.kernel, operation.fake)


_forward_whole, _inference_whole = _whole(BatchNorm), _whole(BatchNormInference)
_backward_whole = _whole(BatchNormBackward)


def _is_lowered(x: Tensor) -> bool:
    """Whether Inductor computes elements in the place of the kernels."""
    return x.device.type == "cpu" and x.dtype != torch.float64


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    relu: bool,
    arithmetic: str | None = None,
    ceiling: float | None = None,
) -> Any:
    if not _is_lowered(x):
        return _forward_whole(x, residual, weight, bias, eps, relu, arithmetic, ceiling)
    computed_in = arithmetic or "float32"
    mean, variance, coefficients = torch.ops.backnorm.forward_coefficients(
        x, weight, bias, eps, computed_in
    )
    y = _normalised(x, coefficients, residual, relu, settled(ceiling, x.dtype))
    return y, mean, variance


def _inference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    relu: bool,
    arithmetic: str | None = None,
    ceiling: float | None = None,
) -> Any:
    if not _is_lowered(x):
        operands = x, residual, weight, bias, mean, variance
        return _inference_whole(*operands, eps, relu, arithmetic, ceiling)
    coefficients = torch.ops.backnorm.inference_coefficients(
        mean, variance, weight, bias, eps, arithmetic or "float32"
    )
    return _normalised(x, coefficients, residual, relu, settled(ceiling, x.dtype))


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
        return _backward_whole(x, dy, mean, variance, weight, eps, training, arithmetic)
    dweight, dbias, coefficients = torch.ops.backnorm.backward_coefficients(
        x, dy, mean, variance, weight, eps, training, arithmetic or "float32"
    )
    center, shift, slope, gain = _of_channels(coefficients, x)
    dx = dy.to(gain.dtype)
    if training:
        dx = (dx - shift) - (x.to(gain.dtype) - center) * slope
    dx = (gain * dx).to(x.dtype)
    return dx, dweight, dbias


def _normalised(
    x: Tensor, coefficients: Tensor, residual: Tensor | None, relu: bool, ceiling: float | None
) -> Tensor:
    center, shift, slope, gain = _of_channels(coefficients, x)
    y = x - center
    if gain.dtype == torch.float64:
        y = y - shift
    y = y * gain + slope
    if residual is not None:
        y = y + residual.to(gain.dtype)
    y = y.to(x.dtype)
    return rectified(y, ceiling) if relu else y


def _of_channels(coefficients: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Return the four coefficients in a shape that x's broadcasts with."""
    shape = (-1, *[1] * (x.ndim - 2))
    return tuple(each.view(shape) for each in coefficients.unbind(0))


_LOWERED: dict[Any, Callable[..., Any]] = {
    BatchNorm.operator: _forward,
    BatchNormInference.operator: _inference,
    BatchNormBackward.operator: _backward,
}


def _cache_tag() -> str:
    """Return what tells compiled code of these formulas and schemas from that of other versions."""
    schemas = "".join(str(operator._schema) for operator in _LOWERED)
    return f"backnorm-{zlib.crc32(schemas.encode() + Path(__file__).read_bytes()):08x}"


def _with_dy_as_x(_node: Any, x: Any, dy: Any, *others: Any) -> tuple[Any, Any]:
    """Have Inductor lay dy out as it does x, so that nobody copies it.

    In a model of contiguous tensors it moves convolutions to channels_last, and x with them, but
    not what it computes itself: a copy of dy took up to four times as long as its sums.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    x.realize()
    order = ir.get_stride_order(x.get_stride(), V.graph.sizevars.shape_env)
    return (x, ir.ExternKernel.require_stride_order(dy, order), *others), {}


def register() -> None:
    """Tell Inductor, when a graph with one of our operators is traced."""
    from torch._inductor import decomposition

    # Dynamo, which calls it while it traces, does not take a cached function.
    if BatchNorm.operator in decomposition.decompositions:
        return
    from torch._inductor.lowering import make_fallback

    sums = torch.ops.backnorm.backward_coefficients.default
    make_fallback(sums, layout_constraint=_with_dy_as_x, warn=False)
    for operator, formula in _LOWERED.items():
        decomposition.register_decomposition([operator])(formula)
    # A copy of the table, made when the first graph is compiled.
    decomposition.fast_random_decomps.cache_clear()
    # PyTorch's caches on disk know a graph by the names of its operators, and returned code of
    # another version's formulas.
    torch.compiler.config.cache_key_tag += _cache_tag()


# Dynamo calls it when it comes across it.
register._dynamo_marked_constant = True  # type: ignore[attr-defined]
