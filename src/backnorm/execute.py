"""Run a problem: allocate, reduce, exchange, apply. Rules of `out` and of values live here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from backnorm.aliasing import check_out
from backnorm.allocation import allocate
from backnorm.dtypes import is_16_bit
from backnorm.kernels.cpu.launch import Launch, stored
from backnorm.layout import (
    Order,
    dense,
    extents_of,
    in_order,
    mask_size,
    memory_order,
    restore,
)
from backnorm.machine import Machine, detect
from backnorm.plan import Plan, plan
from backnorm.problem import Problem, Words, variance_error
from backnorm.results import ChannelSums, Rectified, RectifiedGradients
from backnorm.threads import get_num_threads

__all__ = [
    "Call",
    "Exchange",
    "allocate",
    "apply",
    "backward",
    "forward",
    "inference",
    "planned",
    "reduce",
]

#: Turns the sums over this machine's elements into the sums over all machines' elements.
Exchange = Callable[[ChannelSums], ChannelSums]

_NO_WORDS: Words = {}
_BYTE = np.dtype(np.uint8)


class Call:
    """A problem on arrays laid out like x, planned; the same for all arrays of the same metadata.

    Attributes
    ----------
    problem : Problem
    plan : Plan
    launch : Launch
    plain : bool
        Whether the arrays are known to be contiguous, aligned and native.
    """

    __slots__ = ("_natural", "_order", "_seen_as_is", "launch", "plain", "plan", "problem")

    def __init__(self, problem: Problem, order: Order, decided: Plan, launch: Launch) -> None:
        self.problem, self.plan, self.launch = problem, decided, launch
        self._order, self._natural = order, order == tuple(range(len(order)))
        # Types of 16 bits are integers to the kernels.
        self._seen_as_is = not is_16_bit(problem.dtype), not is_16_bit(problem.statistics_dtype)
        self.plain = False

    def for_plain_arrays(self, *, writeable: bool) -> Call:
        """Return the same call for arrays that are plain, and writeable or perhaps not."""
        call = Call(self.problem, self._order, self.plan, self.launch)
        call.plain = True
        if not writeable:
            # They are seen without the flag.
            call._seen_as_is = False, False
        return call

    def flat(self, array: np.ndarray) -> np.ndarray:
        """Return x or dy as the kernels see it."""
        if self.plain:
            return array.ravel() if self._seen_as_is[0] else stored(array)
        return stored(in_order(array, self._order, self.problem.dtype))

    def flat_target(self, target: np.ndarray) -> np.ndarray:
        """Return the array to write as the kernels see it."""
        return target.ravel() if self.plain and self._seen_as_is[0] else stored(target)

    def flat_channels(self, array: np.ndarray | None) -> np.ndarray | None:
        """Return a per-channel array as the kernels see it."""
        if array is None or (self.plain and self._seen_as_is[1]):
            return array
        return stored(dense(array, self.problem.statistics_dtype))

    def fresh(self) -> np.ndarray:
        """Return a new array to write, dense in x's order."""
        shape = self.problem.shape
        if not self._natural:
            shape = tuple(shape[axis] for axis in self._order)
        return allocate(shape, self.problem.dtype)

    def fresh_channels(self) -> np.ndarray:
        """Return a new per-channel array."""
        return allocate((self.problem.channels,), self.problem.statistics_dtype)

    def within(self, out: np.ndarray) -> np.ndarray:
        """Return the array to write instead of `out`: itself, if it is dense in x's order."""
        if out.dtype == self.problem.dtype and out.flags.aligned:
            if self._natural and out.flags.c_contiguous:
                return out
            moved = out.transpose(self._order)
            if moved.flags.c_contiguous:
                return moved
        return self.fresh()

    def finish(self, target: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """Return the array that was written in the caller's terms."""
        if target is out:
            return target
        result = target if self._natural else restore(target, self._order)
        if out is None:
            return result
        if not np.may_share_memory(result, out):
            out[...] = result
        return out


def planned(
    problem: Problem,
    x: np.ndarray | None,
    *,
    exchanged: bool = False,
    machine: Machine | None = None,
) -> Call:
    """Return how `problem` is computed on arrays laid out like x; None: in row-major order.

    `exchanged` says that the sums will be exchanged between the phases, `machine` which machine
    to plan for instead of this one.
    """
    order = tuple(range(len(problem.shape))) if x is None else memory_order(x)
    return _planned(problem, order, machine or _machine(get_num_threads()), exchanged)


@functools.lru_cache(maxsize=64)
def _machine(threads: int) -> Machine:
    return dataclasses.replace(detect(), threads=threads)


@functools.lru_cache(maxsize=1024)
def _planned(problem: Problem, order: Order, machine: Machine, exchanged: bool) -> Call:
    extents = extents_of(problem.shape, problem.channel_axis, order)
    decided = plan(problem, extents, machine, exchanged=exchanged)
    forward = problem.operation in ("forward", "inference")
    launch = Launch(
        extents,
        decided.geometry,
        dtype=problem.dtype,
        statistics_dtype=problem.statistics_dtype,
        operation="forward" if forward else "backward" if problem.training else "frozen",
        rectified=problem.rectified,
        sided=problem.residual,
        epsilon=problem.epsilon,
        fused=decided.fused,
        streaming=decided.streaming,
        threads=decided.threads,
    )
    return Call(problem, order, decided, launch)


def backward(
    call: Call,
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    *,
    mask: np.ndarray | None = None,
    out: np.ndarray | None = None,
    exchange: Exchange | None = None,
    words: Words = _NO_WORDS,
) -> RectifiedGradients:
    """Return the gradients; with `exchange`, dx from the exchanged sums, dgamma and dbeta local.

    With `exchange` the call must have been planned for it. Where a rectifier follows the layer,
    `mask` is that of its forward pass.
    """
    problem, launch = call.problem, call.launch
    if out is not None:
        inputs = {"x": x, "mean": mean, "variance": variance, "gamma": gamma}
        check_out(problem, out, inputs, dy, words)
    target = call.fresh() if out is None else call.within(out)
    beside = call.fresh() if problem.residual else None
    dgamma, dbeta = call.fresh_channels(), call.fresh_channels()
    places = (
        call.flat(x),
        call.flat(dy),
        call.flat_target(target),
        None if beside is None else call.flat_target(beside),
        mask,
        call.flat_channels(mean),
        call.flat_channels(variance),
        call.flat_channels(gamma),
        None,
        call.flat_channels(dgamma),
        call.flat_channels(dbeta),
    )
    if exchange is None:
        refused = launch.complete(*places)
    else:
        memory = launch.memory()
        refused = launch.reduce(*places, memory=memory)
        if refused < 0:
            sums = exchange(_sums(launch, memory))
            refused = _apply(launch, places, sums, memory)
    if refused >= 0:
        raise variance_error(variance, problem.epsilon, refused, words)
    dresidual = None if beside is None else call.finish(beside, None)
    return RectifiedGradients(call.finish(target, out), dgamma, dbeta, dresidual)


def reduce(call: Call, x: np.ndarray, dy: np.ndarray, mean: np.ndarray) -> ChannelSums:
    """Return the sums of dy and dy * (x - mean) over this machine's elements."""
    launch, memory = call.launch, call.launch.memory()
    launch.sum_all(call.flat(x), call.flat(dy), None, mean=call.flat_channels(mean), memory=memory)
    return _sums(launch, memory)


def apply(
    call: Call,
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    sums: ChannelSums,
    *,
    out: np.ndarray | None = None,
    words: Words = _NO_WORDS,
) -> np.ndarray:
    """Return dx from sums that `reduce` gave (and others may have been added to)."""
    problem, launch = call.problem, call.launch
    if out is not None:
        inputs = {"x": x, "mean": mean, "variance": variance, "gamma": gamma}
        check_out(problem, out, inputs, dy, words)
    target = call.fresh() if out is None else call.within(out)
    places = (
        call.flat(x),
        call.flat(dy),
        call.flat_target(target),
        None,
        None,
        call.flat_channels(mean),
        call.flat_channels(variance),
        call.flat_channels(gamma),
    )
    refused = _apply(launch, places, sums, launch.memory())
    if refused >= 0:
        raise variance_error(variance, problem.epsilon, refused, words)
    return call.finish(target, out)


def forward(
    call: Call,
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    *,
    residual: np.ndarray | None = None,
    out: np.ndarray | None = None,
    words: Words = _NO_WORDS,
) -> Rectified:
    """Return y, the mean and the biased variance of the batch (0 and 0 for an empty batch).

    Where a rectifier follows, also its mask.
    """
    problem, launch = call.problem, call.launch
    if out is not None:
        check_out(problem, out, {"x": x, "gamma": gamma, "beta": beta}, None, words)
    target = call.fresh() if out is None else call.within(out)
    mean, variance = call.fresh_channels(), call.fresh_channels()
    mask = allocate((mask_size(problem.size),), _BYTE) if problem.rectified else None
    refused = launch.complete(
        call.flat(x),
        None,
        call.flat_target(target),
        None if residual is None else call.flat(residual),
        mask,
        gamma=call.flat_channels(gamma),
        beta=call.flat_channels(beta),
        result=call.flat_channels(mean),
        result_2=call.flat_channels(variance),
    )
    if refused >= 0 and problem.count:
        raise variance_error(variance, problem.epsilon, refused, words)
    return Rectified(call.finish(target, out), mean, variance, mask)


def inference(
    call: Call,
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    *,
    residual: np.ndarray | None = None,
    out: np.ndarray | None = None,
    words: Words = _NO_WORDS,
) -> np.ndarray:
    """Return y, normalised with the given statistics."""
    if out is not None:
        inputs = {"x": x, "mean": mean, "variance": variance, "gamma": gamma, "beta": beta}
        check_out(call.problem, out, inputs, None, words)
    target = call.fresh() if out is None else call.within(out)
    refused = call.launch.apply(
        call.flat(x),
        None,
        call.flat_target(target),
        None if residual is None else call.flat(residual),
        None,
        call.flat_channels(mean),
        call.flat_channels(variance),
        call.flat_channels(gamma),
        call.flat_channels(beta),
    )
    if refused >= 0:
        raise variance_error(variance, call.problem.epsilon, refused, words)
    return call.finish(target, out)


def _sums(launch: Launch, memory: np.ndarray) -> ChannelSums:
    sum_dy, sum_dy_xmu = launch.sums(memory)
    return ChannelSums(sum_dy.copy(), sum_dy_xmu.copy(), launch.count)


def _apply(
    launch: Launch,
    places: tuple[Any, ...],
    sums: ChannelSums,
    memory: np.ndarray,
) -> int:
    """Write dx from sums; return the channel that was refused, or -1."""
    sum_dy, sum_dy_xmu = launch.sums(memory)
    sum_dy[...] = sums.sum_dy
    sum_dy_xmu[...] = sums.sum_dy_xmu
    return launch.apply(*places, memory=memory, count=sums.count)
