"""Right forward kernels that compute in different ways, each with the rung that describes it.

Data are rows: x of shape (channels, M), gamma and beta of shape (channels, 1). A function of
statistics takes x in the type of the elements, and returns mean and variance, (channels, 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from backnorm.dtypes import rounded

from .right_kernels import (
    Atomics,
    Blocks,
    kahan,
    numpy_sum,
    pairs,
    reversed_serial,
    serial,
    strided,
    wide,
)


@dataclass
class TwoPass:
    """The mean, and the mean square of what deviates from it."""

    sums: Any
    corrected: bool = False

    def __call__(self, x):
        e = x.dtype.type
        # Sums that are wider are divided before they are rounded.
        mean = self._mean(x)
        c = x - mean
        variance = self._mean(c * c)
        if self.corrected:
            rest = self._mean(c)
            variance = variance - rest * rest
        return mean, variance.astype(e)

    def _mean(self, terms):
        total = self.sums(terms)
        return (total / total.dtype.type(terms.shape[1])).astype(terms.dtype)


@dataclass
class Shifted:
    """Sums of x - shift and of its square, the shift being the first element, or 0."""

    sums: Any
    shift: bool = True

    def __call__(self, x):
        shift = x[:, :1] if self.shift else np.zeros_like(x[:, :1])
        d = x - shift
        first, second = self.sums(d), self.sums(d * d)
        count = first.dtype.type(x.shape[1])
        mean = first / count
        variance = np.maximum(second / count - mean * mean, 0)
        return (shift + mean).astype(x.dtype), variance.astype(x.dtype)


def welford(x):
    e = x.dtype.type
    mean, square = np.zeros((2, len(x), 1), x.dtype)
    for k, column in enumerate(x.T[:, :, None], 1):
        d = column - mean
        mean = mean + d / e(k)
        square = square + d * (column - mean)
    return mean, square / e(x.shape[1])


def _merged(one, other):
    """Return the count, mean and sum of squares of two parts, by Chan's formula."""
    (n, mean, square), (m, other_mean, other_square) = one, other
    total = n + m
    d = other_mean - mean
    return total, mean + d * (m / total), square + other_square + d * d * (n * m / total)


def chan_in_pairs(x):
    """Return statistics of elements, merged in pairs."""
    e = x.dtype.type
    parts = np.ones((1, x.shape[1]), x.dtype), x, np.zeros_like(x)
    while parts[1].shape[1] > 1:
        length = parts[1].shape[1]
        half = length // 2
        first, second = ([p[:, i : 2 * half : 2] for p in parts] for i in (0, 1))
        merged = _merged(first, second)
        last = [p[:, 2 * half :] for p in parts]
        parts = [np.concatenate(each, axis=1) for each in zip(merged, last, strict=True)]
    _, mean, square = parts
    return mean, square / e(x.shape[1])


@dataclass
class ChanInBlocks:
    """Statistics of blocks by one pass of Welford's, merged one after the other."""

    size: int

    def __call__(self, x):
        e = x.dtype.type
        whole = None
        for start in range(0, x.shape[1], self.size):
            block = x[:, start : start + self.size]
            mean, variance = welford(block)
            count = e(block.shape[1])
            part = count, mean, variance * count
            whole = part if whole is None else _merged(whole, part)
        count, mean, square = whole
        return mean, square / count


@dataclass(frozen=True)
class RightForward:
    """A right forward kernel.

    Attributes
    ----------
    name, rung : str
    statistics : callable
    elements : type
        Of every intermediate value.
    folded : bool
        Whether y = A x + B.
    most : float
        The largest mean/deviation for which it is right.
    loops : bool
        Whether it takes seconds for many elements.
    shifted : bool
        Whether elements lose bits by a shift, unless the mean is much larger than the deviation.
    """

    name: str
    rung: str
    statistics: Any
    elements: Any = np.float32
    folded: bool = False
    most: float = np.inf
    loops: bool = False
    shifted: bool = False

    def rung_of(self, ratio):
        """Return the rung for data of this mean/deviation."""
        return "serial" if self.shifted and ratio < 100 else self.rung

    def is_right(self, count, ratio):
        """Whether the kernel is right for so many elements of this mean/deviation."""
        if self.name == "serial, corrected" and count * ratio > 2**23:
            # The mean is off by more than the correction can undo.
            return False
        # In one pass, few elements are far nearer to each other than to 0.
        return ratio <= self.most and (count >= 16 or self.most == np.inf)

    def __call__(self, x, gamma, beta, epsilon, statistics=None):
        e = self.elements
        v, g, b = (values.astype(e) for values in (x, gamma, beta))
        mean, variance = self.statistics(v)
        s = e(1) / np.sqrt(variance + e(epsilon))
        gain = g * s
        y = v * gain + (b - mean * gain) if self.folded else (v - mean) * gain + b
        kept = statistics or gamma.dtype
        types = x.dtype, kept, kept
        results = y, mean[:, 0], variance[:, 0]
        return [rounded(a, t) for a, t in zip(results, types, strict=True)]


RIGHT_FORWARD = (
    RightForward("float64", "float64", TwoPass(wide), np.float64),
    RightForward("float64, one pass", "float64", Shifted(wide, False), np.float64, most=1.0),
    RightForward("float64 sums", "float32", TwoPass(wide)),
    RightForward("float64 sums, folded", "float32", TwoPass(wide), folded=True),
    RightForward("float64 sums, shifted", "float32", Shifted(wide), shifted=True),
    RightForward("float64 sums, one pass", "float32", Shifted(wide, False), most=1.0),
    RightForward("Kahan", "float32", TwoPass(kahan)),
    RightForward("pairs", "pairwise", TwoPass(pairs)),
    RightForward("pairs, folded", "pairwise", TwoPass(pairs), folded=True),
    RightForward("pairs, corrected", "pairwise", TwoPass(pairs, corrected=True)),
    RightForward("NumPy's sum", "pairwise", TwoPass(numpy_sum)),
    RightForward("Chan in pairs", "pairwise", chan_in_pairs),
    RightForward("blocks of 128", "blocked", TwoPass(Blocks(128))),
    RightForward("blocks of 256", "blocked", TwoPass(Blocks(256))),
    RightForward("blocks of 512", "blocked", TwoPass(Blocks(512))),
    RightForward("Chan in blocks", "blocked", ChanInBlocks(256), loops=True),
    RightForward("serial", "serial", TwoPass(serial)),
    RightForward("serial, folded", "serial", TwoPass(serial), folded=True),
    RightForward("serial, corrected", "serial", TwoPass(serial, corrected=True)),
    RightForward("serial, reversed", "serial", TwoPass(reversed_serial)),
    RightForward("serial, strided", "serial", TwoPass(strided)),
    RightForward("serial, shifted", "serial", Shifted(serial)),
    RightForward("serial, one pass", "serial", Shifted(serial, False), most=1.0),
    RightForward("Welford", "serial", welford, loops=True),
    RightForward("atomics", "serial", TwoPass(Atomics())),
)
