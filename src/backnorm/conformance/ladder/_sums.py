"""The rounding errors of the summation methods that the rungs of the ladder stand for."""

from __future__ import annotations

import math
from typing import NamedTuple

from backnorm.conformance._grade import Rung
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

#: The unit roundoff of each type.
ROUNDOFF = {FLOAT64: 2.0**-53, FLOAT32: 2.0**-24, FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8}

# The bound of kind "expected" for n roundings with independent signs is DEVIATIONS * sqrt(n)
# roundoffs. One rounding error has a root mean square of 0.43 roundoffs. The sum of n such errors
# has a root mean square of 0.43 * sqrt(n) roundoffs. So the bound 2 * sqrt(n) is 4.7 standard
# deviations of the sum.
DEVIATIONS = 2.0
# The same factor for additions in any order. In sorted data, many additions are ties, so that
# one rounding error can have a root mean square of a whole roundoff, not of 0.43 roundoffs.
_DEVIATIONS_IN_ANY_ORDER = 5.0
# A pairwise sum first adds up runs of this many terms, one term after the other, and then adds the
# runs' sums in pairs. NumPy's runs have 16 terms, PyTorch's have 16 or 32.
RUN = 16
# Lengths of the shortest and the longest block of the rung "blocked", in elements.
BLOCKS = 128, 512
# How often an inverse standard deviation is rounded: once each for variance + epsilon, the square
# root and the reciprocal.
INVERSE_DEVIATION = 3


class Additions(NamedTuple):
    """The rounding errors of a summation method.

    S is the sum of the terms, Q the sum of their squares, and T the sum of their magnitudes. E is
    the sum of the squares of the rounding errors, divided by the square of the roundoff. If the
    terms are in random order, E is ``sums * S**2 + root * Q``. For any order of the terms, E is at
    most ``terms * T**2``, because no partial sum exceeds T; ``sums``, ``root`` and ``terms`` are
    the fields below. A term is first added to another term, then the result to another one, and so
    on. `height` is the largest number of additions that any term goes through.
    """

    height: float
    sums: float = 0.0
    root: float = 0.0
    terms: float = 0.0


#: The rungs on which the arithmetic of the sums is that of the elements, and not a wider one. It is
#: float64 for float64 data, and float32 for all other data.
SUMS = "pairwise", "blocked", "serial"


def additions_of(rung: Rung, count: int) -> Additions:
    """Return the rounding errors of the additions in a rung's sums of `count` terms. They are zeros
    for the rungs that are not in `SUMS`, because the budget of such a rung includes these errors.
    """
    if rung not in SUMS or count < 2:
        return Additions(0.0)
    if rung == "serial":
        return Additions(count - 1.0, terms=count - 1.0)
    if rung == "pairwise":
        if count <= RUN:
            return _row(count, single=True)
        run, levels = _row(RUN), math.log2(count / RUN)
        sums = run.sums * RUN / count + 2.0
        return Additions(run.height + math.ceil(levels), sums, run.root + levels)
    sizes = [_in_blocks(count, size) for size in BLOCKS]
    return Additions(*(max(column) for column in zip(*sizes, strict=True)))


def in_any_order(additions: Additions, unit: float) -> float:
    """Return the expected error of additions in any order, as a multiple of T.

    Each of the `additions.terms` additions rounds a partial sum of at most T, by at most `unit`
    times T. The rounding errors add up like independent numbers, except for their mean. A partial
    sum has a last place of at most 2 `unit` T. The last places of terms that are spread as widely
    as they are large are then distributed nearly, but not quite, evenly over this last place. So
    the mean of a rounding error can be up to ``additions.terms * unit**2 * T``
    (``docs/tolerance.md`` derives this).
    """
    independent = _DEVIATIONS_IN_ANY_ORDER * unit * math.sqrt(additions.terms)
    return independent + (additions.terms * unit) ** 2


def _in_blocks(count: int, size: int) -> Additions:
    """Return the rounding errors of a sum in blocks: `size` terms at a time are added serially, and
    then the sums of the blocks are added serially.
    """
    if count <= size:
        return _row(count, single=True)
    block, among = _row(size), _row(math.ceil(count / size), single=True)
    sums = block.sums * size / count + among.sums
    return Additions(block.height + among.height, sums, block.root + among.root)


def _row(count: int, single: bool = False) -> Additions:
    """Return the rounding errors of a serial sum.

    If `single` is true, these are the errors to expect of one sum; otherwise, they are the average
    errors of many sums.

    A sum of n = `count` terms has partial sums of k terms, for k from 2 to n. A partial sum of k
    terms is k/n of the whole sum, plus a random part. Averaged over many sums, the square of the
    random part is k/n times the sum of the squared terms. In one sum alone, the squares of the
    random parts are often larger than this average. So if `single` is true, the result allows twice
    the average of the squares.
    """
    sums = (count + 1) * (2 * count + 1) / (6 * count) - 1 / count**2
    root = (count + 1) / 2 - 1 / count
    return Additions(count - 1.0, sums, 2.0 * root if single else root)


def in_a_row(number: float, unit: float) -> float:
    """Return the largest relative error after `number` roundings, each of up to `unit`."""
    return number * unit / (1.0 - number * unit) if number * unit < 1.0 else math.inf
