"""Trying what a plan may choose on the device itself."""

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
from backnorm.torch.options import eager_options

__all__ = ["Trial", "tune"]


class Trial(NamedTuple):
    """A choice that was tried.

    Attributes
    ----------
    operation : {"forward", "backward"}
    knobs : Knobs
    milliseconds : float
        Of a call, by the device's clock, the L2 cache emptied before it.
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
    """Find the fastest plan of a training step on tensors like these, and use it from now on.

    What is found holds for this process, and for calls with tensors of the same shapes, types,
    layout and device, and the same eps and arithmetic. Every plan is right, but they sum in
    different orders: the last bits of results may be others than without tuning. (Among themselves
    they are the same on every run, as always.)

    Parameters
    ----------
    input : Tensor, shape (N, C, ...)
        On a CUDA device. Its values do not matter; it is not written to.
    weight, bias : Tensor, shape (C,), optional
        If the layer has them.
    activation, residual, eps, arithmetic
        As in `batch_norm`.

    Returns
    -------
    list of Trial
        What was tried: of each operation, the fastest first.

    Raises
    ------
    ArgumentValueError
        If input is not on a CUDA device, or its elements have not this arithmetic.
    """
    gpu = kernels.engine_of(input)
    if gpu is cpu:
        raise ArgumentValueError(
            "input",
            "must be on a CUDA device: the CPU's plans have nothing to try",
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
    """Try every plan of a call's problem, and keep to the fastest."""
    trials = []
    problem, extents, _ = place
    for knobs in candidates(problem, extents):
        use(place, knobs)
        trials.append(Trial(problem.operation, knobs, measure(call)))
    trials.sort(key=lambda trial: trial.milliseconds)
    use(place, trials[0].knobs)
    return trials


def measure(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call on the device, the median of many.

    Infinity if the device has too little shared memory, or too few registers, for the plan.
    """
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        milliseconds: float = do_bench(call, warmup=5, rep=30, return_mode="median")
    except OutOfResources:
        return math.inf
    return milliseconds
