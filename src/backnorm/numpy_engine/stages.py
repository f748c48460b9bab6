"""The stages of the NumPy engine: each computes the results of one operation.

A stage reads and writes arrays in memory, as a kernel does (`interfaces.Launch`). It computes group
after group of channels: first the sums, then the output. The formulas of an element are

==============================  =========================================================
backward, training              dx = gain * ((dy - shift) - (x - mean) * slope)
backward, frozen statistics     dx = gain * dy
forward and inference           y  = gain * ((x - mean) - shift) + slope
==============================  =========================================================

with the coefficients of its channel: shift = sum_dy/M, slope = s²·sum_dy_xmu/M and gain = gamma·s
in the backward pass, where s = 1/sqrt(variance + epsilon). In the forward pass, slope is beta, and
the mean of x is the sum of mean and shift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backnorm import interfaces
from backnorm.activations import Activation
from backnorm.addresses import data_of
from backnorm.compensated import two_product
from backnorm.dtypes import FLOAT64, rounded
from backnorm.interfaces import ADDRESSES, summary
from backnorm.layout import Extents
from backnorm.machine import Machine
from backnorm.numpy_engine.memory import Block, Elements, Mask, array_at, block_shape, groups
from backnorm.numpy_engine.sums import Sum
from backnorm.problem import Problem
from backnorm.reproducible_sums import added, bins_of, moments_of, sums_of, zeros
from backnorm.signature import Operation

# A larger inverse standard deviation is replaced by this number: infinity times a difference x -
# mean of 0 would be NaN.
_MOST = 1e150

# A power of two: the sum of 2^63 float64 numbers, each multiplied by it, is finite.
_SMALL_UNIT = 2.0**-64

# Yields, for each block of a group of channels, an array of terms and one of factors.
Terms = Iterator[tuple[np.ndarray, np.ndarray]]


class Plan(interfaces.Plan):
    """The plan of a problem: its blocks follow from the extents."""

    def __str__(self) -> str:
        channels, span = block_shape(self.extents)
        return "\n".join(
            (
                *summary(self.problem, self.extents),
                "  engine   numpy, which computes in float64",
                f"  blocks   of {channels} channels and {span} elements of each",
            )
        )


class Launch(interfaces.Launch):
    """The stages of a problem."""

    def __init__(self, plan: Plan, header: int) -> None:
        self._plan, self._header = plan, header

    def stage(self, operation: Operation) -> Stage:
        """Return the stage that computes all results of an operation."""
        return Stage(self._plan, self._header)


def planned(
    problem: Problem, extents: Extents, machine: Machine, header: int
) -> tuple[Plan, Launch]:
    """Return the plan of a problem, and its stages. Neither depends on the machine."""
    plan = Plan(problem, extents)
    return plan, Launch(plan, header)


class Stage:
    """Computes all results of a problem. `header`: see `engines.Engine`."""

    def __init__(self, plan: Plan, header: int) -> None:
        self._plan, self._header = plan, header
        if plan.problem.operation == "inference":
            self._compute: Callable[[_Call], int] = _inference
        else:
            self._compute = _forward if plan.problem.signature.normalises else _backward

    def __call__(
        self,
        addresses: Sequence[int],
        *,
        momentum: float | None = None,
        count: int | None = None,
        sums: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> int:
        """Compute the results; return the first channel with an invalid variance, or -1.

        Parameters
        ----------
        addresses : sequence of int
            The addresses of `ADDRESSES`, 0 for an absent array.
        momentum : float, optional
            Weight of the batch in the running statistics, if there are any.
        count : int, optional
            The number of elements per channel that were summed, if it is not that of x.
        sums : (float64 array, float64 array), optional
            Sums, or moments, of every channel that the caller provides.
        """
        if self._header:
            addresses = [address and data_of(address, self._header) for address in addresses]
        by_name = dict(zip(ADDRESSES, addresses, strict=True))
        problem, extents = self._plan.problem, self._plan.extents
        total = problem.count if count is None else count
        with np.errstate(all="ignore"):
            return self._compute(_Call(problem, extents, by_name, momentum, total, sums))


@dataclass(frozen=True)
class _Call:
    """A call: its problem, and the addresses of its arrays, 0 for an absent array.

    `count` is the number of elements of a channel in all parts of the batch. `sums` are the sums or
    moments that the caller provides.
    """

    problem: Problem
    extents: Extents
    addresses: Mapping[str, int]
    momentum: float | None
    count: int
    sums: tuple[np.ndarray, np.ndarray] | None

    @property
    def is_wide(self) -> bool:
        return self.problem.dtype == FLOAT64

    def elements(self, name: str) -> Elements:
        """Return an array of x's shape."""
        return Elements(self.addresses[name], self.extents, self.problem.dtype)

    def optional(self, name: str) -> Elements | None:
        """Return an array of x's shape, or None if it is absent."""
        return self.elements(name) if self.addresses[name] else None

    def mask(self) -> Mask | None:
        """Return the mask, or None if it is absent."""
        address = self.addresses["mask"]
        return Mask(address, self.extents) if address else None

    def channels(self, name: str, otherwise: float = 0.0) -> np.ndarray:
        """Return a per-channel array as float64; if it is absent, an array of `otherwise`."""
        address, shape = self.addresses[name], (self.extents.channels,)
        if not address:
            return np.full(shape, otherwise)
        values: np.ndarray = array_at(address, shape, self.problem.statistics_dtype).astype(FLOAT64)
        return values

    def put(self, name: str, values: np.ndarray, dtype: np.dtype | None = None) -> None:
        """Write an array of channels, rounded once, if it is wanted."""
        if self.addresses[name]:
            dtype = self.problem.statistics_dtype if dtype is None else dtype
            array_at(self.addresses[name], values.shape, dtype)[...] = rounded(values, dtype)


def _deviation(call: _Call) -> tuple[np.ndarray, int]:
    """Return 1/sqrt(variance + epsilon) of every channel, and the first invalid channel or -1."""
    problem, variance = call.problem, call.channels("variance")
    if problem.inverse:
        return np.minimum(variance, _MOST), _first(variance < 0.0)
    total = variance + problem.epsilon
    return 1.0 / np.sqrt(total), _first((total <= 0.0) & np.isfinite(total))


def _first(invalid: np.ndarray) -> int:
    return int(invalid.argmax()) if invalid.any() else -1


def _backward(call: _Call) -> int:
    """Compute the results of a backward pass, or of one of its phases."""
    problem, mask = call.problem, call.mask()
    x, dy = call.elements("x"), call.elements("dy")
    out, residual = call.optional("out"), call.optional("residual")
    mean, gamma = call.channels("mean"), call.channels("gamma", 1.0)
    scale, refused = _deviation(call) if call.addresses["variance"] else (np.ones_like(mean), -1)
    if refused >= 0:
        return refused
    gain = gamma * scale
    sums, bins = np.zeros((2, mean.size)), _no_bins(problem, mean.size)
    shift, slope = np.zeros((2, mean.size))

    def gradient(block: Block) -> np.ndarray:
        values = dy.load(block)
        if mask is not None:
            values[~mask.load(block)] = 0.0
        return values

    def centred(block: Block) -> np.ndarray:
        values = x.load(block)
        values -= mean[block.channels, None]
        return values

    for channels, blocks in groups(call.extents):
        terms = ((gradient(block), centred(block)) for block in blocks)
        if call.sums is not None:
            sums[:, channels] = [rows[channels] for rows in call.sums]
        elif problem.reproducible:
            bins[:, channels] = _binned(call, channels, terms)
            sums[:, channels] = sums_of(bins[:, channels], np)
        else:
            sums[:, channels] = _summed(call, channels, terms)
        if call.count and problem.training:
            shift[channels] = sums[0, channels] / call.count
            # The parentheses avoid scale * scale, which would overflow for the smallest epsilon.
            s = scale[channels]
            slope[channels] = s * (s * sums[1, channels] / call.count)
        if out is None:
            continue
        for block in blocks:
            values = gradient(block)
            if residual is not None:
                residual.store(block, values)
            if problem.training:
                values -= shift[channels, None]
                values -= centred(block) * slope[channels, None]
            values *= gain[channels, None]
            out.store(block, values)
    call.put("result", scale * sums[1])
    call.put("result_2", sums[0])
    _exchange(call, bins, sums, (mean, shift, slope, gain))
    return -1


def _inference(call: _Call) -> int:
    """Normalise with given statistics."""
    scale, refused = _deviation(call)
    if refused < 0:
        mean = call.channels("mean")
        gain, beta = call.channels("gamma", 1.0) * scale, call.channels("beta")
        for _, blocks in groups(call.extents):
            _normalise(call, blocks, (mean, np.zeros_like(mean), beta, gain))
    return refused


def _forward(call: _Call) -> int:
    """Compute the results of a forward pass, or of one of its phases."""
    problem, x = call.problem, call.elements("x")
    gamma, beta = call.channels("gamma", 1.0), call.channels("beta")
    mean, low, variance, scale, gain = np.zeros((5, gamma.size))
    bins = _no_bins(problem, gamma.size)
    for channels, blocks in groups(call.extents):
        if call.sums is not None:
            mean[channels], variance[channels] = (rows[channels] for rows in call.sums)
        elif problem.reproducible:
            bins[:, channels] = _binned(call, channels, ((e, e) for e in map(x.load, blocks)))
            found = moments_of(bins[:, channels], np.array([float(call.count)]), np)
            mean[channels], variance[channels] = found
        elif blocks:
            moments = _moments(call, x, channels, blocks)
            mean[channels], low[channels], variance[channels] = moments
        scale[channels] = 1.0 / np.sqrt(variance[channels] + problem.epsilon)
        gain[channels] = gamma[channels] * scale[channels]
        _normalise(call, blocks, (mean, low, beta, gain))
    mask, out = call.mask(), call.optional("out")
    if mask is not None and out is not None:
        mask.store(out.flat(), problem.ceiling)
    rounded_mean = mean + low
    call.put("result", rounded_mean)
    call.put("result_2", scale if problem.inverse else variance)
    if problem.running and call.momentum is not None:
        correction = 1.0 if problem.biased else call.count / max(call.count - 1, 1)
        batch = {"running_mean": rounded_mean, "running_variance": variance * correction}
        for name, statistic in batch.items():
            kept = call.channels(name) * (1.0 - call.momentum)
            call.put(name, kept + statistic * call.momentum)
    _exchange(call, bins, np.stack((rounded_mean, variance)), (mean, low, beta, gain))
    return _first(variance + problem.epsilon <= 0.0)


def _normalise(call: _Call, blocks: list[Block], coefficients: tuple[np.ndarray, ...]) -> None:
    """Write y of some blocks, if it is a result."""
    x, out, residual = call.elements("x"), call.optional("out"), call.optional("residual")
    problem = call.problem
    if out is None:
        return
    for block in blocks:
        mean, low, beta, gain = (row[block.channels, None] for row in coefficients)
        values = gain * ((x.load(block) - mean) - low) + beta
        if residual is not None:
            values = values + residual.load(block)
        out.store(block, _followed(values, problem.activation, problem.ceiling))


def _followed(z: np.ndarray, activation: Activation | None, ceiling: float) -> np.ndarray:
    """Return z, or the ReLU of z; NaN stays NaN."""
    if activation is None:
        return z
    below = np.where(z > ceiling, ceiling, z)
    y: np.ndarray = np.where(below <= 0.0, 0.0, below)
    return y


def _summed(call: _Call, channels: slice, terms: Terms) -> tuple[np.ndarray, np.ndarray]:
    """Return sum(a) and sum(a * b) of each channel, where `terms` yields a and b."""
    first, second = (Sum(channels.stop - channels.start, call.is_wide) for _ in range(2))
    for one, factor in terms:
        first.add(one)
        second.add(one, factor)
    return first.value, second.value


def _no_bins(problem: Problem, channels: int) -> np.ndarray:
    """Return the bins of no terms; if sums are not reproducible, those of no channels."""
    return zeros(problem.dtype.itemsize, channels if problem.reproducible else 0)


def _binned(call: _Call, channels: slice, terms: Terms) -> np.ndarray:
    """Return the bins of sum(a) and sum(a * b) of each channel."""
    itemsize = call.problem.dtype.itemsize
    bins = zeros(itemsize, channels.stop - channels.start)
    for one, factor in terms:
        bins = added(bins, bins_of(one, factor, itemsize, np), np)
    return bins


def _moments(
    call: _Call, x: Elements, channels: slice, blocks: list[Block]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean of each channel, the rounding error of this mean, and the variance."""
    count = float(call.count)

    def of_mean(unit: float) -> tuple[np.ndarray, np.ndarray]:
        total = Sum(channels.stop - channels.start, call.is_wide)
        for block in blocks:
            total.add(x.load(block) * unit)
        mean = total.value / count
        product, cut = two_product(mean, np.full_like(mean, count), np)
        rest = ((total.high - product) + (total.low - cut)) / count
        return mean / unit, np.where(np.isfinite(rest), rest / unit, 0.0)

    mean, low = of_mean(1.0)
    finite = np.isfinite(mean)
    if call.is_wide and not finite.all():
        # The sum of finite elements may have overflowed, although their mean cannot.
        scaled, low_of_scaled = of_mean(_SMALL_UNIT)
        mean, low = np.where(finite, mean, scaled), np.where(finite, low, low_of_scaled)
    squares = Sum(mean.size, call.is_wide)
    for block in blocks:
        centred = (x.load(block) - mean[:, None]) - low[:, None]
        squares.add(centred, centred)
    return mean, low, squares.value / count


def _exchange(
    call: _Call, bins: np.ndarray, sums: np.ndarray, coefficients: tuple[np.ndarray, ...]
) -> None:
    """Write the sums (or bins), or the coefficients, of every channel, if they are results."""
    problem = call.problem
    if problem.operation.endswith("_coefficients"):
        call.put("exchanged", np.stack(coefficients), np.dtype(problem.arithmetic))
    elif problem.operation.startswith("reduce") and problem.reproducible:
        call.put("exchanged", bins, bins.dtype)
    elif problem.operation.startswith("reduce"):
        call.put("exchanged", sums, FLOAT64)
