"""The phases of training in several processes, as operators: reduce -> exchange -> apply.

The message of one phase to the next is a tensor of 2C + 1 float64 numbers, on x's device: two of
every channel, and the number of elements of a channel. `torch.compile` sees these operators, and
the collectives between them (`exchange`).

The message of reproducible sums is integers (see `binned`), and their number of elements. When
those of all processes are added up, `rounded_moments` and `rounded_sums` return the usual message.

The operators have no derivatives of their own: `synchronised` has that of the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from backnorm.binned import moments_of, sums_of
from backnorm.cpu.scratch import bin_rows
from backnorm.errors import BacknormError
from backnorm.torch import kernels
from backnorm.torch.checks import TensorTypeError, TensorValueError, check_device
from backnorm.torch.dispatch import needs_dispatcher
from backnorm.torch.operations import like_statistics
from backnorm.torch.options import arithmetic_of
from backnorm.torch.registry import Operation, register, with_checks
from backnorm.torch.tensors import check_memory, contiguous

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
    "sums",
]


class SecondOrderError(BacknormError, NotImplementedError):
    """A gradient over several processes, or with reproducible sums, was differentiated."""


def refuse_second_order(*_: Any) -> NoReturn:
    """Raise that there is no second derivative."""
    raise SecondOrderError(
        "batch normalisation over several processes, or with reproducible sums, is differentiable "
        "once, not twice; backnorm.torch.revert(model) gives a model its layers of one process back"
    )


def _phase(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the operator ``phase_<name>``; `fake` returns tensors like its own.

    A call on plain tensors without gradients is a call of the function itself, which takes less
    time. The operator has no derivative, and raises if autograd asks for one.
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        name = f"phase_{kernel.__name__}"
        operator = register(Operation(name, kernel, fake, backward=refuse_second_order))
        plain = with_checks(kernel)

        @functools.wraps(kernel)
        def call(x: Tensor, *others: Any) -> Any:
            tensors = (value for value in (x, *others) if isinstance(value, Tensor))
            if torch.is_grad_enabled() or any(map(needs_dispatcher, tensors)):
                return operator(x, *others)
            return plain(x, *others)

        return call

    return decorate


def _rounding(function: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Register a function of a message as an operator, as `_phase` does with functions of x."""

    def fake(message: Tensor, rows: int) -> Tensor:
        channels = (message.shape[0] - 1) // rows
        return message.new_empty(2 * channels + 1, dtype=torch.float64)

    operator = register(Operation(function.__name__, function, fake, reference="message"))

    @functools.wraps(function)
    def call(x: Tensor, bins: Tensor) -> Tensor:
        run: Callable[[Tensor, int], Tensor] = operator if needs_dispatcher(bins) else function
        return run(bins, bin_rows(x.element_size()))

    return call


def _check_message(name: str, message: Tensor, x: Tensor) -> Tensor:
    """Return the message of another phase as kernels read it, or raise."""
    check_device(name, message, "x", x)
    check_memory(message, name)
    if message.dtype is not torch.float64:
        raise TensorTypeError(
            name, "must be the result of the phase before", came=message.dtype,
            accepted=str(torch.float64),
        )  # fmt: skip
    # The kernel checks the rest of x.
    if x.dim() > 1 and message.shape != (2 * x.shape[1] + 1,):
        raise TensorValueError(
            name,
            "must have two numbers of every channel of {x}, and the number of elements",
            came=f"shape {tuple(message.shape)}",
            accepted=f"shape ({2 * x.shape[1] + 1},)",
        )
    return contiguous(message)


def _bins_message(bins: Tensor, count: int) -> Tensor:
    return torch.cat((bins.flatten(), bins.new_full((1,), count)))


def _bins_of(message: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return bins and the number of elements from their message."""
    return message[:-1].view(rows, (message.shape[0] - 1) // rows), message[-1:]


def _fake_message(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(2 * x.shape[1] + 1, dtype=torch.float64)


def _fake_bins(x: Tensor, *_: Any) -> Tensor:
    rows = bin_rows(x.element_size())
    return x.new_empty(rows * x.shape[1] + 1, dtype=torch.int64)


def _fake_normalised(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x), like_statistics(x), like_statistics(x)


def _fake_gradient(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@_phase(_fake_message)
def moments(x: Tensor, arithmetic: str | None = None) -> Tensor:
    """Return means and biased variances of x, and the number of elements of a channel."""
    engine, computed_in = kernels.engine_of(x), arithmetic_of(x.dtype, arithmetic)
    return engine.message(*engine.reduce_forward(x, "NCX", computed_in, False))


@_phase(_fake_bins)
def binned_moments(x: Tensor, arithmetic: str | None = None) -> Tensor:
    """Return the reproducible sums of x and of x^2, and the number of elements of a channel."""
    engine, computed_in = kernels.engine_of(x), arithmetic_of(x.dtype, arithmetic)
    return _bins_message(*engine.reduce_forward(x, "NCX", computed_in, True))


@_rounding
def rounded_moments(message: Tensor, rows: int) -> Tensor:
    """Return the message of `moments` from that of `binned_moments` of all processes."""
    bins, count = _bins_of(message, rows)
    # This does not wait for a tensor on a GPU.
    return torch.cat((*moments_of(bins, count.double(), torch), count.double()))


@_phase(_fake_normalised)
def apply_moments(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    moments: Tensor,
    eps: float,
    arithmetic: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, mean and variance, each rounded once."""
    engine, computed_in = kernels.engine_of(x), arithmetic_of(x.dtype, arithmetic)
    mean, variance, _ = engine.parts(_check_message("moments", moments, x))
    results: tuple[Tensor, ...] = engine.apply_forward(
        x, None, weight, bias, eps, "NCX", None, computed_in, False, sums=(mean, variance)
    )
    return results[0], results[1], results[2]


@_phase(_fake_message)
def sums(x: Tensor, dy: Tensor, mean: Tensor, arithmetic: str | None = None) -> Tensor:
    """Return sums of dy and of dy * (x - mean), and the number of elements of a channel."""
    engine, computed_in = kernels.engine_of(x), arithmetic_of(x.dtype, arithmetic)
    return engine.message(*engine.reduce(x, dy, None, mean, "NCX", computed_in, False))


@_phase(_fake_bins)
def binned_sums(x: Tensor, dy: Tensor, mean: Tensor, arithmetic: str | None = None) -> Tensor:
    """Return the reproducible sums of dy and dy * (x - mean), and the elements of a channel."""
    engine, computed_in = kernels.engine_of(x), arithmetic_of(x.dtype, arithmetic)
    return _bins_message(*engine.reduce(x, dy, None, mean, "NCX", computed_in, True))


@_rounding
def rounded_sums(message: Tensor, rows: int) -> Tensor:
    """Return the message of `sums` from that of `binned_sums` of all processes."""
    bins, count = _bins_of(message, rows)
    return torch.cat((*sums_of(bins, torch), count.double()))


@_phase(_fake_gradient)
def apply_sums(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    eps: float,
    arithmetic: str | None = None,
) -> Tensor:
    """Return dx."""
    engine, computed_in = kernels.engine_of(x), arithmetic_of(x.dtype, arithmetic)
    sum_dy, sum_dy_xmu, count = engine.parts(_check_message("sums", sums, x))
    dx: Tensor = engine.apply(
        x, dy, None, mean, variance, weight, eps, "NCX", True, False, computed_in,
        sums=(sum_dy, sum_dy_xmu), count=count,
    )[0]  # fmt: skip
    return dx
