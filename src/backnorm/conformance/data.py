"""Test data: exact data, whose results are known, and realistic data, like that of training.

dy is never constant: with a constant dy the exact dx and dgamma are 0, and wrong kernels can pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from backnorm.conformance.axes import BATCH_NORM, Axes, Normalization
from backnorm.dtypes import FLOAT32, FLOAT64, is_16_bit, rounded
from backnorm.problem import channel_axis_of

__all__ = ["ExactCase", "LayerData", "exact_data", "read_only", "realistic_data", "rows_of"]


@dataclass(frozen=True, slots=True, eq=False)
class LayerData:
    """The inputs of the forward and backward passes of one layer.

    Attributes
    ----------
    x, dy : numpy.ndarray
        Input, and gradient of the output; equal shapes and types.
    mean, variance : numpy.ndarray
        Shape (C,) in batch normalisation; see :attr:`.axes.Axes.statistics`.
    gamma, beta : numpy.ndarray
        Shape (C,).
    epsilon : float
    data_format : {"NCX", "NXC"}
    normalization : Normalization
    momentum : float or None
        The weight of the batch in the running statistics, of which `mean` and `variance` are the
        old ones; None: there are no running statistics.
    unbiased : bool
        Whether the running variance is an average of variances with Bessel's correction.
    """

    x: np.ndarray
    dy: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    gamma: np.ndarray
    beta: np.ndarray
    epsilon: float
    data_format: str
    normalization: Normalization = field(default=BATCH_NORM, kw_only=True)
    momentum: float | None = field(default=None, kw_only=True)
    unbiased: bool = field(default=False, kw_only=True)

    @property
    def backward_inputs(self) -> tuple[np.ndarray, ...]:
        """The arguments of the backward pass in order: x, dy, mean, variance, gamma."""
        return self.x, self.dy, self.mean, self.variance, self.gamma

    def like(self, result: str) -> np.ndarray:
        """Return the input that has the shape and element type of a result."""
        if result in ("dgamma", "dbeta"):
            return self.gamma
        return self.x if result in ("dx", "y") else self.mean

    @property
    def axes(self) -> Axes:
        """The rows and the parameters of x."""
        return Axes(self.normalization, self.x.shape, self.data_format)

    @property
    def channel_axis(self) -> int:
        """Index of the channel axis of x."""
        return channel_axis_of(self.data_format) % self.x.ndim

    @property
    def inverse_deviation(self) -> np.ndarray:
        """1/sqrt(variance + epsilon), rounded to the type of the variance."""
        with np.errstate(all="ignore"):
            inverse = 1.0 / np.sqrt(self.variance.astype(FLOAT64) + self.epsilon)
        return rounded(inverse, self.variance.dtype)

    def with_inverse_deviation(self) -> Self:
        """Return the data with the float64 variance of which the rounded inverse deviation is the
        exact one.
        """
        inverse = self.inverse_deviation.astype(np.longdouble)
        with np.errstate(all="ignore"):
            variance = (1 / np.square(inverse) - self.epsilon).astype(FLOAT64)
        return replace(self, variance=variance)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that every pass takes."""
        kind, options = self.normalization, dict[str, Any](epsilon=self.epsilon)
        if len(kind.layouts) > 1:
            options |= {"data_format": self.data_format}
        return options | ({"groups": kind.groups} if kind.has_groups else {})


@dataclass(frozen=True, slots=True, eq=False)
class ExactCase(LayerData):
    """Data with known results.

    Attributes
    ----------
    dx, dgamma, dbeta, y : numpy.ndarray
        Exact results of the training backward pass and of the normalisation by mean and variance,
        in float64. dx and y are representable in x's type. dgamma and dbeta are integers times
        powers of two, which a narrow type may have to round once.
    true_statistics : bool
        Whether mean and variance are those of x. If so, y is also the result of the forward pass
        in training.
    """

    dx: np.ndarray = field(kw_only=True)
    dgamma: np.ndarray = field(kw_only=True)
    dbeta: np.ndarray = field(kw_only=True)
    y: np.ndarray = field(kw_only=True)
    true_statistics: bool = field(kw_only=True)


def exact_data(
    shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    data_format: str = "NCX",
    rng: np.random.Generator,
    statistics_dtype: np.dtype | None = None,
    epsilon: float = 0.0,
    mean_magnitude: int = 8,
) -> ExactCase:
    """Return data whose statistics, sums and gradients are exact in any order of evaluation.

    All values are small integers times powers of two. Therefore results, products and partial sums
    are exact. In float32 this holds for up to 2**18 elements per channel. If an output differs from
    these results, its formula or indexing is wrong; rounding is not the cause. oneDNN's benchdnn
    has such data, too.

    Parameters
    ----------
    shape : tuple of int
        Shape of x; rank >= 2. M = 1 and empty shapes are legal.
    dtype : numpy.dtype
        Element type of x and dy.
    data_format : {"NCX", "NXC"}
    rng : numpy.random.Generator
    statistics_dtype : numpy.dtype, optional
        Type of the per-channel arrays; by default float32 for a 16-bit type, else `dtype`.
    epsilon : float
        0, or a power of two below 1/4 that is representable in the statistics' type. The variance
        is a power of four minus epsilon; it is the variance of x only if epsilon is 0.
    mean_magnitude : int
        Bound of the means, which are integers. x is representable if this is at most 2**20 in
        float32, about 8 in 16-bit types.

    Notes
    -----
    Deviations from the mean are pairs c = +b u and c = -b u, where u is a power of two. For every
    five pairs with b = 1 there are three with b = 3; the others have b = 2. So the mean of c**2 is
    (2 u)**2. The dy of a pair are p + q and p - q. The mean of the p is an integer. sum(b q) is a
    multiple of M/2, or, if M is odd, of M; then one more element has c = 0.
    """
    axis, channels, others, statistics = _layout(shape, dtype, data_format, statistics_dtype)
    count = math.prod(others)
    unit = 2.0 ** rng.integers(-2, 1, channels)
    mean = rng.integers(-mean_magnitude, mean_magnitude, channels, endpoint=True).astype(float)
    gamma = rng.choice([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0], channels)
    beta = rng.integers(-2, 2, channels, endpoint=True).astype(float)
    s = 1.0 / (2.0 * unit)

    deviation, gradient = np.empty((2, channels, count))
    mean_dy, mean_dy_xmu = np.zeros((2, channels))
    for channel in range(channels):
        b, d, mean_dy[channel], ratio = _exact_channel(count, rng)
        deviation[channel], gradient[channel] = b * unit[channel], d
        mean_dy_xmu[channel] = ratio * unit[channel]
    column = (slice(None), None)
    coefficient = (s * s * mean_dy_xmu)[column]
    dx = (gamma * s)[column] * (gradient - mean_dy[column] - deviation * coefficient)
    y = (gamma * s)[column] * deviation + beta[column]

    def tensor(rows: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(rows.reshape(channels, *others), 0, axis))

    return ExactCase(
        x=tensor(deviation + mean[column]).astype(dtype),
        dy=tensor(gradient).astype(dtype),
        mean=mean.astype(statistics),
        variance=(4.0 * unit * unit - epsilon).astype(statistics),
        gamma=gamma.astype(statistics),
        beta=beta.astype(statistics),
        epsilon=epsilon,
        data_format=data_format,
        dx=tensor(dx),
        dgamma=s * mean_dy_xmu * count,
        dbeta=mean_dy * count,
        y=tensor(y),
        true_statistics=epsilon == 0.0 and count % 2 == 0 and count > 0,
    )


def realistic_data(
    shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    data_format: str = "NCX",
    rng: np.random.Generator,
    statistics_dtype: np.dtype | None = None,
    epsilon: float = 1e-5,
    ratio: float = 1.0,
    scale: float = 1.0,
    gradient_scale: float = 1.0,
    normalization: Normalization = BATCH_NORM,
) -> LayerData:
    """Return normally distributed data like that of a layer in training.

    Parameters
    ----------
    shape, dtype, data_format, rng, statistics_dtype
        As in :func:`exact_data`.
    epsilon : float
    ratio : float
        Magnitude of the mean of x divided by its standard deviation. With 1e4, formulas whose
        terms cancel fail.
    scale : float
        Standard deviation of x; a row has half to twice this.
    gradient_scale : float
        Magnitude of dy, which is correlated with x and has a mean, so that no term of the gradient
        is small by accident.
    normalization : Normalization
        Rows have different means and deviations.

    Notes
    -----
    mean and variance are computed from the rounded x, and then rounded to `statistics_dtype`.
    """
    _, channels, _, statistics = _layout(shape, dtype, data_format, statistics_dtype)
    axes = Axes(normalization, shape, data_format)
    per_row = (axes.size[0], 1)

    deviation = scale * 2.0 ** rng.uniform(-1, 1, per_row)
    centre = ratio * deviation * rng.choice([-1.0, 1.0], per_row)
    normal = rng.standard_normal(axes.size)
    x = (centre + deviation * normal).astype(dtype)
    tilt, offset = rng.uniform(-1, 1, (2, *per_row))
    dy = gradient_scale * (rng.standard_normal(normal.shape) + tilt * normal + offset)

    mean, variance = axes.statistics_of(x)
    gamma = rng.uniform(0.5, 1.5, channels) * rng.choice([-1.0, 1.0], channels)
    return LayerData(
        x=axes.tensor(x),
        dy=axes.tensor(dy.astype(dtype)),
        mean=mean.astype(statistics),
        variance=variance.astype(statistics),
        gamma=gamma.astype(statistics),
        beta=rng.uniform(-1, 1, channels).astype(statistics),
        epsilon=epsilon,
        data_format=data_format,
        normalization=normalization,
    )


def _layout(
    shape: tuple[int, ...], dtype: np.dtype, data_format: str, statistics: np.dtype | None
) -> tuple[int, int, tuple[int, ...], np.dtype]:
    """Return the channel axis, its size, the sizes of the other axes, and the statistics type."""
    axis = channel_axis_of(data_format) % len(shape)
    others = shape[:axis] + shape[axis + 1 :]
    return axis, shape[axis], others, statistics or (FLOAT32 if is_16_bit(dtype) else dtype)


def in_layout(shape: tuple[int, ...], data_format: str) -> tuple[int, ...]:
    """Return `shape`, given as (N, C, space), with its axes in the order of `data_format`."""
    return shape if data_format == "NCX" else (shape[0], *shape[2:], shape[1])


def rows_of(tensor: np.ndarray, axis: int, dtype: Any = FLOAT64) -> np.ndarray:
    """Return a tensor with channels on `axis` as an array of shape (C, M)."""
    return np.moveaxis(tensor, axis, 0).reshape(tensor.shape[axis], -1).astype(dtype)


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view of an array."""
    view = array.view()
    view.flags.writeable = False
    return view


def _exact_channel(
    count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Return b (see `exact_data`), dy, mean(dy) and mean(dy * b) of one channel."""
    pairs = count // 2
    triples = int(rng.integers(0, pairs // 16, endpoint=True))
    b = np.full(pairs, 2.0)
    b[: 5 * triples] = 1.0
    b[5 * triples : 8 * triples] = 3.0

    mean_dy = float(rng.choice([-2, -1, 1, 2]))
    p = rng.integers(-1, 1, pairs, endpoint=True).astype(float)
    p = mean_dy + p - _spread(p.sum(), pairs)
    # Below, sum(b q) is corrected only at the elements where b is 2: adding 1/2 to such an element
    # of q adds 1 to the sum.
    twos = b == 2.0
    q = rng.integers(-1, 1, pairs, endpoint=True) + rng.choice([-1.0, 1.0]) * b
    # The mean of dy * b, which is 2 * sum(b q) / M, must be an integer. So sum(b q) is made a
    # multiple of M / 2, or of M if M is odd.
    step = pairs if count % 2 == 0 else count
    remainder = (b * q).sum()
    remainder -= step * np.rint(remainder / step) if step else 0.0
    q[twos] -= 0.5 * _spread(remainder, int(twos.sum()))

    deviation, gradient = np.zeros(count), np.full(count, mean_dy)
    deviation[:pairs], deviation[pairs : 2 * pairs] = b, -b
    gradient[:pairs], gradient[pairs : 2 * pairs] = p + q, p - q
    order = rng.permutation(count)
    mean_dy_b = 2.0 * float((b * q).sum()) / count if count else 0.0
    return deviation[order], gradient[order], mean_dy, mean_dy_b


def _spread(total: float, places: int) -> np.ndarray:
    """Return `places` integers that differ by at most one and add up to `total`."""
    if places == 0:
        return np.zeros(0)
    share, rest = divmod(int(total), places)
    values = np.full(places, float(share))
    values[:rest] += 1.0
    return values
