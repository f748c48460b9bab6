"""How the GPU's kernels cut an array: values that a plan decides and a launch follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Arithmetic", "Tiling", "power_of_two"]

#: What elements are computed in: see `kernels.arithmetic`.
Arithmetic = Literal["float64", "compensated", "pairs", "float32"]


@dataclass(frozen=True, slots=True)
class Tiling:
    """The array as rows of columns, and the tiles that a program visits one after another.

    Either a row is a run of one channel ("segments": outer rows for each channel, `units` being
    the channels), or it holds all channels ("columns": `units` are tiles side by side, and sums
    are kept for each column).

    Attributes
    ----------
    columns : bool
        Whether rows hold all channels.
    rows, width : int
        Rows (of every channel, of segments), and elements of a row.
    repeats : int
        Times that all channels are in a row, of columns.
    partial : bool
        Whether the last row is not full.
    tile_rows, tile_columns : int
        Elements of a tile, powers of two.
    units, pieces : int
        Units (see above), and tiles side by side in a row of a segment.
    tiles, per_block, blocks : int
        Tiles of a unit, tiles of a program, programs of a unit.
    warps : int
        Of a program.
    stages : int
        Tiles on their way from memory or at work.
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
    stages: int
    align: int


def power_of_two(value: int) -> int:
    """Return the least power of two that is not less."""
    return 1 << max(0, value - 1).bit_length()
