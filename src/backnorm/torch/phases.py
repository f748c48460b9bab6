"""The phases of training in several processes, as operators: reduce -> exchange -> apply.

What one phase tells the next is a tensor of 2C + 1 float64 numbers, on x's device: two of every
channel, and the number of elements of a channel. `torch.compile` sees these operators, and the
collectives between them (`exchange`).

Of reproducible sums a message is integers, as `binned` has them, and their number of elements; when
those of all processes are added up, `rounded_moments` and `rounded_sums` make it the other one.

They have no derivatives of their own: `synchronised` has that of the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.library import infer_schema, register_autograd

from backnorm.activations import Activation
from backnorm.binned import moments_of, sums_of
from backnorm.cpu.scratch import bin_rows
from backnorm.errors import BacknormError
from backnorm.layout import mask_size
from backnorm.torch import kernels, state
from backnorm.torch.arithmetics import own
from backnorm.torch.checks import TensorTypeError, TensorValueError, check_device
from backnorm.torch.memory import check_memory, contiguous
from backnorm.torch.operations import (
    define,
    in_our_words,
    like_statistics,
)

__all__ = [
    "SecondOrderError",
    "apply_moments",
    "apply_sums",
    "binned_moments",
    "binned_sums",
    "moments",
    "refuse_second_order",
    "rounded_moments",
    "rounded_sums",
    "strides_of_mask",
    "sums",
]


class SecondOrderError(BacknormError, NotImplementedError):
    """The second derivative of normalisation in phases was asked for.

    That is over several processes, or with reproducible sums.
    """


def _operator(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as an operator of its own name; `fake` returns tensors like its own.

    A call on plain tensors is a call of the function itself, which takes less time. A tensor that
    is watched, be it x or another one (dy of batched gradients), makes it a call of the operator.
    Autograd, where gradients are asked for, finds that the operator has none.
    """

    def register(kernel: Callable[..., Any]) -> Any:
        name, plain = f"phase_{kernel.__name__}", in_our_words(kernel)
        operator = define(name + infer_schema(kernel, mutates_args=()), kernel, fake)
        register_autograd(operator, refuse_second_order)

        @functools.wraps(kernel)
        def call(x: Tensor, *others: Any) -> Any:
            tensors = (each for each in (x, *others) if isinstance(each, Tensor))
            if torch.is_grad_enabled() or any(map(state.watched, tensors)):
                return operator(x, *others)
            return plain(x, *others)

        return call

    return register


def _checked(name: str, message: Tensor, x: Tensor) -> Tensor:
    """Return what a phase was told by another as kernels read it, or raise."""
    check_device(name, message, "x", x)
    check_memory(message, name)
    if message.dtype is not torch.float64:
        raise TensorTypeError(
            name, "must be what the phase before returned", came=message.dtype,
            accepted=str(torch.float64),
        )  # fmt: skip
    # What else x may lack is said where it is read.
    if x.dim() > 1 and message.shape != (2 * x.shape[1] + 1,):
        raise TensorValueError(
            name,
            "must have two numbers of every channel of {x}, and the number of elements",
            came=f"shape {tuple(message.shape)}",
            accepted=f"shape ({2 * x.shape[1] + 1},)",
        )
    return contiguous(message)


def strides_of_mask(x: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor that lies in memory as the bits of x's mask do."""
    return torch.empty_like(x, device="meta").stride()


def _in_order(x: Tensor, strides: list[int] | None) -> Tensor:
    """Return x in the order of memory that the bits of a mask have; None: whatever its order."""
    if strides is None or x.stride() == tuple(strides) or strides_of_mask(x) == tuple(strides):
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)


def _whole_mask(mask: Tensor | None, x: Tensor) -> Tensor:
    """Return the mask of a forward pass as operators give it: empty without one.

    What is behind the bits may be anything. Who compares results wants them to be equal.
    """
    if mask is None:
        return x.new_empty(0, dtype=torch.uint8)
    mask[-mask_size(0) :].zero_()
    return mask


def _message(bins: Tensor, count: int) -> Tensor:
    return torch.cat((bins.flatten(), bins.new_full((1,), count)))


def _bins_of(message: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return bins and the number of elements from the message they came in."""
    return message[:-1].view(rows, (message.shape[0] - 1) // rows), message[-1:]


def _rounding(function: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Register a function of a message as an operator, as `_operator` does those of x."""

    def fake(message: Tensor, rows: int) -> Tensor:
        channels = (message.shape[0] - 1) // rows
        return message.new_empty(2 * channels + 1, dtype=torch.float64)

    schema = function.__name__ + infer_schema(function, mutates_args=())
    operator = define(schema, function, fake, reference="message")

    @functools.wraps(function)
    def call(x: Tensor, bins: Tensor) -> Tensor:
        run: Callable[[Tensor, int], Tensor] = operator if state.watched(bins) else function
        return run(bins, bin_rows(x.element_size()))

    return call


def refuse_second_order(*_: Any) -> NoReturn:
    """Raise that there is no second derivative."""
    raise SecondOrderError(
        "batch normalisation over several processes, or with reproducible sums, is differentiable "
        "once, not twice; backnorm.torch.revert(model) gives a model its layers of one process back"
    )


def _fake_message(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(2 * x.shape[1] + 1, dtype=torch.float64)


def _fake_bins(x: Tensor, *_: Any) -> Tensor:
    rows = bin_rows(x.element_size())
    return x.new_empty(rows * x.shape[1] + 1, dtype=torch.int64)


def _fake_normalised(
    x: Tensor, _residual: Any, _weight: Any, _bias: Any, _moments: Any, _eps: float, relu: bool,
    *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    mask = x.new_empty(mask_size(x.numel()) if relu else 0, dtype=torch.uint8)
    return torch.empty_like(x), like_statistics(x), like_statistics(x), mask


def _fake_gradients(
    x: Tensor, _dy: Any, _mask: Any, _mean: Any, _variance: Any, _weight: Any, _sums: Any,
    _eps: float, has_residual: bool, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return torch.empty_like(x), torch.empty_like(x) if has_residual else x.new_empty(0)


@_operator(_fake_message)
def moments(x: Tensor, arithmetic: str | None = None) -> Tensor:
    """Return means and biased variances of x, and the number of elements of a channel."""
    engine = kernels.engine_of(x)
    return engine.message(*engine.reduce_forward(x, "NCX", own(x.dtype, arithmetic), False))


@_operator(_fake_bins)
def binned_moments(x: Tensor, arithmetic: str | None = None) -> Tensor:
    """Return the reproducible sums of x and of x^2, and the number of elements of a channel."""
    bins, count = kernels.engine_of(x).reduce_forward_bins(x, own(x.dtype, arithmetic))
    return _message(bins, count)


@_rounding
def rounded_moments(message: Tensor, rows: int) -> Tensor:
    """Return what `moments` does from what `binned_moments` does, added up over all processes."""
    bins, count = _bins_of(message, rows)
    # A tensor on a GPU is not waited for.
    return torch.cat((*moments_of(bins, count.double(), torch), count.double()))


@_operator(_fake_bins)
def binned_sums(
    x: Tensor,
    dy: Tensor,
    mask: Tensor | None,
    mean: Tensor,
    arithmetic: str | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """Return the reproducible sums of dy and dy * (x - mean), and the elements of a channel."""
    x = _in_order(x, strides)
    computed_in = own(x.dtype, arithmetic)
    bins, count = kernels.engine_of(x).reduce_bins(x, dy, mask, mean, computed_in)
    return _message(bins, count)


@_rounding
def rounded_sums(message: Tensor, rows: int) -> Tensor:
    """Return what `sums` does from what `binned_sums` does, added up over all processes."""
    bins, count = _bins_of(message, rows)
    return torch.cat((*sums_of(bins, torch), count.double()))


@_operator(_fake_normalised)
def apply_moments(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    moments: Tensor,
    eps: float,
    relu: bool,
    arithmetic: str | None = None,
    ceiling: float | None = None,
    strides: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, mean and variance, each rounded once, and the mask, empty without a ReLU.

    `strides`, here and below, are those of `strides_of_mask`. A compiler and hooks of saved tensors
    may lay x out anew between two phases, and then the bits of the mask belong to other elements.
    """
    x = _in_order(x, strides)
    follows = Activation("relu", ceiling) if relu else None
    engine, how = kernels.engine_of(x), (eps, "NCX", follows, own(x.dtype, arithmetic), False)
    whole = engine.parts(_checked("moments", moments, x))[:2]
    operands = x, residual, weight, bias
    y, mean, variance, mask = engine.apply_forward(*operands, *how, sums=whole)
    return y, mean, variance, _whole_mask(mask, x)


@_operator(_fake_message)
def sums(
    x: Tensor,
    dy: Tensor,
    mask: Tensor | None,
    mean: Tensor,
    arithmetic: str | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """Return sums of dy and of dy * (x - mean), and the number of elements of a channel."""
    x = _in_order(x, strides)
    engine = kernels.engine_of(x)
    how = "NCX", own(x.dtype, arithmetic), False
    return engine.message(*engine.reduce(x, dy, mask, mean, *how))


@_operator(_fake_gradients)
def apply_sums(
    x: Tensor,
    dy: Tensor,
    mask: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    eps: float,
    has_residual: bool,
    arithmetic: str | None = None,
    strides: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dx and the gradient of the residual, the latter empty if there is none."""
    x = _in_order(x, strides)
    engine, operands = kernels.engine_of(x), (x, dy, mask, mean, variance, weight)
    how = eps, "NCX", True, has_residual, own(x.dtype, arithmetic)
    *whole, count = engine.parts(_checked("sums", sums, x))
    dx, dresidual = engine.apply(*operands, *how, sums=whole, count=count)
    return dx, x.new_empty(0) if dresidual is None else dresidual
