"""Batch normalisation in mpmath, one channel at a time: independent of the oracle and slower."""

from __future__ import annotations

import mpmath
import numpy as np
from mpmath import mpf

DIGITS = 60


def numbers(values):
    return [mpf(float(value)) for value in np.ravel(values)]


def forward(x, gamma, beta, epsilon):
    """Return y, mean, variance of one channel (lists and numbers of mpmath)."""
    count = len(x)
    mean = mpmath.fsum(x) / count
    variance = mpmath.fsum((v - mean) ** 2 for v in x) / count
    return inference(x, mean, variance, gamma, beta, epsilon), mean, variance


def inference(x, mean, variance, gamma, beta, epsilon):
    deviation = mpmath.sqrt(variance + mpf(epsilon))
    return [gamma * (v - mean) / deviation + beta for v in x]


def backward(x, dy, mean, variance, gamma, epsilon, training):
    """Return dx, dgamma, dbeta of one channel by the textbook formula in x-hat."""
    count = len(x)
    deviation = mpmath.sqrt(variance + mpf(epsilon))
    normalized = [(v - mean) / deviation for v in x]
    dbeta = mpmath.fsum(dy)
    dgamma = mpmath.fsum(d * h for d, h in zip(dy, normalized, strict=True))
    if not training:
        return [gamma * d / deviation for d in dy], dgamma, dbeta
    dx = [
        gamma / deviation * (d - dbeta / count - h * dgamma / count)
        for d, h in zip(dy, normalized, strict=True)
    ]
    return dx, dgamma, dbeta


def assert_equals(exact, expected, terms):
    """Assert that double-doubles are these mpmath numbers, to 2**-94 of the terms."""
    for hi, lo, number, scale in zip(
        exact.hi.ravel(), exact.lo.ravel(), expected, np.ravel(terms), strict=True
    ):
        assert abs(mpf(float(hi)) + mpf(float(lo)) - number) <= mpf(2) ** -94 * mpf(float(scale))
