"""Which device holds which part of an array: shardings as arrays of device numbers.

The *holders* of an array of rank r are an array of rank r + 1: for every axis of the array into how
many parts it is cut, and along the last axis the devices that hold the same part. Devices are
numbered as a compiled function numbers them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["cut_evenly", "groups_of", "holders_of", "parts_of", "reduced", "sharding_of"]


def holders_of(sharding: Any, rank: int) -> np.ndarray:
    """Return the holders of an array of a sharding of XLA (JAX's ``GSPMDSharding``)."""
    described = sharding._to_xla_hlo_sharding(rank)
    if not described.is_tiled():
        return np.arange(sharding.num_devices).reshape((1,) * rank + (-1,))
    cut = tuple(described.tile_assignment_dimensions())[:rank]
    return np.asarray(described.tile_assignment_devices()).reshape((*cut, -1))


def sharding_of(holders: np.ndarray, like: Any) -> Any:
    """Return the sharding of an array with these holders, of the class of another sharding."""
    from jaxlib.xla_client import HloSharding, OpSharding

    devices = tuple(like._device_assignment)
    if parts_of(holders) == 1:
        return type(like)(devices, HloSharding.replicate())
    numbers = np.ascontiguousarray(holders, np.int64)
    same = [OpSharding.Type.REPLICATED]
    return type(like)(
        devices, HloSharding.subgroup_with_device_ordering(numbers, subgroup_types=same)
    )


def parts_of(holders: np.ndarray) -> int:
    """Return into how many parts an array is cut."""
    return math.prod(holders.shape[:-1])


def cut_evenly(holders: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return the holders where an array of this shape is not cut along axes with unequal parts.

    XLA fills up the last parts of such an axis with elements that mean nothing.
    """
    uneven = [axis for axis, size in enumerate(shape) if size % holders.shape[axis]]
    kept = [axis for axis in range(len(shape)) if axis not in uneven]
    return np.expand_dims(reduced(holders, kept), uneven)


def reduced(holders: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Return the holders of an array that has only these axes of another, in that order."""
    rest = [axis for axis in range(holders.ndim) if axis not in axes]
    moved = holders.transpose(*axes, *rest)
    return moved.reshape((*moved.shape[: len(axes)], -1))


def groups_of(holders: np.ndarray, axes: Sequence[int]) -> list[list[int]]:
    """Return the groups of devices that together hold all parts along some axes, each part once."""
    others = [axis for axis in range(holders.ndim) if axis not in axes]
    count = math.prod(holders.shape[axis] for axis in axes)
    groups: list[list[int]] = holders.transpose(*others, *axes).reshape(-1, count).tolist()
    return groups
