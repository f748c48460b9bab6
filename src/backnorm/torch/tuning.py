"""Tune the plans of a GPU: time the candidates on the device, and use the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backnorm.activations import Activation
from backnorm.arithmetics import Arithmetic
from backnorm.errors import ArgumentValueError
from backnorm.gpu.plan import Knobs, candidates
from backnorm.torch import cpu, kernels
from backnorm.torch.checks import check_tensor
from backnorm.torch.options import eager_options


class Trial(NamedTuple):
    """The measured time of a candidate plan.

    Attributes
    ----------
    operation : {"forward", "backward"}
    knobs : Knobs
    milliseconds : float
        The time of a call by the device's clock; the L2 cache is emptied before the call.
    """

    operation: str
    knobs: Knobs
    milliseconds: float


def tune(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: str | Activation | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    arithmetic: Arithmetic | None = None,
) -> list[Trial]:
    """Find the fastest plan of a training step on tensors like the arguments; use it from now on.

    The plan is used in this process, on GPUs of the same model, for calls with the same shapes,
    types and layout of tensors and with the same activation, eps and arithmetic. Every plan is
    correct, but plans sum in different orders, so tuning can change the last bits of results. As
    long as the plan is the same, every run gives the same bits.

    Parameters
    ----------
    input : Tensor, shape (N, C, ...)
        On a CUDA device. Its values do not matter; it is not written to.
    weight, bias : Tensor, shape (C,), optional
        The layer's, if it has them.
    activation, residual, eps, arithmetic
        As in `batch_norm`.

    Returns
    -------
    list of Trial
        The trials of each operation, the fastest first.

    Raises
    ------
    ArgumentTypeError
        If input is not a tensor.
    ArgumentValueError
        If input is not on a CUDA device, or its element type does not support the arithmetic.
    """
    gpu = kernels.engine_of(check_tensor("input", input))
    if gpu is cpu:
        raise ArgumentValueError(
            "input",
            "must be on a CUDA device: plans of a CPU are not tuned",
            came=f"device {input.device}",
            accepted="cuda",
        )
    options = eager_options(True, eps, activation, arithmetic, input.dtype)
    has_residual = residual is not None
    with torch.no_grad(), gpu.on(input):
        forward = partial(kernels.forward, input, residual, weight, bias, None, options)
        _, mean, variance, mask = forward()
        dy = torch.empty_like(input).copy_(input)
        saved = kernels.Saved(input, weight, mean, variance, mask)
        backward = partial(kernels.backward, saved, dy, options, has_residual)
        common = {"epsilon": eps, "arithmetic": options.arithmetic}
        place = gpu.place_of(
            "forward", input, residual, weight, bias, None, None,
            activation=options.activation, **common,
        )  # fmt: skip
        place_of_backward = gpu.place_of(
            "backward", input, dy, mask, mean, variance, weight, residual=has_residual, **common
        )
        return [
            *_tried(gpu.use, place, forward),
            *_tried(gpu.use, place_of_backward, backward),
        ]


def _tried(use: Callable[..., None], place: Any, call: Callable[[], Any]) -> list[Trial]:
    """Measure a call with each of the `candidates`; later calls use the fastest knobs."""
    trials = []
    problem, extents, _ = place
    for knobs in candidates(problem, extents):
        use(place, knobs)
        trials.append(Trial(problem.operation, knobs, measure(call)))
    trials.sort(key=lambda trial: trial.milliseconds)
    use(place, trials[0].knobs)
    return trials


def measure(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call on the device, as the median of repeated calls.

    The time is infinite if a kernel of the call needs more shared memory or registers than the
    device has.
    """
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        milliseconds: float = do_bench(call, warmup=5, rep=30, return_mode="median")
    except OutOfResources:
        return math.inf
    return milliseconds
