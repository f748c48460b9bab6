"""The scratch memory of a record: the table of channels, partial sums, memory of participants.

All sizes are in float64 elements, and every part begins at a cache line. The functions of this
module compute where each part begins. `launch`, which fills the records, and the kernels call the
same functions.

Each row of the table has an element for every channel. `table_pitch` returns the distance between
two rows. The rows are:

=======  =====================================================================================
MEAN     mean; in a forward pass, before the mean is known, the pivot that is subtracted
SHIFT    a coefficient: see `kernels.formulas`
SLOPE    a coefficient; in a forward pass, beta until the sums are known
GAIN     a coefficient, gamma·s; in a forward pass, gamma until the sums are known
SCALE    s = 1/sqrt(variance + epsilon)
FIRST    sum_dy; in a forward pass, the mean
SECOND   sum_dy_xmu; in a forward pass, the variance
=======  =====================================================================================

A row has at least eight elements more than there are channels. The coefficients of the first
channels are repeated after those of the last channel. So a vector of coefficients can be loaded
even for elements that begin in one row of the array and end in the next row.
"""

from __future__ import annotations

#: A vector has `LANES` float64 or `SINGLES` float32 elements.
LANES, SINGLES = 8, 16

#: How many float64 elements the running sums of a channel have in `segments`. A channel has two
#: sums: in a backward pass, those of dy and of dy * (x - mean). Each sum is computed in two vectors
#: of partial sums, so that an addition need not wait for the one before it. For each sum, two more
#: vectors hold the low parts of these partial sums.
SUMS = 8 * LANES

#: How many vectors of terms of a reproducible sum are put into bins at a time: see `kernels.bins`.
TERMS = 32

MEAN, SHIFT, SLOPE, GAIN, SCALE, FIRST, SECOND = range(7)
ROWS = 7


def table_pitch(count: int) -> int:
    """Return how many float64 a row has: `count` rounded up to whole vectors, plus one vector."""
    return (count + 2 * LANES - 1) // LANES * LANES


def single_pitch(count: int) -> int:
    """Return how many float32 a row has: `count` rounded up to whole vectors, plus one vector."""
    return (count + 2 * SINGLES - 1) // SINGLES * SINGLES


def whole(count: int) -> int:
    """Return `count` rounded up to whole vectors."""
    return (count + LANES - 1) // LANES * LANES


def segments_own(group: int, channels: int, *, in_float32: bool) -> int:
    """Return how many float64 elements a participant's memory has in the kernels of `segments`.

    The memory has the running sums of a group of channels; the group's pairs (compensated sums) of
    one block, and those of all blocks; the pairs of a channel that is summed again in float64
    (eight lanes); and, if `in_float32` (float32 arithmetic), coefficients in float32.
    """
    coefficients = 2 * single_pitch(channels) if in_float32 else 0
    return (SUMS + 8) * whole(group) + 4 * LANES + coefficients


def columns_own(tile: int, width: int, *, spread: bool, in_float32: bool) -> int:
    """Return the size of a participant's memory, in float64, in the kernels of `columns`.

    The memory has twelve rows, each with one float64 for every column of a tile. If columns are not
    channels (`spread`), the memory also has four float64 coefficients for every column of a row. In
    float32 arithmetic (`in_float32`), the memory also has four float32 coefficients for every
    column of a row.
    """
    coefficients = 4 * table_pitch(width) if spread else 0
    return 12 * table_pitch(tile) + coefficients + (2 * single_pitch(width) if in_float32 else 0)


def bins_own(pitch: int, rows: int) -> int:
    """Return how many 64-bit numbers reproducible sums add to a participant's scratch memory.

    These are three buffers of terms. In the geometry *segments*, `pitch` is the `table_pitch`
    of a group (the channels that are summed together). The memory then also has bins for each
    channel of the group: one set for the whole channel, and one set for each of the `LANES` lanes
    in which the channel is summed. In *columns*, `pitch` is 0, and the memory has no bins.
    """
    return 3 * TERMS * LANES + rows * (LANES + 1) * pitch
