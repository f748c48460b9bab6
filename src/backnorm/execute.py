"""Run a problem: allocate, reduce, exchange, apply. Rules of `out` and of values live here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from numpy import empty

from backnorm.aliasing import check_out
from backnorm.allocation import LARGE, allocate
from backnorm.cpu.addresses import addresses_of
from backnorm.cpu.launch import Launch
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
from backnorm.results import ChannelSums
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

    __slots__ = (
        "_channels",
        "_dtype",
        "_large",
        "_natural",
        "_order",
        "_shape",
        "_statistics_dtype",
        "launch",
        "plain",
        "plan",
        "problem",
    )

    def __init__(self, problem: Problem, order: Order, decided: Plan, launch: Launch) -> None:
        self.problem, self.plan, self.launch = problem, decided, launch
        self._order, self._natural = order, order == tuple(range(len(order)))
        # What every call asks for, and the problem would compute.
        self._shape = tuple(problem.shape[axis] for axis in order)
        self._dtype, self._statistics_dtype = problem.dtype, problem.statistics_dtype
        self._channels = problem.channels
        self._large = problem.size * problem.dtype.itemsize >= LARGE
        self.plain = False

    def for_plain_arrays(self) -> Call:
        """Return the same call for arrays that are plain."""
        call = Call(self.problem, self._order, self.plan, self.launch)
        call.plain = True
        return call

    def flat(self, array: np.ndarray) -> np.ndarray:
        """Return x or dy as the kernels read it: itself or a copy, dense in x's order."""
        return in_order(array, self._order, self._dtype)

    def flat_channels(self, array: np.ndarray) -> np.ndarray:
        """Return a per-channel array as the kernels read it."""
        return dense(array, self._statistics_dtype)

    def flat_optional(self, array: np.ndarray | None) -> np.ndarray | None:
        """Return the same of one that may be absent."""
        return None if array is None else self.flat_channels(array)

    def fresh(self) -> np.ndarray:
        """Return a new array to write, dense in x's order."""
        return (allocate if self._large else empty)(self._shape, self._dtype)

    def outputs(self, out: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the array to write, new or within `out`, and two new per-channel arrays."""
        return (
            self.fresh() if out is None else self.within(out),
            empty(self._channels, self._statistics_dtype),
            empty(self._channels, self._statistics_dtype),
        )

    def within(self, out: np.ndarray) -> np.ndarray:
        """Return the array to write instead of `out`: itself, if it is dense in x's order."""
        if out.dtype == self._dtype and out.flags.aligned:
            if self._natural and out.flags.c_contiguous:
                return out
            moved = out.transpose(self._order)
            if moved.flags.c_contiguous:
                return moved
        return self.fresh()

    def finish(self, target: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """Return the array that was written in the caller's terms."""
        if self.plain and out is None:
            return target
        result = target if self._natural else restore(target, self._order)
        if out is None or target is out:
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
        relu=problem.relu,
        epsilon=problem.epsilon,
        grouped=decided.grouped,
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
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Return dx, dgamma, dbeta, and the gradient of the residual, if there is one.

    With `exchange` (the call must have been planned for it) dx is from the exchanged sums, dgamma
    and dbeta are local. Where a ReLU follows the layer, `mask` is that of its forward pass.
    """
    problem, launch = call.problem, call.launch
    if out is not None:
        inputs = {"x": x, "mean": mean, "variance": variance, "gamma": gamma}
        check_out(problem, out, inputs, dy, words)
    target, dgamma, dbeta = call.outputs(out)
    beside = call.fresh() if problem.residual else None
    given = variance
    if not call.plain:
        x, dy, mean = call.flat(x), call.flat(dy), call.flat_channels(mean)
        variance, gamma = call.flat_channels(variance), call.flat_optional(gamma)
    places = addresses_of(x, dy, target, beside, mask, mean, variance, gamma, None, dgamma, dbeta)
    if exchange is None:
        refused = launch.complete(places)
    else:
        summed = launch.sums()
        refused = launch.reduce(places, summed=summed)
        if refused < 0:
            sums = exchange(ChannelSums(*summed, launch.count))
            refused = _apply(launch, places, sums)
    if refused >= 0:
        raise variance_error(given, problem.epsilon, refused, words)
    if beside is not None:
        beside = call.finish(beside, None)
    return call.finish(target, out), dgamma, dbeta, beside


def reduce(call: Call, x: np.ndarray, dy: np.ndarray, mean: np.ndarray) -> ChannelSums:
    """Return the sums of dy and dy * (x - mean) over this machine's elements."""
    x, dy, mean = call.flat(x), call.flat(dy), call.flat_channels(mean)
    summed = call.launch.sums()
    call.launch.sum_all(addresses_of(x, dy, None, mean=mean), summed=summed)
    return ChannelSums(*summed, call.launch.count)


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
    problem = call.problem
    if out is not None:
        inputs = {"x": x, "mean": mean, "variance": variance, "gamma": gamma}
        check_out(problem, out, inputs, dy, words)
    target = call.fresh() if out is None else call.within(out)
    given = variance
    x, dy, mean = call.flat(x), call.flat(dy), call.flat_channels(mean)
    variance, gamma = call.flat_channels(variance), call.flat_optional(gamma)
    places = addresses_of(x, dy, target, None, None, mean, variance, gamma)
    refused = _apply(call.launch, places, sums)
    if refused >= 0:
        raise variance_error(given, problem.epsilon, refused, words)
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
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Return y, the mean and the biased variance of the batch (0 and 0 for an empty batch).

    Where a ReLU follows, also its mask.
    """
    problem = call.problem
    if out is not None:
        check_out(problem, out, {"x": x, "gamma": gamma, "beta": beta}, None, words)
    target, mean, variance = call.outputs(out)
    mask = allocate((mask_size(problem.size),), _BYTE) if problem.relu else None
    if not call.plain:
        x, residual = call.flat(x), None if residual is None else call.flat(residual)
        gamma, beta = call.flat_optional(gamma), call.flat_optional(beta)
    refused = call.launch.complete(
        addresses_of(x, None, target, residual, mask, None, None, gamma, beta, mean, variance)
    )
    if refused >= 0 and problem.count:
        raise variance_error(variance, problem.epsilon, refused, words)
    return call.finish(target, out), mean, variance, mask


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
    problem = call.problem
    if out is not None:
        inputs = {"x": x, "mean": mean, "variance": variance, "gamma": gamma, "beta": beta}
        check_out(problem, out, inputs, None, words)
    target = call.fresh() if out is None else call.within(out)
    given = variance
    if not call.plain:
        x, residual = call.flat(x), None if residual is None else call.flat(residual)
        mean, variance = call.flat_channels(mean), call.flat_channels(variance)
        gamma, beta = call.flat_optional(gamma), call.flat_optional(beta)
    refused = call.launch.apply(
        addresses_of(x, None, target, residual, None, mean, variance, gamma, beta)
    )
    if refused >= 0:
        raise variance_error(given, problem.epsilon, refused, words)
    return call.finish(target, out)


def _apply(launch: Launch, places: tuple[int, ...], sums: ChannelSums) -> int:
    """Write dx from sums; return the channel that was refused, or -1."""
    return launch.apply(places, sums=(sums.sum_dy, sums.sum_dy_xmu), count=sums.count)
