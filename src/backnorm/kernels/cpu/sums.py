"""Running sums in Vec registers: plain for narrow types, compensated for float64.

Sums are float64 throughout. For x of float32 or narrower that leaves 29 bits to spare and a
plain addition will do. For float64 there is nothing to spare, so a sum is a pair (high, low)
kept by error-free transformations (Ogita, Rump and Oishi, "Accurate sum and dot product",
2005), and comes out as if computed with twice the digits.

A sum is a tuple of Vec, of one or two elements; the type of the array decides which when the
kernel is compiled. Leaving registers, every sum is a pair of floats (high, low), low being 0
for the plain kind. A pair is not renormalised before `value`, so that an infinite high part
keeps its meaning beside a low part that became NaN.
"""

from __future__ import annotations

import math

from numba import types
from numba.extending import overload

from backnorm.kernels.cpu.jit import inlined
from backnorm.kernels.cpu.memory import (
    load,
    load_first,
    store,
)
from backnorm.kernels.cpu.vector import (
    LANES,
    blend,
    exact_product,
    exact_sum,
    lane,
    multiply_add,
    splat,
)

__all__ = [
    "add",
    "add_product",
    "empty_sum",
    "merge_pairs",
    "pair_add",
    "resume",
    "suspend",
    "take",
    "take_first",
    "total",
    "value",
]


def empty_sum(array):
    """Return the empty sum for elements stored as in `array`."""


@overload(empty_sum)
def _empty_sum(array):
    if array.dtype == types.float64:
        return lambda array: (splat(0.0), splat(0.0))
    return lambda array: (splat(0.0),)


def add(total, term):
    """Return the sum `total` with the Vec `term` added."""


@overload(add)
def _add(total, term):
    if len(total) == 1:
        return lambda total, term: (total[0] + term,)

    def compensated(total, term):
        high, lost = exact_sum(total[0], term)
        return high, total[1] + lost

    return compensated


def add_product(total, left, right):
    """Return the sum `total` with left * right added."""


@overload(add_product)
def _add_product(total, left, right):
    if len(total) == 1:
        return lambda total, left, right: (multiply_add(left, right, total[0]),)

    def compensated(total, left, right):
        product, cut = exact_product(left, right)
        high, lost = exact_sum(total[0], product)
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
    top, lost = exact_sum(high, other_high)
    return top, low + (other_low + lost)


@inlined
def value(high, low):
    """Return the float64 nearest to a pair."""
    return high + low if math.isfinite(high) else high


def total(left, right):
    """Return the pair (high, low) of all lanes of two sums, always in the same order."""


@overload(total)
def _total(left, right):
    if len(left) == 1:

        def plain(left, right):
            lanes = left[0] + right[0]
            low_half = (lane(lanes, 0) + lane(lanes, 1)) + (lane(lanes, 2) + lane(lanes, 3))
            high_half = (lane(lanes, 4) + lane(lanes, 5)) + (lane(lanes, 6) + lane(lanes, 7))
            return low_half + high_half, 0.0

        return plain

    def compensated(left, right):
        lanes, lost = exact_sum(left[0], right[0])
        lows = left[1] + right[1] + lost
        high, low = 0.0, 0.0
        for i in range(LANES):
            high, low = pair_add(high, low, lane(lanes, i), lane(lows, i))
        return high, low

    return compensated


@inlined
def merge_pairs(values, high, low, run, run_high, run_low):
    """Add eight pairs of `run` to eight pairs of `values`; indices say where each part begins."""
    top, lost = exact_sum(load(values, high), load(run, run_high))
    store(values, high, top)
    store(values, low, load(values, low) + (load(run, run_low) + lost))


def resume(array, values, high, low):
    """Return the sum that `suspend` put down at values[high:high+8] and values[low:low+8]."""


@overload(resume)
def _resume(array, values, high, low):
    if array.dtype == types.float64:
        return lambda array, values, high, low: (load(values, high), load(values, low))
    return lambda array, values, high, low: (load(values, high),)


def suspend(total, values, high, low):
    """Put a sum down in values[high:high+8] and, if it is compensated, values[low:low+8]."""


@overload(suspend)
def _suspend(total, values, high, low):
    if len(total) == 1:
        return lambda total, values, high, low: store(values, high, total[0])

    def compensated(total, values, high, low):
        store(values, high, total[0])
        store(values, low, total[1])

    return compensated
