"""The scratch memory of a record: the table of channels, partial sums, what a participant needs.

All sizes are in float64 elements, and everything begins at a cache line. The kernels (which import
the functions here) use what a launch lays out by the same functions.

The table has a place for every channel in each of its rows, which are `table_pitch` apart:

=======  =====================================================================================
MEAN     mean, or before it is known (forward pass) the pivot that is subtracted in its place
SHIFT    coefficients: see `kernels.formulas`. Before a forward pass is solved SLOPE and GAIN
SLOPE    hold beta and gamma, before a backward pass is solved GAIN holds gamma·s
GAIN
SCALE    s = 1/sqrt(variance + epsilon)
FIRST    sum_dy, or mean
SECOND   sum_dy_xmu, or variance
=======  =====================================================================================

A row is longer than the number of channels by at least eight places. After the coefficients of
the last channel come those of the first again, so that a vector may run over the end of a row
of memory and go on with the next.
"""

from __future__ import annotations

__all__ = [
    "FIRST",
    "GAIN",
    "LANES",
    "MEAN",
    "ROWS",
    "SCALE",
    "SECOND",
    "SHIFT",
    "SINGLES",
    "SLOPE",
    "SUMS",
    "TERMS",
    "bin_rows",
    "bins_own",
    "columns_own",
    "narrow_pitch",
    "segments_own",
    "table_pitch",
    "whole",
]

#: Float64 elements of a vector, and float32 elements.
LANES, SINGLES = 8, 16

#: Float64 elements of the running sums of a channel of `segments`: two vectors of dy and two of the
#: product, to hide the latency of additions, and their low parts.
SUMS = 8 * LANES

#: Vectors of terms that are put into bins at a time: see `kernels.bins`.
TERMS = 32

MEAN, SHIFT, SLOPE, GAIN, SCALE, FIRST, SECOND = range(7)
ROWS = 7


def table_pitch(count: int) -> int:
    """Return the length of a row of `count` places: whole vectors, and one to spare."""
    return (count + 2 * LANES - 1) // LANES * LANES


def narrow_pitch(count: int) -> int:
    """Return the length of a row of `count` float32 places: whole vectors, and one to spare."""
    return (count + 2 * SINGLES - 1) // SINGLES * SINGLES


def whole(count: int) -> int:
    """Return `count` rounded up to whole vectors."""
    return (count + LANES - 1) // LANES * LANES


def segments_own(group: int, channels: int, *, narrow: bool) -> int:
    """Return what a participant of `segments` needs.

    Running sums of a group, their pairs twice, pairs of eight channels, and (`narrow`: elements of
    16 bits) float32 coefficients.
    """
    coefficients = 2 * narrow_pitch(channels) if narrow else 0
    return (SUMS + 8) * whole(group) + 4 * LANES + coefficients


def columns_own(tile: int, width: int, *, spread: bool, narrow: bool) -> int:
    """Return what a participant of `columns` needs.

    Twelve rows of a tile; coefficients `spread` over the columns, where those are not channels;
    and (`narrow`) float32 coefficients.
    """
    coefficients = 4 * table_pitch(width) if spread else 0
    return 12 * table_pitch(tile) + coefficients + (2 * narrow_pitch(width) if narrow else 0)


def bin_rows(itemsize: int) -> int:
    """Return how many numbers the bins of both sums of a channel are: see `kernels.bins`.

    A limit and three digits for each sum, or of elements of eight bytes four.
    """
    return 10 if itemsize == 8 else 8


def bins_own(pitch: int, rows: int) -> int:
    """Return what a participant needs beside, to put terms into bins.

    Three buffers of terms; in `segments`, of a group of channels with this `table_pitch`, the bins
    of every channel, and of every lane of each.
    """
    return 3 * TERMS * LANES + rows * (LANES + 1) * pitch
