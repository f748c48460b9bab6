"""Right backward kernels that compute in different ways, each with the rung that describes it.

Data are rows: x and dy of shape (channels, M), the parameters of shape (channels, 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from backnorm.conformance.ladder import RUNGS
from backnorm.dtypes import rounded


def serial(terms):
    return np.add.accumulate(terms, axis=1)[:, -1:]


def reversed_serial(terms):
    return serial(terms[:, ::-1])


def strided(terms, stride=7):
    order = np.concatenate([np.arange(i, terms.shape[1], stride) for i in range(stride)])
    return serial(terms[:, order])


@dataclass
class Atomics:
    """Atomic additions: every channel in a random order of its own."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def __call__(self, terms):
        return serial(self.rng.permuted(terms, axis=1))


def numpy_sum(terms):
    return np.ascontiguousarray(terms).sum(1, keepdims=True, dtype=terms.dtype)


def pairs(terms):
    while terms.shape[1] > 1:
        if terms.shape[1] % 2:
            terms = np.concatenate([terms, np.zeros_like(terms[:, :1])], axis=1)
        terms = terms[:, 0::2] + terms[:, 1::2]
    return terms


@dataclass
class Blocks:
    """Sums one after the other in blocks, and of one block after the other."""

    size: int

    def __call__(self, terms):
        channels, count = terms.shape
        padded = np.zeros((channels, -(-count // self.size) * self.size), terms.dtype)
        padded[:, :count] = terms
        blocks = padded.reshape(-1, self.size)
        return serial(serial(blocks).reshape(channels, -1))


def wide(terms):
    """Return sums in the next wider type."""
    wider = np.float64 if terms.dtype == np.float32 else np.longdouble
    return terms.astype(wider).sum(1, keepdims=True)


def kahan(terms, lanes=64):
    """Return sums of lanes by Kahan's method; the lanes and what they lost are added up wide."""
    channels, count = terms.shape
    padded = np.zeros((channels, max(-(-count // lanes), 1) * lanes), terms.dtype)
    padded[:, :count] = terms
    total, lost = np.zeros((2, channels, lanes), terms.dtype)
    for term in np.moveaxis(padded.reshape(channels, -1, lanes), 1, 0):
        corrected = term - lost
        following = total + corrected
        lost = (following - total) - corrected
        total = following
    return wide(np.concatenate([total, -lost], axis=1))


def bfloat16_sum(terms):
    return serial(terms.astype(ml_dtypes.bfloat16)).astype(np.float32)


@dataclass(frozen=True)
class RightKernel:
    """A right kernel.

    Attributes
    ----------
    name, rung : str
    sums : callable
    elements : type
        Of every intermediate value.
    deviation : type
        What the inverse deviation is rounded to.
    folded : bool
        Whether dx = A dy + B x + K.
    centred : bool
        Whether the folded form has x - mean for x.
    normalised : bool
        Whether x is normalised before it is multiplied.
    """

    name: str
    rung: str
    sums: Any
    elements: Any = np.float32
    deviation: Any = np.float32
    folded: bool = False
    centred: bool = False
    normalised: bool = False

    def __call__(self, x, dy, mean, variance, gamma, epsilon, training=True):
        e = self.elements
        v, d, m, w, g = (values.astype(e) for values in (x, dy, mean, variance, gamma))
        count = e(x.shape[1])
        if self.deviation is e:
            s = e(1) / np.sqrt(w + e(epsilon))
        else:
            s = (1 / np.sqrt(w.astype("d") + epsilon)).astype(self.deviation).astype(e)
        c = v - m
        if self.normalised:
            c = c * s
        sum_dy, sum_dy_c = self.sums(d).astype(e), self.sums(d * c).astype(e)
        gain = g * s
        mean_dy = sum_dy / count
        if self.normalised:
            slope = sum_dy_c / count
            dgamma = sum_dy_c
        else:
            slope = s * s * (sum_dy_c / count)
            dgamma = s * sum_dy_c
        if not training:
            dx = gain * d
        elif self.folded:
            v, m = (c, e(0)) if self.centred else (v, m)
            dx = gain * d + (-gain * slope) * v + gain * (slope * m - mean_dy)
        else:
            dx = gain * (d - mean_dy - c * slope)
        types = x.dtype, mean.dtype, mean.dtype
        return [rounded(a, t) for a, t in zip((dx, dgamma[:, 0], sum_dy[:, 0]), types, strict=True)]


RIGHT = (
    RightKernel("float64", "float64", wide, np.float64, np.float64),
    RightKernel("rounded inverse deviation", "float32", wide, np.float64, np.float32),
    RightKernel("float64 sums", "float32", wide),
    RightKernel("normalised, float64 sums", "float32", wide, normalised=True),
    RightKernel("Kahan", "float32", kahan),
    RightKernel("folded, float64 sums", "float32", wide, folded=True),
    RightKernel("folded, centred", "float32", wide, folded=True, centred=True),
    RightKernel("pairs", "pairwise", pairs),
    RightKernel("NumPy's sum", "pairwise", numpy_sum),
    RightKernel("blocks of 128", "blocked", Blocks(128)),
    RightKernel("blocks of 256", "blocked", Blocks(256)),
    RightKernel("blocks of 512", "blocked", Blocks(512)),
    RightKernel("serial", "serial", serial),
    RightKernel("serial, reversed", "serial", reversed_serial),
    RightKernel("serial, strided", "serial", strided),
    RightKernel("normalised, serial", "serial", serial, normalised=True),
    RightKernel("atomics", "serial", Atomics()),
)

STATUSES = [*RUNGS, "wrong", "nonfinite"]
# The roundoff of float32.
U = 2.0**-24


def worst(grades):
    return max((g.status for g in grades.values()), key=STATUSES.index)


def check_rung(grades, rung, name):
    """Fail unless all outputs of a kernel are within the bounds of its rung."""
    for output, found in grades.items():
        what = name, output, found
        # Float32's rung does not exist for float64 data.
        if rung in found.share:
            assert found.share[rung] <= 1.0, what
            assert STATUSES.index(found.status) <= STATUSES.index(rung), what


#: Terms whose sums lose more than sums of random terms do: name -> function of the count.
ADVERSARIAL = {
    # All partial sums are rounded up by nearly half a unit.
    "rounded up each time": lambda n, rng: np.r_[1.0, np.full(n - 1, U * (1 + 2.0**-10))],
    "constant": lambda n, rng: np.full(n, 0.1),
    "sorted": lambda n, rng: np.sort(rng.standard_normal(n)),
    "positive first": lambda n, rng: np.sort(rng.standard_normal(n))[::-1],
    "cancelling in pairs": lambda n, rng: (
        np.repeat(rng.uniform(1, 2, n), 2)[:n] * (1 - 2.0 * (np.arange(n) % 2))
    ),
    "of all magnitudes": lambda n, rng: rng.choice([-1, 1], n) * 2.0 ** rng.uniform(-30, 30, n),
    "increasing": lambda n, rng: np.arange(n) + 1 / 3,
    "increasing, far from 0": lambda n, rng: 1e4 + np.arange(n) / n,
    "one outlier first": lambda n, rng: np.r_[1e4, rng.standard_normal(n - 1)],
    "one outlier last": lambda n, rng: np.r_[rng.standard_normal(n - 1), 1e4],
}


def adversarial(name, count, rng):
    """Return two channels of such terms, which are the negative of each other."""
    terms = ADVERSARIAL[name](count, rng)
    return np.stack([terms, -terms]).astype(np.float32)
