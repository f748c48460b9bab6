"""Arrays of a problem: their shapes, how they lie in memory, and their elements."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

import numpy as np
from memory import Arena

from backnorm.dtypes import FLOAT16, FLOAT64, is_16_bit

__all__ = ["LAYOUTS", "MOST", "Operand", "channel_values", "data_values", "laid_out", "some_shape"]

#: How an array lies in memory, and how often.
LAYOUTS = {"rows": 50, "Fortran": 8, "permuted": 16, "strided": 10, "reversed": 8, "mixed": 8}

# Elements of the pools that values come from, and at most of an array.
_POOL, MOST = 1 << 21, 1 << 20

# Elements up to which a problem goes, and how often.
_BUDGETS = {48: 20, 512: 35, 4096: 33, 40_000: 11, MOST: 0.15}

_UNUSUAL = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, 6e-8, 6e4, 1e38)


@dataclass(frozen=True, slots=True)
class Operand:
    """An array: what it looks like, and the elements of its memory one after the other.

    Attributes
    ----------
    shape, dtype
    content : numpy.ndarray
    offset : int
        The element of memory where the array begins.
    strides : tuple of int or None
        In elements; None: in rows.
    read_only : bool
        Whether its pages cannot be written to.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    content: np.ndarray
    offset: int = 0
    strides: tuple[int, ...] | None = None
    read_only: bool = True

    def plain(self) -> np.ndarray:
        """Return the array in memory of its own."""
        memory = self.content.astype(self.dtype)
        return np.ndarray(
            self.shape, self.dtype, memory, self.offset * self.dtype.itemsize, self._bytes()
        )

    def guarded(self, arena: Arena, name: str) -> np.ndarray:
        """Return the array between unreadable pages."""
        return arena.array(
            name, self.shape, self.dtype, elements=self.content.size, offset=self.offset,
            strides=self._bytes(), content=self.content, read_only=self.read_only,
        )  # fmt: skip

    def _bytes(self) -> tuple[int, ...] | None:
        if self.strides is None:
            return None
        return tuple(stride * self.dtype.itemsize for stride in self.strides)


@functools.cache
def _pool(dtype: np.dtype, kind: str) -> np.ndarray:
    """Return many values: usual ones, positive ones, or of all magnitudes that the type has."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal(_POOL)
    if kind == "positive":
        values = np.abs(values) + 0.125
    elif kind == "wide":
        most = 14 if dtype == FLOAT16 else 40 if is_16_bit(dtype) else 90
        values = np.ldexp(values, rng.integers(-most, most + 1, _POOL))
    with np.errstate(over="ignore"):
        return values if dtype == FLOAT64 else values.astype(dtype)


def _taken(rnd: random.Random, dtype: np.dtype, kind: str, count: int) -> np.ndarray:
    start = rnd.randrange(_POOL - count)
    return _pool(dtype, kind)[start : start + count]


def _with_unusual(rnd: random.Random, values: np.ndarray) -> np.ndarray:
    values = values.copy()
    with np.errstate(over="ignore"):
        for _ in range(rnd.randint(1, 4) if values.size else 0):
            values[rnd.randrange(values.size)] = rnd.choice(_UNUSUAL)
    return values


def data_values(rnd: random.Random, dtype: np.dtype, count: int, values: str) -> np.ndarray:
    """Return elements: "usual", "wide" (of all magnitudes), or some of them "unusual"."""
    found = _taken(rnd, dtype, "wide" if values == "wide" else "usual", count)
    return _with_unusual(rnd, found) if values == "unusual" else found


def channel_values(
    rnd: random.Random, dtype: np.dtype, count: int, values: str, *, positive: bool = False
) -> np.ndarray:
    """Return values of channels."""
    found = _taken(rnd, dtype, "positive" if positive else "usual", count)
    if values == "unusual" and rnd.random() < 0.3:
        found = _with_unusual(rnd, found)
        # A variance that is refused is another matter: it is, in one of a hundred problems.
        return np.abs(found) if positive and rnd.random() < 0.9 else found
    return found


def _size(rnd: random.Random, most: int) -> int:
    """Return a length: small, beside a multiple of a vector or a line, or anything."""
    if most <= 1 or rnd.random() < 0.015:
        return most if rnd.random() < 0.9 else 0
    kind = rnd.random()
    if kind < 0.3:
        found = rnd.choice((1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13))
    elif kind < 0.7:
        found = rnd.choice((8, 8, 16, 16, 32, 64)) * rnd.randint(1, 9) + rnd.choice((-1, 0, 0, 1))
    else:
        found = int(math.exp(rnd.uniform(0.0, math.log(most + 1))))
    return max(1, min(most, found))


def _split(rnd: random.Random, size: int, most: int) -> tuple[int, ...]:
    """Return up to `most` lengths with this product."""
    found = [size]
    while len(found) < most and rnd.random() < 0.6:
        at = rnd.randrange(len(found))
        factor = next((f for f in rnd.sample((1, 2, 3, 5, 7), 5) if found[at] % f == 0), 1)
        found[at : at + 1] = (
            [factor, found[at] // factor] if rnd.random() < 0.5 else [found[at] // factor, factor]
        )
    return tuple(found)


def some_shape(rnd: random.Random) -> tuple[tuple[int, ...], str | tuple[int, ...]]:
    """Return a shape of up to six axes, and the data format."""
    budget = rnd.choices(tuple(_BUDGETS), tuple(_BUDGETS.values()))[0]
    # The axis that is chosen first can have all of it.
    extents = {}
    for name in rnd.sample(("outer", "channels", "inner"), 3):
        extents[name] = _size(rnd, budget) if rnd.random() < 0.9 else 1
        budget //= max(1, extents[name])
    outer, channels, inner = extents["outer"], extents["channels"], extents["inner"]
    kind = rnd.random()
    if kind < 0.45:
        more = _split(rnd, inner, 4) if inner != 1 or rnd.random() < 0.5 else ()
        return (outer, channels, *more), "NCX"
    if kind < 0.85:
        # What lies behind the channels of the other format lies before them here.
        return (*_split(rnd, outer * inner, 5), channels), "NXC"
    if kind < 0.93:
        before, own = _split(rnd, outer, 2), _split(rnd, channels, 2)
        after = _split(rnd, inner, 2)
        axes = range(len(before), len(before) + len(own))
        return (*before, *own, *after), tuple(axes)
    rank = rnd.randint(0, 6)
    lengths = _split(rnd, outer * channels * inner, rank) if rank else ()
    shape = (*lengths, *(1 for _ in range(rank - len(lengths))))
    return shape, tuple(sorted(rnd.sample(range(rank), rnd.randint(0, rank))))


def laid_out(
    rnd: random.Random, shape: tuple[int, ...], layout: str
) -> tuple[int, int, tuple[int, ...] | None]:
    """Return how many elements of memory an array has, where it begins, and its strides."""
    if layout == "rows":
        return math.prod(shape), 0, None
    rank = len(shape)
    order = list(range(rank))[::-1] if layout == "Fortran" else list(range(rank))
    if layout in ("permuted", "mixed"):
        rnd.shuffle(order)
    steps, spare = [1] * rank, [0] * rank
    for axis in range(rank):
        if layout in ("strided", "mixed") and rnd.random() < 0.5:
            steps[axis], spare[axis] = rnd.choice(((1, 1), (2, 0), (1, 3), (2, 1)))
        if layout in ("reversed", "mixed") and rnd.random() < 0.5:
            steps[axis] = -steps[axis]
    strides, offset, step = [0] * rank, 0, 1
    for axis in reversed(order):
        strides[axis] = step * steps[axis]
        if steps[axis] < 0:
            offset += max(0, shape[axis] - 1) * -strides[axis]
        step *= shape[axis] * abs(steps[axis]) + spare[axis]
    if 0 in shape:
        return 0, 0, tuple(strides)
    if step > 2 * MOST - 1:
        return math.prod(shape), 0, None
    return step, offset, tuple(strides)
