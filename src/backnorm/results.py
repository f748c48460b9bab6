"""The values that operators return."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from backnorm.dtypes import FLOAT64, element_type
from backnorm.errors import ArgumentTypeError, ArgumentValueError, described, shown
from backnorm.scalars import check_integer, check_number

__all__ = [
    "Blend",
    "ChannelSums",
    "Gradients",
    "GradientsWithResidual",
    "Normalized",
    "NormalizedWithMask",
    "SecondGradients",
    "check_blend",
    "check_sums",
    "check_sums_of",
]

# What a kernel can count.
_MOST = sys.maxsize


class Gradients(NamedTuple):
    """Gradients of batch normalisation: dx, of x's shape and type; dgamma and dbeta, (C,)."""

    dx: np.ndarray
    dgamma: np.ndarray
    dbeta: np.ndarray


class Blend(NamedTuple):
    """How a result is blended into what its output holds: alpha * result + beta * held.

    Attributes
    ----------
    data, channels : (float, float)
        alpha and beta of dx, and of dgamma and dbeta, finite. With beta = 0 what is held is not
        read.
    """

    data: tuple[float, float] = (1.0, 0.0)
    channels: tuple[float, float] = (1.0, 0.0)


class SecondGradients(NamedTuple):
    """Gradients of the backward pass: with respect to x and dy, of x's shape; to gamma, (C,)."""

    x: np.ndarray
    dy: np.ndarray
    gamma: np.ndarray


class Normalized(NamedTuple):
    """Result of the training forward: y, and the batch mean and biased variance, (C,) each."""

    y: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


class NormalizedWithMask(NamedTuple):
    """Result of the training forward with a ReLU: as `Normalized`, and the mask.

    Bit i % 8 of byte i // 8 of the mask (uint8) says whether element i of y, in the order of
    memory, is more than zero. A few bytes at the end are padding.
    """

    y: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    mask: np.ndarray


class GradientsWithResidual(NamedTuple):
    """Gradients through a ReLU and the sum before it: as `Gradients`, and the residual's."""

    dx: np.ndarray
    dgamma: np.ndarray
    dbeta: np.ndarray
    dresidual: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class ChannelSums:
    """The two sums of the backward pass, per channel; what is exchanged between phases.

    Two of them add up (``a + b``): over threads, micro-batches, chunks of a file or machines.
    The empty sum is ``ChannelSums.zero(channels)``.

    Attributes
    ----------
    sum_dy : numpy.ndarray
        float64, shape (C,): sum of dy.
    sum_dy_xmu : numpy.ndarray
        float64, shape (C,): sum of dy * (x - mean).
    count : int
        Number of elements per channel that were summed, M.
    """

    sum_dy: np.ndarray
    sum_dy_xmu: np.ndarray
    count: int

    @classmethod
    def zero(cls, channels: int) -> ChannelSums:
        """Return the sums over no elements, for `channels` channels, 0 or more."""
        accepted = "an integer, 0 or more"
        number = check_integer("channels", channels, accepted=accepted)
        if not 0 <= number <= _MOST // FLOAT64.itemsize:
            raise ArgumentValueError(
                "channels", "is no number of channels", came=number, accepted=accepted
            )
        return cls(np.zeros(number), np.zeros(number), 0)

    def __add__(self, other: object) -> ChannelSums:
        """Return the sums over both sets of elements."""
        if not isinstance(other, ChannelSums):
            return NotImplemented
        one, two = check_sums(self), check_sums(other)
        if one.sum_dy.shape != two.sum_dy.shape:
            raise ArgumentValueError(
                "sums",
                "only sums over the same channels add up",
                came=f"{one.sum_dy.size} and {two.sum_dy.size} channels",
            )
        # Infinities of different signs are NaN.
        with np.errstate(all="ignore"):
            return ChannelSums(
                one.sum_dy + two.sum_dy,
                one.sum_dy_xmu + two.sum_dy_xmu,
                one.count + two.count,
            )


def check_sums(sums: object, name: str = "sums") -> ChannelSums:
    """Return sums as float64 arrays of one value per channel and an integer, or raise.

    Parameters
    ----------
    sums : ChannelSums
        Arrays of any floating-point type, or what can be read as such.
    name : str
        The argument in the caller's words.
    """
    if not issubclass(type(sums), ChannelSums):
        raise ArgumentTypeError(
            name,
            "must be the ChannelSums that backnorm.reduce returned (or a sum of several)",
            came=type(sums).__name__,
            accepted="ChannelSums",
        )
    assert isinstance(sums, ChannelSums)
    one, other, count = sums.sum_dy, sums.sum_dy_xmu, sums.count
    plain = type(sums) is ChannelSums and _is_plain(one) and _is_plain(other)
    if plain and one.shape == other.shape and type(count) is int and 0 <= count <= _MOST:
        return sums
    read = (_sums_of(name, "sum_dy", one), _sums_of(name, "sum_dy_xmu", other))
    if read[0].shape != read[1].shape:
        raise ArgumentValueError(
            name,
            "its arrays must have one value per channel each",
            came=f"shapes {read[0].shape} and {read[1].shape}",
            accepted="arrays of one shape",
        )
    accepted = "an integer, the number of elements of a channel that were summed"
    problem = "its count must be an integer"
    whole = check_integer(name, count, problem=problem, accepted=accepted)
    if not 0 <= whole <= _MOST:
        raise ArgumentValueError(
            name, "its count must not be negative, nor beyond 64 bits", came=whole,
            accepted=accepted,
        )  # fmt: skip
    return ChannelSums(*read, whole)


def check_sums_of(sums: ChannelSums, channels: int, count: int, name: str = "sums") -> ChannelSums:
    """Return checked sums, or raise unless they can be those of a batch with this part in it.

    Parameters
    ----------
    sums : ChannelSums
    channels : int
        Of the part.
    count : int
        Elements of a channel in it.
    name : str
    """
    if sums.sum_dy.shape != (channels,):
        raise ArgumentValueError(
            name,
            "its per-channel sums must match the channels of {x}",
            came=f"sums of shape {sums.sum_dy.shape}",
            accepted=f"shape ({channels},)",
        )
    if sums.count < count:
        raise ArgumentValueError(
            name,
            "its count must be that of all parts of the batch, {x} among them",
            came=f"count {sums.count}",
            accepted=f"{count} or more",
        )
    return sums


def _is_plain(sums: object) -> bool:
    return type(sums) is np.ndarray and sums.dtype is FLOAT64 and sums.ndim == 1


def _sums_of(name: str, field: str, value: object) -> np.ndarray:
    """Return sums of every channel as a float64 array."""
    try:
        if issubclass(type(value), np.ma.MaskedArray):
            raise TypeError("masked arrays are not supported: the mask would be lost")
        array = np.asarray(value)
    except Exception as error:
        raise ArgumentTypeError(
            name,
            f"its {field} cannot be read as an array ({shown(error, str)})",
            came=type(value).__name__,
            accepted="a float64 array",
        ) from error
    if element_type(array.dtype) is None:
        raise ArgumentTypeError(
            name,
            f"its {field} has an unsupported element type",
            came=array.dtype,
            accepted="float64, or another floating-point type",
        )
    if array.ndim != 1:
        raise ArgumentValueError(
            name,
            f"its {field} must hold one value per channel",
            came=f"shape {array.shape}",
            accepted="rank 1",
        )
    return array.astype(FLOAT64)


def check_blend(blend: object) -> Blend:
    """Return a blend of floats, or raise if it is no `Blend` or of other than finite numbers."""
    accepted = "Blend((alpha, beta), (alpha, beta)) of finite numbers"
    if not issubclass(type(blend), Blend):
        raise ArgumentTypeError(
            "blend", "must be a Blend", came=type(blend).__name__, accepted=accepted
        )
    pairs: list[tuple[float, float]] = []
    # Of a subclass the elements, whatever it says of itself.
    given: Any = tuple.__getitem__(cast("Blend", blend), slice(None))
    for field, pair in zip(Blend._fields, given, strict=True):
        if type(pair) not in (tuple, list) or len(pair) != 2:
            raise ArgumentTypeError(
                "blend", f"its {field} must be a pair, alpha and beta", came=described(pair),
                accepted=accepted,
            )  # fmt: skip
        problem = f"its {field} must be real numbers"
        alpha, beta = (
            check_number("blend", share, problem=problem, accepted=accepted) for share in pair
        )
        if not (math.isfinite(alpha) and math.isfinite(beta)):
            raise ArgumentValueError(
                "blend", f"its {field} must be finite", came=shown(pair), accepted=accepted
            )
        pairs.append((alpha, beta))
    return Blend(*pairs)
