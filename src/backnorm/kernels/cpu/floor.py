"""The floor of a benchmark: the same memory moved, and nothing computed.

Arrays are taken as float64 whatever their elements are, so that a vector is 64 bytes and no
conversion costs anything. One addition per vector keeps the loads alive. At most 63 bytes at the
end are left alone.
"""

from __future__ import annotations

import numpy as np

from backnorm.kernels.cpu.jit import inlined, kernel
from backnorm.kernels.cpu.memory import address, aligned_head, load, store, store_one, stream
from backnorm.kernels.cpu.threads import claim, enter, finish, leave, parallel
from backnorm.kernels.cpu.vector import LANES, lane, splat

__all__ = ["move"]

# Elements of an item at the most. Measured on 160 MB (AMD EPYC, 2 threads), backward, GB/s: 32 KiB
# 43, 64 KiB 67, 128 KiB 76, 256 KiB 77, 512 KiB 78, 1 MiB 80; on 5 MB 512 KiB are best.
_ITEM = 1 << 16

# Items for each thread at the least, so that all end together.
_ITEMS = 4


@kernel
def _read(x, dy, share, kept, cursor, summed, items, index):
    """Read x, and dy unless it is None, `share` elements an item."""
    rung = enter(cursor)
    x_, dy_, size = address(x), address(dy), x.size
    last = False
    item = claim(cursor, summed, items, index)
    while item < items:
        start = item * share
        store_one(kept, item, _sum(x_, dy_, start, min(size, start + share)))
        last = finish(cursor, items)
        item = claim(cursor, summed, items, index)
    return leave(cursor, items, index, rung, last)


@kernel
def _write(x, dy, out, share, streaming, cursor, summed, items, index):
    """Read x, and dy unless it is None, and write out, `share` elements an item."""
    rung = enter(cursor)
    x_, dy_, out_, size = address(x), address(dy), address(out), x.size
    last = False
    item = claim(cursor, summed, items, index)
    while item < items:
        start = item * share
        _copy(x_, dy_, out_, start, min(size, start + share), streaming)
        last = finish(cursor, items)
        item = claim(cursor, summed, items, index)
    return leave(cursor, items, index, rung, last)


@inlined
def _sum(x, dy, i, end):
    a, b, c, d = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    while i + 2 * LANES <= end:
        a = a + load(x, i)
        b = b + load(x, i + LANES)
        if dy is not None:
            c = c + load(dy, i)
            d = d + load(dy, i + LANES)
        i += 2 * LANES
    return lane((a + b) + (c + d), 0)


@inlined
def _copy(x, dy, out, i, end, streaming):
    if streaming:
        i += aligned_head(out, i, LANES)
        while i + LANES <= end:
            stream(out, i, _one(x, dy, i))
            i += LANES
    else:
        while i + LANES <= end:
            store(out, i, _one(x, dy, i))
            i += LANES


@inlined
def _one(x, dy, i):
    value = load(x, i)
    if dy is not None:
        value = value + load(dy, i)
    return value


def move(
    x: np.ndarray,
    dy: np.ndarray | None,
    out: np.ndarray,
    *,
    reads_first: bool,
    streaming: bool,
    threads: int,
) -> None:
    """Read x and dy (if `reads_first`), then read both again and write as many bytes to `out`.

    Parameters
    ----------
    x, dy, out : numpy.ndarray
        Contiguous float64, of one length. What `out` holds afterwards means nothing.
    reads_first : bool
        Whether there is a reduction before the writing.
    streaming : bool
        Whether to write past the caches.
    threads : int
    """
    even = -(-x.size // (_ITEMS * threads * LANES)) * LANES
    share = min(_ITEM, even)
    items = -(-x.size // share)
    if reads_first:
        parallel(_read, (x, dy, share, np.empty(items)), items, items, threads)
    parallel(_write, (x, dy, out, share, streaming), 0, items, threads)
