"""Float32 arithmetic, and its replacement by float64 where the range of float32 is too small.

Float32 has 13 bits more than float16, so the errors of float32 arithmetic are small compared with
the final rounding to 16 bits. Therefore the output of 16-bit arrays is computed in float32. The
sums of a backward pass are also computed in float32, a few terms at a time, and these partial sums
are added in float64. Float32 arrays are computed in float32 arithmetic only if the caller asks for
it (with the argument `arithmetic`, for example). Float32 arithmetic saves the conversion to float64
and back, which takes longer than all other operations. But an intermediate value may be outside the
range of float32: it then overflows or underflows. Therefore a float32 result (an element of the
output, or a block of a channel's sums) is used only if no intermediate value was outside this
range. Otherwise, the result is computed again in float64. The choice depends only on the values of
that element or block, so the bits do not depend on how the work is distributed.

docs/architecture/float32.md has the reasons why these results are exact enough.
"""

from __future__ import annotations

from numba import types

from backnorm_kernels.kernels.epilogue import has_relu, is_forward
from backnorm_kernels.kernels.jit import by_type, inlined, nothing
from backnorm_kernels.kernels.memory import (
    load,
    load_one,
    load_singles,
    load_singles_some,
    offset,
    singles_within,
    store,
    store_one,
    stored_sound,
)
from backnorm_kernels.kernels.operands import Rows
from backnorm_kernels.kernels.storage import splits, tells_sound
from backnorm_kernels.kernels.sums import add, pair_add
from backnorm_kernels.kernels.vector import (
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
from backnorm_kernels.scratch import LANES, SINGLES, single_pitch

# If a shift, a slope or a gain is below `_LEAST` in magnitude, float32 values that are computed
# with it may lose bits to cancellation or underflow.
_LEAST = 2.0**-100

# If a sum of fewer than 2^30 products is at least this large, underflow has changed it by less than
# 2^-40 of its value.
_LEAST_SUM = 2.0**-80


_row = inlined(single_pitch)


@by_type
def rows_for(kind, exact, place, count):
    """Return the rows of `count` coefficients in the type in which elements are computed.

    In float64 arithmetic, these are the rows `exact`. In float32 arithmetic, they are the rows that
    `coefficients_for` writes to `place`.
    """
    if kind.arithmetic == types.float32:
        return lambda kind, exact, place, count: Rows(singles_within(place), _row(count))
    return lambda kind, exact, place, count: exact


@by_type
def lanes_of(values):
    """Return the number of lanes of a vector that has the element type of `values`."""
    lanes = SINGLES if values.dtype == types.float32 else LANES
    return lambda values: lanes


@by_type
def splat_of(values, index):
    """Return a vector with the coefficient at `index` in every lane."""
    if values.dtype == types.float32:
        return lambda values, index: splat_single(load_one(values, index))
    return lambda values, index: splat(load_one(values, index))


@by_type
def in_pairs(values):
    """Return whether computing and writing two vectors of the output at a time is faster than one
    at a time: it is in float32. `values` is the memory of the coefficients.
    """
    pairs = values.dtype == types.float32
    return lambda values: pairs


@by_type
def vector_of(values, index):
    """Return a vector of the coefficients from `index` on, one in each lane."""
    if values.dtype == types.float32:
        return lambda values, index: load_singles(values, index)
    return lambda values, index: load(values, index)


@by_type
def ordered_for(out, coefficients):
    """Return the four coefficient vectors with lanes in the order in which `out` is written."""
    if coefficients.dtype != Singles or not splits(out.dtype):
        return lambda out, coefficients: coefficients
    return lambda out, coefficients: (
        even_odd(coefficients[0]),
        even_odd(coefficients[1]),
        even_odd(coefficients[2]),
        even_odd(coefficients[3]),
    )


@by_type
def as_singles(value):
    """Return `value` with its lanes in the order in which the elements are in memory."""
    if value == EvenOdd:
        return lambda value: in_order(value)
    return lambda value: value


@by_type
def holds(value, count):
    """Return whether the first `count` lanes of an output can be used as they are, without
    computing them again in float64.
    """
    if value == Vec:
        return lambda value, count: True
    if value == EvenOdd:
        # A vector in the order EvenOdd is always whole, so `count` need not be considered.
        return lambda value, count: sound(value)

    def single(value, count):
        if count < SINGLES:
            return sound(blend(count, value, splat_single(0.0)))
        return sound(value)

    return single


@by_type
def both_hold(output, left, right):
    """Return whether all lanes of two vectors of an output are exact enough: see `holds`."""
    if left == Vec:
        return lambda output, left, right: True
    if not tells_sound(output[2].dtype):
        return lambda output, left, right: both_sound(left, right)
    forward = is_forward(output[1])

    # If a lane is zero, `stored_sound` cannot decide, and `both_sound` examines both vectors again.
    # Outputs after a ReLU, and their gradients, have many zeros. For them, `both_sound` is called
    # at once.
    def hold(output, left, right):
        many_zeros = has_relu(output.dy) if forward else output.frozen
        if not many_zeros and stored_sound(output.out, left, right):
            return True
        return both_sound(left, right)

    return hold


@by_type
def coefficients_for(output, span, refused):
    """Write the float32 coefficients of a span of channels, if elements are computed in float32.

    Coefficients are written eight at a time, so in each row up to seven coefficients after those of
    the span are overwritten, too. If `refused` is true, every gain is NaN, so that all elements are
    computed in float64.

    The formulas in float32 first subtract from x the float32 nearest to the mean. The remainder of
    the mean, which is the mean minus this float32, is included in slope (forward pass) or in shift
    (backward pass). An element x of 32 bits or less cannot be nearer to the mean than this float32.
    So the magnitude of the remainder is at most |x - mean| for every x. Therefore the term with the
    remainder is not larger than the term with x - mean, so few digits are lost when the formula
    combines the two.
    """
    if output[4][0].dtype != types.float32:
        return nothing

    def in_float32(output, span, refused):
        exact, exact_pitch = output.exact
        values, pitch = output.rows
        for c in range(span[0], span[1], LANES):
            coefficients = (
                load(exact, c),
                load(exact, c + exact_pitch),
                load(exact, c + 2 * exact_pitch),
                load(exact, c + 3 * exact_pitch),
            )
            mean, shift, slope, gain = _singly_rounded(output.dy, output.frozen, coefficients)
            if refused:
                gain = splat(float("nan"))
            store(values, c, mean)
            store(values, c + pitch, shift)
            store(values, c + 2 * pitch, slope)
            store(values, c + 3 * pitch, gain)

    return in_float32


@by_type
def _singly_rounded(dy, frozen, coefficients):
    """Return the coefficients of the float32 formulas, as float64 vectors. If the gain of a channel
    is NaN, float32 is not exact enough for this channel, and its elements are computed in float64.
    """

    def forward(dy, frozen, coefficients):
        mean, shift, slope, gain = _about_rounded_forward(coefficients)
        return mean, shift, slope, _unless_tiny(slope, _unless_tiny(gain, gain))

    def backward(dy, frozen, coefficients):
        mean, shift, slope, gain = coefficients
        if frozen:
            return mean, shift, slope, _unless_tiny(gain, gain)
        mean, shift, slope, gain = _about_rounded_backward(coefficients)
        zero, nan = splat(0.0), splat(float("nan"))
        kept = _unless_tiny(slope, _unless_tiny(gain, gain))
        # If the shift is tiny, (dy - shift) - (x - mean) * slope may be tiny, too, and would be
        # rounded to a multiple of 2^-149. So the gain is replaced by NaN. This makes every float32
        # element NaN, and the elements are computed again in float64. If shift and slope are both
        # 0, the gain is kept, because the element is then just gain * dy.
        alone = where_equal(shift, zero, where_equal(slope, zero, kept, nan), nan)
        return mean, shift, slope, where_less(magnitude(shift), splat(_LEAST), alone, kept)

    return forward if is_forward(dy) else backward


@by_type
def about_rounded(kind, frozen, coefficients):
    """Return `coefficients`, changed for a formula that subtracts a rounded mean.

    The formula subtracts the mean rounded to float32 from x. The part of the mean that this
    rounding drops is taken into account by another coefficient.
    """

    def backward(kind, frozen, coefficients):
        return coefficients if frozen else _about_rounded_backward(coefficients)

    if kind.direction == "forward":
        return lambda kind, frozen, coefficients: _about_rounded_forward(coefficients)
    return backward


@inlined
def _about_rounded_forward(coefficients):
    mean, shift, slope, gain = coefficients
    rest = (mean - rounded(mean)) + shift
    return mean, shift, multiply_add(negated(gain), rest, slope), gain


@inlined
def _about_rounded_backward(coefficients):
    mean, shift, slope, gain = coefficients
    return mean, multiply_add(rounded(mean) - mean, slope, shift), slope, gain


@inlined
def _unless_tiny(tested, gain):
    """Return `gain`, or NaN in the lanes where `tested` is tiny but not zero."""
    refused = where_equal(tested, splat(0.0), gain, splat(float("nan")))
    return where_less(magnitude(tested), splat(_LEAST), refused, gain)


@inlined
def repeat_first(rows, width):
    """Copy the first sixteen float32 coefficients of each row behind the row's last one.

    They are needed there, because a vector of elements of an NXC array can begin with the last
    channels of a row and end with the first channels of the next row.
    """
    values, pitch = rows
    for row in range(4 if lanes_of(values) == SINGLES else 0):
        for k in range(SINGLES):
            at = row * pitch
            store_one(values, at + width + k, load_one(values, at + k % width))


@inlined
def add_strip(operands, i, stride, mean, totals):
    """Add four vectors (a strip) to `totals`. Vector k begins at element i + k * `stride`.

    The totals are four vectors of eight float64 (Vec). The first Vec has the sums of dy in the
    first eight lanes of the float32 vectors, and the second Vec those in the last eight lanes. The
    third and the fourth Vec have the sums of dy * (x - mean) in the same lanes.
    """
    x, dy = operands
    d0, d1 = load_singles(dy, i), load_singles(dy, i + stride)
    d2, d3 = load_singles(dy, i + 2 * stride), load_singles(dy, i + 3 * stride)
    c0, c1 = load_singles(x, i) - mean, load_singles(x, i + stride) - mean
    c2, c3 = load_singles(x, i + 2 * stride) - mean, load_singles(x, i + 3 * stride) - mean
    return _added((d0, d1, d2, d3), (c0, c1, c2, c3), totals)


@inlined
def add_strip_first(operands, i, stride, counts, mean, totals):
    """Like `add_strip`, but add only the first `counts[k]` elements of vector k.

    In the lanes after these elements, dy and x - mean count as zero.
    """
    d0, c0 = _pair(operands, i, counts[0], mean)
    d1, c1 = _pair(operands, i + stride, counts[1], mean)
    d2, c2 = _pair(operands, i + 2 * stride, counts[2], mean)
    d3, c3 = _pair(operands, i + 3 * stride, counts[3], mean)
    return _added((d0, d1, d2, d3), (c0, c1, c2, c3), totals)


@inlined
def _pair(operands, i, count, mean):
    centred = load_singles_some(operands.x, i, count) - mean
    return load_singles_some(operands.dy, i, count), blend(count, centred, splat_single(0.0))


@inlined
def end_strip(operands, i, mean, before, totals):
    """Add the sums of a strip (four vectors) to `totals`. The last of the four vectors begins at
    element `i`.

    `before` has four values, which come from the first three vectors: the sum of dy over the first
    two vectors, the sum of dy * (x - mean) over the first two vectors, dy of the third vector, and
    dy * (x - mean) of the third vector.
    """
    gradient = load_singles(operands.dy, i)
    product = multiply_add(gradient, load_singles(operands.x, i) - mean, before[3])
    return _widened(before[0] + (before[2] + gradient), before[1] + product, totals)


@inlined
def _added(d, c, totals):
    product = multiply_add(d[1], c[1], d[0] * c[0]) + multiply_add(d[3], c[3], d[2] * c[2])
    return _widened((d[0] + d[1]) + (d[2] + d[3]), product, totals)


@inlined
def _widened(total, product, totals):
    return (
        add(totals[0], low_half(total)),
        add(totals[1], high_half(total)),
        add(totals[2], low_half(product)),
        add(totals[3], high_half(product)),
    )


@inlined
def recentre(mean, pairs, k):
    """Change the pivot of the sums of eight channels: from the mean rounded to float32, to the
    mean.

    Return a Vec that is NaN in the lanes whose sums must be computed in float64, and 0 in others.
    NaN marks sums with terms that overflowed, and sums that are so small that products may have
    underflowed, including sums that are zero.
    """
    sums, pitch = offset(pairs.values, k), pairs.pitch
    sum_dy = load(sums, 0)
    moved = (rounded(mean) - mean) * (sum_dy + load(sums, pitch))
    high, low = pair_add(load(sums, 2 * pitch), load(sums, 3 * pitch), moved, splat(0.0))
    store(sums, 2 * pitch, high)
    store(sums, 3 * pitch, low)
    kept = (sum_dy - sum_dy) + (high - high)
    return where_less(magnitude(high), splat(_LEAST_SUM), splat(float("nan")), kept)
