"""The parameters of kernels besides arrays: sizes at run time, the rest at compile time."""

from __future__ import annotations

from typing import Any, NamedTuple

from backnorm.gpu.geometry import Arithmetic


class Sizes(NamedTuple):
    """The sizes of a kernel; `geometry.Tiling` explains them. The fields whose names end in
    `_units` are sizes divided by Form.align.
    """

    rows: Any
    width_units: Any
    total_units: Any
    channels: Any
    inner: Any
    pieces: Any
    tiles: Any
    per_block: Any
    units: Any


class Parts(NamedTuple):
    """The sizes of a kernel that adds up partial results: a channel has `inner` partial results in
    each of `rows` rows, and `elements` elements.
    """

    channels: Any
    inner: Any
    rows: Any
    elements: Any


class Form(NamedTuple):
    """The compile-time parameters of a kernel.

    Attributes
    ----------
    columns, partial, tile_rows, tile_columns, align
        See `geometry.Tiling`.
    arithmetic : Arithmetic
        The arithmetic of elements; see `arithmetic`.
    relu : bool
        Whether there is a ReLU.
    ceiling : float
        The ceiling of the ReLU, or infinity.
    training : bool
        Whether the statistics are functions of x.
    epsilon : float
    """

    columns: bool
    partial: bool
    tile_rows: int
    tile_columns: int
    align: int
    arithmetic: Arithmetic
    relu: bool
    ceiling: float
    training: bool
    epsilon: float


class PartsForm(NamedTuple):
    """The compile-time parameters of a kernel that adds up partial results: it reads tiles of
    `tile_parts` partial results of `tile_channels` channels.
    """

    tile_channels: int
    tile_parts: int
    epsilon: float


def encoded(sizes: Any) -> Any:
    """Return sizes as a launch passes them, which `tiles.sizes_of` and `tiles.parts_of` decode.

    Triton compiles a kernel again if a number in a tuple is 1, or becomes or ceases to be a
    multiple of 16 (`do_not_specialize` does not apply to tuples). Here all numbers are odd and,
    because no size is 0, greater than 1. So kernels are not compiled again for other sizes.
    """
    return type(sizes)(*(2 * size + 1 for size in sizes))
