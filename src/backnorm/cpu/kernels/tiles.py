"""Sums of a few rows, for as many neighbouring columns at a time as registers hold.

A column is a lane. A tile of columns takes up its running sums, adds the rows to them in registers,
and puts them down, so a column's sum does not depend on the tile that it is in.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import overload

from backnorm.cpu.kernels.jit import inlined
from backnorm.cpu.kernels.memory import load, offset, prefetch
from backnorm.cpu.kernels.storage import has_feature
from backnorm.cpu.kernels.sums import resume, suspend, take, take_first
from backnorm.cpu.scratch import LANES

__all__ = ["add_rows", "ahead_of_rows"]

# Elements between what is summed, or written, and what is prefetched.
_AHEAD = 2048


@inlined
def add_rows(x, dy, start, stride, rows, width, pivot, run, pitch):
    """Add a few rows to the running sums of their columns."""
    part = (start, stride, rows, width)
    k = _add_wide(x, dy, part, pivot, run, pitch)
    k = _add_narrow(x, dy, part, k, pivot, run, pitch)
    products = offset(run, 2 * pitch)
    while k < width:
        i = start + k
        m = load(pivot, k)
        s, p = resume(x, run, k, pitch), resume(x, products, k, pitch)
        for _ in range(rows):
            s, p = take_first(x, dy, i, width - k, m, s, p)
            i += stride
        suspend(s, run, k, pitch)
        suspend(p, products, k, pitch)
        k += LANES


@inlined
def ahead_of_rows(rows, width):
    """Return how many rows before its turn one is prefetched, `rows` being side by side.

    In a model x is in no cache when its backward pass comes to it, and in the shared one, at best,
    when its forward pass does, as dy is; rows side by side, or of tiles, processors do not read
    ahead by themselves, and where they do, not beyond a page.
    """
    return max(rows, _AHEAD // width + 1)


@inlined
def _take(x, dy, i, pivot, k, s, p):
    return take(x, dy, i, load(pivot, k), s, p)


def _doubled(lanes: int, resume: Any, suspend: Any, take: Any) -> tuple[int, Any, Any, Any]:
    """Return how to take up, put down and add to sums of twice as many columns, as pairs."""

    @inlined
    def resume_both(x, run, k, pitch):
        return resume(x, run, k, pitch), resume(x, run, k + lanes, pitch)

    @inlined
    def suspend_both(total, run, k, pitch):
        suspend(total[0], run, k, pitch)
        suspend(total[1], run, k + lanes, pitch)

    @inlined
    def take_both(x, dy, i, pivot, k, s, p):
        left, left_product = take(x, dy, i, pivot, k, s[0], p[0])
        right, right_product = take(x, dy, i + lanes, pivot, k + lanes, s[1], p[1])
        return (left, right), (left_product, right_product)

    return 2 * lanes, resume_both, suspend_both, take_both


def _adding(lanes: int, resume: Any, suspend: Any, take: Any) -> Any:
    """Return what adds rows of all whole tiles of columns from k on, and returns where they end."""

    @inlined
    def add(x, dy, part, k, pivot, run, pitch):
        start, stride, rows, width = part
        products = offset(run, 2 * pitch)
        ahead = ahead_of_rows(rows, width) * stride
        while k + lanes <= width:
            i = start + k
            s, p = resume(x, run, k, pitch), resume(x, products, k, pitch)
            for _ in range(rows):
                prefetch(x, i + ahead, lanes)
                prefetch(dy, i + ahead, lanes)
                s, p = take(x, dy, i, pivot, k, s, p)
                i += stride
            suspend(s, run, k, pitch)
            suspend(p, products, k, pitch)
            k += lanes
        return k

    return add


# Two vectors: additions of one would wait for each other.
_TWO = _doubled(LANES, resume, suspend, _take)
# Sixteen sums, and means: most of the registers of AVX-512.
_EIGHT = _doubled(*_doubled(*_TWO))
_add_narrow, _add_eight = _adding(*_TWO), _adding(*_EIGHT)


def _add_wide(x, dy, part, pivot, run, pitch):
    """Add rows of whole tiles of 64 columns, where there are registers for it; return their end.

    Sums are taken up and put down as often, but what goes with it is done once for four times as
    many columns: a float32 backward pass of NXC takes 0.96 of the time where it is in the caches,
    (16, 128, 17, 16) 0.91 (one thread of an Intel Xeon).
    """


@overload(_add_wide)
def _add_wide_of(x, dy, part, pivot, run, pitch):
    if x.dtype == types.float64 or not has_feature("avx512f"):
        return lambda x, dy, part, pivot, run, pitch: 0
    return lambda x, dy, part, pivot, run, pitch: _add_eight(x, dy, part, 0, pivot, run, pitch)
