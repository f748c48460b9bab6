"""What a kernel does before and after its items: channels from the record, and back to it."""

from __future__ import annotations

from numba import types
from numba.extending import overload

from backnorm.cpu.kernels import channels as of_channels
from backnorm.cpu.kernels.bins import digits_of, write_no_bins
from backnorm.cpu.kernels.cursor import await_flag, raise_flag
from backnorm.cpu.kernels.jit import inlined
from backnorm.cpu.kernels.memory import clear, load, offset, store_some
from backnorm.cpu.kernels.record import (
    call_off,
    doubles_at,
    ended,
    gradient_of,
    singles_at,
    values_at,
)
from backnorm.cpu.kernels.singles import about_rounded
from backnorm.cpu.record import FROM_DATA, MEANS_ALONE, SLOTS
from backnorm.cpu.scratch import FIRST, GAIN, LANES, MEAN, SECOND, SHIFT, SLOPE

__all__ = ["after", "before"]

_READY = SLOTS["ready"]


@inlined
def before(kind, head, cells, index, table, pitch, extents, own):
    """Fill the table of channels as the record asks, or, all but the caller, wait until it is.

    If a channel is refused, all is called off. The second time that a caller enters, all that is
    done already.
    """
    if index != 0:
        await_flag(cells, _READY)
        return
    if head.ready != 0:
        return
    refused = -1
    if head.prepares != 0:
        refused = _prepare(kind, head, table, pitch, extents)
    if refused >= 0:
        call_off(head, cells, refused)
        return
    if head.settles != 0 and head.exchanged != 0:
        if head.binned != 0:
            _settle_bins(kind, head, cells, table, pitch, extents[1], own)
        else:
            of_channels.take(table, pitch, extents[1], doubles_at(kind, head.exchanged))
            _settle(kind, head, table, pitch, extents[1])
    elif head.items == 0:
        # Nothing will be summed: the sums of no elements are zero.
        clear(offset(table, FIRST * pitch), 2 * pitch)
        if head.binned != 0 and head.exchanged != 0:
            x, out = values_at(kind, head.x), doubles_at(kind, head.exchanged)
            write_no_bins(digits_of(x), extents[1], out)
    raise_flag(cells, _READY)


@inlined
def after(kind, head, table, pitch, channels):
    """Write the results of channels, if the record asks; return what the kernel returns."""
    if head.refused != 0:
        return ended(head.refused - 1)
    refused = _finish(kind, head, table, pitch, channels) if head.finishes != 0 else -1
    if head.exchanged != 0 and head.settles == 0 and head.binned == 0:
        if head.finishes != 0:
            _write_coefficients(kind, head, table, pitch, channels)
        else:
            _write_sums(kind, head, table, pitch, channels)
    return ended(refused)


def wider(kind, bits):
    """Return whether statistics of so many bits are of another type than the elements."""


@overload(wider)
def _wider(kind, bits):
    own = kind.element.bitwidth
    return lambda kind, bits: bits > own


@inlined
def _settle_bins(kind, head, cells, table, pitch, channels, own):
    """Fill the coefficients from reproducible sums that came from elsewhere."""
    x, dy, bins = values_at(kind, head.x), gradient_of(kind, head, cells), head.exchanged
    given = (doubles_at(kind, bins), own)
    of_channels.settle_bins(x, dy, given, head.count, table, pitch, channels, head.epsilon)


def _settle(kind, head, table, pitch, channels):
    """Fill the coefficients from sums, or from mean and variance, that came from elsewhere."""


@overload(_settle)
def _settle_of(kind, head, table, pitch, channels):
    if kind.operation == "forward":
        return lambda kind, head, table, pitch, channels: of_channels.settle_forward(
            table, pitch, channels, head.epsilon
        )
    return lambda kind, head, table, pitch, channels: of_channels.settle(
        table, pitch, channels, head.count
    )


@inlined
def _prepare(kind, head, table, pitch, extents):
    """Fill the table from statistics, from means alone, or from samples of x."""
    if wider(kind, 64) and head.statistics == 64:
        return _prepare_from(doubles_at, kind, head, table, pitch, extents)
    if wider(kind, 32) and head.statistics == 32:
        return _prepare_from(singles_at, kind, head, table, pitch, extents)
    return _prepare_from(values_at, kind, head, table, pitch, extents)


@inlined
def _prepare_from(at, kind, head, table, pitch, extents):
    gamma, beta = at(kind, head.gamma), at(kind, head.beta)
    present = (head.gamma != 0, head.beta != 0)
    if head.prepares == FROM_DATA:
        x = values_at(kind, head.x)
        of_channels.prepare_forward(table, pitch, x, extents, gamma, beta, present)
        if head.binned != 0:
            # Of what lies elsewhere nothing is known: there is no pivot.
            clear(offset(table, MEAN * pitch), pitch)
        return -1
    mean = at(kind, head.mean)
    if head.prepares == MEANS_ALONE:
        of_channels.prepare_means(table, pitch, extents[1], mean)
        return -1
    given = (mean, at(kind, head.variance), gamma, beta)
    return of_channels.prepare(
        table, pitch, extents[1], given, present, head.epsilon, head.inverse != 0
    )


@inlined
def _finish(kind, head, table, pitch, channels):
    """Write the two results of every channel."""
    if wider(kind, 64) and head.statistics == 64:
        return _finish_to(doubles_at, kind, head, table, pitch, channels)
    if wider(kind, 32) and head.statistics == 32:
        return _finish_to(singles_at, kind, head, table, pitch, channels)
    return _finish_to(values_at, kind, head, table, pitch, channels)


@inlined
def _write_sums(kind, head, table, pitch, channels):
    """Write the sums, or mean and variance, of every channel."""
    out = doubles_at(kind, head.exchanged)
    for c in range(0, channels, LANES):
        count = channels - c
        store_some(out, c, count, load(table, FIRST * pitch + c))
        store_some(out, channels + c, count, load(table, SECOND * pitch + c))


def _write_coefficients(kind, head, table, pitch, channels):
    """Write the coefficients of every channel, in the type that elements are computed in."""


@overload(_write_coefficients)
def _write_coefficients_of(kind, head, table, pitch, channels):
    def wide(kind, head, table, pitch, channels):
        out = doubles_at(kind, head.exchanged)
        for c in range(0, channels, LANES):
            _put(out, channels, c, _coefficients(table, pitch, c))

    if kind.arithmetic != types.float32:
        return wide

    def narrow(kind, head, table, pitch, channels):
        if head.in_float64 != 0:
            wide(kind, head, table, pitch, channels)
            return
        out = singles_at(kind, head.exchanged)
        for c in range(0, channels, LANES):
            _put(out, channels, c, about_rounded(kind, _coefficients(table, pitch, c)))

    wide = inlined(wide)
    return narrow


@inlined
def _coefficients(table, pitch, c):
    """Return the mean, shift, slope and gain of eight channels."""
    return (
        load(table, MEAN * pitch + c),
        load(table, SHIFT * pitch + c),
        load(table, SLOPE * pitch + c),
        load(table, GAIN * pitch + c),
    )


@inlined
def _put(out, channels, c, values):
    """Write the four coefficients of the channels from c on to their rows."""
    count = channels - c
    store_some(out, c, count, values[0])
    store_some(out, channels + c, count, values[1])
    store_some(out, 2 * channels + c, count, values[2])
    store_some(out, 3 * channels + c, count, values[3])


def _finish_to(at, kind, head, table, pitch, channels):
    """Write the results to statistics of a type, taken from the record by `at`."""


@overload(_finish_to)
def _finish_to_of(at, kind, head, table, pitch, channels):
    if kind.operation != "forward":

        def backward(at, kind, head, table, pitch, channels):
            dgamma, dbeta = at(kind, head.result), at(kind, head.result_2)
            of_channels.finish_backward(table, pitch, channels, dgamma, dbeta)
            return -1

        return backward

    def forward(at, kind, head, table, pitch, channels):
        results = (at(kind, head.result), at(kind, head.result_2))
        running = (
            at(kind, head.running_mean),
            at(kind, head.running_variance),
            head.running_mean != 0,
            head.momentum,
            head.correction,
        )
        return of_channels.finish_forward(
            table,
            pitch,
            channels,
            results,
            head.epsilon,
            head.inverse != 0,
            running,
        )

    return forward
