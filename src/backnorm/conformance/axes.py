"""The axes by which normalisations differ: those of a row, which has statistics of its own.

x is viewed as (N, G, K, S): images, groups, the channels of a group, space. Every normalisation has
a parameter for each channel, so a parameter belongs to N*S elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from backnorm.problem import channel_axis_of

__all__ = ["BATCH_NORM", "NORMALIZATIONS", "Axes", "Normalization"]


@dataclass(frozen=True, slots=True)
class Normalization:
    """A normalisation: x minus its mean, divided by its deviation, in each row.

    Attributes
    ----------
    name : str
    kept : tuple of int
        The axes of (N, G, K, S) by which rows differ. A row has the elements along the others.
    row : str
        A word for a row.
    is_centred : bool
        Whether the mean is subtracted. If not, the variance is the mean of x**2.
    layouts : tuple of str
    groups : int
        G.
    """

    name: str
    kept: tuple[int, ...]
    row: str
    is_centred: bool = True
    layouts: tuple[str, ...] = ("NCX", "NXC")
    groups: int = 1

    @property
    def has_groups(self) -> bool:
        """Whether a row has all channels of a group."""
        return 1 in self.kept and 2 not in self.kept


#: Batch normalisation, whose rows are channels.
BATCH_NORM = Normalization("batch-norm", (1, 2), "channel")
#: The normalisations by name.
NORMALIZATIONS: Mapping[str, Normalization] = MappingProxyType(
    {
        each.name: each
        for each in (
            BATCH_NORM,
            Normalization("layer-norm", (0, 3), "row", layouts=("NXC",)),
            Normalization("rms-norm", (0, 3), "row", is_centred=False, layouts=("NXC",)),
            Normalization("group-norm", (0, 1), "group"),
            Normalization("instance-norm", (0, 1, 2), "channel"),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Axes:
    """The rows and the parameters of x.

    Attributes
    ----------
    normalization : Normalization
    shape : tuple of int
        The shape of x.
    data_format : {"NCX", "NXC"}
    """

    normalization: Normalization
    shape: tuple[int, ...]
    data_format: str

    @property
    def _view(self) -> tuple[int, int, int, int]:
        images, channels, *space = self._channels_first
        groups = self.normalization.groups
        return images, groups, channels // groups, math.prod(space)

    @property
    def _channels_first(self) -> tuple[int, ...]:
        axis = channel_axis_of(self.data_format) % len(self.shape)
        others = self.shape[:axis] + self.shape[axis + 1 :]
        return (others[0], self.shape[axis], *others[1:])

    @property
    def _order(self) -> tuple[int, ...]:
        kept = self.normalization.kept
        return kept + tuple(axis for axis in range(4) if axis not in kept)

    @property
    def size(self) -> tuple[int, int]:
        """R and M: the number of rows, and that of the elements of a row."""
        view, kept = self._view, self.normalization.kept
        rows = math.prod(view[axis] for axis in kept)
        return rows, math.prod(n for axis, n in enumerate(view) if axis not in kept)

    @property
    def statistics(self) -> tuple[int, ...]:
        """The shape of the mean and of the variance."""
        images, channels, *space = self._channels_first
        groups, kept = self.normalization.groups, self.normalization.kept
        rows = groups if self.normalization.has_groups else channels
        sizes = (images,) * (0 in kept), (rows,) * (1 in kept)
        return (*sizes[0], *sizes[1], *(space if 3 in kept else ()))

    def rows(self, tensor: np.ndarray, dtype: Any = None) -> np.ndarray:
        """Return a tensor of x's shape as an array (R, M)."""
        first = np.moveaxis(tensor, channel_axis_of(self.data_format), 1).reshape(self._view)
        rows = first.transpose(self._order).reshape(self.size)
        return rows if dtype is None else rows.astype(dtype)

    def tensor(self, rows: np.ndarray) -> np.ndarray:
        """Return an array (R, M) as a tensor of x's shape."""
        first = self._viewed(rows).reshape(self._channels_first)
        return np.ascontiguousarray(np.moveaxis(first, 1, channel_axis_of(self.data_format)))

    def _viewed(self, rows: np.ndarray) -> np.ndarray:
        """Return an array (R, M) with the axes (N, G, K, S)."""
        sizes = [self._view[axis] for axis in self._order]
        return rows.reshape(sizes).transpose(np.argsort(self._order))

    def statistics_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of the rows of x in float64; 0 and 1 if they have no elements.

        The mean of a normalisation that is not centred is 0.
        """
        wide, shape = rows.astype(np.float64), self.statistics
        if not self.size[1]:
            return np.zeros(shape), np.ones(shape)
        mean = wide.mean(axis=1) * self.normalization.is_centred
        variance = np.square(wide - mean[:, None]).mean(axis=1)
        return mean.reshape(shape), variance.reshape(shape)

    @property
    def parameters(self) -> np.ndarray:
        """The elements of each parameter: indices into a flat array (R, M), of shape (C, N*S)."""
        images, groups, channels, space = self._view
        places = self._viewed(np.arange(math.prod(self.shape)))
        return places.transpose(1, 2, 0, 3).reshape(groups * channels, images * space)

    def over_rows(self, parameter: np.ndarray) -> np.ndarray:
        """Return a parameter, of shape (C,), for each element of the rows: an array (R, M)."""
        _, groups, channels, _ = self._view
        spread = np.broadcast_to(parameter.reshape(1, groups, channels, 1), self._view)
        return spread.transpose(self._order).reshape(self.size)
