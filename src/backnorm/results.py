"""The values that operators return."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from backnorm.dtypes import FLOAT64, element_type
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.scalars import as_array, check_integer

# The largest number of elements per channel that a kernel takes.
_MOST = sys.maxsize


class Gradients(NamedTuple):
    """Gradients of batch normalisation: dx (x's shape and type), dgamma and dbeta (shape (C,))."""

    dx: np.ndarray
    dgamma: np.ndarray
    dbeta: np.ndarray


class SecondGradients(NamedTuple):
    """Gradients of the backward pass with respect to x, dy and gamma.

    The gradients with respect to x and dy have x's shape. The gradient with respect to gamma has
    the shape (C,).
    """

    x: np.ndarray
    dy: np.ndarray
    gamma: np.ndarray


class Normalized(NamedTuple):
    """Results of a training forward pass.

    y has the shape of x. `mean` and `variance` (biased) are those of the batch, with shape (C,).
    """

    y: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


class NormalizedWithMask(NamedTuple):
    """Results of a training forward pass with a ReLU: those of `Normalized`, and the mask.

    Bit i % 8 of byte i // 8 of the mask (uint8) says whether element i of y, in memory order, is
    more than zero and less than the ceiling. Eight bytes of padding follow. The last eight bytes
    store the order of y's axes in memory; if y is row-major, they are zeros. Because the mask has
    this order, a backward pass can read the mask even if the x of the backward pass has its axes in
    another order.
    """

    y: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    mask: np.ndarray


class GradientsWithResidual(NamedTuple):
    """Gradients through a residual and a ReLU: those of `Gradients`, and that of the residual."""

    dx: np.ndarray
    dgamma: np.ndarray
    dbeta: np.ndarray
    dresidual: np.ndarray


class _OfChannels:
    """Two arrays of sums or moments per channel, and the number of elements per channel.

    A subclass is a dataclass of two arrays and `count`. The sum of two instances describes the
    elements of both instances together.
    """

    __slots__ = ()
    count: int

    @classmethod
    def zero(cls, channels: int) -> Self:
        """Return an instance that describes no elements (count 0); `channels` is an integer, 0 or
        more.
        """
        accepted = "an integer, 0 or more"
        number = check_integer("channels", channels, accepted=accepted)
        if not 0 <= number <= _MOST // FLOAT64.itemsize:
            raise ArgumentValueError(
                "channels", "must be a number of channels", came=number, accepted=accepted
            )
        return cls(np.zeros(number), np.zeros(number), 0)  # type: ignore[call-arg]

    def __add__(self, other: object) -> Self:
        """Return the sums or moments of both sets of elements together."""
        cls = type(self)
        if not isinstance(other, cls):
            return NotImplemented
        one, two = check_of_channels(self, cls), check_of_channels(other, cls)
        (first, _), (second, _) = arrays_of(one), arrays_of(two)
        if first.shape != second.shape:
            raise ArgumentValueError(
                _NAMES[cls],
                f"only {_NAMES[cls]} over the same channels add up",
                came=f"{first.size} and {second.size} channels",
            )
        # NumPy would warn that infinities of different signs add up to NaN.
        with np.errstate(all="ignore"):
            return one._plus(two)

    def _plus(self, other: Self) -> Self:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class ChannelSums(_OfChannels):
    """The two sums of every channel, which `backnorm.reduce` returns and `backnorm.apply` takes.

    ``a + b`` adds up the sums of two parts of a batch, such as micro-batches, chunks of a file or
    the batches of machines. The sums of no elements are ``ChannelSums.zero(channels)``.

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

    def _plus(self, other: ChannelSums) -> ChannelSums:
        count = self.count + other.count
        return ChannelSums(self.sum_dy + other.sum_dy, self.sum_dy_xmu + other.sum_dy_xmu, count)


@dataclass(frozen=True, slots=True, eq=False)
class ChannelMoments(_OfChannels):
    """Mean and biased variance of every channel, which `backnorm.reduce_forward` returns and
    `backnorm.apply_forward` takes.

    ``a + b`` combines the moments of two sets of elements by the formula of Chan, Golub and
    LeVeque, which loses no digits even if the means are much larger than the deviations from them.
    Let w be the share of a's elements in all elements of both sets, v = 1 - w the share of b's
    elements, and d = mean_b - mean_a. Then::

        mean     = mean_a + v * d
        variance = w * variance_a + v * variance_b + w * v * d**2

    Attributes
    ----------
    mean, variance : numpy.ndarray
        float64, shape (C,).
    count : int
        Number of elements per channel, M.

    References
    ----------
    Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979.
    """

    mean: np.ndarray
    variance: np.ndarray
    count: int

    def _plus(self, other: ChannelMoments) -> ChannelMoments:
        if not (self.count and other.count):
            # The moments of an empty set are undefined, so those of the other set are returned.
            return self if self.count else other
        count = self.count + other.count
        weight, share = self.count / count, other.count / count
        apart = other.mean - self.mean
        variance = weight * self.variance + share * other.variance
        return ChannelMoments(
            self.mean + share * apart, variance + weight * share * apart * apart, count
        )


# `_NAMES` maps a class to the name of the argument that takes instances of the class. `_SOURCES`
# maps a class to the name of the function that returns instances of the class.
_NAMES = {ChannelSums: "sums", ChannelMoments: "moments"}
_SOURCES = {ChannelSums: "backnorm.reduce", ChannelMoments: "backnorm.reduce_forward"}

_Known = TypeVar("_Known", bound=_OfChannels)


def arrays_of(known: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the two arrays of sums or moments."""
    one, other, _ = type(known).__dataclass_fields__
    return getattr(known, one), getattr(known, other)


def check_of_channels(known: object, cls: type[_Known]) -> _Known:
    """Return `known` with float64 arrays of shape (C,) and an integer count.

    If `known` is invalid, raise an error.

    Parameters
    ----------
    known
        Sums or moments, whose arrays may be of any floating-point type, or array-like.
    cls : {ChannelSums, ChannelMoments}
    """
    name = _NAMES[cls]
    if not issubclass(type(known), cls):
        raise ArgumentTypeError(
            name,
            f"must be the {cls.__name__} that {_SOURCES[cls]} returned (or a sum of several)",
            came=type(known).__name__,
            accepted=cls.__name__,
        )
    assert isinstance(known, cls)
    fields: dict[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    (one_name, other_name, _), count = fields, known.count
    one, other = getattr(known, one_name), getattr(known, other_name)
    plain = type(known) is cls and _is_plain(one) and _is_plain(other)
    if plain and one.shape == other.shape and type(count) is int and 0 <= count <= _MOST:
        return known
    read = _array_of(name, one_name, one), _array_of(name, other_name, other)
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
            name, "its count must be from 0 to 2^63 - 1", came=whole,
            accepted=accepted,
        )  # fmt: skip
    return cls(*read, whole)  # type: ignore[call-arg]


def check_whole(known: _OfChannels, channels: int, count: int) -> None:
    """Raise if sums or moments cannot be those of a batch that contains a given part.

    Parameters
    ----------
    known : ChannelSums or ChannelMoments
    channels : int
        Channels of the part.
    count : int
        Elements of a channel in the part.
    """
    name, (one, _) = _NAMES[type(known)], arrays_of(known)
    if one.shape != (channels,):
        raise ArgumentValueError(
            name,
            f"its per-channel {name} must match the channels of {{x}}",
            came=f"{name} of shape {one.shape}",
            accepted=f"shape ({channels},)",
        )
    if known.count < count:
        raise ArgumentValueError(
            name,
            "its count must be that of all parts of the batch, {x} among them",
            came=f"count {known.count}",
            accepted=f"{count} or more",
        )


def _is_plain(array: object) -> bool:
    return type(array) is np.ndarray and array.dtype is FLOAT64 and array.ndim == 1


def _array_of(name: str, field: str, value: object) -> np.ndarray:
    """Return a field of sums or moments as a float64 array of one value per channel."""
    array = as_array(name, value, f"its {field}: ")
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
