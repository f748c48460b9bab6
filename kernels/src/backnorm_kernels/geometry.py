"""Geometries: how the kernels divide an array. `plan` chooses the values; `launch` writes them into
records.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segments:
    """Geometry for arrays in which a channel's elements are contiguous (NCX): see
    `kernels.segments`.

    Attributes
    ----------
    rows, length : int
        A chunk is `rows` segments, or a piece of `length` elements of one segment.
    chunks, block, blocks : int
        Chunks of a channel, chunks of a block, blocks of a channel.
    group, batch : int
        Channels that are summed together, and groups of an item.
    share : int
        Elements that one item of the apply pass writes.
    """

    rows: int
    length: int
    chunks: int
    block: int
    blocks: int
    group: int
    batch: int
    share: int


@dataclass(frozen=True, slots=True)
class Columns:
    """Geometry for arrays whose rows have several channels (NXC): see `columns`.

    Attributes
    ----------
    rows, width, rest, repeats : int
        Rows of `width` columns (`repeats` times all channels), and elements after the last row.
    block, blocks : int
        Rows of a block, number of blocks (the rest counts as one).
    tile, depth : int
        Columns of an item of the reduction, and rows that it sums side by side.
    share, abreast : int
        Rows of an item of the apply pass, and rows that it writes side by side.
    """

    rows: int
    width: int
    rest: int
    repeats: int
    block: int
    blocks: int
    tile: int
    depth: int
    share: int
    abreast: int


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
