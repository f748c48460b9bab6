"""A right backward kernel in float32 arithmetic, and broken ones whose float32 is not enough.

Each step is rounded to float32 as a kernel's would be: sums four terms at a time, which are added
up in float64, and elements from coefficients that are rounded once.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from backnorm.conformance.mutants import (
    DeviatesInFloat32,
    FoldsMeanIntoConstant,
    Kernel,
    SumsInFloat32,
    SumsProductBeforeMean,
    Truncates,
)

#: What is wrong with these is right in float32 arithmetic, or no more than that may lose: two of
#: them cancel in float64, and have a mutant here that does so in float32.
WITHIN_FLOAT32 = (
    DeviatesInFloat32,
    FoldsMeanIntoConstant,
    SumsInFloat32,
    SumsProductBeforeMean,
    Truncates,
)

# Lanes of a vector, and vectors that are added up at a time.
_LANES, _RUN = 16, 4


def single(values):
    """Return values rounded to float32, as float64."""
    return np.asarray(values, np.float64).astype(np.float32).astype(np.float64)


def fused(left, right, term):
    """Return left * right + term, rounded once: products of two float32 are exact in float64."""
    return single(left * right + term)


def runs(values):
    """Return four arrays whose elements are added up in float32, with zeros after the last."""
    channels, count = values.shape
    padded = np.zeros((channels, -(-count // (_LANES * _RUN)) * _LANES * _RUN))
    padded[:, :count] = values
    return padded.reshape(channels, -1, _RUN, _LANES).transpose(2, 0, 1, 3)


class Single(Kernel):
    """The right one."""

    def deviation(self, x, mean):
        return single(x - mean)

    def sums(self, x, dy, c, mean):
        d, k = runs(dy), runs(c)
        total = single(single(d[0] + d[1]) + single(d[2] + d[3]))
        pairs = [fused(d[i + 1], k[i + 1], single(d[i] * k[i])) for i in (0, 2)]
        product = single(pairs[0] + pairs[1])
        return tuple(each.sum((1, 2))[:, None] for each in (total, product))

    def coefficients(self, sum_dy, sum_dy_xmu, s, count):
        return tuple(map(single, super().coefficients(sum_dy, sum_dy_xmu, s, count)))

    def scale(self, gamma, s):
        return single(super().scale(gamma, s))

    def training_dx(self, x, dy, c, mean, gamma, s, mean_dy, slope):
        return single(self.scale(gamma, s) * fused(-c, slope, single(dy - mean_dy)))


class SumsOneByOne(Single):
    wrong = "the sums are float32, one term after the other"

    def sums(self, x, dy, c, mean):
        narrow = {"axis": 1, "dtype": np.float32}
        return tuple(
            each.cumsum(**narrow)[:, -1:].astype(np.float64) if each.size else each.sum(1)[:, None]
            for each in (dy, dy * c)
        )


class SumsProductsOfBfloat16(Single):
    wrong = "the factors of the product are rounded to bfloat16"

    def sums(self, x, dy, c, mean):
        narrow = [each.astype(ml_dtypes.bfloat16).astype(np.float64) for each in (dy, c)]
        return super().sums(x, dy, c, mean)[0], super().sums(x, *narrow, mean)[1]


class SumsBeforeTheMean(Single):
    wrong = "sum(dy x) - mean sum(dy), from float32 products"

    def sums(self, x, dy, c, mean):
        total, product = super().sums(x, dy, x, mean)
        return total, product - mean * total


class FoldsMean(Single):
    wrong = "dx = A dy + B x + K, with a float32 K"

    def training_dx(self, x, dy, c, mean, gamma, s, mean_dy, slope):
        constant = single(slope * mean - mean_dy)
        return single(self.scale(gamma, s) * fused(-slope, x, single(dy + constant)))


class CoefficientsOfTensorFloat32(Single):
    wrong = "coefficients have eleven bits"

    def coefficients(self, sum_dy, sum_dy_xmu, s, count):
        found = super().coefficients(sum_dy, sum_dy_xmu, s, count)
        return tuple(_eleven_bits(each) for each in found)


class GainOfFloat16(Single):
    wrong = "the gain is rounded to float16"

    def scale(self, gamma, s):
        return super().scale(gamma, s).astype(np.float16).astype(np.float64)


def _eleven_bits(values):
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.rint(fraction * 2.0**11), exponent - 11)


SINGLE_MUTANTS = list(Single.__subclasses__())
