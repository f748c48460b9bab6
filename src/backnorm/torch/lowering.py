"""Decompose backnorm's operators for Inductor: kernels for the sums, formulas for the elements.

A compiler cannot fuse anything with an opaque operator, so the operator's inputs and outputs are
written to memory and read again. Therefore each operator on float32 and 16-bit elements in a CPU's
memory is decomposed into two parts. The first part is an operator that computes the sums and
returns four coefficients per channel. (In inference, there are no sums, and the operator only
returns the coefficients.) The second part is the formula of an element (see
`backnorm_kernels.kernels.formulas`). Inductor fuses this formula with the addition and the
activation that follow, and may compute it again in the backward pass.

Elements are computed in the arithmetic of the call. In calls that Inductor compiles, the default
arithmetic is float32, because Inductor's code in float64 takes twice as long as in float32. These
float32 results are nearer to the exact results than Inductor's results for PyTorch's layers
(measured in `docs/measurements/errors.md`). Where the range of float32 is not enough, backnorm's
kernels compute a result again in float64; Inductor's code does not do this.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backnorm.arithmetics import check_arithmetic
from backnorm.options import Options
from backnorm.signature import Operation
from backnorm.torch import engines, library
from backnorm.torch.memory import inverse_deviation
from backnorm.torch.registry import LOWERED, register

# The operators that return coefficients have the arguments of the operators that they replace. The
# arithmetic, whose default is float32 here, is the type of the coefficients.


def _forward_sums(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    arithmetic: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and the biased variance of x, and the coefficients that give y."""
    return _compute("forward_coefficients", (x, weight, bias), eps, True, arithmetic)


def _backward_sums(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
    arithmetic: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of weight and bias, and the coefficients that give dx."""
    operands = x, dy, mean, variance, weight
    return _compute("backward_coefficients", operands, eps, training, arithmetic)


def _compute(
    operation: Operation, operands: Any, eps: float, training: bool, arithmetic: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(eps, training=training, arithmetic=check_arithmetic(arithmetic or LOWERED))
    first, second, coefficients = engines.run(operation, operands, options)
    return first, second, coefficients


def _constants(
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    arithmetic: str | None = None,
) -> Tensor:
    """Return the coefficients from which inference computes y."""
    gain = inverse_deviation(variance, eps)
    gain = gain if weight is None else weight.double() * gain
    slope = torch.zeros_like(gain) if bias is None else bias.double()
    dtype = getattr(torch, arithmetic or LOWERED)
    # The mean is rounded to `dtype`. The slope is corrected for this rounding error.
    slope = slope + gain * (mean.to(dtype).double() - mean)
    return torch.stack((mean.double(), torch.zeros_like(gain), slope, gain)).to(dtype)


def _fake_constants(
    mean: Tensor, _variance: Any, _weight: Any, _bias: Any, _eps: float, arithmetic: Any = None
) -> Tensor:
    return mean.new_empty((4, mean.shape[0]), dtype=getattr(torch, arithmetic or LOWERED))


_forward_coefficients = register(
    "forward_coefficients",
    _forward_sums,
    ("statistics", "statistics", "coefficients"),
    # This tag says that the operator accepts x in any layout, so Inductor does not copy x to
    # another layout.
    tags=(torch.Tag.flexible_layout,),
)
_backward_coefficients = register(
    "backward_coefficients", _backward_sums, ("parameter", "parameter", "coefficients")
)
# A separate operator computes the coefficients of inference. If Inductor freezes a model, the
# model's parameters and statistics become constants. So the operands of this operator are
# constants, and Inductor computes the coefficients only once.
_inference_coefficients = register("inference_coefficients", _constants, _fake_constants)


def _is_lowered(x: Tensor) -> bool:
    """Whether Inductor's code, rather than a kernel, computes the elements."""
    return x.device.type == "cpu" and x.dtype != torch.float64


# The formulas take the arguments of the operators that they replace.


def _forward(x: Tensor, *others: Any) -> Any:
    if not _is_lowered(x):
        return NotImplemented
    mean, variance, coefficients = _forward_coefficients(x, *others)
    return _normalised(x, coefficients), mean, variance


def _inference(x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, *settings: Any) -> Any:
    if not _is_lowered(x):
        return NotImplemented
    return _normalised(x, _inference_coefficients(mean, variance, weight, bias, *settings))


def _backward(x: Tensor, dy: Tensor, *others: Any) -> Any:
    if not _is_lowered(x):
        return NotImplemented
    dweight, dbias, coefficients = _backward_coefficients(x, dy, *others)
    center, shift, slope, gain = _of_channels(coefficients, x)
    dx = dy.to(gain.dtype)
    _, _, _, _, training, *_ = others
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
    """Return the four coefficients in a shape that broadcasts with x."""
    shape = (-1, *[1] * (x.ndim - 2))
    return tuple(each.view(shape) for each in coefficients.unbind(0))


_FORMULAS: dict[Any, Callable[..., Any]] = {
    library.batch_norm: _forward,
    library.batch_norm_inference: _inference,
    library.batch_norm_backward: _backward,
}


def _cache_tag() -> str:
    """Return a digest of the formulas in this module and of the operators' schemas."""
    schemas = "".join(str(operator._schema) for operator in _FORMULAS)
    return f"backnorm-{zlib.crc32(schemas.encode() + Path(__file__).read_bytes()):08x}"


def _with_dy_as_x(_node: Any, x: Any, dy: Any, *others: Any) -> tuple[Any, Any]:
    """Make Inductor use the layout of x for dy, so that the kernel does not copy dy.

    In a model of contiguous tensors, Inductor changes convolutions and their results (x) to
    channels_last, but not the tensors that it computes itself (dy). Copying dy took up to four
    times as long as computing the sums of the backward pass.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    x.realize()
    order = ir.get_stride_order(x.get_stride(), V.graph.sizevars.shape_env)
    return (x, ir.ExternKernel.require_stride_order(dy, order), *others), {}


def lower() -> None:
    """Register the decompositions; Dynamo calls this while it traces a graph with the operators."""
    from torch._inductor import decomposition

    # This check replaces `functools.cache`, because Dynamo would not call a cached function.
    if library.batch_norm in decomposition.decompositions:
        return
    from torch._inductor.lowering import constrain_to_fx_strides, make_fallback

    make_fallback(_backward_coefficients, layout_constraint=_with_dy_as_x, warn=False)
    for operator, formula in _FORMULAS.items():
        # `formula` returns NotImplemented if a kernel is to compute the elements (`_is_lowered` is
        # false for x). Inductor then keeps the operator, and its code calls the operator.
        make_fallback(operator, layout_constraint=constrain_to_fx_strides, warn=False)
        decomposition.register_decomposition([operator])(formula)
    # PyTorch's function `fast_random_decomps` returns a copy of the table of decompositions, which
    # it caches when PyTorch compiles the first graph. A copy that was made before these lines lacks
    # the new entries, so the cache is cleared.
    decomposition.fast_random_decomps.cache_clear()
    # PyTorch's caches on disk identify a graph by the names of its operators. The names do not
    # change if a new version of backnorm changes the formulas. So a digest of the formulas is added
    # to the caches' key; without it, a cache could return code with the formulas of another
    # version.
    torch.compiler.config.cache_key_tag += _cache_tag()


lower._dynamo_marked_constant = True  # type: ignore[attr-defined]
