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
from backnorm.kernels.cpu.vector import (
    LANES,
    exact_product,
    exact_sum,
    lane,
    last_lanes,
    load,
    load_one,
    multiply_add,
    splat,
    store,
)

__all__ = [
    "add",
    "add_product",
    "empty_sum",
    "flush",
    "merge_pairs",
    "pair_add",
    "take",
    "take_last",
    "take_one",
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


def gradient_one(dy, index, centred):
    """Return dy[index], or `centred` where dy is None."""


@overload(gradient_one)
def _gradient_one(dy, index, centred):
    if isinstance(dy, types.NoneType):
        return lambda dy, index, centred: centred
    return lambda dy, index, centred: load_one(dy, index)


@inlined
def take(x, dy, index, mean, sum_dy, sum_dy_xmu):
    """Add elements index .. index+7 to both sums."""
    centred = load(x, index) - mean
    slope = gradient(dy, index, centred)
    return add(sum_dy, slope), add_product(sum_dy_xmu, slope, centred)


@inlined
def take_last(x, dy, index, count, mean, sum_dy, sum_dy_xmu):
    """Add the last `count` of elements index .. index+7 to both sums.

    Both factors are cleared in the other lanes: 0 * infinity would be NaN.
    """
    centred = last_lanes(load(x, index) - mean, count)
    slope = last_lanes(gradient(dy, index, centred), count)
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


@inlined
def take_one(x, dy, index, mean, sums):
    """Add element `index` to the pairs (sum_dy high, low, sum_dy_xmu high, low)."""
    centred = load_one(x, index) - mean
    slope = gradient_one(dy, index, centred)
    product, cut = exact_product(slope, centred)
    return pair_add(sums[0], sums[1], slope, 0.0) + pair_add(sums[2], sums[3], product, cut)


def total(sum0, sum1, sum2, sum3):
    """Return the pair (high, low) of all lanes of four sums, always in the same order."""


@overload(total)
def _total(sum0, sum1, sum2, sum3):
    if len(sum0) == 1:

        def plain(sum0, sum1, sum2, sum3):
            lanes = (sum0[0] + sum1[0]) + (sum2[0] + sum3[0])
            low_half = (lane(lanes, 0) + lane(lanes, 1)) + (lane(lanes, 2) + lane(lanes, 3))
            high_half = (lane(lanes, 4) + lane(lanes, 5)) + (lane(lanes, 6) + lane(lanes, 7))
            return low_half + high_half, 0.0

        return plain

    def compensated(sum0, sum1, sum2, sum3):
        left, left_lost = exact_sum(sum0[0], sum1[0])
        right, right_lost = exact_sum(sum2[0], sum3[0])
        lanes, lost = exact_sum(left, right)
        lows = (sum0[1] + sum1[1]) + (sum2[1] + sum3[1]) + (left_lost + right_lost + lost)
        high, low = 0.0, 0.0
        for i in range(LANES):
            high, low = pair_add(high, low, lane(lanes, i), lane(lows, i))
        return high, low

    return compensated


@inlined
def merge_pairs(highs, lows, column, high, low):
    """Add the pairs (high, low) of eight columns to highs and lows from `column` on."""
    top, lost = exact_sum(load(highs, column), high)
    store(highs, column, top)
    store(lows, column, load(lows, column) + (low + lost))


def flush(total, highs, lows, column):
    """Add a sum to the pairs highs[column:column+8], lows[column:column+8], lane by lane."""


@overload(flush)
def _flush(total, highs, lows, column):
    if len(total) == 1:
        return lambda total, highs, lows, column: merge_pairs(
            highs, lows, column, total[0], splat(0.0)
        )
    return lambda total, highs, lows, column: merge_pairs(highs, lows, column, total[0], total[1])
