"""The first and last steps of a kernel: fill the table, and write the per-channel results."""

from __future__ import annotations

from numba import types

from backnorm_kernels.kernels import channels as of_channels
from backnorm_kernels.kernels.bins import digits_of, write_no_bins
from backnorm_kernels.kernels.float32 import about_rounded
from backnorm_kernels.kernels.jit import by_type, inlined, outlined
from backnorm_kernels.kernels.memory import clear, load, offset, store_some
from backnorm_kernels.kernels.record import (
    cancel,
    doubles_at,
    ended,
    singles_at,
    values_at,
)
from backnorm_kernels.kernels.work_queue import set_flag, wait_for_flag
from backnorm_kernels.record import FROM_DATA, MEANS_ALONE, SLOTS
from backnorm_kernels.scratch import FIRST, GAIN, LANES, MEAN, SECOND, SHIFT, SLOPE

_READY = SLOTS["ready"]


@inlined
def before(kind, head, cells, index, table, extents):
    """Fill the table of channels as the record says; participants other than the caller wait.

    If a channel is invalid, the call is cancelled. If a call pauses for signal handlers, the caller
    runs the kernel again after the pause. In this second run the table is already filled.
    """
    if index != 0:
        wait_for_flag(cells, _READY)
    elif head.ready == 0:
        _fill(kind, head, cells, table, extents)


@outlined
def _fill(kind, head, cells, table, extents):
    refused = -1
    if head.prepares != 0:
        refused = _prepare(kind, head, table, extents)
    if refused >= 0:
        cancel(head, cells, refused)
        return
    if head.settles != 0 and head.exchanged != 0:
        of_channels.take(table, doubles_at(kind, head.exchanged))
        _settle(kind, head, table)
    elif head.items == 0:
        # If the call has no items, no participant writes the sums, so they are set to 0 here.
        clear(offset(table.values, FIRST * table.pitch), 2 * table.pitch)
        if head.binned != 0 and head.exchanged != 0:
            out = doubles_at(kind, head.exchanged)
            write_no_bins(digits_of(values_at(kind, head.x)), extents[1], out)
    set_flag(cells, _READY)


@outlined
def after(kind, head, table):
    """Write what the record asks for: results, coefficients or sums of every channel.

    Return the result of the kernel: 1, or -1 - c if channel c is invalid (see `ended`).
    """
    if head.refused != 0:
        return ended(head.refused - 1)
    refused = _finish(kind, head, table) if head.finishes != 0 else -1
    if head.exchanged != 0 and head.settles == 0 and head.binned == 0:
        if head.finishes != 0:
            _write_coefficients(kind, head, table)
        else:
            _write_sums(kind, head, table)
    return ended(refused)


@by_type
def _wider(kind, bits):
    """Return whether the statistics, whose type has `bits` bits, are wider than the elements."""
    own = kind.element.bitwidth
    return lambda kind, bits: bits > own


@by_type
def _settle(kind, head, table):
    """Fill the coefficients from the table, which has either sums, or means and variances."""
    if kind.direction == "forward":
        return lambda kind, head, table: of_channels.settle_forward(table, head.epsilon)
    return lambda kind, head, table: of_channels.settle(table, head.count)


@inlined
def _prepare(kind, head, table, extents):
    """Fill the table; `head.prepares` says from what: statistics, means alone, or samples of x."""
    if _wider(kind, 64) and head.statistics == 64:
        return _prepare_from(doubles_at, kind, head, table, extents)
    if _wider(kind, 32) and head.statistics == 32:
        return _prepare_from(singles_at, kind, head, table, extents)
    return _prepare_from(values_at, kind, head, table, extents)


@by_type
def _prepare_from(at, kind, head, table, extents):
    def from_statistics(at, kind, head, table):
        statistics = (
            at(kind, head.mean),
            at(kind, head.variance),
            at(kind, head.gamma),
            at(kind, head.beta),
        )
        present = (head.gamma != 0, head.beta != 0)
        return of_channels.prepare(table, statistics, present, head.epsilon, head.inverse != 0)

    def forward(at, kind, head, table, extents):
        if head.prepares != FROM_DATA:
            return from_statistics(at, kind, head, table)
        x, affine = values_at(kind, head.x), (at(kind, head.gamma), at(kind, head.beta))
        present = (head.gamma != 0, head.beta != 0)
        of_channels.prepare_forward(table, x, extents, affine, present)
        if head.binned != 0:
            # Set the pivots to 0. A pivot that is computed from x would depend on how the batch is
            # split into parts, but reproducible sums must not depend on the split.
            clear(offset(table.values, MEAN * table.pitch), table.pitch)
        return -1

    def backward(at, kind, head, table, extents):
        if head.prepares != MEANS_ALONE:
            return from_statistics(at, kind, head, table)
        of_channels.prepare_means(table, at(kind, head.mean))
        return -1

    from_statistics = inlined(from_statistics)
    return forward if kind.direction == "forward" else backward


@outlined
def _finish(kind, head, table):
    """Write the two results of every channel: dgamma and dbeta, or mean and variance."""
    if _wider(kind, 64) and head.statistics == 64:
        return _finish_to(doubles_at, kind, head, table)
    if _wider(kind, 32) and head.statistics == 32:
        return _finish_to(singles_at, kind, head, table)
    return _finish_to(values_at, kind, head, table)


@outlined
def _write_sums(kind, head, table):
    """Write the two sums of every channel; in a forward pass, write mean and variance instead."""
    out, channels = doubles_at(kind, head.exchanged), table.channels
    for c in range(0, channels, LANES):
        count = channels - c
        store_some(out, c, count, load(table.values, FIRST * table.pitch + c))
        store_some(out, channels + c, count, load(table.values, SECOND * table.pitch + c))


@inlined
def _write_coefficients(kind, head, table):
    """Write the coefficients of every channel, in the type in which elements are computed."""
    for c in range(0, table.channels, LANES):
        at = table.pitch
        coefficients = (
            load(table.values, MEAN * at + c),
            load(table.values, SHIFT * at + c),
            load(table.values, SLOPE * at + c),
            load(table.values, GAIN * at + c),
        )
        _put_coefficients(kind, head, table.channels, c, coefficients)


@by_type
def _put_coefficients(kind, head, channels, c, coefficients):
    """Write the four coefficients of at most `LANES` channels, of which c is the first, to the
    array whose address is in the record's field `exchanged`.
    """

    def wide(kind, head, channels, c, coefficients):
        _put(doubles_at(kind, head.exchanged), channels, c, coefficients)

    def in_float32(kind, head, channels, c, coefficients):
        if head.in_float64 != 0:
            _put(doubles_at(kind, head.exchanged), channels, c, coefficients)
        else:
            out = singles_at(kind, head.exchanged)
            _put(out, channels, c, about_rounded(kind, head.frozen != 0, coefficients))

    return in_float32 if kind.arithmetic == types.float32 else wide


@inlined
def _put(out, channels, c, coefficients):
    count = channels - c
    store_some(out, c, count, coefficients[0])
    store_some(out, channels + c, count, coefficients[1])
    store_some(out, 2 * channels + c, count, coefficients[2])
    store_some(out, 3 * channels + c, count, coefficients[3])


@by_type
def _finish_to(at, kind, head, table):
    """Write the per-channel results in the type of the statistics. `at` converts a field of the
    record to an address of that type.
    """

    def backward(at, kind, head, table):
        of_channels.finish_backward(table, at(kind, head.result), at(kind, head.result_2))
        return -1

    def forward(at, kind, head, table):
        results = (at(kind, head.result), at(kind, head.result_2))
        running = (
            at(kind, head.running_mean),
            at(kind, head.running_variance),
            head.running_mean != 0,
            head.momentum,
            head.correction,
        )
        return of_channels.finish_forward(table, results, head.epsilon, head.inverse != 0, running)

    return forward if kind.direction == "forward" else backward
