"""Running sums in Vec registers: plain for narrow types, compensated for float64.

Running sums are float64 throughout (`singles` has what is added up before, of elements of 16
bits). For x of float32 or narrower that leaves 29 bits to spare and a plain addition will do.
For float64 there is nothing to spare, so a sum is a pair (high, low) kept by error-free
transformations (Ogita, Rump and Oishi, "Accurate sum and dot product", 2005), and comes out as
if computed with twice the digits.

A sum is a tuple of Vec, of one or two elements; the type of the array decides which when the
kernel is compiled. Leaving registers, every sum is a pair of floats (high, low), low being 0
for the plain kind. A pair is not renormalised before `value`, so that an infinite high part
keeps its meaning beside a low part that became NaN.
"""

from __future__ import annotations

from numba import types
from numba.extending import overload

from backnorm.cpu.kernels.jit import inlined
from backnorm.cpu.kernels.memory import (
    load,
    load_first,
    load_one,
    offset,
    store,
    store_one,
)
from backnorm.cpu.kernels.vector import (
    blend,
    lane,
    multiply_add,
    splat,
    sums_of_lanes,
    two_product,
    two_sum,
    where_finite,
)
from backnorm.cpu.scratch import LANES

__all__ = [
    "add",
    "add_product",
    "add_totals",
    "merge_pairs",
    "pair_add",
    "resume",
    "suspend",
    "take",
    "take_first",
    "value",
]


def add(total, term):
    """Return the sum `total` with the Vec `term` added."""


@overload(add)
def _add(total, term):
    if len(total) == 1:
        return lambda total, term: (total[0] + term,)

    def compensated(total, term):
        high, lost = two_sum(total[0], term)
        return high, total[1] + lost

    return compensated


def add_product(total, left, right):
    """Return the sum `total` with left * right added."""


@overload(add_product)
def _add_product(total, left, right):
    if len(total) == 1:
        return lambda total, left, right: (multiply_add(left, right, total[0]),)

    def compensated(total, left, right):
        product, cut = two_product(left, right)
        high, lost = two_sum(total[0], product)
        return high, total[1] + (cut + lost)

    return compensated


def gradient(dy, index, centred):
    """Return dy[index:index+8], or `centred` where dy is None (the sums are then of x alone)."""


@overload(gradient)
def _gradient(dy, index, centred):
    if isinstance(dy, types.NoneType):
        return lambda dy, index, centred: centred
    return lambda dy, index, centred: load(dy, index)


def gradient_first(dy, index, count, centred):
    """Return `count` elements of dy and zeros, or `centred` where dy is None."""


@overload(gradient_first)
def _gradient_first(dy, index, count, centred):
    if isinstance(dy, types.NoneType):
        return lambda dy, index, count, centred: centred
    return lambda dy, index, count, centred: load_first(dy, index, count)


@inlined
def take(x, dy, index, mean, sum_dy, sum_dy_xmu):
    """Add elements index .. index+7 to both sums."""
    centred = load(x, index) - mean
    slope = gradient(dy, index, centred)
    return add(sum_dy, slope), add_product(sum_dy_xmu, slope, centred)


@inlined
def take_first(x, dy, index, count, mean, sum_dy, sum_dy_xmu):
    """Add `count` elements from `index` on to both sums.

    Both factors are zero in the other lanes: 0 * infinity would be NaN.
    """
    centred = blend(count, load_first(x, index, count) - mean, splat(0.0))
    slope = gradient_first(dy, index, count, centred)
    return add(sum_dy, slope), add_product(sum_dy_xmu, slope, centred)


@inlined
def pair_add(high, low, other_high, other_low):
    """Return the sum of two pairs as a pair."""
    top, lost = two_sum(high, other_high)
    return top, low + (other_low + lost)


@inlined
def value(high, low):
    """Return the float64 nearest to each pair of two Vec."""
    return where_finite(high, high + low, high)


def add_totals(x, running, pitch, sums, far):
    """Add the totals of eight accumulators each for sums of dy and of the product to their pairs.

    An accumulator is two sums put down by `suspend`, `2 * LANES` apart; those of the product come
    after those of dy, and the next channel's after `pitch` elements. `sums` are pairs, their parts
    `far` elements apart. The lanes of a sum are always added in the same order.
    """


@overload(add_totals)
def _add_totals(x, running, pitch, sums, far):
    if x.dtype == types.float64:
        return _add_totals_compensated
    return _add_totals_plain


def _add_totals_plain(x, running, pitch, sums, far):
    _merge(sums, 0, far, sums_of_lanes(_all_lanes(running, pitch)), splat(0.0))
    lanes = _all_lanes(offset(running, 4 * LANES), pitch)
    _merge(sums, 2 * far, 3 * far, sums_of_lanes(lanes), splat(0.0))


@inlined
def _all_lanes(running, pitch):
    return (
        load(running, 0) + load(running, 2 * LANES),
        load(running, pitch) + load(running, pitch + 2 * LANES),
        load(running, 2 * pitch) + load(running, 2 * pitch + 2 * LANES),
        load(running, 3 * pitch) + load(running, 3 * pitch + 2 * LANES),
        load(running, 4 * pitch) + load(running, 4 * pitch + 2 * LANES),
        load(running, 5 * pitch) + load(running, 5 * pitch + 2 * LANES),
        load(running, 6 * pitch) + load(running, 6 * pitch + 2 * LANES),
        load(running, 7 * pitch) + load(running, 7 * pitch + 2 * LANES),
    )


def _add_totals_compensated(x, running, pitch, sums, far):
    for part in range(2):
        for j in range(LANES):
            place = j * pitch + part * 4 * LANES
            lanes, lost = two_sum(load(running, place), load(running, place + 2 * LANES))
            lows = load(running, place + LANES) + load(running, place + 3 * LANES) + lost
            high, low = 0.0, 0.0
            for i in range(LANES):
                high, low = pair_add(high, low, lane(lanes, i), lane(lows, i))
            at = part * 2 * far + j
            high, low = pair_add(load_one(sums, at), load_one(sums, at + far), high, low)
            store_one(sums, at, high)
            store_one(sums, at + far, low)


@inlined
def _merge(values, high, low, more_high, more_low):
    top, bottom = pair_add(load(values, high), load(values, low), more_high, more_low)
    store(values, high, top)
    store(values, low, bottom)


@inlined
def merge_pairs(values, far, run, run_far):
    """Add eight channels' pairs of `run` to those of `values`; their parts are so far apart."""
    _merge(values, 0, far, load(run, 0), load(run, run_far))
    _merge(values, 2 * far, 3 * far, load(run, 2 * run_far), load(run, 3 * run_far))


def resume(array, values, place, pitch):
    """Return the sum that `suspend` put down at `place`."""


@overload(resume)
def _resume(array, values, place, pitch):
    if array.dtype == types.float64:
        return lambda array, values, place, pitch: (
            load(values, place),
            load(values, place + pitch),
        )
    return lambda array, values, place, pitch: (load(values, place),)


def suspend(total, values, place, pitch):
    """Put a sum down: a vector at `place` and, if it is compensated, another `pitch` further on."""


@overload(suspend)
def _suspend(total, values, place, pitch):
    if len(total) == 1:
        return lambda total, values, place, pitch: store(values, place, total[0])

    def compensated(total, values, place, pitch):
        store(values, place, total[0])
        store(values, place + pitch, total[1])

    return compensated
