r"""Diagnose a wrong forward pass: describe the mistake in one sentence.

Every formula, right or wrong, computes y as a + b*(x - mean), where a and b are the same for all
elements of a channel. Four numbers of each channel are compared with those of known formulas: a, b,
the returned mean and the returned variance. (:mod:`backnorm.conformance.diagnosis` does the same
for the backward pass, with five numbers.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from backnorm.conformance._explain import explained
from backnorm.conformance._fit import results_of
from backnorm.conformance._naming import Diagnosis, Values
from backnorm.conformance.data import LayerData, realistic_data
from backnorm.conformance.formula import INVERSE_DEVIATION_MISTAKES, Mistake, rows_of
from backnorm.conformance.judge import FORWARD_RESULTS
from backnorm.conformance.ladder import ForwardLadder
from backnorm.dtypes import FLOAT64

__all__ = [
    "FORWARD_MISTAKES",
    "Normalization",
    "diagnose_forward",
    "forward_diagnostic_data",
    "normalization",
]

Array = np.ndarray

_WORDS = {
    "": "1 and x - mean",
    "gain": "the factor of x - mean in y",
    "offset": "the constant term of y",
    "mean": "the mean",
    "variance": "the variance",
}


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """The inputs of a call by channel, in float64: x of shape (C, M), the others of shape (C,).

    mean and variance are computed from x. `running_mean` and `running_variance` are inputs, because
    the operators of some specifications take running statistics.
    """

    x: Array
    mean: Array
    variance: Array
    running_mean: Array
    running_variance: Array
    gamma: Array
    beta: Array
    epsilon: float

    @classmethod
    def of(cls, data: LayerData, scaled: bool) -> _Batch:
        """Return a call's inputs from `data`; if `scaled` is False, gamma is 1 and beta is 0."""
        x = rows_of(data.x, data.channel_axis)
        gamma, beta = np.ones(len(x)), np.zeros(len(x))
        if scaled:
            gamma, beta = data.gamma.astype(FLOAT64), data.beta.astype(FLOAT64)
        with np.errstate(all="ignore"):
            mean = x.sum(1) / max(x.shape[1], 1)
            variance = np.square(x - mean[:, None]).sum(1) / max(x.shape[1], 1)
        running = data.mean.astype(FLOAT64), data.variance.astype(FLOAT64)
        return cls(x, mean, variance, *running, gamma, beta, data.epsilon)

    @property
    def count(self) -> int:
        """Number of elements per channel, M."""
        return int(self.x.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Normalization:
    """The numbers of each channel that describe a forward pass.

    Each attribute is an array of shape (C,), or None if it is not known. `gain` and `offset`
    describe y, which is ``gain*(x - m) + offset``, where m is the mean of x in the channel. `mean`
    and `variance` are the other two results of the pass.
    """

    gain: Array | None
    offset: Array | None
    mean: Array | None
    variance: Array | None


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """The steps of the formula: functions of the batch and of the results of earlier steps."""

    statistics: Callable[[_Batch], tuple[Array, Array]]
    inverse_deviation: Callable[[Array, float, _Batch], Array]
    gain: Callable[[_Batch, Array], Array]
    offset: Callable[[_Batch, Array], Array]
    mean: Callable[[_Batch, Array], Array]
    variance: Callable[[_Batch, Array, Array], Array]


_RIGHT = _Steps(
    statistics=lambda b: (b.mean, b.variance),
    inverse_deviation=lambda w, e, b: 1.0 / np.sqrt(w + e),
    gain=lambda b, s: b.gamma * s,
    offset=lambda b, s: b.beta,
    mean=lambda b, m: m,
    variance=lambda b, w, s: w,
)


def _bessel(b: _Batch, w: Array) -> Array:
    return w * b.count / max(b.count - 1, 1)


#: Mistakes that implementations of the forward pass make. Each mistake changes one step of the
#: formula.
FORWARD_MISTAKES = tuple(
    Mistake(*row)
    for row in (
        ("bessel", "the variance is divided by M - 1, not by M", "statistics",
         lambda b: (b.mean, _bessel(b, b.variance))),
        ("running-statistics", "the running statistics are used instead of those of the batch",
         "statistics", lambda b: (b.running_mean, b.running_variance)),
        ("initial-statistics", "the statistics 0 and 1 are used instead of those of the batch",
         "statistics", lambda b: (0.0 * b.mean, np.ones_like(b.mean))),
        ("mean-left-out", "the mean is not subtracted", "statistics",
         lambda b: (0.0 * b.mean, b.variance)),
        ("second-moment", "the mean of x**2 is used for the variance", "statistics",
         lambda b: (b.mean, b.variance + b.mean**2)),
        ("statistics-swapped", "mean and variance are swapped", "statistics",
         lambda b: (b.variance, np.abs(b.mean))),
        ("bessel-in-y", "y has the variance that is divided by M - 1", "inverse_deviation",
         lambda w, e, b: 1.0 / np.sqrt(_bessel(b, w) + e)),
        *INVERSE_DEVIATION_MISTAKES,
        ("gamma-left-out", "y is not multiplied by gamma", "gain", lambda b, s: s),
        ("gamma-twice", "y is multiplied by gamma twice", "gain", lambda b, s: b.gamma**2 * s),
        ("gamma-absolute", "y is multiplied by |gamma|", "gain", lambda b, s: np.abs(b.gamma) * s),
        ("gain-no-s", "y is not divided by the standard deviation", "gain", lambda b, s: b.gamma),
        ("gain-beta", "y is multiplied by beta, not by gamma", "gain", lambda b, s: b.beta * s),
        ("beta-left-out", "y lacks beta", "offset", lambda b, s: 0.0 * b.beta),
        ("beta-sign", "beta is subtracted, not added", "offset", lambda b, s: -b.beta),
        ("beta-gamma", "beta is multiplied by gamma", "offset", lambda b, s: b.gamma * b.beta),
        ("beta-s", "beta is multiplied by s", "offset", lambda b, s: s * b.beta),
        ("offset-gamma", "gamma is added, not beta", "offset", lambda b, s: b.gamma),
        ("mean-zero", "the returned mean is 0", "mean", lambda b, m: 0.0 * m),
        ("mean-sum", "the returned mean is the sum of x", "mean", lambda b, m: b.count * m),
        ("mean-running", "the returned mean is the running mean", "mean",
         lambda b, m: b.running_mean),
        ("variance-zero", "the returned variance is 0", "variance", lambda b, w, s: 0.0 * w),
        ("variance-unbiased", "the returned variance is divided by M - 1, not by M", "variance",
         lambda b, w, s: _bessel(b, w)),
        ("variance-sum", "the returned variance is not divided by M", "variance",
         lambda b, w, s: b.count * w),
        ("variance-epsilon", "the returned variance contains epsilon", "variance",
         lambda b, w, s: w + b.epsilon),
        ("variance-running", "the returned variance is the running variance", "variance",
         lambda b, w, s: b.running_variance),
        ("variance-deviation", "the standard deviation is returned for the variance", "variance",
         lambda b, w, s: np.sqrt(w)),
        ("variance-inverse", "the inverse deviation is returned for the variance", "variance",
         lambda b, w, s: s),
    )
)  # fmt: skip


def forward_diagnostic_data(
    dtype: np.dtype,
    *,
    data_format: str = "NCX",
    statistics_dtype: np.dtype | None = None,
    seed: int = 0,
) -> LayerData:
    """Return inputs for which different mistakes in a formula give different numbers.

    There are 11 channels of only M = 3 x 11 elements, so that a division by M - 1 instead of M
    changes the variance noticeably. The number of channels, the number of elements in a channel and
    the number of all elements are odd, so a kernel's vector length divides none of them. Two axes
    have the same size, so the channel axis cannot be guessed from the sizes. epsilon is about as
    large as the variance, and gamma has both signs. The fields `mean` and `variance` of the result
    are running statistics, which differ from the statistics of x.
    """
    rng = np.random.default_rng(seed)
    data = realistic_data(
        (3, 11, 1, 11),
        dtype,
        data_format=data_format,
        rng=rng,
        statistics_dtype=statistics_dtype,
        epsilon=0.25,
        scale=0.5,
    )
    mean, variance = data.mean.astype(float), data.variance.astype(float)
    return replace(
        data,
        mean=(mean + rng.uniform(0.2, 0.6, 11)).astype(data.mean.dtype),
        variance=(variance * rng.uniform(1.3, 2.5, 11)).astype(data.variance.dtype),
    )


def normalization(
    data: LayerData, mistakes: tuple[Mistake, ...] = (), *, scaled: bool = True
) -> Normalization:
    """Return the gain, offset, mean and variance that a layer with these mistakes computes."""
    return _normalization(_Batch.of(data, scaled), mistakes)


def _normalization(batch: _Batch, mistakes: tuple[Mistake, ...]) -> Normalization:
    steps = replace(_RIGHT, **{mistake.step: mistake.function for mistake in mistakes})
    with np.errstate(all="ignore"):
        mean, variance = steps.statistics(batch)
        s = steps.inverse_deviation(variance, batch.epsilon, batch)
        gain = steps.gain(batch, s)
        offset = steps.offset(batch, s) + gain * (batch.mean - mean)
        returned = steps.mean(batch, mean), steps.variance(batch, variance, s)
    return Normalization(gain, offset, *returned)


def diagnose_forward(
    data: LayerData, outputs: Mapping[str, np.ndarray | None], *, scaled: bool = True
) -> Diagnosis:
    """Return the diagnosis of the outputs of a forward pass in training.

    Parameters
    ----------
    data : LayerData
        The inputs. Only inputs like those of :func:`forward_diagnostic_data` distinguish all
        mistakes. If the inputs do not distinguish a mistake from others, the diagnosis names them
        all, or none.
    outputs : mapping
        y, mean and variance by name; None or absent for an output that is not judged.
    scaled : bool
        Whether gamma and beta were passed.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an output has an element type without bounds, or a wrong shape.
    """
    if not data.x.size:
        return Diagnosis("right", (), "there are no elements")
    operands = (data.gamma, data.beta) if scaled else (None, None)
    ladder = ForwardLadder.of(data.x, *operands, **data.options)
    known = {name: outputs.get(name) for name in FORWARD_RESULTS}
    results = results_of(known, ladder, ladder.allowances, data.channel_axis)
    if not any(each.is_wrong for each in results.values()):
        return Diagnosis("right", (), "the errors are within the bounds of rounding")
    batch = _Batch.of(data, scaled)
    centred = batch.x - batch.mean[:, None]

    def values(mistakes: tuple[Mistake, ...]) -> Values:
        found = _normalization(batch, mistakes)
        return {name: getattr(found, name) for name in _WORDS if name}

    functions = {"gain": centred, "offset": np.ones_like(centred)}
    return explained(results, functions, values, FORWARD_MISTAKES, _WORDS)
