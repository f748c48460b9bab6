"""The formula of the backward pass in steps, and mistakes in each step.

:func:`coefficients` evaluates the steps of the formula for each channel of a call. For right steps
and for wrong ones, dx is ``gain*dy + offset + slope*(x - mean)``, where gain, offset and slope are
numbers of the channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from backnorm.dtypes import FLOAT64

__all__ = ["MISTAKES", "RIGHT", "Channels", "Coefficients", "Mistake", "Steps", "coefficients"]

Array = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """The inputs of a call, arranged by channel and converted to float64.

    Attributes
    ----------
    x, dy : numpy.ndarray
        Shape (C, M), the elements of a channel in row-major order.
    mean, variance, gamma : numpy.ndarray
        Shape (C,).
    epsilon : float
    images : int
        The size of the first axis of x.
    training : bool
    """

    x: Array
    dy: Array
    mean: Array
    variance: Array
    gamma: Array
    epsilon: float
    images: int
    training: bool

    @classmethod
    def of(
        cls,
        x: Array,
        dy: Array,
        mean: Array,
        variance: Array,
        gamma: Array | None,
        *,
        epsilon: float,
        data_format: str,
        training: bool,
    ) -> Channels:
        """Return the inputs of a call: x and dy in shape (C, M), and per-channel arrays in shape
        (C,).
        """
        axis = 1 if data_format == "NCX" else x.ndim - 1
        mean, variance = mean.astype(FLOAT64), variance.astype(FLOAT64)
        scale = np.ones_like(mean) if gamma is None else gamma.astype(FLOAT64)
        rows = rows_of(x, axis), rows_of(dy, axis)
        return cls(*rows, mean, variance, scale, epsilon, x.shape[0], training)

    @property
    def count(self) -> int:
        """Number of elements per channel, M."""
        return int(self.x.shape[1])


def rows_of(tensor: Array, axis: int) -> Array:
    """Return a tensor as a float64 array of shape (C, M)."""
    return np.moveaxis(tensor, axis, 0).reshape(tensor.shape[axis], -1).astype(FLOAT64)


@dataclass(frozen=True, slots=True, eq=False)
class Coefficients:
    """The five numbers of each channel that describe a backward pass.

    Each attribute is an array of shape (C,), or None if these numbers are not known.
    """

    gain: Array | None
    offset: Array | None
    slope: Array | None
    dgamma: Array | None
    dbeta: Array | None

    @property
    def all(self) -> tuple[Array, ...]:
        """All five numbers, none of which may be None."""
        found = self.gain, self.offset, self.slope, self.dgamma, self.dbeta
        return tuple(each for each in found if each is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The steps of the formula of the backward pass.

    Attributes
    ----------
    statistics : callable
        Returns mean and variance of the channels.
    inverse_deviation : callable
        Takes variance, epsilon and the channels; returns s = 1/sqrt(variance + epsilon).
    training : callable
        Takes the channels; returns whether the statistics depend on x.
    count : callable
        Takes the channels; returns M.
    sums : callable
        Takes the channels, the mean and s; returns sum dy and sum dy*(x - mean).
    mean_dy : callable
        Takes sum(dy) and M; returns sum(dy)/M.
    projection : callable
        Takes sum(dy*(x - mean)), M and s; returns s**2 * sum(dy*(x - mean))/M.
    gain : callable
        Takes gamma and s; returns gamma*s.
    dgamma : callable
        Takes both sums, s, gamma and M; returns dgamma.
    dbeta : callable
        Takes both sums, s, gamma and M; returns dbeta.
    """

    statistics: Callable[[Channels], tuple[Array, Array]]
    inverse_deviation: Callable[[Array, float, Channels], Array]
    training: Callable[[Channels], bool]
    count: Callable[[Channels], float]
    sums: Callable[[Channels, Array, Array], tuple[Array, Array]]
    mean_dy: Callable[[Array, float], Array]
    projection: Callable[[Array, float, Array], Array]
    gain: Callable[[Array, Array], Array]
    dgamma: Callable[[Array, Array, Array, Array, float], Array]
    dbeta: Callable[[Array, Array, Array, Array, float], Array]


def _sums(channels: Channels, mean: Array, s: Array) -> tuple[Array, Array]:
    centred = channels.x - mean[:, None]
    return channels.dy.sum(1), (channels.dy * centred).sum(1)


#: The steps of the correct formula. A `Mistake` replaces one of these steps by a wrong one.
RIGHT = Steps(
    statistics=lambda channels: (channels.mean, channels.variance),
    inverse_deviation=lambda variance, epsilon, channels: 1.0 / np.sqrt(variance + epsilon),
    training=lambda channels: channels.training,
    count=lambda channels: channels.count,
    sums=_sums,
    mean_dy=lambda total, count: total / count,
    projection=lambda total, count, s: s * s * total / count,
    gain=lambda gamma, s: gamma * s,
    dgamma=lambda sum_dy, sum_dy_xmu, s, gamma, count: s * sum_dy_xmu,
    dbeta=lambda sum_dy, sum_dy_xmu, s, gamma, count: sum_dy,
)


def coefficients(channels: Channels, steps: Steps = RIGHT) -> Coefficients:
    """Return the coefficients of each channel, computed by these steps."""
    with np.errstate(all="ignore"):
        mean, variance = steps.statistics(channels)
        s = steps.inverse_deviation(variance, channels.epsilon, channels)
        count = steps.count(channels)
        sum_dy, sum_dy_xmu = steps.sums(channels, mean, s)
        gain = steps.gain(channels.gamma, s)
        offset, slope = np.zeros_like(gain), np.zeros_like(gain)
        if steps.training(channels):
            slope = -gain * steps.projection(sum_dy_xmu, count, s)
            # If the steps are wrong, they may subtract another `mean` from x than channels.mean.
            # `Coefficients` defines `slope` as the factor of x - channels.mean. So `slope` times
            # the difference of the two means is added to `offset`.
            offset = -gain * steps.mean_dy(sum_dy, count) + slope * (channels.mean - mean)
        known = sum_dy, sum_dy_xmu, s, channels.gamma, count
        return Coefficients(gain, offset, slope, steps.dgamma(*known), steps.dbeta(*known))


@dataclass(frozen=True, slots=True, eq=False)
class Mistake:
    """A wrong step.

    Attributes
    ----------
    name : str
        The identifier in machine-readable reports.
    says : str
        The mistake as a sentence without a full stop.
    step : str
        The field of :class:`Steps`.
    function : callable
        Replaces the right step.
    """

    name: str
    says: str
    step: str
    function: Callable[..., Any]


def _of_x(channels: Channels) -> tuple[Array, Array]:
    mean = channels.x.mean(1)
    return mean, np.square(channels.x - mean[:, None]).mean(1)


def _mean_of_x(channels: Channels) -> tuple[Array, Array]:
    return channels.x.mean(1), channels.variance


def _variance_of_x(channels: Channels) -> tuple[Array, Array]:
    return channels.mean, channels.x.var(1)


def _bessel(channels: Channels) -> tuple[Array, Array]:
    return channels.mean, channels.variance * channels.count / max(channels.count - 1, 1)


def _without(
    places: Array | list[int],
) -> Callable[[Channels, Array, Array], tuple[Array, Array]]:
    def sums(channels: Channels, mean: Array, s: Array) -> tuple[Array, Array]:
        sum_dy, sum_dy_xmu = _sums(channels, mean, s)
        x, dy = channels.x[:, places], channels.dy[:, places]
        return sum_dy - dy.sum(1), sum_dy_xmu - (dy * (x - mean[:, None])).sum(1)

    return sums


def tails_left_out(channels: Channels) -> list[Mistake]:
    """Return the mistakes of vectorised loops that leave out the last elements.

    Such a loop adds 4 to 64 elements at a time. It forgets the elements at the end of an image or
    of a channel that do not fill a vector.
    """
    found = []
    image = channels.count // max(channels.images, 1)
    for size, whole in {image: "each image", channels.count: "a channel"}.items():
        for rest in sorted({size % step for step in (4, 8, 16, 32, 64)} - {0, size}):
            places = np.flatnonzero(np.arange(channels.count) % size >= size - rest)
            # `MISTAKES` already has the mistake that leaves out only the last element.
            if len(places) > 1:
                says = f"the sums lack the last {rest} of the {size} elements of {whole}"
                found.append(Mistake("tail-left-out", says, "sums", _without(places)))
    return found


def _not_centred(channels: Channels, mean: Array, s: Array) -> tuple[Array, Array]:
    return channels.dy.sum(1), (channels.dy * channels.x).sum(1)


#: Mistakes in s = 1/sqrt(variance + epsilon), as arguments of `Mistake`. These mistakes are used in
#: the diagnosis of forward passes and in that of backward passes.
INVERSE_DEVIATION_MISTAKES = (
    ("epsilon-outside", "epsilon is added outside of the root", "inverse_deviation",
     lambda w, e, _: 1.0 / (np.sqrt(w) + e)),
    ("epsilon-left-out", "epsilon is left out, or is a constant of at most 1e-5",
     "inverse_deviation", lambda w, e, _: 1.0 / np.sqrt(w)),
    ("epsilon-constant", "epsilon is the constant 0.001, not the one that was passed",
     "inverse_deviation", lambda w, e, _: 1.0 / np.sqrt(w + 1e-3)),
    ("epsilon-twice", "epsilon is added twice", "inverse_deviation",
     lambda w, e, _: 1.0 / np.sqrt(w + 2.0 * e)),
    ("epsilon-squared", "the square of epsilon is added", "inverse_deviation",
     lambda w, e, _: 1.0 / np.sqrt(w + e * e)),
    ("no-root", "the root is left out: 1/(variance + epsilon) is used for s",
     "inverse_deviation", lambda w, e, _: 1.0 / (w + e)),
    ("deviation-for-inverse", "the standard deviation is used instead of its inverse",
     "inverse_deviation", lambda w, e, _: np.sqrt(w + e)),
)  # fmt: skip

#: Mistakes that implementations make, each in one step of the formula (`Steps`).
MISTAKES = tuple(
    Mistake(*row)
    for row in (
        ("statistics-of-x", "the statistics of x are used instead of those that were passed",
         "statistics", _of_x),
        (
            "mean-of-x",
            "the mean of x is used instead of the one that was passed",
            "statistics",
            _mean_of_x,
        ),
        (
            "variance-of-x",
            "the variance of x is used instead of the one that was passed",
            "statistics",
            _variance_of_x,
        ),
        ("statistics-swapped", "mean and variance are swapped", "statistics",
         lambda ch: (ch.variance, np.abs(ch.mean))),
        ("mean-ignored", "the mean is taken for 0", "statistics",
         lambda ch: (0.0 * ch.mean, ch.variance)),
        ("bessel", "the variance gets Bessel's correction, M/(M - 1)", "statistics", _bessel),
        *INVERSE_DEVIATION_MISTAKES,
        ("variance-for-inverse", "the variance is used as if it were the inverse deviation",
         "inverse_deviation", lambda w, e, ch: w),
        ("inverse-for-variance", "the variance is used as if it were the standard deviation",
         "inverse_deviation", lambda w, e, ch: 1.0 / (w + np.sqrt(e))),
        ("inverse-as-variance", "the inverse deviation is used as if it were the variance",
         "inverse_deviation", lambda w, e, ch: 1.0 / np.sqrt(1.0 / np.sqrt(w + e) + e)),
        ("frozen", "dx has the formula of constant statistics, although they depend on x",
         "training", lambda ch: False),
        ("not-frozen", "dx has the formula of training, although the statistics are constants",
         "training", lambda ch: True),
        ("count-less-one", "M - 1 is used for M", "count", lambda ch: max(ch.count - 1, 1)),
        ("count-more-one", "M + 1 is used for M", "count", lambda ch: ch.count + 1),
        ("count-of-images", "the number of images is used for M", "count",
         lambda ch: ch.images),
        ("count-of-image", "the number of elements of one image is used for M", "count",
         lambda ch: ch.count / max(ch.images, 1)),
        ("count-of-all", "the number of all elements is used for M", "count",
         lambda ch: ch.x.size),
        ("last-left-out", "the sums lack the last element of a channel", "sums", _without([-1])),
        ("first-left-out", "the sums lack the first element of a channel", "sums", _without([0])),
        ("not-centred", "the sum is of dy*x, not of dy*(x - mean)", "sums", _not_centred),
        ("no-mean-dy", "dx lacks the term sum(dy)/M", "mean_dy", lambda t, n: 0.0 * t),
        ("mean-dy-twice", "dx has the term sum(dy)/M twice", "mean_dy", lambda t, n: 2.0 * t / n),
        ("mean-dy-sign", "the term sum(dy)/M is added, not subtracted", "mean_dy",
         lambda t, n: -t / n),
        ("mean-dy-less-one", "the sum of dy in dx is divided by M - 1, not by M", "mean_dy",
         lambda t, n: t / max(n - 1, 1)),
        ("no-division-of-mean-dy", "the sum of dy is not divided by M", "mean_dy",
         lambda t, n: t),
        ("no-projection", "dx lacks the term along x - mean", "projection",
         lambda t, n, s: 0.0 * t),
        ("projection-twice", "dx has the term along x - mean twice", "projection",
         lambda t, n, s: 2.0 * s * s * t / n),
        ("projection-sign", "the term along x - mean is added, not subtracted", "projection",
         lambda t, n, s: -s * s * t / n),
        ("projection-s", "the term along x - mean has s instead of s**2", "projection",
         lambda t, n, s: s * t / n),
        ("projection-no-s", "the term along x - mean lacks s**2", "projection",
         lambda t, n, s: t / n),
        ("projection-s-cubed", "the term along x - mean has s**3 instead of s**2", "projection",
         lambda t, n, s: s**3 * t / n),
        ("projection-s-fourth", "the term along x - mean has s**4 instead of s**2", "projection",
         lambda t, n, s: s**4 * t / n),
        ("projection-less-one", "the sum along x - mean is divided by M - 1, not by M",
         "projection", lambda t, n, s: s * s * t / max(n - 1, 1)),
        ("no-division-of-projection", "the sum along x - mean is not divided by M", "projection",
         lambda t, n, s: s * s * t),
        ("no-gamma", "dx is not multiplied by gamma", "gain", lambda g, s: s),
        ("gamma-absolute", "dx is multiplied by |gamma|", "gain", lambda g, s: np.abs(g) * s),
        ("gamma-twice", "dx is multiplied by gamma twice", "gain", lambda g, s: g * g * s),
        ("gain-no-s", "dx is not multiplied by s", "gain", lambda g, s: g),
        ("gain-s-squared", "dx is multiplied by s**2 instead of s", "gain",
         lambda g, s: g * s * s),
        ("dgamma-no-s", "dgamma is not multiplied by s", "dgamma", lambda b, t, s, g, n: t),
        ("dgamma-s-squared", "dgamma is multiplied by s**2 instead of s", "dgamma",
         lambda b, t, s, g, n: s * s * t),
        ("dgamma-gamma", "dgamma is multiplied by gamma", "dgamma",
         lambda b, t, s, g, n: g * s * t),
        ("dgamma-mean", "dgamma is divided by M", "dgamma", lambda b, t, s, g, n: s * t / n),
        ("dgamma-sign", "dgamma has the wrong sign", "dgamma", lambda b, t, s, g, n: -s * t),
        ("dgamma-zero", "dgamma is 0", "dgamma", lambda b, t, s, g, n: 0.0 * t),
        ("dgamma-dbeta", "dgamma has the values of dbeta", "dgamma", lambda b, t, s, g, n: b),
        ("dbeta-mean", "dbeta is divided by M", "dbeta", lambda b, t, s, g, n: b / n),
        ("dbeta-gamma", "dbeta is multiplied by gamma", "dbeta", lambda b, t, s, g, n: g * b),
        ("dbeta-s", "dbeta is multiplied by s", "dbeta", lambda b, t, s, g, n: s * b),
        ("dbeta-sign", "dbeta has the wrong sign", "dbeta", lambda b, t, s, g, n: -b),
        ("dbeta-zero", "dbeta is 0", "dbeta", lambda b, t, s, g, n: 0.0 * b),
        ("dbeta-dgamma", "dbeta has the values of dgamma", "dbeta",
         lambda b, t, s, g, n: s * t),
    )
)  # fmt: skip
