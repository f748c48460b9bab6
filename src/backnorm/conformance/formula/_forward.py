"""The formula of the forward pass in training in steps, and mistakes in each step.

For right steps and for wrong ones, y is ``gain*(x - m) + offset``, where m is the mean of x in the
channel, and gain and offset are numbers of the channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from backnorm.conformance.formula._channels import Channels
from backnorm.conformance.formula._formula import (
    INVERSE_DEVIATION_MISTAKES,
    Formula,
    Mistake,
    Values,
)
from backnorm.conformance.judge import FORWARD_RESULTS, MORE_FORWARD_RESULTS, Quantity

Array = np.ndarray


def _bessel(b: Channels, w: Array) -> Array:
    return w * b.count / max(b.count - 1, 1)


#: Mistakes that implementations of the forward pass make. Each mistake changes one step of the
#: formula.
FORWARD_MISTAKES = tuple(
    Mistake(*row)
    for row in (
        ("bessel", "the variance is divided by M - 1, not by M", "statistics",
         lambda b: (b.of_x[0], _bessel(b, b.of_x[1]))),
        ("running-statistics", "the running statistics are used instead of those of the batch",
         "statistics", lambda b: (b.mean, b.variance)),
        ("initial-statistics", "the statistics 0 and 1 are used instead of those of the batch",
         "statistics", lambda b: (0.0 * b.of_x[0], np.ones_like(b.of_x[0]))),
        ("mean-left-out", "the mean is not subtracted", "statistics",
         lambda b: (0.0 * b.of_x[0], b.of_x[1])),
        ("second-moment", "the mean of x**2 is used for the variance", "statistics",
         lambda b: (b.of_x[0], b.of_x[1] + b.of_x[0] ** 2)),
        ("statistics-swapped", "mean and variance are swapped", "statistics",
         lambda b: (b.of_x[1], np.abs(b.of_x[0]))),
        ("statistics-of-neighbour", "the statistics of the next channel are used", "statistics",
         lambda b: tuple(np.roll(each, -1) for each in b.of_x)),
        ("statistics-of-channel-before", "the statistics of the channel before are used",
         "statistics", lambda b: tuple(np.roll(each, 1) for each in b.of_x)),
        ("statistics-of-first-image", "the statistics are those of the first image", "statistics",
         lambda b: b.of_first(b.count // max(b.images, 1))),
        ("statistics-of-first-half", "the statistics are those of the first half of a channel",
         "statistics", lambda b: b.of_first(b.count // 2)),
        ("last-left-out", "the statistics lack the last element of a channel", "statistics",
         lambda b: b.of_first(b.count - 1)),
        ("bessel-in-y", "y has the variance that is divided by M - 1", "inverse_deviation",
         lambda w, e, b: 1.0 / np.sqrt(_bessel(b, w) + e)),
        *INVERSE_DEVIATION_MISTAKES,
        ("gamma-left-out", "y is not multiplied by gamma", "gain", lambda b, s: s),
        ("gamma-twice", "y is multiplied by gamma twice", "gain", lambda b, s: b.gamma**2 * s),
        ("gamma-absolute", "y is multiplied by |gamma|", "gain", lambda b, s: np.abs(b.gamma) * s),
        ("gamma-of-neighbour", "the gamma of the next channel is used", "gain",
         lambda b, s: np.roll(b.gamma, -1) * s),
        ("gain-no-s", "y is not divided by the standard deviation", "gain", lambda b, s: b.gamma),
        ("gain-beta", "y is multiplied by beta, not by gamma", "gain", lambda b, s: b.beta * s),
        ("beta-left-out", "y lacks beta", "offset", lambda b, s: 0.0 * b.beta),
        ("beta-sign", "beta is subtracted, not added", "offset", lambda b, s: -b.beta),
        ("beta-gamma", "beta is multiplied by gamma", "offset", lambda b, s: b.gamma * b.beta),
        ("beta-s", "beta is multiplied by s", "offset", lambda b, s: s * b.beta),
        ("beta-of-neighbour", "the beta of the next channel is used", "offset",
         lambda b, s: np.roll(b.beta, -1)),
        ("beta-twice", "beta is added twice", "offset", lambda b, s: 2.0 * b.beta),
        ("offset-gamma", "gamma is added, not beta", "offset", lambda b, s: b.gamma),
        ("mean-zero", "the returned mean is 0", "mean", lambda b, m: 0.0 * m),
        ("mean-sum", "the returned mean is the sum of x", "mean", lambda b, m: b.count * m),
        ("mean-running", "the returned mean is the running mean", "mean",
         lambda b, m: b.mean),
        ("variance-zero", "the returned variance is 0", "variance", lambda b, w, s: 0.0 * w),
        ("variance-unbiased", "the returned variance is divided by M - 1, not by M", "variance",
         lambda b, w, s: _bessel(b, w)),
        ("variance-sum", "the returned variance is not divided by M", "variance",
         lambda b, w, s: b.count * w),
        ("variance-epsilon", "the returned variance contains epsilon", "variance",
         lambda b, w, s: w + b.epsilon),
        ("variance-running", "the returned variance is the running variance", "variance",
         lambda b, w, s: b.variance),
        ("variance-deviation", "the standard deviation is returned for the variance", "variance",
         lambda b, w, s: np.sqrt(w)),
        ("variance-inverse", "the inverse deviation is returned for the variance", "variance",
         lambda b, w, s: s),
        ("inverse-variance", "the variance is returned for the inverse deviation", "inverse",
         lambda b, w, s: w),
        ("inverse-deviation", "the standard deviation is returned for its inverse", "inverse",
         lambda b, w, s: 1.0 / s),
        ("inverse-epsilon", "the returned inverse deviation lacks epsilon", "inverse",
         lambda b, w, s: 1.0 / np.sqrt(w)),
        ("momentum-swapped", "momentum and 1 - momentum are swapped in the running statistics",
         "momentum", lambda m: 1.0 - m),
        ("running-not-updated", "the running statistics are not updated", "momentum",
         lambda m: 0.0),
        ("running-replaced", "the running statistics are those of the batch", "momentum",
         lambda m: 1.0),
        ("running-variance-unbiased", "the running variance averages variances that are divided "
         "by M - 1, not by M", "averaged", _bessel),
        ("running-variance-biased", "the running variance averages variances that are divided "
         "by M, not by M - 1", "averaged", lambda b, w: w),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardFormula(Formula):
    """The formula of the forward pass in training.

    Attributes
    ----------
    statistics : callable
        Takes the channels; returns the mean and the variance that y is normalised with.
    inverse_deviation : callable
        Takes this variance, epsilon and the channels; returns s = 1/sqrt(variance + epsilon).
    gain, offset : callable
        Take the channels and s; return the factor of x - mean in y, and the number that is added.
    mean : callable
        Takes the channels and the mean; returns the mean as a result.
    variance : callable
        Takes the channels, the variance and s; returns the variance as a result.
    inverse : callable
        Takes the same; returns the inverse deviation as a result.
    momentum : callable
        Takes the weight of the batch in the running statistics; returns the one that is used.
    averaged : callable
        Takes the channels and the variance; returns the one that the running variance averages.
    """

    mistakes: ClassVar[tuple[Mistake, ...]] = FORWARD_MISTAKES
    words: ClassVar[Mapping[str, str]] = {
        "": "1 and x - mean",
        "gain": "the factor of x - mean in y",
        "offset": "the constant term of y",
        "mean": "the mean",
        "variance": "the variance",
        "inverse_deviation": "the inverse deviation",
        "running_mean": "the running mean",
        "running_variance": "the running variance",
    }

    statistics: Callable[[Channels], tuple[Array, Array]] = lambda b: b.of_x
    inverse_deviation: Callable[[Array, float, Channels], Array] = lambda w, e, b: (
        1.0 / np.sqrt(w + e)
    )
    gain: Callable[[Channels, Array], Array] = lambda b, s: b.gamma * s
    offset: Callable[[Channels, Array], Array] = lambda b, s: b.beta
    mean: Callable[[Channels, Array], Array] = lambda b, m: m
    variance: Callable[[Channels, Array, Array], Array] = lambda b, w, s: w
    inverse: Callable[[Channels, Array, Array], Array] = lambda b, w, s: s
    momentum: Callable[[float], float] = lambda m: m
    averaged: Callable[[Channels, Array], Array] = lambda b, w: _bessel(b, w) if b.unbiased else w

    def known_mistakes(self, channels: Channels) -> Sequence[Mistake]:
        """Return the mistakes, without those of running statistics if there are none."""
        absent = ("momentum", "averaged") if channels.momentum is None else ()
        return [mistake for mistake in self.mistakes if mistake.step not in absent]

    def functions(self, channels: Channels) -> Values:
        """Return x - m and 1."""
        centred = channels.x - channels.of_x[0][:, None]
        return {"gain": centred, "offset": np.ones_like(centred)}

    def numbers(self, channels: Channels) -> Values:
        """Return gain, offset, and the results that have a number in each channel."""
        with np.errstate(all="ignore"):
            mean, variance = self.statistics(channels)
            s = self.inverse_deviation(variance, channels.epsilon, channels)
            gain = self.gain(channels, s)
            share, averaged = self.momentum(channels.momentum or 0.0), self.averaged
            return {
                "gain": gain,
                "offset": self.offset(channels, s) + gain * (channels.of_x[0] - mean),
                "mean": self.mean(channels, mean),
                "variance": self.variance(channels, variance, s),
                "inverse_deviation": self.inverse(channels, variance, s),
                "running_mean": channels.mean + share * (mean - channels.mean),
                "running_variance": channels.variance
                + share * (averaged(channels, variance) - channels.variance),
            }

    def rows(self, channels: Channels) -> Iterator[tuple[Quantity, Array]]:
        """Yield the results that have a number in each channel, and y."""
        numbers = self.numbers(channels)
        for name in (*FORWARD_RESULTS[1:], *MORE_FORWARD_RESULTS):
            if channels.momentum is not None or not name.startswith("running_"):
                yield name, numbers[name]
        with np.errstate(all="ignore"):
            gain, offset = numbers["gain"][:, None], numbers["offset"][:, None]
            y = gain * self.functions(channels)["gain"] + offset
        yield "y", y


#: The correct formula.
FORWARD = ForwardFormula()
