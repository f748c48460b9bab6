"""What a kernel does before and after its items: channels from the record, and back to it."""

from __future__ import annotations

from numba.extending import overload

from backnorm.kernels.cpu import channels as of_channels
from backnorm.kernels.cpu.channels import FIRST
from backnorm.kernels.cpu.jit import inlined
from backnorm.kernels.cpu.memory import clear, offset
from backnorm.kernels.cpu.record import (
    BETA,
    COUNT,
    EPSILON,
    FINISHES,
    FROM_DATA,
    GAMMA,
    ITEMS,
    MEAN,
    MEANS_ALONE,
    MOMENTUM,
    PREPARES,
    READY,
    RESULT,
    RESULT_2,
    RUNNING_MEAN,
    RUNNING_VARIANCE,
    SETTLES,
    STATISTICS,
    VARIANCE,
    X,
    call_off,
    doubles_at,
    ended,
    number,
    singles_at,
    values_at,
)
from backnorm.kernels.cpu.threads import raise_flag

__all__ = ["after", "before"]


@inlined
def before(kind, cells, rows, step, extents):
    """Fill the table of channels as the record asks, and let the others begin.

    Returns
    -------
    int
        The first channel refused, or -1. If there is one, all is called off.
    """
    refused = -1
    if cells[PREPARES] != 0:
        refused = _prepare(kind, cells, rows, step, extents)
    if refused >= 0:
        call_off(cells)
        return refused
    if cells[SETTLES] != 0:
        of_channels.settle(rows, step, extents[1], cells[COUNT])
    if cells[ITEMS] == 0:
        # Nothing will be summed: the sums of no elements are zero.
        clear(offset(rows, FIRST * step), 2 * step)
    raise_flag(cells, READY)
    return -1


@inlined
def after(kind, cells, rows, step, channels):
    """Write the results of channels, if the record asks; return what the kernel returns."""
    return ended(_finish(kind, cells, rows, step, channels) if cells[FINISHES] != 0 else -1)


def wider(kind, bits):
    """Return whether statistics of so many bits are of another type than the elements."""


@overload(wider)
def _wider(kind, bits):
    own = kind.element.bitwidth
    return lambda kind, bits: bits > own


@inlined
def _prepare(kind, cells, rows, step, extents):
    """Fill the table from statistics, from means alone, or from samples of x."""
    if wider(kind, 64) and cells[STATISTICS] == 64:
        return _prepare_from(doubles_at, kind, cells, rows, step, extents)
    if wider(kind, 32) and cells[STATISTICS] == 32:
        return _prepare_from(singles_at, kind, cells, rows, step, extents)
    return _prepare_from(values_at, kind, cells, rows, step, extents)


@inlined
def _prepare_from(at, kind, cells, rows, step, extents):
    gamma, beta = at(kind, cells, GAMMA), at(kind, cells, BETA)
    present = (cells[GAMMA] != 0, cells[BETA] != 0)
    if cells[PREPARES] == FROM_DATA:
        x = values_at(kind, cells, X)
        of_channels.prepare_forward(rows, step, x, extents, gamma, beta, present)
        return -1
    mean = at(kind, cells, MEAN)
    if cells[PREPARES] == MEANS_ALONE:
        of_channels.prepare_means(rows, step, extents[1], mean)
        return -1
    given = (mean, at(kind, cells, VARIANCE), gamma, beta)
    return of_channels.prepare(rows, step, extents[1], given, present, number(cells, EPSILON))


@inlined
def _finish(kind, cells, rows, step, channels):
    """Write the two results of every channel."""
    if wider(kind, 64) and cells[STATISTICS] == 64:
        return _finish_to(doubles_at, kind, cells, rows, step, channels)
    if wider(kind, 32) and cells[STATISTICS] == 32:
        return _finish_to(singles_at, kind, cells, rows, step, channels)
    return _finish_to(values_at, kind, cells, rows, step, channels)


def _finish_to(at, kind, cells, rows, step, channels):
    """Write the results to statistics of a type, taken from the record by `at`."""


@overload(_finish_to)
def _finish_to_of(at, kind, cells, rows, step, channels):
    if kind.operation != "forward":

        def backward(at, kind, cells, rows, step, channels):
            dgamma, dbeta = at(kind, cells, RESULT), at(kind, cells, RESULT_2)
            of_channels.finish_backward(rows, step, channels, dgamma, dbeta)
            return -1

        return backward

    def forward(at, kind, cells, rows, step, channels):
        results = (at(kind, cells, RESULT), at(kind, cells, RESULT_2))
        running = (
            at(kind, cells, RUNNING_MEAN),
            at(kind, cells, RUNNING_VARIANCE),
            cells[RUNNING_MEAN] != 0,
        )
        return of_channels.finish_forward(
            rows,
            step,
            channels,
            results,
            number(cells, EPSILON),
            running,
            number(cells, MOMENTUM),
            cells[COUNT],
        )

    return forward
