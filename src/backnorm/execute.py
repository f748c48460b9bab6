"""Run a problem: allocate, reduce, exchange, apply. Rules of `out` and of values live here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np

from backnorm.aliasing import check_out
from backnorm.kernels.cpu import channels
from backnorm.kernels.cpu.launch import Work, stored
from backnorm.layout import Order, dense, extents_of, in_order, memory_order, restore
from backnorm.machine import Machine, detect
from backnorm.plan import Plan, plan
from backnorm.problem import Problem, Words, variance_error
from backnorm.results import ChannelSums, Gradients, Normalized
from backnorm.threads import get_num_threads

__all__ = [
    "Exchange",
    "allocate",
    "apply",
    "backward",
    "explain",
    "forward",
    "inference",
    "reduce",
]

#: Turns the sums over this machine's elements into the sums over all machines' elements.
Exchange = Callable[[ChannelSums], ChannelSums]

_NO_WORDS: Words = {}


def allocate(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a new array with undefined contents; every array that is returned starts here."""
    return np.empty(shape, dtype)


def backward(
    problem: Problem,
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
    """Return the gradients; with `exchange`, dx from the exchanged sums, dgamma and dbeta local."""
    task = _Task(problem, x, dy, out, {"mean": mean, "variance": variance, "gamma": gamma}, words)
    decided, work = task.work(exchanged=exchange is not None)
    _prepare(problem, work, mean, variance, gamma, words)
    dgamma = allocate((problem.channels,), problem.statistics_dtype)
    dbeta = allocate((problem.channels,), problem.statistics_dtype)
    if exchange is None:
        work.complete(fused=decided.fused, needs_x=problem.training)
    else:
        work.reduce()
    channels.finish_backward(work.channel, work.result, stored(dgamma), stored(dbeta))
    if exchange is not None:
        _settle(work, exchange(_sums(work)))
        work.apply(needs_x=problem.training)
    return Gradients(task.finish(), dgamma, dbeta)


def reduce(problem: Problem, x: np.ndarray, dy: np.ndarray, mean: np.ndarray) -> ChannelSums:
    """Return the sums of dy and dy * (x - mean) over this machine's elements."""
    task = _Task(problem, x, dy, None, {}, _NO_WORDS, writes=False)
    _, work = task.work(exchanged=True)
    work.channel[0] = mean
    work.reduce()
    return _sums(work)


def apply(
    problem: Problem,
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
    task = _Task(problem, x, dy, out, {"mean": mean, "variance": variance, "gamma": gamma}, words)
    _, work = task.work(exchanged=True)
    _prepare(problem, work, mean, variance, gamma, words)
    _settle(work, sums)
    work.apply(needs_x=problem.training)
    return task.finish()


def forward(
    problem: Problem,
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    *,
    out: np.ndarray | None = None,
    words: Words = _NO_WORDS,
) -> Normalized:
    """Return y, the mean and the biased variance of the batch (0 and 0 for an empty batch)."""
    task = _Task(problem, x, None, out, {"gamma": gamma, "beta": beta}, words)
    decided, work = task.work()
    dtype = problem.statistics_dtype
    affine = [_stored(a, dtype) for a in (gamma, beta)]
    channels.prepare_forward(*affine, work.channel)
    channels.pivots(work.x, work.extents, work.channel)
    work.complete(fused=decided.fused)
    mean, variance = work.result
    if problem.count:
        _check_variance(variance, problem.epsilon, words)
    outputs = []
    for values in (mean, variance):
        outputs.append(allocate((problem.channels,), dtype))
        channels.write(values, stored(outputs[-1]))
    return Normalized(task.finish(), outputs[0], outputs[1])


def inference(
    problem: Problem,
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
    per_channel = {"mean": mean, "variance": variance, "gamma": gamma, "beta": beta}
    task = _Task(problem, x, None, out, per_channel, words)
    _, work = task.work(exchanged=True)
    _prepare(problem, work, mean, variance, gamma, words)
    work.coefficients[0] = work.channel[0]
    if beta is not None:
        work.coefficients[2] = beta
    work.coefficients[3] = work.channel[2]
    work.apply()
    return task.finish()


def explain(problem: Problem, x: np.ndarray) -> Plan:
    """Return the plan that an array laid out like `x` gets."""
    order = memory_order(x)
    return plan(problem, extents_of(x.shape, problem.channel_axis, order), _machine())


class _Task:
    """The caller's arrays of one call, and their canonical form."""

    def __init__(
        self,
        problem: Problem,
        x: np.ndarray,
        dy: np.ndarray | None,
        out: np.ndarray | None,
        per_channel: Mapping[str, np.ndarray | None],
        words: Words,
        *,
        writes: bool = True,
    ) -> None:
        self.problem = problem
        self.order: Order = memory_order(x)
        self.x = in_order(x, self.order, problem.dtype)
        self.dy = None if dy is None else in_order(dy, self.order, problem.dtype)
        self.out = out
        self.target: np.ndarray | None = None
        if writes:
            if out is not None:
                check_out(problem, out, {"x": x, **per_channel}, dy, words)
            self.target = self._target(out)

    def _target(self, out: np.ndarray | None) -> np.ndarray:
        """Return the dense array to write: `out` itself where it is dense in x's order."""
        shape = self.x.shape
        if out is not None and out.dtype == self.problem.dtype and out.flags.aligned:
            moved = out.transpose(self.order)
            if moved.flags.c_contiguous:
                return moved
        return allocate(shape, self.problem.dtype)

    def work(self, *, exchanged: bool = False) -> tuple[Plan, Work]:
        """Return the plan of this task and the kernels' view of it."""
        problem = self.problem
        extents = extents_of(problem.shape, problem.channel_axis, self.order)
        decided = plan(problem, extents, _machine(), exchanged=exchanged)
        work = Work(
            stored(self.x),
            None if self.dy is None else stored(self.dy),
            None if self.target is None else stored(self.target),
            extents=extents,
            geometry=decided.geometry,
            epsilon=problem.epsilon,
            streaming=decided.streaming,
            threads=decided.threads,
        )
        return decided, work

    def finish(self) -> np.ndarray:
        """Return the output in the caller's terms."""
        assert self.target is not None
        result = restore(self.target, self.order)
        if self.out is None:
            return result
        if not np.may_share_memory(result, self.out):
            self.out[...] = result
        return self.out


def _machine() -> Machine:
    return _with_threads(detect(), get_num_threads())


@functools.lru_cache(maxsize=64)
def _with_threads(machine: Machine, threads: int) -> Machine:
    return dataclasses.replace(machine, threads=threads)


def _stored(array: np.ndarray | None, dtype: np.dtype) -> np.ndarray | None:
    return None if array is None else stored(dense(array, dtype))


def _prepare(
    problem: Problem,
    work: Work,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    words: Words,
) -> None:
    dtype = problem.statistics_dtype
    arrays = [_stored(a, dtype) for a in (mean, variance, gamma)]
    refused = channels.prepare(*arrays, problem.epsilon, work.channel)
    if refused >= 0:
        raise variance_error(variance, problem.epsilon, refused, words)


def _check_variance(variance: np.ndarray, epsilon: float, words: Words) -> None:
    refused = np.flatnonzero(variance + epsilon <= 0.0)
    if refused.size:
        raise variance_error(variance, epsilon, int(refused[0]), words)


def _sums(work: Work) -> ChannelSums:
    return ChannelSums(work.result[0].copy(), work.result[1].copy(), work.count)


def _settle(work: Work, sums: ChannelSums) -> None:
    work.result[0] = sums.sum_dy
    work.result[1] = sums.sum_dy_xmu
    channels.settle(sums.count, work.channel, work.coefficients, work.result)
