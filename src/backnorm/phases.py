"""The phases of a backward pass, each by itself: reduce -> exchange -> apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from backnorm.arrays import NUMPY
from backnorm.cpu.addresses import address_of
from backnorm.cpu.record import ADDRESSES
from backnorm.executable import Executable
from backnorm.layout import restore
from backnorm.problem import variance_error
from backnorm.results import ChannelSums, check_sums, check_sums_of

__all__ = ["Exchange", "apply", "exchanged", "reduce"]

#: Turns the sums over this machine's elements into the sums over all machines' elements.
Exchange = Callable[[ChannelSums], ChannelSums]


def reduce(found: Executable, *operands: np.ndarray | None) -> ChannelSums:
    """Return the sums of dy and dy * (x - mean) over this machine's elements."""
    return ChannelSums(*found.run(*operands))


def apply(
    found: Executable,
    *operands: np.ndarray | None,
    sums: ChannelSums,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return dx from sums that `reduce` gave (and others may have been added to)."""
    dx: np.ndarray
    given = sums.sum_dy, sums.sum_dy_xmu
    (dx,) = found.run(*operands, out=out, sums=given, count=sums.count)
    return dx


def exchanged(
    found: Executable, *operands: np.ndarray | None, exchange: Exchange
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return dx, from the exchanged sums, and this machine's own dgamma and dbeta.

    The executable must be one that was planned for an exchange.
    """
    problem, order = found.problem, found.order
    x, dy, mask, mean, variance, gamma = found.ready(operands)
    dx = NUMPY.new(problem, order)
    dgamma, dbeta = np.empty((2, problem.channels), problem.statistics_dtype)
    arrays = {"x": x, "dy": dy, "out": dx, "mask": mask, "mean": mean, "variance": variance}
    places = _places(**arrays, gamma=gamma, result=dgamma, result_2=dbeta)
    summed: tuple[np.ndarray, np.ndarray] = found.launch.sums()
    refused = found.launch.reduce(*places, summed=summed)
    if refused < 0:
        sums = check_sums(exchange(ChannelSums(*summed, found.launch.count)), "exchange")
        check_sums_of(sums, problem.channels, found.launch.count, "exchange")
        given = sums.sum_dy, sums.sum_dy_xmu
        refused = found.launch.apply(*places, sums=given, count=sums.count)
    if refused >= 0:
        raise variance_error(variance, problem, refused)
    return restore(dx, order), dgamma, dbeta


def _places(**arrays: Any) -> tuple[int, ...]:
    """Return the addresses of a record."""
    given = (arrays.get(field) for field in ADDRESSES)
    return tuple(0 if array is None else address_of(array) for array in given)
