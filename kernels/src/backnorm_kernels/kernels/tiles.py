"""Sums of a few rows, for as many neighbouring columns at a time as fit in registers.

These columns are a *register tile*, a part of the tile of columns in a plan. Each lane of a vector
register belongs to one column: it holds an element or a running sum of this column. A function here
loads the running sums of a register tile into registers, adds the rows to these sums, and stores
the sums again. The rows of a column are always added in their order, so the sum of a column does
not depend on which register tile the column is in. Running sums are stored as `Pairs`: each running
sum has a high and a low part. A running sum that is not compensated uses only its high part.
"""

from __future__ import annotations

from typing import Any

from numba import types

from backnorm_kernels.kernels.jit import by_type, inlined
from backnorm_kernels.kernels.memory import load, offset, prefetch
from backnorm_kernels.kernels.storage import has_feature
from backnorm_kernels.kernels.sums import resume, suspend, take, take_first
from backnorm_kernels.scratch import LANES

# Kernels prefetch about this many elements ahead of those that they read.
_AHEAD = 2048


@inlined
def add_rows(operands, part, pivot, running):
    """Add a few rows to the running sums of their columns.

    `part` is a tuple: the index of the first element, the distance between two rows (in elements),
    and the numbers of rows and columns.
    """
    start, stride, rows, width = part
    run, pitch = running
    k = _add_most(operands, part, pivot, running)
    k = _add_two(operands, part, k, pivot, running)
    products = offset(run, 2 * pitch)
    while k < width:
        i = start + k
        m = load(pivot, k)
        s = resume(operands.x, run, k, pitch)
        p = resume(operands.x, products, k, pitch)
        for _ in range(rows):
            s, p = take_first(operands, i, width - k, m, (s, p))
            i += stride
        suspend(s, run, k, pitch)
        suspend(p, products, k, pitch)
        k += LANES


@inlined
def ahead_of_rows(rows, width):
    """Return how many rows ahead a kernel prefetches if it reads `rows` rows side by side.

    When the backward pass of a layer in a model begins, x is not in any cache, and dy is either in
    the shared cache or in no cache. When the forward pass begins, x is either in the shared cache
    or in no cache. Processors do not by themselves prefetch rows that are read side by side or in
    tiles. In no case do processors prefetch beyond the end of a page of memory.
    """
    return max(rows, _AHEAD // width + 1)


@inlined
def _take(operands, i, pivot, k, sums):
    return take(operands, i, load(pivot, k), sums[0], sums[1])


def _doubled(lanes: int, resume: Any, suspend: Any, take: Any) -> tuple[int, Any, Any, Any]:
    """Return twice `lanes`, and the three functions in versions for twice as many columns."""

    @inlined
    def resume_both(x, run, k, pitch):
        return resume(x, run, k, pitch), resume(x, run, k + lanes, pitch)

    @inlined
    def suspend_both(total, run, k, pitch):
        suspend(total[0], run, k, pitch)
        suspend(total[1], run, k + lanes, pitch)

    @inlined
    def take_both(operands, i, pivot, k, sums):
        s, p = sums
        left, left_product = take(operands, i, pivot, k, (s[0], p[0]))
        right, right_product = take(operands, i + lanes, pivot, k + lanes, (s[1], p[1]))
        return (left, right), (left_product, right_product)

    return 2 * lanes, resume_both, suspend_both, take_both


def _adding(lanes: int, resume: Any, suspend: Any, take: Any) -> Any:
    """Return a function that adds rows to the running sums of columns.

    The returned function begins at column k, processes one whole register tile after another, and
    returns the first column after the last whole tile.
    """

    @inlined
    def add(operands, part, k, pivot, running):
        start, stride, rows, width = part
        run, pitch = running
        products = offset(run, 2 * pitch)
        ahead = ahead_of_rows(rows, width) * stride
        while k + lanes <= width:
            i = start + k
            s = resume(operands.x, run, k, pitch)
            p = resume(operands.x, products, k, pitch)
            for _ in range(rows):
                prefetch(operands.x, i + ahead, lanes)
                prefetch(operands.dy, i + ahead, lanes)
                s, p = take(operands, i, pivot, k, (s, p))
                i += stride
            suspend(s, run, k, pitch)
            suspend(p, products, k, pitch)
            k += lanes
        return k

    return add


# The smallest register tile has two vectors of columns. With a single vector, every addition to it
# would have to wait for the previous addition.
_TWO = _doubled(LANES, resume, suspend, _take)
# Eight vectors of columns need sixteen registers for the two sums of each column, and eight
# registers for the means. These are 24 of the 32 registers of AVX-512.
_EIGHT = _doubled(*_doubled(*_TWO))
_add_two, _add_eight = _adding(*_TWO), _adding(*_EIGHT)


@by_type
def _add_most(operands, part, pivot, running):
    """Add rows in whole register tiles of 64 columns; return the first column after these tiles. If
    registers do not suffice for 64 columns, add nothing and return 0.

    A register tile takes some fixed time in addition to the time of its columns. With 64 instead of
    16 columns, this fixed time is divided among four times as many columns. The sums of a column
    are loaded and stored as often as with 16 columns. On one thread of an Intel Xeon, a float32
    backward pass of NXC arrays in the caches takes 0.96 of the time that it takes with register
    tiles of 16 columns. For the shape (16, 128, 17, 16) it takes 0.91 of that time.
    """
    if operands[0].dtype == types.float64 or not has_feature("avx512f"):
        return lambda operands, part, pivot, running: 0
    return lambda operands, part, pivot, running: _add_eight(operands, part, 0, pivot, running)
