"""A right backward kernel in float32 arithmetic, and broken ones whose float32 is not enough.

Each step is rounded to float32 as a kernel's would be: sums four terms at a time, which are added
up in float64, and elements from coefficients that are rounded once.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from backnorm.conformance.formula import BACKWARD, IMPRECISE, Mistake

#: What is wrong with these is right in float32 arithmetic, or no more than that may lose: two of
#: them cancel in float64, and have a mistake here that does so in float32.
WITHIN_FLOAT32 = tuple(
    mistake for mistake in IMPRECISE if mistake.name not in ("float16-sums", "rounded-twice")
)

# Lanes of a vector, and vectors that are added up at a time.
_LANES, _RUN = 16, 4


def single(values):
    """Return values rounded to float32, as float64."""
    with np.errstate(over="ignore"):
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


def column(values):
    return values.astype(np.float64)[:, None]


def deviation(x, mean):
    return single(x - mean)


def sums(channels, mean, c):
    d, k = runs(channels.dy), runs(c)
    total = single(single(d[0] + d[1]) + single(d[2] + d[3]))
    pairs = [fused(d[i + 1], k[i + 1], single(d[i] * k[i])) for i in (0, 2)]
    product = single(pairs[0] + pairs[1])
    return tuple(each.sum((1, 2)).astype(np.longdouble) for each in (total, product))


def dx(channels, c, gain, mean_dy, projection):
    dy = channels.dy.astype(np.float64)
    inner = fused(-c, column(projection), single(dy - column(mean_dy)))
    return single(column(gain) * inner)


def rounded(step, of=single):
    """Return a step of the formula whose result is rounded."""
    function = getattr(BACKWARD, step)
    return lambda *operands: of(function(*operands))


SINGLE = replace(
    BACKWARD,
    deviation=deviation,
    sums=sums,
    dx=dx,
    **{step: rounded(step) for step in ("gain", "mean_dy", "projection")},
)


def sums_one_by_one(channels, mean, c):
    narrow = {"axis": 1, "dtype": np.float32}
    return tuple(
        each.astype(np.float64).cumsum(**narrow)[:, -1].astype(np.longdouble)
        if each.size
        else each.sum(1)
        for each in (channels.dy, channels.dy * c)
    )


def sums_of_bfloat16_products(channels, mean, c):
    dy, c = (each.astype(ml_dtypes.bfloat16).astype(np.float64) for each in (channels.dy, c))
    return sums(channels, mean, c)[0], sums(replace(channels, dy=dy), mean, c)[1]


def sums_before_the_mean(channels, mean, c):
    total, product = sums(channels, mean, channels.x)
    return total, product - mean * total


def folded_mean(channels, c, gain, mean_dy, projection):
    x, dy = channels.x.astype(np.float64), channels.dy.astype(np.float64)
    constant = single(column(projection) * column(channels.mean) - column(mean_dy))
    return single(column(gain) * fused(-column(projection), x, single(dy + constant)))


def eleven_bits(values):
    fraction, exponent = np.frexp(single(values))
    return np.ldexp(np.rint(fraction * 2.0**11), exponent - 11)


def float16(values):
    return single(values).astype(np.float16).astype(np.float64)


#: Mistakes with which `SINGLE` is less accurate than float32 arithmetic.
SINGLE_MISTAKES = tuple(
    Mistake(*row)
    for row in (
        ("float32-sums", "sums are float32, one term after the other", "sums", sums_one_by_one),
        ("bfloat16-products", "the factors of the product are rounded to bfloat16", "sums",
         sums_of_bfloat16_products),
        ("sum-before-mean", "sum(dy x) - mean sum(dy), from float32 products", "sums",
         sums_before_the_mean),
        ("folded-mean", "dx = a dy + b x + constant, with a float32 constant", "dx", folded_mean),
        ("projection-bits", "a coefficient has eleven bits", "projection",
         rounded("projection", eleven_bits)),
        ("float16-gain", "the gain is rounded to float16", "gain", rounded("gain", float16)),
    )
)  # fmt: skip
