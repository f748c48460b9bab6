"""A channel axis anywhere: tensors seen with it second, which is the canonical NCX, and back."""

from __future__ import annotations

import numpy as np

__all__ = ["channel_from_second", "channel_to_second"]


def channel_to_second(array: np.ndarray, axis: int) -> np.ndarray:
    """Return a view with `axis` second; an array of rank 1 becomes a batch of one."""
    return array[None] if array.ndim == 1 else np.moveaxis(array, axis, 1)


def channel_from_second(array: np.ndarray, axis: int, rank: int) -> np.ndarray:
    """Return a view with the second axis back in its place in an array of `rank` axes."""
    return array[0] if rank == 1 else np.moveaxis(array, 1, axis)
