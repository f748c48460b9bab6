"""Geometry of the GPU's kernels: how a plan divides an array among programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: The ways in which a kernel can compute elements, by name. The docstring of the module
#: `gpu.kernels.arithmetic` describes each of them.
Arithmetic = Literal["float64", "compensated", "float32"]


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the array is divided into rows and columns, and into tiles. A program visits tiles one
    after another.

    In "segments", a row consists of `inner` adjacent elements of one channel; each channel has
    `outer` rows, and a unit (of work) is a channel. In "columns", a row contains all channels,
    once or several times. A unit is a column of tiles, and a separate sum is computed for each
    column of elements.

    Attributes
    ----------
    columns : bool
        Whether rows hold all channels.
    rows, width : int
        Rows (in segments: rows of each channel), and elements of a row.
    repeats : int
        In columns: how many times a row contains all channels.
    partial : bool
        Whether the last row is not full.
    tile_rows, tile_columns : int
        Rows and columns of a tile, powers of two.
    units, pieces : int
        Units (see above), and in segments the tiles of a row.
    tiles, per_block, blocks : int
        Tiles of a unit, tiles of a program, programs of a unit.
    warps : int
        Warps of a program.
    stages : int or None
        Tiles that are being loaded or computed at the same time; 1 means no prefetching. None if
        Triton's autotuner chooses the number (`kernels.tuning`).
    align : int
        A power of two, in elements, that divides the width and the size.
    """

    columns: bool
    rows: int
    width: int
    repeats: int
    partial: bool
    tile_rows: int
    tile_columns: int
    units: int
    pieces: int
    tiles: int
    per_block: int
    blocks: int
    warps: int
    stages: int | None
    align: int


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()
