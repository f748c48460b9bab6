"""Reproducible sums outside the kernels: splitting, addition and rounding of bins.

The *bins* of a channel's two sums are a column of an int64 array of shape (2 * (digits + 1), C).
For each of the two sums, the column contains the top bin, followed by the digits from the highest
to the lowest. The first digit counts multiples of 2^(32 j), where j is the top bin. The second
digit counts multiples of 2^(32 (j - 1)), and so on. If the top bin is `SPECIAL`, the first three
digits count the terms that are NaN, +infinity and -infinity.

The kernels have the same algorithm for machine code (`backnorm_kernels.kernels.bins`, which says
why it works). Every function here repeats the operations of the kernels one by one, so it gives the
bits that the kernels would give. Addition of bins is exact, so its order does not matter. `xp` is
the namespace of the arrays, `numpy` or `torch`; tensors may be on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from backnorm.compensated import two_product, two_sum
from backnorm.errors import ArgumentValueError
from backnorm.results import ChannelMoments, ChannelSums

# A channel must have fewer elements than this. A digit is an int64. An element with one term
# changes a digit by at most 2^31. An element with two terms (a float64 product and its rounding
# error) changes a digit by at most 1.5 * 2^31. With fewer than 2^31 elements, the digits and the
# carries of `_pair` therefore stay below 2^63.
_MOST = 1 << 31

#: This number replaces the top bin of a sum that has NaN or infinite terms. The first three digits
#: of such a sum count its terms that are NaN, +infinity and -infinity.
SPECIAL = 1 << 20

_HALF, _BELOW = 1 << 31, (1 << 32) - 1

# `_LEAST` maps the number of digits of a sum to the lowest top bin that the sum may have. `_HUGE`
# is the least magnitude that counts as infinite. See `backnorm_kernels.kernels.bins`.
_LEAST, _HUGE = {3: -31, 4: -30}, 2.0**991

# An array of int64 or float64, of NumPy or of another framework. The functions of this module take
# the framework's namespace, which has NumPy's functions, as the argument `xp`.
Array = Any


def bin_rows(itemsize: int) -> int:
    """Return how many integers the bins of a channel's two sums have.

    Each sum has a top bin and three digits; for elements of eight bytes, four digits.
    """
    return 10 if itemsize == 8 else 8


def check_count(name: str, count: int) -> None:
    """Raise if a channel has too many elements for a reproducible sum."""
    if count >= _MOST:
        raise ArgumentValueError(
            name,
            "has more elements in a channel than reproducible sums hold",
            came=count,
            accepted=f"fewer than {_MOST}, in all parts of the batch",
        )


def zeros(itemsize: int, channels: int) -> np.ndarray:
    """Return the bins of no terms, of elements of `itemsize` bytes, as a NumPy array."""
    none = np.zeros((channels, 0))
    bins: np.ndarray = bins_of(none, none, itemsize, np)
    return bins


def bins_of(terms: Array, factors: Array, itemsize: int, xp: Any) -> Array:
    """Return the bins of sum(terms) and of sum(terms * factors) of each channel.

    The integers are those that a kernel writes, bit for bit: terms are split by the same
    operations, and the order in which integers are added has no effect. `terms` and `factors` are
    float64 arrays of shape (C, M). The elements from which they were made have `itemsize` bytes.
    """
    digits = bin_rows(itemsize) // 2 - 1
    product = terms * factors
    parts = [product]
    if digits == 4:
        # For float64 elements, the rounding errors of the products are added as further terms.
        _, error = two_product(terms, factors, xp)
        parts.append(xp.where(xp.isfinite(error), error, xp.zeros_like(error)))
    return xp.stack([*_bins([terms], digits, xp), *_bins(parts, digits, xp)])


def _bins(parts: list[Array], digits: int, xp: Any) -> list[Array]:
    """Return, for each channel, the top bin and the digits of the sum of all terms in `parts`.

    Each part is an array of terms, of shape (C, M). The first part has the largest term of each
    channel, which determines the channel's top bin.
    """
    terms, least = parts[0], _LEAST[digits]
    sizes = xp.abs(terms)
    most = xp.amax(sizes, 1) if terms.shape[1] else sizes.sum(1)
    special = ~(most < _HUGE)
    exponents = xp.frexp(xp.where(special, xp.zeros_like(most), most))[1]
    zero = most.view(xp.int64) * 0
    top = zero + xp.where((most == 0.0) | ((exponents >> 5) < least), least, exponents >> 5)
    unit = 1.5 * ((32 * top + 52 + 1023) << 52).view(xp.float64)[:, None]
    rows = [xp.where(special, zero + SPECIAL, top)]
    tests = terms != terms, terms >= _HUGE, terms <= -_HUGE
    for digit in range(digits):
        number = zero
        for k, part in enumerate(parts):
            total = part + unit
            number = number + (total.view(xp.int64) - unit.view(xp.int64)).sum(1)
            parts[k] = part - (total - unit)
        counted = tests[digit].sum(1) if digit < len(tests) else zero
        rows.append(xp.where(special, counted, number))
        unit = unit * 2.0**-32
    return rows


def added(one: Array, other: Array, xp: Any) -> Array:
    """Return the sum of two arrays of bins, as bins."""
    tops = xp.maximum(tops_of(one), tops_of(other))
    return with_tops(raised(one, tops, xp) + raised(other, tops, xp), tops, xp)


def tops_of(bins: Array) -> Array:
    """Return the top bins of both sums, shape (2, C)."""
    return bins[:: bins.shape[0] // 2]


def raised(bins: Array, tops: Array, xp: Any) -> Array:
    """Return `bins` with every digit moved to the row that it has if the top bins are `tops`.

    In the result, the two rows for top bins (one for each of the two sums of a channel) are 0. So
    arrays that were raised to the same `tops` can be added as integers. Afterwards, `with_tops`
    writes `tops` into these two rows.
    """
    rows, found = bins.shape[0] // 2, []
    for part in range(2):
        own = bins[part * rows : (part + 1) * rows]
        moved = tops[part] - own[0]
        found.append(xp.zeros_like(moved))
        found += [
            sum(xp.where(moved == k, own[digit - k], 0) for k in range(digit))
            for digit in range(1, rows)
        ]
    return xp.stack(found)


def with_tops(bins: Array, tops: Array, xp: Any) -> Array:
    """Return `bins` with its top bins replaced by `tops`."""
    rows = bins.shape[0] // 2
    return xp.concatenate((tops[:1], bins[1:rows], tops[1:], bins[rows + 1 :]))


def sums_of(bins: Array, xp: Any) -> tuple[Array, Array]:
    """Return the two sums of every channel, as two float64 arrays of shape (C,). Each result is the
    exact sum rounded once. There is one exception: if the exact sum is very near to the midpoint of
    two float64 numbers, the result may be the farther one of these two numbers.
    """
    first, second = _pairs(bins, xp)
    return _value(first, xp), _value(second, xp)


def moments_of(bins: Array, count: Array, xp: Any) -> tuple[Array, Array]:
    """Return mean and biased variance of `count` elements from the sums of x and of x^2.

    The formulas are those of `backnorm_kernels.kernels.formulas.solve_forward` with pivot 0.
    `count` is float64, of shape (1,).
    """
    (total, rest_of_total), (squares, rest_of_squares) = _pairs(bins, xp)
    elements = xp.where(count > 0.0, count, xp.ones_like(count))
    mean = _value((total, rest_of_total), xp) / elements
    product, cut = two_product(mean, elements, xp)
    rest = ((total - product) + (rest_of_total - cut)) / elements
    low = xp.where(xp.isfinite(mean), rest, xp.zeros_like(rest))
    square, cut = two_product(total, mean, xp)
    cut = cut + (total * rest + rest_of_total * mean)
    variance = ((squares - square) + (rest_of_squares - cut)) / elements
    return mean + low, xp.where(variance < 0.0, xp.zeros_like(variance), variance)


def _pairs(bins: Array, xp: Any) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    rows = bins.shape[0] // 2
    return _pair(bins[:rows], xp), _pair(bins[rows:], xp)


def _pair(bins: Array, xp: Any) -> tuple[Array, Array]:
    """Return the sum in `bins` as two float64: the rounded sum, and what rounding has left."""
    special = bins[0] == SPECIAL
    top = xp.where(special, xp.zeros_like(bins[0]), bins[0])
    unit = ((32 * top + 1023) << 52).view(xp.float64)
    zero = xp.zeros_like(unit)
    carry = xp.zeros_like(top)
    # Reduce each digit to the range from -2^31 to 2^31 - 1, beginning with the lowest digit. The
    # excess of a digit is added, as `carry`, to the next higher digit.
    parts = []
    for digit in range(bins.shape[0] - 1, 0, -1):
        value = bins[digit] + carry
        left = ((value + _HALF) & _BELOW) - _HALF
        carry = (value - left) >> 32
        parts.append(zero + left)
    first, second, third, *fourth = reversed(parts)
    last = (fourth[0] if fourth else zero) * 2.0**-96
    high, low = two_sum((zero + carry) * 2.0**32, first)
    other, rest = two_sum(second * 2.0**-32, third * 2.0**-64)
    high, lost = two_sum(high, other)
    high, low = two_sum(high, (low + lost) + (rest + last))
    infinite = _infinite(bins[1:], zero, xp)
    return xp.where(special, infinite, high * unit), xp.where(special, zero, low * unit)


def _infinite(counts: Array, zero: Array, xp: Any) -> Array:
    """Return the value of a sum with terms that are NaN or infinite. `counts` has the numbers of
    terms that are NaN, +infinity and -infinity.
    """
    infinity, nan = zero + float("inf"), zero + float("nan")
    value = xp.where(counts[1] > 0, infinity, zero)
    value = xp.where(counts[2] > 0, xp.where(counts[1] > 0, nan, -infinity), value)
    return xp.where(counts[0] > 0, nan, value)


def _value(pair: tuple[Array, Array], xp: Any) -> Array:
    high, low = pair
    return xp.where(xp.isfinite(high), high + low, high)


@dataclass(frozen=True, slots=True, eq=False)
class _Reproducible:
    """Two sums of every channel as integers, and the number of elements that were summed."""

    bins: np.ndarray
    count: int

    def __add__(self, other: object) -> Self:
        """Return the sums over the elements of `self` and `other` together."""
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, _Reproducible)
        if other.bins.shape != self.bins.shape:
            raise ArgumentValueError(
                "sums",
                "only sums over the same channels, of elements of one type, add up",
                came=f"bins of shapes {self.bins.shape} and {other.bins.shape}",
            )
        count = self.count + other.count
        check_count("sums", count)
        return type(self)(added(self.bins, other.bins, np), count)


class ReproducibleSums(_Reproducible):
    """The sums of `ChannelSums`, but with the same bits for every order of the elements.

    ``backnorm.reduce(..., reproducible=True)`` returns these sums. ``backnorm.apply`` takes them.
    Two instances add up exactly (``a + b``), so the total does not depend on how a batch is
    divided.

    Attributes
    ----------
    bins : numpy.ndarray
        int64, shape (8, C), or (10, C) for float64 elements: see `backnorm.reproducible_sums`.
    count : int
        Number of elements per channel, M; below 2^31.
    """

    __slots__ = ()

    def rounded(self) -> ChannelSums:
        """Return the sums as float64."""
        check_count("sums", self.count)
        with np.errstate(all="ignore"):
            return ChannelSums(*sums_of(self.bins, np), self.count)


class ReproducibleMoments(_Reproducible):
    """The sums of x and x^2 in the forward pass, from which mean and variance are computed.

    ``backnorm.reduce_forward(..., reproducible=True)`` returns these sums.
    ``backnorm.apply_forward`` takes them in place of `ChannelMoments`. Two instances add up exactly
    (``a + b``), so the total does not depend on how a batch is divided.

    Attributes
    ----------
    bins : numpy.ndarray
        int64, shape (8, C), or (10, C) for float64 elements: see `backnorm.reproducible_sums`.
    count : int
        Number of elements per channel, M; below 2^31.
    """

    __slots__ = ()

    def rounded(self) -> ChannelMoments:
        """Return the mean and the biased variance of each channel, in float64."""
        check_count("moments", self.count)
        with np.errstate(all="ignore"):
            count = np.array([float(self.count)])
            return ChannelMoments(*moments_of(self.bins, count, np), self.count)
