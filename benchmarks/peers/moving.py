"""The kernel of the floor: it reads and writes the arrays of a pass, but computes nothing.

Numba compiles it when this module is imported. All arrays are read as float64, so that a vector has
64 bytes and no conversions are needed. One addition per vector keeps the compiler from removing the
loads. At the two ends of an item, elements that do not fill a whole vector are skipped. The
elements that an item skips have fewer than 128 bytes in all.

The kernel has the record of the geometry *segments*, in which `inner` is the number of elements of
each array, of which an item takes up to `share`.
"""

from __future__ import annotations

from numba import cfunc, types

from backnorm_kernels.kernels.jit import inlined, outlined
from backnorm_kernels.kernels.memory import aligned_head, load, store, store_one, stream
from backnorm_kernels.kernels.record import cells_of, doubles_at, own_of, segments_head
from backnorm_kernels.kernels.vector import lane, splat
from backnorm_kernels.kernels.work_queue import (
    arrive_at_barrier,
    complete_item,
    open_barrier,
    set_flag,
    take_item,
    take_next_item,
    wait_at_barrier,
    wait_for_flag,
)
from backnorm_kernels.record import JOINED, SLOTS
from backnorm_kernels.scratch import LANES

_READY = SLOTS["ready"]


@outlined
def _run(record, index):
    """Read x and dy in the first phase. In the second phase, read both again and write `out`.

    If the record has no dy, only x is read.
    """
    if index == JOINED:
        return 1
    head, cells = segments_head(record), cells_of(record)
    own = own_of(None, head, record, index)
    if index == 0:
        set_flag(cells, _READY)
    else:
        wait_for_flag(cells, _READY)
    x, out, streaming = doubles_at(None, head.x), doubles_at(None, head.out), head.streaming != 0
    dy = doubles_at(None, head.dy if head.dy != 0 else head.x)
    both = head.dy != 0
    size, share, summed, items = head.inner, head.share, head.summed, head.items
    item = take_item(cells, summed, items, index)
    while item < items:
        if item < summed:
            start = item * share
            store_one(own, 0, _sum(x, dy, both, start, min(size, start + share)))
            if arrive_at_barrier(cells, summed):
                open_barrier(cells)
        else:
            if summed > 0:
                wait_at_barrier(cells)
            start = (item - summed) * share
            _copy(x, dy, both, out, start, min(size, start + share), streaming)
        complete_item(cells)
        item = take_next_item(cells, summed, items, index)
    return 0


@inlined
def _sum(x, dy, both, i, end):
    a, b, c, d = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    if both:
        while i + 2 * LANES <= end:
            a = a + load(x, i)
            b = b + load(x, i + LANES)
            c = c + load(dy, i)
            d = d + load(dy, i + LANES)
            i += 2 * LANES
    else:
        while i + 2 * LANES <= end:
            a = a + load(x, i)
            b = b + load(x, i + LANES)
            i += 2 * LANES
    return lane((a + b) + (c + d), 0)


@inlined
def _copy(x, dy, both, out, i, end, streaming):
    if streaming:
        i += aligned_head(out, i, LANES)
        if both:
            while i + LANES <= end:
                stream(out, i, load(x, i) + load(dy, i))
                i += LANES
        else:
            while i + LANES <= end:
                stream(out, i, load(x, i))
                i += LANES
    elif both:
        while i + LANES <= end:
            store(out, i, load(x, i) + load(dy, i))
            i += LANES
    else:
        while i + LANES <= end:
            store(out, i, load(x, i))
            i += LANES


@cfunc(types.int64(types.int64, types.int64))
def run(record, index):
    """Run the kernel as the participant `index` of a record."""
    return _run(record, index)
