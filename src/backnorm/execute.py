"""Run a problem: allocate, reduce, exchange, apply. Rules of `out` and of values live here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from backnorm.aliasing import check_out
from backnorm.allocation import allocate
from backnorm.dtypes import is_16_bit
from backnorm.kernels.cpu import channels
from backnorm.kernels.cpu.launch import Launch, stored
from backnorm.layout import Order, dense, extents_of, in_order, memory_order, restore
from backnorm.machine import Machine, detect
from backnorm.plan import Plan, plan
from backnorm.problem import Problem, Words, variance_error
from backnorm.results import ChannelSums, Gradients, Normalized
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


class Call:
    """A problem on arrays laid out like x, planned; the same for all arrays of the same metadata.

    Attributes
    ----------
    problem : Problem
    plan : Plan
    launch : Launch
    plain : bool
        Whether the arrays are known to be ones that the kernels can take as they are: contiguous,
        aligned, native, writable.
    """

    __slots__ = ("_natural", "_order", "_seen_as_is", "launch", "plain", "plan", "problem")

    def __init__(self, problem: Problem, order: Order, decided: Plan, launch: Launch) -> None:
        self.problem, self.plan, self.launch = problem, decided, launch
        self._order, self._natural = order, order == tuple(range(len(order)))
        # Types of 16 bits are integers to the kernels.
        self._seen_as_is = not is_16_bit(problem.dtype), not is_16_bit(problem.statistics_dtype)
        self.plain = False

    def for_plain_arrays(self) -> Call:
        """Return the same call for arrays that the kernels can take as they are."""
        call = Call(self.problem, self._order, self.plan, self.launch)
        call.plain = True
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
    problem: Problem, x: np.ndarray, *, exchanged: bool = False, machine: Machine | None = None
) -> Call:
    """Return how `problem` is computed on arrays laid out like x.

    `exchanged` says that the sums will be exchanged between the phases, `machine` which machine
    to plan for instead of this one.
    """
    return _planned(problem, memory_order(x), machine or _machine(get_num_threads()), exchanged)


@functools.lru_cache(maxsize=64)
def _machine(threads: int) -> Machine:
    return dataclasses.replace(detect(), threads=threads)


@functools.lru_cache(maxsize=1024)
def _planned(problem: Problem, order: Order, machine: Machine, exchanged: bool) -> Call:
    extents = extents_of(problem.shape, problem.channel_axis, order)
    decided = plan(problem, extents, machine, exchanged=exchanged)
    launch = Launch(
        extents,
        decided.geometry,
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
    out: np.ndarray | None = None,
    exchange: Exchange | None = None,
    words: Words = _NO_WORDS,
) -> Gradients:
    """Return the gradients; with `exchange`, dx from the exchanged sums, dgamma and dbeta local.

    With `exchange` the call must have been planned for it.
    """
    problem, launch = call.problem, call.launch
    if out is not None:
        inputs = {"x": x, "mean": mean, "variance": variance, "gamma": gamma}
        check_out(problem, out, inputs, dy, words)
    target = call.fresh() if out is None else call.within(out)
    table = _prepared(call, mean, variance, gamma, None, words)
    x_, dy_, dx_ = call.flat(x), call.flat(dy), call.flat_target(target)
    dgamma = allocate((problem.channels,), problem.statistics_dtype)
    dbeta = allocate((problem.channels,), problem.statistics_dtype)
    results = call.flat_channels(dgamma), call.flat_channels(dbeta)
    if exchange is None:
        launch.complete(x_, dy_, dx_, table, needs_x=problem.training)
        channels.finish_backward(table, *results)
    else:
        launch.reduce(x_, dy_, table)
        channels.finish_backward(table, *results)
        _settle(launch, table, exchange(_sums(launch, table)))
        launch.apply(x_, dy_, dx_, table, needs_x=problem.training)
    return Gradients(call.finish(target, out), dgamma, dbeta)


def reduce(call: Call, x: np.ndarray, dy: np.ndarray, mean: np.ndarray) -> ChannelSums:
    """Return the sums of dy and dy * (x - mean) over this machine's elements."""
    table = call.launch.table()
    table[: call.problem.channels] = mean
    call.launch.reduce(call.flat(x), call.flat(dy), table)
    return _sums(call.launch, table)


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
    table = _prepared(call, mean, variance, gamma, None, words)
    _settle(launch, table, sums)
    x_, dy_, dx_ = call.flat(x), call.flat(dy), call.flat_target(target)
    launch.apply(x_, dy_, dx_, table, needs_x=problem.training)
    return call.finish(target, out)


def forward(
    call: Call,
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    *,
    out: np.ndarray | None = None,
    words: Words = _NO_WORDS,
) -> Normalized:
    """Return y, the mean and the biased variance of the batch (0 and 0 for an empty batch)."""
    problem, launch = call.problem, call.launch
    if out is not None:
        check_out(problem, out, {"x": x, "gamma": gamma, "beta": beta}, None, words)
    target = call.fresh() if out is None else call.within(out)
    x_, table = call.flat(x), launch.table()
    launch.pivots(x_, call.flat_channels(gamma), call.flat_channels(beta), table)
    launch.complete(x_, None, call.flat_target(target), table)
    dtype = problem.statistics_dtype
    mean, variance = allocate((problem.channels,), dtype), allocate((problem.channels,), dtype)
    refused = channels.finish_forward(table, problem.epsilon, stored(mean), stored(variance))
    if refused >= 0 and problem.count:
        raise variance_error(launch.results(table)[1], problem.epsilon, refused, words)
    return Normalized(call.finish(target, out), mean, variance)


def inference(
    call: Call,
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    *,
    out: np.ndarray | None = None,
    words: Words = _NO_WORDS,
) -> np.ndarray:
    """Return y, normalised with the given statistics."""
    if out is not None:
        inputs = {"x": x, "mean": mean, "variance": variance, "gamma": gamma, "beta": beta}
        check_out(call.problem, out, inputs, None, words)
    target = call.fresh() if out is None else call.within(out)
    table = _prepared(call, mean, variance, gamma, beta, words)
    call.launch.apply(call.flat(x), None, call.flat_target(target), table)
    return call.finish(target, out)


def _prepared(
    call: Call,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    words: Words,
) -> np.ndarray:
    """Return a table filled from statistics."""
    epsilon, table = call.problem.epsilon, call.launch.table()
    flat = map(call.flat_channels, (mean, variance, gamma, beta))
    refused = channels.prepare(*flat, epsilon, table)
    if refused >= 0:
        raise variance_error(variance, epsilon, refused, words)
    return table


def _sums(launch: Launch, table: np.ndarray) -> ChannelSums:
    sum_dy, sum_dy_xmu = launch.results(table)
    return ChannelSums(sum_dy.copy(), sum_dy_xmu.copy(), launch.count)


def _settle(launch: Launch, table: np.ndarray, sums: ChannelSums) -> None:
    sum_dy, sum_dy_xmu = launch.results(table)
    sum_dy[...] = sums.sum_dy
    sum_dy_xmu[...] = sums.sum_dy_xmu
    launch.settle(sums.count, table)
