"""Running sums in Vec registers: plain for narrow types, compensated for float64.

Running sums are always float64. (The functions of `float32` first add up a few terms in float32,
and then add these partial sums to a running sum.) If x is float32 or narrower, float64 has at least
29 bits more than the elements of x, and a plain addition is accurate enough. If x is float64, a
float64 sum has no more bits than an element, so a sum is a pair of float64 (high, low). Error-free
transformations make the pair as accurate as a sum that is computed with twice the digits (Ogita,
Rump and Oishi, "Accurate sum and dot product", 2005).

In registers, a sum is a tuple of Vecs: one Vec, or, if the elements of x are float64, two Vecs
(high, low). In memory, every sum is a pair of float64 (high, low). If a sum is plain, its low is 0.
Only the function `value` adds low to high. If high is infinite, `value` returns high alone, because
low is then often NaN.
"""

from __future__ import annotations

from numba import types

from backnorm_kernels.kernels.epilogue import is_forward
from backnorm_kernels.kernels.jit import by_type, inlined
from backnorm_kernels.kernels.memory import (
    load,
    load_first,
    load_like,
    load_one,
    offset,
    store,
    store_one,
)
from backnorm_kernels.kernels.vector import (
    blend,
    lane,
    multiply_add,
    splat,
    sums_of_lanes,
    two_product,
    two_sum,
    where_finite,
)
from backnorm_kernels.scratch import LANES


@by_type
def add(total, term):
    """Return the sum `total` with the Vec `term` added."""

    def compensated(total, term):
        high, lost = two_sum(total[0], term)
        return high, total[1] + lost

    return compensated if len(total) == 2 else lambda total, term: (total[0] + term,)


@by_type
def add_product(total, left, right):
    """Return the sum `total` with left * right added."""

    def compensated(total, left, right):
        product, cut = two_product(left, right)
        high, lost = two_sum(total[0], product)
        return high, total[1] + (cut + lost)

    if len(total) == 2:
        return compensated
    return lambda total, left, right: (multiply_add(left, right, total[0]),)


@by_type
def gradient(dy, index, count, centred):
    """Return elements of dy in the vector type of `centred`.

    In a forward pass, return `centred` itself, so that the second sum is that of the squares.
    """
    if is_forward(dy):
        return lambda dy, index, count, centred: centred
    return lambda dy, index, count, centred: load_like(dy, index, count, centred)


@inlined
def take(operands, index, mean, sum_dy, sum_dy_xmu):
    """Add the terms of elements index .. index+7 to both sums, `sum_dy` and `sum_dy_xmu`."""
    centred = load(operands.x, index) - mean
    slope = gradient(operands.dy, index, None, centred)
    return add(sum_dy, slope), add_product(sum_dy_xmu, slope, centred)


@inlined
def take_first(operands, index, count, mean, sums):
    """Add the terms of `count` elements, from `index` on, to both sums.

    In lanes from `count` on, both factors of the product are set to zero: if only one were zero, 0
    * infinity would give NaN.
    """
    centred = blend(count, load_first(operands.x, index, count) - mean, splat(0.0))
    slope = gradient(operands.dy, index, count, centred)
    return add(sums[0], slope), add_product(sums[1], slope, centred)


@inlined
def pair_add(high, low, other_high, other_low):
    """Return the sum of two pairs as a pair."""
    top, lost = two_sum(high, other_high)
    return top, low + (other_low + lost)


@inlined
def value(high, low):
    """Return, for each lane of two Vec, the float64 nearest to the pair (high, low)."""
    return where_finite(high, high + low, high)


@by_type
def add_totals(x, running, channel_pitch, sums):
    """Add the running sums of eight channels to the pairs in `sums`.

    A channel has two running sums. In a backward pass they are the sums of dy and of dy * (x -
    mean), and in a forward pass those of x - pivot and of its square. Each running sum consists of
    two vectors of partial sums, which `suspend` wrote `2 * LANES` elements apart. The running sums
    of two neighbouring channels begin `channel_pitch` elements apart. The lanes of a sum are always
    added in the same order.
    """
    return _add_totals_compensated if x.dtype == types.float64 else _add_totals_plain


def _add_totals_plain(x, running, channel_pitch, sums):
    values, pitch = sums
    _merge(values, 0, pitch, sums_of_lanes(_all_lanes(running, channel_pitch)), splat(0.0))
    lanes = _all_lanes(offset(running, 4 * LANES), channel_pitch)
    _merge(values, 2 * pitch, 3 * pitch, sums_of_lanes(lanes), splat(0.0))


@inlined
def _all_lanes(running, channel_pitch):
    return (
        load(running, 0) + load(running, 2 * LANES),
        load(running, channel_pitch) + load(running, channel_pitch + 2 * LANES),
        load(running, 2 * channel_pitch) + load(running, 2 * channel_pitch + 2 * LANES),
        load(running, 3 * channel_pitch) + load(running, 3 * channel_pitch + 2 * LANES),
        load(running, 4 * channel_pitch) + load(running, 4 * channel_pitch + 2 * LANES),
        load(running, 5 * channel_pitch) + load(running, 5 * channel_pitch + 2 * LANES),
        load(running, 6 * channel_pitch) + load(running, 6 * channel_pitch + 2 * LANES),
        load(running, 7 * channel_pitch) + load(running, 7 * channel_pitch + 2 * LANES),
    )


def _add_totals_compensated(x, running, channel_pitch, sums):
    values, pitch = sums
    for part in range(2):
        for j in range(LANES):
            of_sum = j * channel_pitch + part * 4 * LANES
            lanes, lost = two_sum(load(running, of_sum), load(running, of_sum + 2 * LANES))
            lows = load(running, of_sum + LANES) + load(running, of_sum + 3 * LANES) + lost
            high, low = 0.0, 0.0
            for i in range(LANES):
                high, low = pair_add(high, low, lane(lanes, i), lane(lows, i))
            at = part * 2 * pitch + j
            high, low = pair_add(load_one(values, at), load_one(values, at + pitch), high, low)
            store_one(values, at, high)
            store_one(values, at + pitch, low)


@inlined
def _merge(values, high, low, more_high, more_low):
    top, bottom = pair_add(load(values, high), load(values, low), more_high, more_low)
    store(values, high, top)
    store(values, low, bottom)


@inlined
def merge_pairs(pairs, k, others, j):
    """Add columns j to j + 7 of `others` to columns k to k + 7 of `pairs`."""
    values, pitch = pairs
    more, other_pitch = others
    _merge(values, k, k + pitch, load(more, j), load(more, j + other_pitch))
    j += 2 * other_pitch
    _merge(values, k + 2 * pitch, k + 3 * pitch, load(more, j), load(more, j + other_pitch))


@by_type
def resume(array, values, at, pitch):
    """Return the sum that `suspend` wrote at `at`."""
    if array.dtype == types.float64:
        return lambda array, values, at, pitch: (
            load(values, at),
            load(values, at + pitch),
        )
    return lambda array, values, at, pitch: (load(values, at),)


@by_type
def suspend(total, values, at, pitch):
    """Write a sum to the index `at` of `values`.

    A compensated sum consists of two vectors. The second one is written `pitch` elements after the
    first.
    """

    def compensated(total, values, at, pitch):
        store(values, at, total[0])
        store(values, at + pitch, total[1])

    if len(total) == 2:
        return compensated
    return lambda total, values, at, pitch: store(values, at, total[0])
