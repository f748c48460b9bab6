"""Reproducible sums: the same bits for every order and every division of the terms.

A sum is stored as integers. A *bin* has 32 binary digits at a fixed position: bin j counts
multiples of 2^(32 j), for any integer j. A term is split at these positions: it is rounded to a
multiple of the unit of a bin, and the remainder is split further. Each bin adds up integers, so the
order has no effect. A sum has three adjacent bins (four if elements are float64). The term with the
largest magnitude determines which bin is the top bin. The part of a term below the lowest bin is
rounded to a multiple of that bin's unit. How a term is split depends only on the term and on the
positions of the bins. If a term is too large for the top bin, a higher bin becomes the top bin, and
the lowest bins are dropped. The result is the same as if the sum had begun with the higher top bin.

A sum is stored as a *limit*, followed by one *digit* for each bin, from the top bin down. The limit
is 2^(32 j + 31), where j is the top bin; the magnitudes of all terms are below the limit. A term is
rounded by at most half the unit of the lowest bin. With three bins, half the unit of the lowest bin
is 2^-65 of the unit of the top bin. The largest magnitude of all terms is at least half the unit of
the top bin. So a term is rounded by at most 2^-64 of the largest magnitude (with four bins, by
2^-96 of it). This bound does not hold if all terms are tiny, because the unit of the lowest bin is
never below 2^-1056. A digit is an int64, which has room for 2^31 elements, because an element adds
at most 1.5 * 2^31 to a digit. This is true even of an element with two terms (a float64 product and
the rounding error of this product).

A term of magnitude 2^991 or more (possible only with float64 elements) counts as infinite. If a
term of a sum is NaN or infinite, the limit of the sum is 0. Its first three digits are then three
counts: of the terms that are NaN, of those that are +infinity, and of those that are -infinity.

The method is based on Demmel and Nguyen, "Parallel Reproducible Summation", 2015, and Ahrens,
Demmel and Nguyen, "Algorithms for Efficient Reproducible Floating Point Summation", 2020. In these
papers, bins are floating-point numbers, so carries must be propagated after a limited number of
terms. Here, bins are integers with room for the terms of 2^31 elements. So no carries are
propagated while terms are added, and the kernels need not count the terms.

Bins are stored in float64 memory, in rows that are `pitch` elements apart. Each column (a lane of a
vector) has two sums, such as sum(dy) and sum(dy * (x - mean)). The rows have, in this order: the
limits of all first sums, the digits of all first sums (as int64), the limits of all second sums,
and the digits of all second sums. A row has one element for each column.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from backnorm_kernels.kernels.epilogue import is_forward
from backnorm_kernels.kernels.jit import by_type, emitted, inlined, integer, outlined, rare
from backnorm_kernels.kernels.memory import (
    load,
    load_first,
    load_one,
    offset,
    prefetch,
    store,
    store_one,
)
from backnorm_kernels.kernels.storage import has_feature
from backnorm_kernels.kernels.sums import gradient
from backnorm_kernels.kernels.vector import (
    Vec,
    blend,
    fused,
    lane,
    magnitude,
    multiply_add,
    negated,
    splat,
    two_product,
    two_sum,
    where_finite,
)
from backnorm_kernels.scratch import LANES, TERMS

_I64 = ir.IntType(64)
_INTEGERS = ir.VectorType(_I64, LANES)
_Integers = types.CPointer(types.int64)

# The lowest top bin is `_LEAST` for a sum with three digits, and `_LEAST_OF_FOUR` for a sum with
# four digits. Terms are rounded to the unit u of the lowest bin by adding and subtracting the
# number 1.5 * 2^52 * u (see below). If the top bin were lower, this number would be subnormal.
_LEAST, _LEAST_OF_FOUR = -31, -30

# This number replaces the top bin in the output of `write_bins` if a sum has terms that are not
# finite.
_SPECIAL = 1 << 20

# A term of at least this magnitude counts as infinite, because there are no bins for it.
_HUGE = 2.0**991

# Each bin has a number n = 1.5 * 2^52 * u, where u is the unit of the bin. Adding n to a term, and
# subtracting n again, rounds the term to a multiple of u. The n of the top bin of a sum is
# `_TO_TOP` times the limit of the sum. The n of any lower bin is `_DOWN` times the n of the bin
# above it.
_TO_TOP = 1.5 * 2.0**21
_DOWN = 2.0**-32

# In the bits of a float64, `_EXPONENT` is the position of the exponent field, and `_BIAS` is the
# content of this field for 2^0.
_EXPONENT, _BIAS = 52, 1023

_SIZE = TERMS * LANES

# In the geometry *columns*, the bins of a column are loaded and stored once for every `_STRIP`
# rows. In the geometry *segments*, the bins of a channel are loaded and stored once for every
# `_VISIT` vectors of a segment.
_STRIP, _VISIT = 16, 64


def _combining(emit: Any) -> Any:
    """Return a function that combines two Vec lane by lane, as `emit` combines two integers."""

    @emitted(Vec(Vec, Vec))
    def combine(builder, left, right):
        combined = emit(builder, *(builder.bitcast(each, _INTEGERS) for each in (left, right)))
        return builder.bitcast(combined, left.type)

    return combine


def _larger_of(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.icmp_signed(">", left, right), left, right)


# Both functions take two vectors, and read the bits of each lane as an integer. For each lane,
# `_patterns_added` returns the sum of the two integers modulo 2^64, and `_larger` returns the
# larger of the two. If `_larger` compares the bit patterns of magnitudes, infinity is larger than
# all numbers, and NaN is larger than infinity.
_patterns_added = _combining(lambda builder, left, right: builder.add(left, right))
_larger = _combining(_larger_of)


@emitted(Vec(Vec, Vec, types.intp))
def _patterns_less(builder, value, other, times):
    """Return value - times * other in every lane.

    The bit patterns of `value` and `other` are treated as integers, modulo 2^64.
    """
    minuend, subtrahend = (builder.bitcast(each, _INTEGERS) for each in (value, other))
    nothing = ir.Constant(_INTEGERS, ir.Undefined)
    first = builder.insert_element(nothing, times, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    every = builder.shuffle_vector(first, nothing, lanes)
    return builder.bitcast(builder.sub(minuend, builder.mul(subtrahend, every)), value.type)


@emitted(Vec(Vec, Vec, Vec))
def _without(builder, total, term, one):
    """Return total - term, rounded once.

    With AVX-512, the difference is computed as the fused operation one * total - term, where `one`
    is 1. On processors that have separate units for fused operations (AMD Zen), this is faster than
    a subtraction, because the calling loop already keeps the addition units busy. If `one` were a
    constant, LLVM would turn the operation into a subtraction.
    """
    if not has_feature("avx512f"):
        return builder.fsub(total, term)
    return fused(builder, total, one, builder.fneg(term))


@emitted(types.boolean(Vec, Vec))
def _all_below(builder, left, right):
    """Return whether left < right in all lanes, if the bits of the lanes are read as integers."""
    left, right = (builder.bitcast(each, _INTEGERS) for each in (left, right))
    mask = builder.bitcast(builder.icmp_signed("<", left, right), ir.IntType(LANES))
    return builder.icmp_unsigned("==", mask, ir.Constant(ir.IntType(LANES), -1))


@emitted(types.int64(types.float64))
def _pattern_of(builder, number):
    """Return the bit pattern of a float64 as an integer."""
    return builder.bitcast(number, _I64)


@emitted(types.float64(types.int64))
def _number_with(builder, pattern):
    """Return the float64 that has a bit pattern."""
    return builder.bitcast(pattern, ir.DoubleType())


@emitted(lambda values: _Integers(values) if values == types.CPointer(types.float64) else None)
def _integers_at(builder, values):
    """Return the address of float64 memory as an address of integers."""
    return builder.bitcast(values, _I64.as_pointer())


@by_type
def digits_of(x):
    """Return how many digits each sum has: four if x is float64, otherwise three."""
    return (lambda x: 4) if x.dtype == types.float64 else (lambda x: 3)


@by_type
def terms_of(x):
    """Return how many terms a product of two elements adds to a sum.

    For float64 elements, there are two terms: the product and its rounding error. For other
    elements, the product is the only term.
    """
    return (lambda x: 2) if x.dtype == types.float64 else (lambda x: 1)


@inlined
def _limit(top):
    """Return the limit of a sum whose top bin is `top`."""
    return _number_with((32 * top + 31 + _BIAS) << _EXPONENT)


@inlined
def _top(limit):
    """Return the top bin of a sum with this limit."""
    return ((_pattern_of(limit) >> _EXPONENT) - _BIAS - 31) >> 5


@outlined
def clear_bins(bins, columns, digits):
    """Set the bins of both sums to zero, in the first `columns` columns."""
    bins, pitch = bins
    least = _limit(_LEAST if digits == 3 else _LEAST_OF_FOUR)
    for part in range(2):
        row = part * (digits + 1)
        for k in range(columns):
            store_one(bins, row * pitch + k, least)
            for digit in range(1, digits + 1):
                store_one(bins, (row + digit) * pitch + k, 0.0)


@inlined
def _widen(bins, at, pitch, digits, limit):
    """Move the bins of a sum to a higher limit, dropping the lowest bins."""
    numbers = _integers_at(bins)
    moved = _top(limit) - _top(load_one(bins, at))
    for digit in range(digits, 0, -1):
        value = 0
        if digit > moved:
            value = numbers[at + (digit - moved) * pitch]
        numbers[at + digit * pitch] = value
    store_one(bins, at, limit)


@inlined
def _give_up(bins, at, pitch, digits):
    """Discard a sum: set its limit and its digits to 0.

    From then on, the digits count the terms that are NaN, +infinity and -infinity.
    """
    numbers = _integers_at(bins)
    for row in range(digits + 1):
        numbers[at + row * pitch] = 0


@rare
def _make_room(bins, at, digits, most):
    """For each of eight columns, raise the limit of the sum above the column's lane of `most`.

    Return whether all terms that the sums of these columns have got until now are finite.
    """
    bins, pitch = bins
    finite = True
    for k in range(LANES):
        limit, value = load_one(bins, at + k), lane(most, k)
        if limit == 0.0:
            finite = False
        elif not value < _HUGE:
            _give_up(bins, at + k, pitch, digits)
            finite = False
        elif value >= limit:
            # The magnitude of `value` is below 2^exponent.
            exponent = (_pattern_of(value) >> _EXPONENT) - _BIAS + 1
            _widen(bins, at + k, pitch, digits, _limit(exponent >> 5))
    return finite


@rare
def _put_slowly(bins, at, digits, terms, count):
    """Put vectors of terms, some of them not finite, into the bins of eight columns."""
    bins, pitch = bins
    numbers = _integers_at(bins)
    for k in range(LANES):
        limit, column = load_one(bins, at + k), at + k
        for row in range(count):
            term = load_one(terms, row * LANES + k)
            if limit == 0.0:
                if term != term:
                    numbers[column + pitch] += 1
                elif term >= _HUGE:
                    numbers[column + 2 * pitch] += 1
                elif term <= -_HUGE:
                    numbers[column + 3 * pitch] += 1
                continue
            unit = limit * _TO_TOP
            for digit in range(1, digits + 1):
                total = term + unit
                numbers[column + digit * pitch] += _pattern_of(total) - _pattern_of(unit)
                term = term - (total - unit)
                unit = unit * _DOWN


@inlined
def _put(x, bins, at, terms, count):
    """Put `count` vectors of terms into the bins of eight columns.

    Lane k of each vector has a term of the k-th of these columns.
    """
    digits = digits_of(x)
    most = magnitude(load(terms, 0))
    for row in range(1, count):
        most = _larger(most, magnitude(load(terms, row * LANES)))
    finite = _all_below(most, load(bins.values, at)) or _make_room(bins, at, digits, most)
    if not finite:
        _put_slowly(bins, at, digits, terms, count)
        return
    units = _units(x, load(bins.values, at))
    patterns = _load_digits(x, bins, at)
    for row in range(count):
        patterns = _take_apart(patterns, load(terms, row * LANES), units)
    _store_digits(patterns, units, count, bins, at)


@by_type
def _units(x, limit):
    """Return the numbers that round terms to the units of the bins, and a 1, as one tuple.

    The number of a bin is 1.5 * 2^52 * u, where u is the unit of the bin. The number of the top bin
    comes first. The 1 is computed as limit / limit, so that the compiler does not treat it as a
    constant: see `_without`.
    """
    if x.dtype == types.float64:
        return lambda x, limit: (
            *_down(_down(_down((limit * splat(_TO_TOP),)))),
            limit / limit,
        )
    return lambda x, limit: (*_down(_down((limit * splat(_TO_TOP),))), limit / limit)


@inlined
def _down(units):
    return (*units, units[-1] * splat(_DOWN))


@by_type
def _load_digits(x, bins, at):
    """Return the digits of one sum for eight columns: one vector for each bin, top bin first."""

    def three(x, bins, at):
        values, pitch = bins
        return load(values, at + pitch), load(values, at + 2 * pitch), load(values, at + 3 * pitch)

    def four(x, bins, at):
        values, pitch = bins
        return (
            load(values, at + pitch),
            load(values, at + 2 * pitch),
            load(values, at + 3 * pitch),
            load(values, at + 4 * pitch),
        )

    return four if x.dtype == types.float64 else three


@by_type
def _take_apart(patterns, term, units):
    """Split a term into one part for each bin. For each bin, `units` has the number n = 1.5 * 2^52
    * u, where u is the unit of the bin. The bits of (part + n) are added, as an integer, to the
    bin's digit. Later, `_store_digits` subtracts the bits of n from the digit again, as many times
    as there were terms.
    """

    def three(patterns, term, units):
        first = term + units[0]
        term = term - _without(first, units[0], units[3])
        second = term + units[1]
        term = term - _without(second, units[1], units[3])
        third = term + units[2]
        return (
            _patterns_added(patterns[0], first),
            _patterns_added(patterns[1], second),
            _patterns_added(patterns[2], third),
        )

    def four(patterns, term, units):
        first = term + units[0]
        term = term - _without(first, units[0], units[4])
        second = term + units[1]
        term = term - _without(second, units[1], units[4])
        third = term + units[2]
        term = term - _without(third, units[2], units[4])
        fourth = term + units[3]
        return (
            _patterns_added(patterns[0], first),
            _patterns_added(patterns[1], second),
            _patterns_added(patterns[2], third),
            _patterns_added(patterns[3], fourth),
        )

    return three if len(patterns) == 3 else four


@inlined
def _store_digits(patterns, units, count, bins, at):
    """Complete the sums of `_take_apart`, called `count` times with `units`; write the digits."""
    for k in range(len(patterns)):
        store(bins.values, at + (k + 1) * bins.pitch, _patterns_less(patterns[k], units[k], count))


@by_type
def _hold(x, slope, centred, terms, at):
    """Write the terms of the two sums to the buffers at `terms`.

    The term of the first sum is `slope` (in a backward pass, dy); that of the second sum is `slope`
    * `centred`. If x is float64, the rounding error of this product is a third term, which belongs
    to the second sum.
    """

    def hold(x, slope, centred, terms, at):
        store(terms, at, slope)
        store(terms, _SIZE + at, slope * centred)

    def hold_exactly(x, slope, centred, terms, at):
        product, error = two_product(slope, centred)
        store(terms, at, slope)
        store(terms, _SIZE + at, product)
        store(terms, 2 * _SIZE + at, where_finite(product, error, splat(0.0)))

    return hold_exactly if x.dtype == types.float64 else hold


@inlined
def _second(x, bins, at):
    """Return the position of the bins of the second sum."""
    return at + (digits_of(x) + 1) * bins.pitch


@rare
def _put_with_care(operands, part, m, bins, at, terms):
    """Put the terms of several vectors of elements into bins. They may have any magnitude.

    `part` is a tuple: the index of the first element, the distance between two vectors (in
    elements), the number of vectors, and the number of elements in each vector. The terms are first
    written to the buffers `terms`. `_put` then finds the largest of them before it splits them.
    """
    i, stride, count, lanes = part
    x, dy = operands
    second = _second(x, bins, at)
    row = 0
    while row < count:
        stop, kept = min(count, row + TERMS), 0
        while row < stop:
            index = i + row * stride
            centred = blend(lanes, _centred(dy, load_first(x, index, lanes), m), splat(0.0))
            _hold(x, gradient(dy, index, lanes, centred), centred, terms, kept * LANES)
            row += 1
            kept += 1
        _put(x, bins, at, terms, kept)
        for k in range(1, 1 + terms_of(x)):
            _put(x, bins, second, offset(terms, k * _SIZE), kept)


@inlined
def _begin(x, bins, at):
    """Load the bins of eight columns; each column has two sums.

    Return the limits, the units, the digits, and zeros as the largest terms so far. Each of these
    four results is a pair: one part for each of the two sums.
    """
    second = _second(x, bins, at)
    limits = load(bins.values, at), load(bins.values, second)
    units = _units(x, limits[0]), _units(x, limits[1])
    digits = _load_digits(x, bins, at), _load_digits(x, bins, second)
    return limits, units, digits, (splat(0.0), splat(0.0))


@inlined
def _step(operands, slope, centred, units, digits, most):
    """Split the terms of a vector of elements into parts, and add the parts to `digits`.

    This is done as if no term exceeded the limit of its sum. The second result has the largest
    magnitude so far of each sum's terms (see `_larger_product` for the forward pass). Later, `_end`
    compares these magnitudes with the limits.
    """
    x, dy = operands
    product = slope * centred
    first = _take_apart(digits[0], slope, units[0])
    second = _take_apart(digits[1], product, units[1])
    second = _take_error_apart(x, second, (slope, centred, product), units[1])
    largest = _larger(most[0], magnitude(slope)), _larger_product(dy, most[1], product)
    return (first, second), largest


@by_type
def _larger_product(dy, most, product):
    """Return the larger one of `most` and the magnitude of the product. In a forward pass, return
    `most` unchanged: `_largest_product` computes the largest product there as the square of the
    largest term.
    """
    if is_forward(dy):
        return lambda dy, most, product: most
    return lambda dy, most, product: _larger(most, magnitude(product))


@by_type
def _largest_product(dy, most):
    """Return the largest product. In a backward pass, this is `most[1]`. In a forward pass,
    products are squares of terms, so it is the square of the largest term, `most[0]`.
    """
    if is_forward(dy):
        return lambda dy, most: most[0] * most[0]
    return lambda dy, most: most[1]


@by_type
def _centred(dy, value, mean):
    """Return value - mean; in a forward pass, which has no mean yet, return `value` itself."""
    if is_forward(dy):
        return lambda dy, value, mean: value
    return lambda dy, value, mean: value - mean


@by_type
def _take_error_apart(x, patterns, factors, units):
    """If elements are float64, also put the rounding error of a product into the bins."""

    def error(x, patterns, factors, units):
        slope, centred, product = factors
        return _take_apart(patterns, multiply_add(slope, centred, negated(product)), units)

    return error if x.dtype == types.float64 else lambda x, patterns, factors, units: patterns


@inlined
def _end(operands, state, count, bins, at):
    """Write the sums to the bins and return True, if all terms were below the limits.

    `state` has both sums of `count` vectors. If a term was not below its limit, nothing is
    written, and the result is False.
    """
    limits, units, digits, most = state
    product = _largest_product(operands.dy, most)
    if not (_all_below(most[0], limits[0]) and _all_below(product, limits[1])):
        return False
    second = _second(operands.x, bins, at)
    _store_digits(digits[0], units[0], count, bins, at)
    _store_digits(digits[1], units[1], count * terms_of(operands.x), bins, second)
    return True


@inlined
def _visit(operands, part, m, bins, at, terms):
    """Put the terms of vectors into the bins of eight columns.

    `part` is a tuple: the index of the first element, the distance between two vectors (in
    elements), the number of whole vectors, and the number of elements after them. If a term is not
    below the limits, the result is discarded, and `_put_with_care` puts the terms into bins again.
    """
    i, stride, count, left = part
    x, dy = operands
    limits, units, digits, most = _begin(x, bins, at)
    index, ahead = i, count * stride
    for _ in range(count):
        prefetch(x, index + ahead, 1)
        prefetch(dy, index + ahead, 1)
        centred = _centred(dy, load(x, index), m)
        slope = gradient(dy, index, None, centred)
        digits, most = _step(operands, slope, centred, units, digits, most)
        index += stride
    if left > 0:
        centred = blend(left, _centred(dy, load_first(x, index, left), m), splat(0.0))
        slope = gradient(dy, index, left, centred)
        digits, most = _step(operands, slope, centred, units, digits, most)
    if not _end(operands, (limits, units, digits, most), count + (left > 0), bins, at):
        whole = (i, stride, count, integer(LANES))
        _put_with_care(operands, whole, m, bins, at, terms)
        if left > 0:
            last = (index, stride, integer(1), left)
            _put_with_care(operands, last, m, bins, at, terms)


@inlined
def _visit_first(operands, part, m, bins, at, terms):
    """Put the terms of fewer than eight columns into the bins of the columns. There are `lanes`
    columns, and each has one lane of a vector.

    `part` is a tuple: the index of the first element, the distance between two vectors (in
    elements), the number of vectors, and `lanes`.
    """
    i, stride, count, lanes = part
    x, dy = operands
    limits, units, digits, most = _begin(x, bins, at)
    index = i
    for _ in range(count):
        centred = blend(lanes, _centred(dy, load_first(x, index, lanes), m), splat(0.0))
        slope = gradient(dy, index, lanes, centred)
        digits, most = _step(operands, slope, centred, units, digits, most)
        index += stride
    if not _end(operands, (limits, units, digits, most), count, bins, at):
        _put_with_care(operands, part, m, bins, at, terms)


@inlined
def put_segment(operands, i, end, mean, bins, terms):
    """Put the terms of a segment into the bins of its channel. The channel has eight sets of bins,
    one for each lane of a vector.

    `bins` has rows of eight elements; `terms` has three buffers of `TERMS` vectors.
    """
    m = splat(mean)
    while i < end:
        stop = min(end, i + _VISIT * LANES)
        count = (stop - i) // LANES
        part = (i, integer(LANES), count, stop - i - count * LANES)
        _visit(operands, part, m, bins, integer(0), terms)
        i = stop


@inlined
def put_columns(operands, part, pivot, bins, terms):
    """Put the terms of some rows into bins; each column has its own bins.

    `part` is a tuple: the index of the first element, the distance between two rows (in elements),
    the number of rows, and the number of columns. In a backward pass, `pivot` has the means of the
    columns; a forward pass does not use it. `terms` has three buffers of `TERMS` vectors.
    """
    start, stride, rows, width = part
    row = 0
    while row < rows:
        count, origin, k = min(_STRIP, rows - row), start + row * stride, 0
        while k + LANES <= width:
            _visit(
                operands, (origin + k, stride, count, integer(0)), load(pivot, k), bins, k, terms
            )
            k += LANES
        if k < width:
            last = (origin + k, stride, count, width - k)
            _visit_first(operands, last, load(pivot, k), bins, k, terms)
        row += count


@outlined
def merge_bins(bins, at, others, other_at, digits):
    """Add both sums of one column to those of another.

    The sums of the column `other_at` of `others` are added to those of the column `at` of `bins`.
    """
    for _ in range(2):
        _merge(bins, at, others, other_at, digits)
        at += (digits + 1) * bins.pitch
        other_at += (digits + 1) * others.pitch


@inlined
def _merge(bins, at, others, other_at, digits):
    bins, pitch = bins
    others, other_pitch = others
    numbers, added = _integers_at(bins), _integers_at(others)
    limit, other = load_one(bins, at), load_one(others, other_at)
    moved = 0
    if limit == 0.0 or other == 0.0:
        if limit != 0.0:
            _give_up(bins, at, pitch, digits)
        if other != 0.0:
            return
    else:
        if other > limit:
            _widen(bins, at, pitch, digits, other)
        moved = _top(load_one(bins, at)) - _top(other)
    for digit in range(moved + 1, digits + 1):
        numbers[at + digit * pitch] += added[other_at + (digit - moved) * other_pitch]


@outlined
def pairs_of_bins(bins, at, digits, pairs, to):
    """Convert the two sums in column `at` of `bins` to pairs in column `to` of `pairs`."""
    sums, pitch = pairs
    for _ in range(2):
        high, low = _pair(bins, at, digits)
        store_one(sums, to, high)
        store_one(sums, to + pitch, low)
        at += (digits + 1) * bins.pitch
        to += 2 * pitch


@inlined
def _pair(bins, at, digits):
    """Round a sum from bins to a pair, high and low, by the operations of
    `backnorm.reproducible_sums`.
    """
    bins, pitch = bins
    numbers, limit = _integers_at(bins), load_one(bins, at)
    if limit == 0.0:
        return _special(numbers[at + pitch], numbers[at + 2 * pitch], numbers[at + 3 * pitch]), 0.0
    # Beginning with the lowest digit, each digit is reduced to the range from -2^31 to 2^31 - 1;
    # what exceeds this range is carried to the next higher digit.
    fourth, carry = 0.0, 0
    if digits == 4:
        digit, carry = _carried(numbers[at + 4 * pitch], 0)
        fourth = float(digit)
    digit, carry = _carried(numbers[at + 3 * pitch], carry)
    third = float(digit)
    digit, carry = _carried(numbers[at + 2 * pitch], carry)
    second = float(digit)
    digit, carry = _carried(numbers[at + pitch], carry)
    first, above = float(digit), float(carry)
    high, low = two_sum(above * 2.0**32, first)
    other, rest = two_sum(second * 2.0**-32, third * 2.0**-64)
    high, lost = two_sum(high, other)
    high, low = two_sum(high, (low + lost) + (rest + fourth * 2.0**-96))
    unit = limit * 2.0**-31
    return high * unit, low * unit


@inlined
def _carried(digit, carry):
    value = digit + carry
    left = ((value + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
    return left, (value - left) >> 32


@inlined
def _special(nans, positive, negative):
    value = 0.0
    if positive > 0:
        value = value + _infinity()
    if negative > 0:
        value = value - _infinity()
    if nans > 0:
        value = value + (_infinity() - _infinity())
    # The bits of a NaN must not depend on the processor or on the order of the operations.
    return value if value == value else _number_with(0x7FF8000000000000)


@inlined
def _infinity():
    return _number_with(0x7FF0000000000000)


@outlined
def write_no_bins(digits, channels, out):
    """Write to `out` the bins of sums without terms, in the layout that `write_bins` uses."""
    to = _integers_at(out)
    for cell in range(2 * (digits + 1) * channels):
        to[cell] = 0
    for c in range(channels):
        least = _LEAST if digits == 3 else _LEAST_OF_FOUR
        to[c] = least
        to[(digits + 1) * channels + c] = least


@outlined
def write_bins(bins, digits, channels, out):
    """Write both sums of every channel to `out` as integers. For each of the two sums, `out` has a
    row with the top bins of all channels, followed by `digits` rows with the digits of all
    channels.

    If a sum has terms that are not finite, 2^20 is written in other_at of its top bin.
    """
    bins, pitch = bins
    numbers, to = _integers_at(bins), _integers_at(out)
    for part in range(2):
        row = part * (digits + 1)
        for c in range(channels):
            limit = load_one(bins, row * pitch + c)
            to[row * channels + c] = _SPECIAL if limit == 0.0 else _top(limit)
            for digit in range(row + 1, row + digits + 1):
                to[digit * channels + c] = numbers[digit * pitch + c]
