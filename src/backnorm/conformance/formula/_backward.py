"""The formula of the backward pass in steps, and mistakes in each step.

For right steps and for wrong ones, dx is ``gain*dy + offset + slope*(x - mean)``, where gain,
offset and slope are numbers of the channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from backnorm.conformance.data import LayerData
from backnorm.conformance.formula._channels import WIDE, Channels
from backnorm.conformance.formula._formula import (
    INVERSE_DEVIATION_MISTAKES,
    Formula,
    Mistake,
    Values,
)
from backnorm.conformance.judge import GRADIENTS, Quantity
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, rounded

Array = np.ndarray


def _sums(channels: Channels, mean: Array, c: Array) -> tuple[Array, Array]:
    return channels.dy.sum(1), (channels.dy * c).sum(1)


def _dx(channels: Channels, c: Array, gain: Array, mean_dy: Array, projection: Array) -> Array:
    dx: Array = gain[:, None] * (channels.dy - mean_dy[:, None] - c * projection[:, None])
    return dx


def _without(places: Array | list[int]) -> Callable[[Channels, Array, Array], tuple[Array, Array]]:
    def sums(channels: Channels, mean: Array, c: Array) -> tuple[Array, Array]:
        sum_dy, sum_dy_xmu = _sums(channels, mean, c)
        dy = channels.dy[:, places]
        return sum_dy - dy.sum(1), sum_dy_xmu - (dy * c[:, places]).sum(1)

    return sums


#: Mistakes that implementations make, each in one step of the formula.
MISTAKES = tuple(
    Mistake(*row)
    for row in (
        ("statistics-of-x", "the statistics of x are used instead of those that were passed",
         "statistics", lambda ch: ch.of_x),
        ("mean-of-x", "the mean of x is used instead of the one that was passed", "statistics",
         lambda ch: (ch.of_x[0], ch.variance)),
        ("variance-of-x", "the variance of x is used instead of the one that was passed",
         "statistics", lambda ch: (ch.mean, ch.of_x[1])),
        ("statistics-swapped", "mean and variance are swapped", "statistics",
         lambda ch: (ch.variance, np.abs(ch.mean))),
        ("mean-ignored", "the mean is taken for 0", "statistics",
         lambda ch: (0.0 * ch.mean, ch.variance)),
        ("bessel", "the variance gets Bessel's correction, M/(M - 1)", "statistics",
         lambda ch: (ch.mean, ch.variance * ch.count / max(ch.count - 1, 1))),
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
        ("not-centred", "the sum is of dy*x, not of dy*(x - mean)", "sums",
         lambda ch, mean, c: (ch.dy.sum(1), (ch.dy * ch.x).sum(1))),
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


def _tails_left_out(channels: Channels) -> list[Mistake]:
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


def _narrow_sums(dtype: np.dtype) -> Callable[[Channels, Array, Array], tuple[Array, Array]]:
    def sums(channels: Channels, mean: Array, c: Array) -> tuple[Array, Array]:
        terms = channels.dy, channels.dy * c
        one, other = (each.astype(FLOAT64).sum(1, dtype=dtype).astype(WIDE) for each in terms)
        return one, other

    return sums


def _folded(channels: Channels, c: Array, gain: Array, mean_dy: Array, projection: Array) -> Array:
    slope = projection.astype(FLOAT64)[:, None]
    constant = (projection * channels.mean - mean_dy).astype(FLOAT64)[:, None]
    x, dy = channels.x.astype(FLOAT64), channels.dy.astype(FLOAT64)
    dx: Array = gain.astype(FLOAT64)[:, None] * (dy - slope * x + constant)
    return dx


def _truncated(dx: Array, dtype: np.dtype) -> Array:
    nearest = rounded(dx.astype(FLOAT64), dtype)
    beyond = np.abs(nearest.astype(FLOAT64)) > np.abs(dx)
    return np.where(beyond, np.nextafter(nearest, dtype.type(0)), nearest)


#: Steps that are right but imprecise. Rounding in some arithmetic has as large errors, so no
#: diagnosis looks for them.
IMPRECISE = tuple(
    Mistake(*row)
    for row in (
        ("folded-mean", "dx = a dy + b x + constant, which cancels where the mean is large", "dx",
         _folded),
        ("sum-before-mean", "sum(dy x) - mean sum(dy) is used for sum(dy (x - mean))", "sums",
         lambda ch, mean, c: (
             ch.dy.sum(1), (ch.dy * ch.x).sum(1) - mean * ch.dy.sum(1)
         )),
        ("float32-sums", "the sums are accumulated in float32", "sums", _narrow_sums(FLOAT32)),
        ("float16-sums", "the sums are accumulated in float16", "sums", _narrow_sums(FLOAT16)),
        ("float32-deviation", "x - mean is rounded to float32", "deviation",
         lambda x, mean: (x - mean).astype(FLOAT32).astype(WIDE)),
        ("truncated", "dx is rounded toward zero", "round", _truncated),
        ("rounded-twice", "dx is rounded to bfloat16 before its own type", "round",
         lambda dx, dtype: dx.astype(BFLOAT16).astype(dtype)),
    )
)  # fmt: skip

#: All mistakes with which :data:`BACKWARD` is a wrong kernel.
WRONG = MISTAKES + IMPRECISE


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BackwardFormula(Formula):
    """The formula of the backward pass. It can be called as an operator, in extended precision.

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
    deviation : callable
        Takes x and the mean; returns x - mean.
    sums : callable
        Takes the channels, the mean and x - mean; returns sum dy and sum dy*(x - mean).
    mean_dy : callable
        Takes sum(dy) and M; returns sum(dy)/M.
    projection : callable
        Takes sum(dy*(x - mean)), M and s; returns s**2 * sum(dy*(x - mean))/M.
    gain : callable
        Takes gamma and s; returns gamma*s.
    dx : callable
        Takes the channels, x - mean, gain, mean_dy and projection; returns the dx of training.
    dgamma : callable
        Takes both sums, s, gamma and M; returns dgamma.
    dbeta : callable
        Takes both sums, s, gamma and M; returns dbeta.
    """

    mistakes: ClassVar[tuple[Mistake, ...]] = MISTAKES
    words: ClassVar[Mapping[str, str]] = {
        "": "dy, 1 and x - mean",
        "gain": "the factor of dy in dx",
        "offset": "the term sum(dy)/M of dx",
        "slope": "the term along x - mean of dx",
        "dgamma": "dgamma",
        "dbeta": "dbeta",
    }

    statistics: Callable[[Channels], tuple[Array, Array]] = lambda ch: (ch.mean, ch.variance)
    inverse_deviation: Callable[[Array, float, Channels], Array] = lambda w, e, ch: (
        1.0 / np.sqrt(w + e)
    )
    training: Callable[[Channels], bool] = lambda ch: ch.training
    count: Callable[[Channels], float] = lambda ch: ch.count
    deviation: Callable[[Array, Array], Array] = lambda x, mean: x - mean
    sums: Callable[[Channels, Array, Array], tuple[Array, Array]] = _sums
    mean_dy: Callable[[Array, float], Array] = lambda t, n: t / n
    projection: Callable[[Array, float, Array], Array] = lambda t, n, s: s * s * t / n
    gain: Callable[[Array, Array], Array] = lambda g, s: g * s
    dx: Callable[[Channels, Array, Array, Array, Array], Array] = _dx
    dgamma: Callable[[Array, Array, Array, Array, float], Array] = lambda b, t, s, g, n: s * t
    dbeta: Callable[[Array, Array, Array, Array, float], Array] = lambda b, t, s, g, n: b

    def known_mistakes(self, channels: Channels) -> list[Mistake]:
        """Return the catalogue, and the tails that a vectorised loop may leave out."""
        return [*MISTAKES, *_tails_left_out(channels)]

    def functions(self, channels: Channels) -> Values:
        """Return dy, 1 and x - mean."""
        centred = channels.x - channels.mean[:, None]
        return {"gain": channels.dy, "offset": np.ones_like(centred), "slope": centred}

    def numbers(self, channels: Channels) -> Values:
        """Return gain, offset, slope, dgamma and dbeta."""
        with np.errstate(all="ignore"):
            mean, _, gain, mean_dy, projection, dgamma, dbeta = self._evaluated(channels)
            offset, slope = np.zeros_like(gain), np.zeros_like(gain)
            if self.training(channels):
                slope = -gain * projection
                # If the steps are wrong, they may subtract another `mean` from x than
                # channels.mean. `slope` is the factor of x - channels.mean. So `slope` times the
                # difference of the two means is added to `offset`.
                offset = -gain * mean_dy + slope * (channels.mean - mean)
        return {"gain": gain, "offset": offset, "slope": slope, "dgamma": dgamma, "dbeta": dbeta}

    def rows(self, channels: Channels) -> Iterator[tuple[Quantity, Array]]:
        """Yield dbeta, dgamma and dx."""
        with np.errstate(all="ignore"):
            _, c, gain, mean_dy, projection, dgamma, dbeta = self._evaluated(channels)
        yield "dbeta", dbeta
        yield "dgamma", dgamma
        with np.errstate(all="ignore"):
            if self.training(channels):
                dx = self.dx(channels, c, gain, mean_dy, projection)
            else:
                dx = gain[:, None] * channels.dy
        yield "dx", dx

    def _evaluated(self, channels: Channels) -> tuple[Array, ...]:
        mean, variance = self.statistics(channels)
        s = self.inverse_deviation(variance, channels.epsilon, channels)
        count, c = self.count(channels), self.deviation(channels.x, mean[:, None])
        sum_dy, sum_dy_xmu = self.sums(channels, mean, c)
        gain, mean_dy = self.gain(channels.gamma, s), self.mean_dy(sum_dy, count)
        known = sum_dy, sum_dy_xmu, s, channels.gamma, count
        projection = self.projection(sum_dy_xmu, count, s)
        return mean, c, gain, mean_dy, projection, self.dgamma(*known), self.dbeta(*known)

    def __call__(
        self,
        x: Array,
        dy: Array,
        mean: Array,
        variance: Array,
        gamma: Array | None,
        *,
        epsilon: float,
        data_format: str,
        training: bool,
    ) -> tuple[Array, Array, Array]:
        """Return dx, dgamma and dbeta, like :class:`.battery.BackwardOperator`."""
        scale = mean if gamma is None else gamma
        data = LayerData(x, dy, mean, variance, scale, scale, epsilon, data_format)
        scaled = gamma is not None
        channels = Channels.of(data, training=training, scaled=scaled, wide=True)
        found = dict(self.outputs(data, channels))
        dx, dgamma, dbeta = (found[name] for name in GRADIENTS)
        return dx, dgamma, dbeta


#: The correct formula.
BACKWARD = BackwardFormula()
