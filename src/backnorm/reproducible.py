"""The results of `reduce` and `reduce_forward` with ``reproducible=True``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from backnorm import binned
from backnorm.errors import ArgumentValueError
from backnorm.results import ChannelMoments, ChannelSums


@dataclass(frozen=True, slots=True, eq=False)
class _Reproducible:
    """Two sums of every channel as integers, and the number of elements that were summed."""

    bins: np.ndarray
    count: int

    def __add__(self, other: object) -> Self:
        """Return the sums over the elements of `self` and `other` together."""
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, _Reproducible)
        if other.bins.shape != self.bins.shape:
            raise ArgumentValueError(
                "sums",
                "only sums over the same channels, of elements of one type, add up",
                came=f"bins of shapes {self.bins.shape} and {other.bins.shape}",
            )
        count = self.count + other.count
        binned.check_count("sums", count)
        return type(self)(binned.added(self.bins, other.bins, np), count)


class ReproducibleSums(_Reproducible):
    """The sums of `ChannelSums`, but with the same bits for every order of the elements.

    ``backnorm.reduce(..., reproducible=True)`` returns these sums. ``backnorm.apply`` takes them.
    Two instances add up exactly (``a + b``), so the total does not depend on how a batch is
    divided.

    Attributes
    ----------
    bins : numpy.ndarray
        int64, shape (8, C), or (10, C) for float64 elements. `backnorm.binned` describes them.
    count : int
        Number of elements per channel, M; below 2^31.
    """

    __slots__ = ()

    def rounded(self) -> ChannelSums:
        """Return the sums as float64."""
        binned.check_count("sums", self.count)
        with np.errstate(all="ignore"):
            return ChannelSums(*binned.sums_of(self.bins, np), self.count)


class ReproducibleMoments(_Reproducible):
    """The sums of x and x^2 in the forward pass, from which mean and variance are computed.

    ``backnorm.reduce_forward(..., reproducible=True)`` returns these sums.
    ``backnorm.apply_forward`` takes them in place of `ChannelMoments`. Two instances add up exactly
    (``a + b``), so the total does not depend on how a batch is divided.

    Attributes
    ----------
    bins : numpy.ndarray
        int64, shape (8, C), or (10, C) for float64 elements. `backnorm.binned` describes them.
    count : int
        Number of elements per channel, M; below 2^31.
    """

    __slots__ = ()

    def rounded(self) -> ChannelMoments:
        """Return the mean and the biased variance of each channel, in float64."""
        binned.check_count("moments", self.count)
        with np.errstate(all="ignore"):
            count = np.array([float(self.count)])
            return ChannelMoments(*binned.moments_of(self.bins, count, np), self.count)
