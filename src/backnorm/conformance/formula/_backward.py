"""The formula of the backward pass in steps, and mistakes in each step.

For right steps and for wrong ones, dx is ``gain*dy + offset + slope*(x - mean)``, where gain,
offset and slope are numbers of the channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from backnorm.conformance.data import LayerData
from backnorm.conformance.formula._channels import WIDE, Channels
from backnorm.conformance.formula._formula import (
    FEW_BITS,
    INVERSE_DEVIATION_MISTAKES,
    Formula,
    Mistake,
    Values,
)
from backnorm.conformance.formula._known import (
    Known,
    Sums,
    always,
    counting,
    dx_of,
    image_size,
    sums_of,
)
from backnorm.conformance.formula._variations import in_parts, of_vectors
from backnorm.conformance.judge import GRADIENTS, Quantity
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, rounded

Array = np.ndarray


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
        ("mean-of-neighbour", "the mean of the next channel is used", "statistics",
         lambda ch: (np.roll(ch.mean, -1), ch.variance)),
        ("mean-of-channel-before", "the mean of the channel before is used", "statistics",
         lambda ch: (np.roll(ch.mean, 1), ch.variance)),
        ("mean-of-channel-0", "the mean of channel 0 is used in each channel", "statistics",
         lambda ch: (np.full_like(ch.mean, ch.mean[0]), ch.variance)),
        ("variance-of-neighbour", "the variance of the next channel is used", "statistics",
         lambda ch: (ch.mean, np.roll(ch.variance, -1))),
        ("variance-of-channel-before", "the variance of the channel before is used", "statistics",
         lambda ch: (ch.mean, np.roll(ch.variance, 1))),
        ("variance-of-channel-0", "the variance of channel 0 is used in each channel",
         "statistics", lambda ch: (ch.mean, np.full_like(ch.variance, ch.variance[0]))),
        ("statistics-of-neighbour", "mean and variance of the next channel are used",
         "statistics", lambda ch: (np.roll(ch.mean, -1), np.roll(ch.variance, -1))),
        ("statistics-of-first-image",
         "the statistics of the first image are used instead of those that were passed",
         "statistics", lambda ch: ch.of_first(image_size(ch))),
        ("statistics-of-last-image",
         "the statistics of the last image are used instead of those that were passed",
         "statistics", lambda ch: ch.of_last(image_size(ch))),
        ("initial-statistics",
         "the statistics 0 and 1 are used instead of those that were passed",
         "statistics", lambda ch: (0.0 * ch.mean, np.ones_like(ch.variance))),
        ("second-moment", "the mean of x**2 is used for the variance", "statistics",
         lambda ch: (ch.mean, ch.of_x[1] + ch.of_x[0] ** 2)),
        ("mean-of-all-channels", "the average of the means is used in each channel",
         "statistics", lambda ch: (np.full_like(ch.mean, ch.mean.mean()), ch.variance)),
        ("statistics-of-all-channels",
         "the averages of the means and of the variances are used in each channel", "statistics",
         lambda ch: tuple(np.full_like(a, a.mean()) for a in (ch.mean, ch.variance))),
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
        ("count-of-channels", "the number of channels is used for M", "count",
         lambda ch: len(ch.x)),
        ("last-left-out", "the sums lack the last element of a channel", "sums",
         counting(lambda ch: [-1], 0)),
        ("first-left-out", "the sums lack the first element of a channel", "sums",
         counting(lambda ch: [0], 0)),
        ("first-twice", "the sums count the first element of a channel twice", "sums",
         counting(lambda ch: [0], 2)),
        ("last-twice", "the sums count the last element of a channel twice", "sums",
         counting(lambda ch: [-1], 2)),
        ("all-twice", "the sums count each element twice", "sums",
         counting(lambda ch: slice(None), 2)),
        ("first-image-left-out", "the sums lack the first image", "sums",
         counting(lambda ch: slice(image_size(ch)), 0)),
        ("last-image-left-out", "the sums lack the last image", "sums",
         counting(lambda ch: slice(ch.count - image_size(ch), None), 0)),
        ("first-image-twice", "the sums count the first image twice", "sums",
         counting(lambda ch: slice(image_size(ch)), 2)),
        ("last-image-twice", "the sums count the last image twice", "sums",
         counting(lambda ch: slice(ch.count - image_size(ch), None), 2)),
        ("first-image-alone", "the sums are over the first image alone", "sums",
         counting(lambda ch: slice(image_size(ch), None), 0)),
        ("first-half-alone", "the sums are over the first half of a channel alone", "sums",
         counting(lambda ch: slice(ch.count // 2, None), 0)),
        ("last-half-alone", "the sums are over the last half of a channel alone", "sums",
         counting(lambda ch: slice(ch.count // 2), 0)),
        ("every-second", "the sums are over every second element of a channel alone", "sums",
         counting(lambda ch: slice(1, None, 2), 0)),
        ("of-all-channels", "the sums are over all channels", "sums",
         lambda ch, mean, c: (
             np.full_like(mean, ch.dy.sum()), np.full_like(mean, (ch.dy * c).sum())
         )),
        ("averaged-over-channels", "the sums are averages over all channels", "sums",
         lambda ch, mean, c: (
             np.full_like(mean, ch.dy.sum(1).mean()), np.full_like(mean, (ch.dy * c).sum(1).mean())
         )),
        ("not-centred", "the sum is of dy*x, not of dy*(x - mean)", "sums",
         lambda ch, mean, c: (ch.dy.sum(1), (ch.dy * ch.x).sum(1))),
        ("no-mean-dy", "dx lacks the term sum(dy)/M", "mean_dy", lambda k: 0.0 * k.mean_dy),
        ("mean-dy-twice", "dx has the term sum(dy)/M twice", "mean_dy", lambda k: 2.0 * k.mean_dy),
        ("mean-dy-sign", "the term sum(dy)/M is added, not subtracted", "mean_dy",
         lambda k: -k.mean_dy),
        ("mean-dy-less-one", "the sum of dy in dx is divided by M - 1, not by M", "mean_dy",
         lambda k: k.mean_dy * k.count / max(k.count - 1, 1)),
        ("no-division-of-mean-dy", "the sum of dy is not divided by M", "mean_dy",
         lambda k: k.sum_dy),
        ("mean-dy-less", "the sum of dy is divided by M twice", "mean_dy",
         lambda k: k.mean_dy / k.count),
        ("mean-dy-no-gamma", "the term sum(dy)/M is not multiplied by gamma", "mean_dy",
         lambda k: k.mean_dy / k.gamma),
        ("mean-dy-gamma-twice", "the term sum(dy)/M is multiplied by gamma twice", "mean_dy",
         lambda k: k.mean_dy * k.gamma),
        ("mean-dy-no-s", "the term sum(dy)/M is not multiplied by s", "mean_dy",
         lambda k: k.mean_dy / k.s),
        ("mean-dy-s-squared", "the term sum(dy)/M is multiplied by s**2 instead of s", "mean_dy",
         lambda k: k.mean_dy * k.s),
        ("mean-dy-no-epsilon", "the term sum(dy)/M alone has s without epsilon", "mean_dy",
         lambda k: k.mean_dy * k.s_of() / k.s),
        ("mean-dy-bessel", "the term sum(dy)/M alone has s of the unbiased variance", "mean_dy",
         lambda k: k.mean_dy * k.s_of(k.channels.epsilon, bessel=True) / k.s),
        ("no-projection", "dx lacks the term along x - mean", "projection",
         lambda k: 0.0 * k.projection),
        ("projection-twice", "dx has the term along x - mean twice", "projection",
         lambda k: 2.0 * k.projection),
        ("projection-sign", "the term along x - mean is added, not subtracted", "projection",
         lambda k: -k.projection),
        ("projection-s", "the term along x - mean has s instead of s**2", "projection",
         lambda k: k.projection / k.s),
        ("projection-no-s", "the term along x - mean lacks s**2", "projection",
         lambda k: k.projection / k.s**2),
        ("projection-s-cubed", "the term along x - mean has s**3 instead of s**2", "projection",
         lambda k: k.projection * k.s),
        ("projection-s-fourth", "the term along x - mean has s**4 instead of s**2", "projection",
         lambda k: k.projection * k.s**2),
        ("projection-less-one", "the sum along x - mean is divided by M - 1, not by M",
         "projection", lambda k: k.projection * k.count / max(k.count - 1, 1)),
        ("no-division-of-projection", "the sum along x - mean is not divided by M", "projection",
         lambda k: k.projection * k.count),
        ("projection-less", "the sum along x - mean is divided by M twice", "projection",
         lambda k: k.projection / k.count),
        ("along-x", "dx has a term along x, not along x - mean", "centre",
         lambda ch, mean: 0.0 * mean),
        ("projection-no-gamma", "the term along x - mean is not multiplied by gamma",
         "projection", lambda k: k.projection / k.gamma),
        ("projection-gamma-twice", "the term along x - mean is multiplied by gamma twice",
         "projection", lambda k: k.projection * k.gamma),
        ("projection-no-epsilon", "the term along x - mean alone has s**2 without epsilon",
         "projection", lambda k: k.projection * (k.s_of() / k.s) ** 2),
        ("projection-bessel", "the term along x - mean alone has s**2 of the unbiased variance",
         "projection",
         lambda k: k.projection * (k.s_of(k.channels.epsilon, bessel=True) / k.s) ** 2),
        ("factor-no-gamma", "dy is not multiplied by gamma in dx, but both sums are", "factor",
         lambda k, gain: gain / k.gamma),
        ("factor-gamma-twice", "dy is multiplied by gamma twice in dx, the sums once", "factor",
         lambda k, gain: gain * k.gamma),
        ("factor-no-s", "dy is not multiplied by s in dx, but both sums are", "factor",
         lambda k, gain: gain / k.s),
        ("factor-no-epsilon", "the factor of dy in dx alone has s without epsilon", "factor",
         lambda k, gain: gain * k.s_of() / k.s),
        ("no-dy", "dx lacks the term of dy", "factor", lambda k, gain: 0.0 * gain),
        ("dy-added", "dx has dy added to it", "added", lambda ch: (1.0, 0.0)),
        ("x-added", "dx has x added to it", "added", lambda ch: (0.0, 1.0)),
        ("gamma-of-neighbour", "the gamma of the next channel is used", "gain",
         lambda k: np.roll(k.gamma, -1) * k.s),
        ("gamma-of-channel-before", "the gamma of the channel before is used", "gain",
         lambda k: np.roll(k.gamma, 1) * k.s),
        ("gamma-of-channel-0", "the gamma of channel 0 is used in each channel", "gain",
         lambda k: k.gamma[0] * k.s),
        ("no-gamma", "dx is not multiplied by gamma", "gain", lambda k: k.s),
        ("gamma-plus-one", "1 + gamma is used for gamma", "gain",
         lambda k: (1.0 + k.gamma) * k.s),
        ("gamma-absolute", "dx is multiplied by |gamma|", "gain", lambda k: np.abs(k.gamma) * k.s),
        ("gamma-twice", "dx is multiplied by gamma twice", "gain", lambda k: k.gain * k.gamma),
        ("dx-sign", "dx has the wrong sign", "gain", lambda k: -k.gain),
        ("dx-twice", "dx is twice what it should be", "gain", lambda k: 2.0 * k.gain),
        ("dx-images", "dx is divided by the number of images", "gain",
         lambda k: k.gain / k.channels.images),
        ("dx-mean", "dx is divided by M", "gain", lambda k: k.gain / k.count),
        ("gain-no-s", "dx is not multiplied by s", "gain", lambda k: k.gamma),
        ("gain-s-squared", "dx is multiplied by s**2 instead of s", "gain",
         lambda k: k.gain * k.s),
        ("dgamma-no-s", "dgamma is not multiplied by s", "dgamma", lambda k: k.sum_dy_xmu),
        ("dgamma-s-squared", "dgamma is multiplied by s**2 instead of s", "dgamma",
         lambda k: k.projection * k.count),
        ("dgamma-gamma", "dgamma is multiplied by gamma", "dgamma",
         lambda k: k.gain * k.sum_dy_xmu),
        ("dgamma-no-epsilon", "dgamma alone has s without epsilon", "dgamma",
         lambda k: k.s_of() * k.sum_dy_xmu),
        ("dgamma-bessel", "dgamma alone has s of the unbiased variance", "dgamma",
         lambda k: k.s_of(k.channels.epsilon, bessel=True) * k.sum_dy_xmu),
        ("dgamma-over-gamma", "dgamma is divided by gamma", "dgamma",
         lambda k: k.dgamma / k.gamma),
        ("dgamma-twice", "dgamma is twice what it should be", "dgamma", lambda k: 2.0 * k.dgamma),
        ("dbeta-twice", "dbeta is twice what it should be", "dbeta", lambda k: 2.0 * k.sum_dy),
        ("dgamma-images", "dgamma is divided by the number of images", "dgamma",
         lambda k: k.dgamma / k.channels.images),
        ("dgamma-of-dx", "dgamma is the sum of dx*(x - mean)*s, not of dy*(x - mean)*s", "dgamma",
         lambda k: k.s * (k.dx * k.centred).sum(1)),
        ("dgamma-mean", "dgamma is divided by M", "dgamma", lambda k: k.dgamma / k.count),
        ("dgamma-sign", "dgamma has the wrong sign", "dgamma", lambda k: -k.dgamma),
        ("dgamma-zero", "dgamma is 0", "dgamma", lambda k: 0.0 * k.dgamma),
        ("dgamma-dbeta", "dgamma has the values of dbeta", "dgamma", lambda k: k.sum_dy),
        ("dbeta-images", "dbeta is divided by the number of images", "dbeta",
         lambda k: k.sum_dy / k.channels.images),
        ("dbeta-of-dx", "dbeta is the sum of dx, not of dy", "dbeta", lambda k: k.dx.sum(1)),
        ("dbeta-mean", "dbeta is divided by M", "dbeta", lambda k: k.sum_dy / k.count),
        ("dbeta-gamma", "dbeta is multiplied by gamma", "dbeta", lambda k: k.gamma * k.sum_dy),
        ("dbeta-s", "dbeta is multiplied by s", "dbeta", lambda k: k.s * k.sum_dy),
        ("dbeta-sign", "dbeta has the wrong sign", "dbeta", lambda k: -k.sum_dy),
        ("dbeta-zero", "dbeta is 0", "dbeta", lambda k: 0.0 * k.sum_dy),
        ("dbeta-dgamma", "dbeta has the values of dgamma", "dbeta",
         lambda k: k.dgamma),
    )
)  # fmt: skip


def _places(own: Array, values: Array) -> tuple[Array, str]:
    """Return the channels whose values are nearest to wrong numbers, and the first one in words."""
    known, first = np.unique(values, return_index=True)
    above = np.searchsorted(known, own).clip(1, known.size - 1)
    found = first[above - (own - known[above - 1] <= known[above] - own)]
    at = int(np.argmax(found != np.arange(found.size)))
    return found, f"that of channel {found[at]} in channel {at}"


def _other_variances(channels: Channels, found: Array) -> Iterator[Mistake]:
    """Yield the mistakes with which the variances are those that were found in wrong results."""
    passed = channels.variance
    is_other = np.abs(found - passed) > FEW_BITS * (passed + channels.epsilon)
    if not is_other.any():
        says = "s = 1/sqrt(variance + epsilon) has few right bits"
        yield Mistake("s-other", says, "statistics", always((channels.mean, found)))
        return
    bound = float(np.median(found[is_other]))
    for says, variance in (
        (f"a variance below {bound:.3g} counts as {bound:.3g}", np.maximum(passed, bound)),
        (f"a variance above {bound:.3g} counts as {bound:.3g}", np.minimum(passed, bound)),
        ("another variance is used than the one that was passed", found),
    ):
        yield Mistake("variance-other", says, "statistics", always((channels.mean, variance)))


def _narrow_sums(dtype: np.dtype) -> Sums:
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
    gain, mean_dy, projection, dgamma, dbeta : callable
        Take what is known after the sums; return gamma*s, sum(dy)/M, s**2 * sum(dy*(x - mean))/M,
        dgamma and dbeta.
    factor : callable
        Takes what is known, and the gain; returns the factor of dy in the dx of training: the gain.
    centre : callable
        Takes the channels and the mean; returns what dx alone has for the mean in its term along
        x - mean.
    added : callable
        Takes the channels; returns the multiples of dy and of x that are added to dx.
    dx : callable
        Takes the channels, x - mean, gain, mean_dy and projection; returns the dx of training.
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
    sums: Callable[[Channels, Array, Array], tuple[Array, Array]] = sums_of
    gain: Callable[[Known], Array] = lambda k: k.gain
    mean_dy: Callable[[Known], Array] = lambda k: k.mean_dy
    projection: Callable[[Known], Array] = lambda k: k.projection
    dgamma: Callable[[Known], Array] = lambda k: k.dgamma
    dbeta: Callable[[Known], Array] = lambda k: k.sum_dy
    factor: Callable[[Known, Array], Array] = lambda k, gain: gain
    centre: Callable[[Channels, Array], Array] = lambda ch, mean: mean
    added: Callable[[Channels], tuple[float, float]] = lambda ch: (0.0, 0.0)
    dx: Callable[[Channels, Array, Array, Array, Array], Array] = dx_of

    def known_mistakes(self, channels: Channels) -> list[Mistake]:
        """Return the catalogue, and what vectorised loops do wrong in the last elements."""
        return [*MISTAKES, *of_vectors(channels)]

    def partial_mistakes(self, channels: Channels) -> list[Mistake]:
        """Return the mistakes of sums in a part of the results."""
        # So many mistakes explain the few numbers of one or two channels by chance.
        known = self.known_mistakes(channels) if len(channels.x) > 2 else ()
        return list(in_parts(known, channels))

    @np.errstate(all="ignore")
    def fitted_mistakes(self, channels: Channels, own: Values) -> Iterator[Mistake]:
        """Yield other gammas and gradients, another epsilon, and in training another M and other
        statistics.
        """
        yield from self.other_constants(channels, own)
        # With one or two channels, another number explains a mistake that is none of these.
        if not {"gain", "dgamma"} <= own.keys() or own["gain"].size < 3:
            return
        right = self.numbers(channels)
        s = self.inverse_deviation(channels.variance, channels.epsilon, channels)
        of_gain, such = _places(own["gain"] / s, channels.gamma)
        says = f"the gamma of other channels is used, such as {such}"
        yield Mistake("gamma-other", says, "gain", lambda k: k.gamma[of_gain] * k.s)
        of_gamma, such = _places(own["dgamma"], right["dgamma"])
        says = f"dgamma has the values of other channels, such as {such}"
        dgamma = Mistake("dgamma-other", says, "dgamma", lambda k: k.dgamma[of_gamma])
        says = f"dgamma and dbeta have the values of other channels, such as {such}"
        of_beta, such = _places(own.get("dbeta", right["dbeta"]), right["dbeta"])
        step: Any = lambda k: k.dbeta[of_beta]  # noqa: E731
        both = Mistake("parameters-other", says, "dgamma", dgamma.function, {"dbeta": step})
        says = f"dbeta has the values of other channels, such as {such}"
        yield from (dgamma, Mistake("dbeta-other", says, "dbeta", step), both)
        if not self.training(channels):
            return
        variance = np.square(channels.gamma / own["gain"]) - channels.epsilon
        # dgamma may have a wider type than dx, from which `variance` is.
        of_dgamma = np.square(right["dgamma"] / s / own["dgamma"]) - channels.epsilon
        for found in (of_dgamma, variance):
            yield from _other_variances(channels, found)
        sum_dy, sum_dy_x = self.sums(channels, channels.mean, channels.x)
        mean = (sum_dy_x - own["dgamma"] * np.sqrt(variance + channels.epsilon)) / sum_dy
        says = "another mean is used than the one that was passed"
        yield Mistake("mean-other", says, "statistics", always((mean, channels.variance)))
        says = "another mean and another variance are used than those that were passed"
        yield Mistake("statistics-other", says, "statistics", always((mean, variance)))

    def other_constants(self, channels: Channels, own: Values) -> Iterator[Mistake]:
        """Yield another epsilon, and in training another M."""
        # As in `fitted_mistakes`.
        if not {"gain", "offset"} <= own.keys() or own["gain"].size < 3:
            return
        variance = np.square(channels.gamma / own["gain"])
        epsilon = float(np.median(variance - channels.variance))
        if epsilon >= 0:
            says = f"epsilon is {epsilon:.3g}, not {channels.epsilon:.3g}, which was passed"
            inverse_deviation = lambda w, e, ch: 1.0 / np.sqrt(w + epsilon)  # noqa: E731
            yield Mistake("epsilon-other", says, "inverse_deviation", inverse_deviation)
        if self.training(channels):
            right = self.numbers(channels)["offset"]
            count = float(np.median(channels.count * right / own["offset"]))
            says = f"{count:.4g} is used for M, which is {channels.count}"
            yield Mistake("count-other", says, "count", lambda ch: count)

    def functions(self, channels: Channels) -> Values:
        """Return dy, 1 and x - mean."""
        centred = channels.x - channels.mean[:, None]
        return {"gain": channels.dy, "offset": np.ones_like(centred), "slope": centred}

    def numbers(self, channels: Channels) -> Values:
        """Return gain, offset, slope, dgamma and dbeta."""
        with np.errstate(all="ignore"):
            mean, _, gain, factor, mean_dy, projection, dgamma, dbeta = self._evaluated(channels)
            offset, slope = np.zeros_like(gain), np.zeros_like(gain)
            if self.training(channels):
                slope = -gain * projection
                # If the steps are wrong, they may subtract another `mean` from x than
                # channels.mean. `slope` is the factor of x - channels.mean. So `slope` times the
                # difference of the two means is added to `offset`.
                offset = -gain * mean_dy + slope * (channels.mean - self.centre(channels, mean))
            of_dy, of_x = self.added(channels)
            gain, offset, slope = factor + of_dy, offset + of_x * channels.mean, slope + of_x
        return {"gain": gain, "offset": offset, "slope": slope, "dgamma": dgamma, "dbeta": dbeta}

    def rows(self, channels: Channels) -> Iterator[tuple[Quantity, Array]]:
        """Yield dbeta, dgamma and dx."""
        with np.errstate(all="ignore"):
            mean, c, gain, factor, mean_dy, projection, dgamma, dbeta = self._evaluated(channels)
        yield "dbeta", dbeta
        yield "dgamma", dgamma
        with np.errstate(all="ignore"):
            if not self.training(channels):
                dx = factor[:, None] * channels.dy
            else:
                centre = self.centre(channels, mean)
                if centre is not mean:
                    c = c + (mean - centre)[:, None]
                dx = self.dx(channels, c, gain, mean_dy, projection)
                if factor is not gain:
                    dx = dx + (factor - gain)[:, None] * channels.dy
            of_dy, of_x = self.added(channels)
            if of_dy or of_x:
                dx = dx + of_dy * channels.dy + of_x * channels.x
        yield "dx", dx

    def _evaluated(self, channels: Channels) -> tuple[Array, ...]:
        mean, variance = self.statistics(channels)
        s = self.inverse_deviation(variance, channels.epsilon, channels)
        count, c = self.count(channels), self.deviation(channels.x, mean[:, None])
        known = Known(channels, count, channels.gamma, s, *self.sums(channels, mean, c))
        gain = self.gain(known)
        factor = self.factor(known, gain) if self.training(channels) else gain
        terms = self.mean_dy(known), self.projection(known)
        return mean, c, gain, factor, *terms, self.dgamma(known), self.dbeta(known)

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
