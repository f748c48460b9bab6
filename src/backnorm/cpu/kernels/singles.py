"""Float32 arithmetic, and where its range does not suffice.

Float32 has 13 bits more than float16, so the output of 16-bit arrays is computed in it, and so
are the sums of a backward pass, a few terms at a time. Of float32 arrays they are where that is
asked for: conversions to float64 and back take longer than all else. What float64 has beside more
bits is range; so the float32 result is taken only where its range suffices, and that of float64
elsewhere: an element of the output, a block of a channel's sums. Both follow from the values of
that element or block alone, and therefore the bits do not depend on how the work is shared out.

Output: an element is taken if its float32 is zero or normal (`vector.sound`), because

- overflow anywhere in the formula ends in infinity or NaN, which no later operation hides;
- a subnormal result would be rounded twice, where bfloat16 is subnormal too, or before the last
  operation to fewer bits than others;
- a zero is exact, or a product below 2^-150, which is nearer to zero than to any element, or
  terms that cancel: those are not so small that they lose anything to underflow.

A term of the formula has at most five roundings, those of its coefficients among them, beside what
the sums in those have lost. `narrow_coefficients` makes NaN of the gain of channels whose
coefficients or intermediate values may be so small that float32 does not hold them to 24 bits: none
of their elements is taken.

Sums: `add_strip` has at most four roundings a term, which is 2^-22 of the sum of magnitudes, and
each term that underflows loses at most 2^-150. They are about m, the float32 nearest to the mean;
`recentre` moves them to the mean itself, and has the rule of what is taken. No element is nearer to
the mean than m. One that is m adds nothing; of its neighbours x - m is a power of two, so that its
product with dy is exact, and |x - m| at most twice |x - mean|; of others at most 4/3 of that, where
it is exact, or nearly the same. So the bound holds of the magnitudes about the mean, too.
"""

from __future__ import annotations

from numba import types
from numba.extending import overload

from backnorm.cpu.kernels.jit import inlined
from backnorm.cpu.kernels.memory import (
    load,
    load_one,
    load_singles,
    load_singles_some,
    singles_within,
    store,
    store_one,
    stored_sound,
)
from backnorm.cpu.kernels.relu import Activation, ReLU
from backnorm.cpu.kernels.storage import splits, tells_sound
from backnorm.cpu.kernels.sums import add, pair_add
from backnorm.cpu.kernels.vector import (
    EvenOdd,
    Singles,
    Vec,
    blend,
    both_sound,
    even_odd,
    high_half,
    in_order,
    low_half,
    magnitude,
    multiply_add,
    negated,
    rounded,
    sound,
    splat,
    splat_single,
    where_equal,
    where_less,
)
from backnorm.cpu.scratch import LANES, SINGLES, narrow_pitch

__all__ = [
    "about_rounded",
    "add_strip",
    "add_strip_first",
    "as_singles",
    "both_hold",
    "coefficients_for",
    "end_strip",
    "holds",
    "lanes_of",
    "narrow_coefficients",
    "ordered_for",
    "recentre",
    "repeat_first",
    "splat_of",
    "vector_of",
]

# Coefficients and shifts below this may lose bits, to others or to underflow.
_LEAST = 2.0**-100

# A sum of products of fewer than 2^30 elements that is as large as this has lost less than 2^-40
# of itself to underflow.
_LEAST_SUM = 2.0**-80


_row = inlined(narrow_pitch)


def coefficients_for(kind, table, pitch, place, count):
    """Return where the coefficients for writing elements are, and the distance of their rows.

    That is the table itself, or the place where `narrow_coefficients` puts the float32 ones.
    """


@overload(coefficients_for)
def _coefficients_for(kind, table, pitch, place, count):
    if kind.arithmetic == types.float32:
        return lambda kind, table, pitch, place, count: (singles_within(place), _row(count))
    return lambda kind, table, pitch, place, count: (table, pitch)


def lanes_of(coefficients):
    """Return the lanes of vectors of these coefficients."""


@overload(lanes_of)
def _lanes_of(coefficients):
    lanes = SINGLES if coefficients.dtype == types.float32 else LANES
    return lambda coefficients: lanes


def splat_of(coefficients, index):
    """Return a vector of one coefficient."""


@overload(splat_of)
def _splat_of(coefficients, index):
    if coefficients.dtype == types.float32:
        return lambda coefficients, index: splat_single(load_one(coefficients, index))
    return lambda coefficients, index: splat(load_one(coefficients, index))


def vector_of(coefficients, index):
    """Return a vector of neighbouring coefficients."""


@overload(vector_of)
def _vector_of(coefficients, index):
    if coefficients.dtype == types.float32:
        return lambda coefficients, index: load_singles(coefficients, index)
    return lambda coefficients, index: load(coefficients, index)


def ordered_for(out, coefficients):
    """Return a vector of each of four coefficients, in the order that is best for writing `out`."""


@overload(ordered_for)
def _ordered_for(out, coefficients):
    if coefficients.dtype != Singles or not splits(out.dtype):
        return lambda out, coefficients: coefficients
    return lambda out, coefficients: (
        even_odd(coefficients[0]),
        even_odd(coefficients[1]),
        even_odd(coefficients[2]),
        even_odd(coefficients[3]),
    )


def as_singles(value):
    """Return a vector with its lanes in the order of memory."""


@overload(as_singles)
def _as_singles(value):
    if value == EvenOdd:
        return lambda value: in_order(value)
    return lambda value: value


def holds(value, count):
    """Return whether the first `count` lanes of an output are as good as those of float64."""


@overload(holds)
def _holds(value, count):
    if value == Vec:
        return lambda value, count: True
    if value == EvenOdd:
        # Whole vectors alone are in this order.
        return lambda value, count: sound(value)

    def single(value, count):
        if count < SINGLES:
            return sound(blend(count, value, splat_single(0.0)))
        return sound(value)

    return single


def both_hold(x, dy, out, left, right):
    """Return whether all lanes of two vectors of an output do."""


@overload(both_hold)
def _both_hold(x, dy, out, left, right):
    if left == Vec:
        return lambda x, dy, out, left, right: True
    # That asks again if there are zeros, of which a ReLU makes many, a Hardswish some, and of which
    # a gradient that came from one has as many.
    many_zeros = isinstance(x, types.NoneType) or isinstance(dy, ReLU | Activation)
    if many_zeros or not tells_sound(out.dtype):
        return lambda x, dy, out, left, right: both_sound(left, right)
    return lambda x, dy, out, left, right: stored_sound(out, left, right) or both_sound(left, right)


def narrow_coefficients(head, x, dy, table, pitch, first, end, coefficients):
    """Write the float32 coefficients of channels first .. end-1, if there are any.

    `table` and its `pitch` have those in float64; they are written to `coefficients`, which is what
    `coefficients_for` returned. Up to seven places after the last are overwritten.

    Of the mean they have the nearest float32, which is subtracted first. The rest of it is part of
    a constant, in which it does not cancel: no element of 32 bits or less is nearer to the mean
    than its nearest float32, so the rest is not more than x - mean. If all is to be in float64,
    every channel is refused.
    """


@overload(narrow_coefficients)
def _narrow_coefficients(head, x, dy, table, pitch, first, end, coefficients):
    if coefficients.types[0].dtype != types.float32:
        return lambda head, x, dy, table, pitch, first, end, coefficients: None

    def narrow(head, x, dy, table, pitch, first, end, coefficients):
        values, far = coefficients
        for c in range(first, end, LANES):
            given = (
                load(table, c),
                load(table, c + pitch),
                load(table, c + 2 * pitch),
                load(table, c + 3 * pitch),
            )
            mean, shift, slope, gain = _narrowed(x, dy, given)
            if head.in_float64 != 0:
                gain = splat(float("nan"))
            store(values, c, mean)
            store(values, c + far, shift)
            store(values, c + 2 * far, slope)
            store(values, c + 3 * far, gain)

    return narrow


def _narrowed(x, dy, given):
    """Return four coefficients as they will be rounded to float32; the gain is NaN if refused."""


@overload(_narrowed)
def _narrowed_of(x, dy, given):
    if isinstance(x, types.NoneType):
        return lambda x, dy, given: (given[0], given[1], given[2], _unless_tiny(given[3], given[3]))
    return _narrowed_forward if isinstance(dy, types.NoneType) else _narrowed_backward


def _narrowed_forward(x, dy, given):
    mean, shift, slope, gain = _about_rounded_forward(given)
    return mean, shift, slope, _unless_tiny(slope, _unless_tiny(gain, gain))


def _narrowed_backward(x, dy, given):
    mean, shift, slope, gain = _about_rounded_backward(given)
    zero, nan = splat(0.0), splat(float("nan"))
    kept = _unless_tiny(slope, _unless_tiny(gain, gain))
    # Without shift and slope there is nothing to add; a tiny sum would be rounded to 2^-149.
    alone = where_equal(shift, zero, where_equal(slope, zero, kept, nan), nan)
    return mean, shift, slope, where_less(magnitude(shift), splat(_LEAST), alone, kept)


def about_rounded(kind, given):
    """Return four coefficients for elements less the float32 nearest to the mean."""


@overload(about_rounded)
def _about_rounded(kind, given):
    if kind.operation == "frozen":
        return lambda kind, given: given
    if kind.operation == "forward":
        return lambda kind, given: _about_rounded_forward(given)
    return lambda kind, given: _about_rounded_backward(given)


@inlined
def _about_rounded_forward(given):
    mean, shift, slope, gain = given
    rest = (mean - rounded(mean)) + shift
    return mean, shift, multiply_add(negated(gain), rest, slope), gain


@inlined
def _about_rounded_backward(given):
    mean, shift, slope, gain = given
    return mean, multiply_add(rounded(mean) - mean, slope, shift), slope, gain


@inlined
def _unless_tiny(tested, gain):
    """Return `gain`, or NaN in the lanes where `tested` is tiny but not zero."""
    refused = where_equal(tested, splat(0.0), gain, splat(float("nan")))
    return where_less(magnitude(tested), splat(_LEAST), refused, gain)


@inlined
def repeat_first(coefficients, width):
    """Repeat the first float32 coefficients after the last, for vectors from row to row."""
    values, far = coefficients
    for row in range(4 if lanes_of(values) == SINGLES else 0):
        for k in range(SINGLES):
            at = row * far
            store_one(values, at + width + k, load_one(values, at + k % width))


@inlined
def add_strip(x, dy, i, apart, mean, totals):
    """Add four vectors of elements, `apart` elements apart, to the four `totals`.

    Those are sums of dy, of the first and the last eight lanes, and such sums of the products.
    """
    d0, d1 = load_singles(dy, i), load_singles(dy, i + apart)
    d2, d3 = load_singles(dy, i + 2 * apart), load_singles(dy, i + 3 * apart)
    c0, c1 = load_singles(x, i) - mean, load_singles(x, i + apart) - mean
    c2, c3 = load_singles(x, i + 2 * apart) - mean, load_singles(x, i + 3 * apart) - mean
    return _added(d0, d1, d2, d3, c0, c1, c2, c3, totals)


@inlined
def add_strip_first(x, dy, i, apart, counts, mean, totals):
    """Add the first elements, as many as `counts` says, of four vectors as `add_strip` does.

    Both factors are zero in the other lanes.
    """
    d0, c0 = _pair(x, dy, i, counts[0], mean)
    d1, c1 = _pair(x, dy, i + apart, counts[1], mean)
    d2, c2 = _pair(x, dy, i + 2 * apart, counts[2], mean)
    d3, c3 = _pair(x, dy, i + 3 * apart, counts[3], mean)
    return _added(d0, d1, d2, d3, c0, c1, c2, c3, totals)


@inlined
def _pair(x, dy, i, count, mean):
    centred = load_singles_some(x, i, count) - mean
    return load_singles_some(dy, i, count), blend(count, centred, splat_single(0.0))


@inlined
def end_strip(x, dy, i, mean, before, totals):
    """Add the last vector of a strip to the totals, and what is known of the first three.

    `before` are the sum and the sum of products of the first two, and those of the third.
    """
    gradient = load_singles(dy, i)
    product = multiply_add(gradient, load_singles(x, i) - mean, before[3])
    return _widened(before[0] + (before[2] + gradient), before[1] + product, totals)


@inlined
def _added(d0, d1, d2, d3, c0, c1, c2, c3, totals):
    product = multiply_add(d1, c1, d0 * c0) + multiply_add(d3, c3, d2 * c2)
    return _widened((d0 + d1) + (d2 + d3), product, totals)


@inlined
def _widened(total, product, totals):
    return (
        add(totals[0], low_half(total)),
        add(totals[1], high_half(total)),
        add(totals[2], low_half(product)),
        add(totals[3], high_half(product)),
    )


@inlined
def recentre(mean, sums, far):
    """Turn the sums of eight channels about the nearest float32 of their mean to those about it.

    `sums` are their pairs, parts `far` elements apart. Return a Vec of zeros, with NaN in the lanes
    whose sums must be taken in float64: those of terms that overflowed, and of products so small
    that some may have underflowed; so also sums that are still zero.
    """
    sum_dy = load(sums, 0)
    moved = (rounded(mean) - mean) * (sum_dy + load(sums, far))
    high, low = pair_add(load(sums, 2 * far), load(sums, 3 * far), moved, splat(0.0))
    store(sums, 2 * far, high)
    store(sums, 3 * far, low)
    kept = (sum_dy - sum_dy) + (high - high)
    return where_less(magnitude(high), splat(_LEAST_SUM), splat(float("nan")), kept)
