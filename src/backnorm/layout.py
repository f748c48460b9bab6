"""Memory layout: dense arrays are viewed as (outer, channel, inner), usually without a copy.

Batch normalisation reduces over all axes but the channel axes, so the order of the reduced axes
does not matter as long as x, dy and dx share it. An x that is contiguous in *some* order of its
axes (NCX, NXC, channels_last, Fortran) is therefore used without a copy. Any other x is copied
once. An x whose channel axes are not adjacent in memory is also copied once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from backnorm.errors import ArgumentValueError

#: A mask ends with this number of bytes, which store in which order of axes the mask's bits are.
MARK_BYTES = 8

#: The axes of an array from the slowest to the fastest in memory.
Order = tuple[int, ...]


class Extents(NamedTuple):
    """The sizes of an array that is seen as (outer, channels, inner)."""

    outer: int
    channels: int
    inner: int


def kept_shape(shape: Sequence[int], axes: Collection[int]) -> tuple[int, ...]:
    """Return `shape` with 1 for each reduced axis, i.e. each axis that is not in `axes`."""
    return tuple(size if axis in axes else 1 for axis, size in enumerate(shape))


def memory_order(array: np.ndarray) -> Order:
    """Return the order of axes in which `array` is dense; if it is not dense, row-major order."""
    natural = tuple(range(array.ndim))
    if array.flags.c_contiguous:
        return natural
    order = by_strides(array.strides)
    return order if array.transpose(order).flags.c_contiguous else natural


def by_strides(strides: Sequence[int]) -> Order:
    """Return the axes from the slowest to the fastest: by descending stride."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def adjacent(shape: tuple[int, ...], channel_axes: tuple[int, ...], order: Order) -> Order:
    """Return an order of axes in which the channel axes are adjacent and ascending.

    If the channel axes are adjacent and ascending in `order`, return `order` itself. Otherwise,
    return `order` with the channel axes moved to its end. The positions of axes of length 1 do not
    matter.
    """
    if len(channel_axes) == 1:
        return order
    wide = [axis for axis in order if shape[axis] != 1]
    channel = [axis for axis in channel_axes if shape[axis] != 1]
    if not channel:
        return order
    first = wide.index(channel[0])
    if wide[first : first + len(channel)] == channel:
        return order
    others = [axis for axis in order if axis not in channel_axes]
    return (*others, *channel_axes)


def extents_of(shape: tuple[int, ...], channel_axes: tuple[int, ...], order: Order) -> Extents:
    """Return the sizes (outer, channels, inner) of an array of `shape` that is dense in `order`.

    Those channel axes whose size is not 1 must be adjacent in `order`: see `adjacent`.
    """
    channels = math.prod(shape[axis] for axis in channel_axes)
    if channels == 1:
        # With one channel, the order of axes does not matter.
        return Extents(1, 1, math.prod(shape))
    channel = [axis for axis in channel_axes if shape[axis] != 1]
    first, last = order.index(channel[0]), order.index(channel[-1])
    outer = math.prod(shape[axis] for axis in order[:first])
    inner = math.prod(shape[axis] for axis in order[last + 1 :])
    return Extents(outer, channels, inner)


def in_order(array: np.ndarray, order: Order, dtype: np.dtype) -> np.ndarray:
    """Return `array` with its axes in `order`, contiguous, aligned and of `dtype`, copied if
    necessary.
    """
    natural = order == tuple(range(len(order)))
    return dense(array if natural else array.transpose(order), dtype)


def dense(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return `array` if it is contiguous, aligned and of `dtype`; else a copy that is."""
    flags = array.flags
    if array.dtype == dtype and flags.c_contiguous and flags.aligned:
        return array
    return np.require(array, dtype, ("C", "A"))


def restore(array: np.ndarray, order: Order) -> np.ndarray:
    """Undo the transposition of `in_order`."""
    return array.transpose(sorted(range(len(order)), key=order.__getitem__))


def mask_size(elements: int) -> int:
    """Return the size of a ReLU's mask in bytes.

    A mask has one bit per element, in memory order; eight bytes of padding, because kernels read
    whole words; and eight bytes in which NumPy's masks store the `order_mark`.
    """
    return -(-elements // 8) + 8 + MARK_BYTES


def order_mark(shape: tuple[int, ...], order: Order) -> bytes:
    """Return the last `MARK_BYTES` bytes of a mask, which store the order of axes of its bits.

    The bytes store one number: the position of `order` in the lexicographic list of all orders of
    the axes. Row-major order has the position 0. Axes of size 1 are left out: moving such an axis
    does not change the layout in memory, so it must not change the mark.
    """
    rest, number = _wide(shape), 0
    for axis in order:
        if shape[axis] != 1:
            number = number * len(rest) + rest.index(axis)
            rest.remove(axis)
    try:
        return number.to_bytes(MARK_BYTES, "big")
    except OverflowError:
        # The number has 64 bits. It can number the 20! orders of 20 axes, because 20! < 2^64, but
        # not the 21! orders of 21 axes.
        raise ArgumentValueError(
            "x",
            "has too many axes for a mask of this order in memory",
            came=f"{len(_wide(shape))} axes of more than one element",
            accepted="at most 20, or row-major order",
        ) from None


def reordered_mask(mask: np.ndarray, shape: tuple[int, ...], order: Order) -> np.ndarray:
    """Return a mask with its bits in `order`: the mask itself, or a reordered copy.

    `mask` has a bit for each element of an array of the given shape. The mask ends with the
    `order_mark` of the order in which its bits are now.

    Raises
    ------
    ArgumentValueError
        If the mark is not valid for this shape.
    """
    mark = mask[-MARK_BYTES:].tobytes()
    if mark == order_mark(shape, order):
        return mask
    own = _marked_order(mark, shape)
    size = math.prod(shape)
    bits = np.unpackbits(mask, count=size, bitorder="little")
    bits = restore(bits.reshape([shape[axis] for axis in own]), own).transpose(order)
    result = np.zeros(mask.size, np.uint8)
    result[: -(-size // 8)] = np.packbits(bits, bitorder="little")
    return result


def _marked_order(mark: bytes, shape: tuple[int, ...]) -> Order:
    """Return the order of axes that an `order_mark` stores; axes of size 1 come first."""
    rest = _wide(shape)
    number, places = int.from_bytes(mark, "big"), []
    for radix in range(1, len(rest) + 1):
        number, place = divmod(number, radix)
        places.append(place)
    if number:
        raise ArgumentValueError(
            "mask",
            "must be the mask that batch_norm_forward returned for an x of this shape; its last "
            f"{MARK_BYTES} bytes store no valid order of the axes of {{x}}",
            came=mark.hex(),
            accepted="the mask as it was returned (zeros: bits in row-major order)",
        )
    single = (axis for axis, size in enumerate(shape) if size == 1)
    return (*single, *(rest.pop(place) for place in reversed(places)))


def _wide(shape: tuple[int, ...]) -> list[int]:
    """Return the axes whose length is not 1."""
    return [axis for axis, size in enumerate(shape) if size != 1]
