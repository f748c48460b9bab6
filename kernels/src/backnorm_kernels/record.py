"""The record, the only argument of every kernel, and its description.

A record is a block of memory that begins at a cache line. It has three parts. The *head* has named
fields of eight bytes each. In the cells after the head, participants *claim* items: each
participant has one cache line for each phase. *Scratch* memory is all other memory that the kernel
needs (see `scratch`). Python fills the head in, and kernels read it. Both use the description of
the head that the function `fields` returns. `LAYOUT` identifies this description. A library that
was built with another `LAYOUT` is not loaded, and XLA's handler rejects a record that has another
`LAYOUT`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from backnorm_kernels.scratch import columns_own, segments_own, table_pitch


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record's head. Each field has eight bytes.

    Attributes
    ----------
    name : str
    kind : {"address", "int", "float"}
        An address is an int, 0 for an absent array.
    meaning : str
    """

    name: str
    kind: str
    meaning: str


def _described(kind: str, **meanings: str) -> tuple[Field, ...]:
    return tuple(Field(name, kind, meaning) for name, meaning in meanings.items())


#: The fields that are filled in for every call, in their order in memory.
_CALL = (
    *_described(
        "address",
        x="input",
        dy="gradient of the output",
        out="y or dx, which is written",
        residual="forward: the residual; backward: its gradient, which is written",
        mask="bits of a ReLU: whether 0 < y < ceiling",
        mean="statistics",
        variance="statistics",
        gamma="scale",
        beta="offset",
        result="dgamma, or the mean, which is written",
        result_2="dbeta, or the variance, which is written",
        running_mean="running statistics, which are updated",
        running_variance="running statistics, which are updated",
        exchanged="sums or moments of every channel, two rows of float64, read if `settles`, else"
        " written; the bins of reproducible sums, which are written; or, if the call sums and"
        " `finishes`: the coefficients of every channel, four rows, which are written",
    ),
    *_described(
        "int",
        ready="0 before a call begins; 1 when the caller has filled the table",
        region="threads of a region of PyTorch's team; 0: the package's own pool helps",
        function="address of the kernel",
    ),
    *_described("float", momentum="weight of the batch in the running statistics"),
    *_described("int", count="elements of a channel that are summed, in all parts of a batch"),
)
ADDRESSES = tuple(field.name for field in _CALL if field.kind == "address")

#: The fields that are the same in every call of a problem.
_PROBLEM = (
    *_described(
        "int",
        layout="`LAYOUT` of the description that the record was made from",
        bytes="size of the whole record",
        scratch="byte where the scratch memory begins: the table of channels, then partial sums",
        own="byte where the memory of the first participant begins, followed by the others'",
        own_bytes="size of the memory of a participant, whole cache lines",
        limit="nanoseconds after which no thread begins another item; 0: no limit",
    ),
    *_described(
        "float",
        epsilon="added to the variance",
        correction="factor of the batch's variance in the update of the running variance",
        ceiling="upper bound of a ReLU; infinity: none",
    ),
    *_described(
        "int",
        summed="items of the first phase, which sums",
        items="items of both phases",
        streaming="0 or 1: the output is written past the caches",
        out_bytes="bytes of `out` if huge pages are requested for it, because it is new; else 0",
        residual_bytes="the same of `residual`, if it is written",
        grouped="0 or 1: a group of channels is written while it is in the cache",
        prepares="how the table is filled first: 0 not at all, 1 from statistics, 2 from the means"
        " alone (for sums), 3 from the data",
        settles="0 or 1: sums or moments are read, not computed",
        finishes="0 or 1: results of channels are written at the end",
        inverse="0 or 1: the variance that is read or written is 1/sqrt(variance + epsilon)",
        statistics="bits of a statistic, if it is of a wider type than the elements; else 0",
        in_float64="0 or 1: a kernel of float32 arithmetic computes in float64",
        binned="0 or 1: sums are reproducible",
        relu="0 or 1: a ReLU follows the normalisation; in a backward pass, there is its mask",
        frozen="0 or 1: in a backward pass, the statistics are constants",
        beyond="an integer above the bits of all positive elements below the ceiling: the ceiling's"
        " bits; without a ceiling 1 + infinity's",
    ),
)
#: Values of `prepares`.
FROM_STATISTICS, MEANS_ALONE, FROM_DATA = 1, 2, 3

#: The fields of each geometry; see the classes of the same names in `geometry`, and the kernels.
GEOMETRIES: dict[str, tuple[Field, ...]] = {
    "segments": _described(
        "int",
        outer="samples",
        channels="channels",
        inner="elements of a segment",
        rows="segments of a chunk",
        length="elements of a piece of a segment",
        chunks="chunks of a channel",
        block="chunks of a block",
        blocks="blocks of a channel",
        group="channels that are summed together",
        batch="groups of an item",
        share="elements that an item of the second phase writes",
    ),
    "columns": _described(
        "int",
        rows="rows of the matrix",
        width="columns",
        rest="elements after the last row",
        inner="neighbouring columns of a channel",
        channels="channels",
        repeats="how often a row repeats all channels",
        block="rows of a block",
        blocks="blocks of rows; the rest counts as one",
        tile="columns of an item of the sums",
        depth="rows that are summed side by side",
        share="rows that an item of the second phase writes",
        abreast="rows that are written side by side",
    ),
}
_NUMBERS = max(map(len, GEOMETRIES.values()))

#: The last fields of every head, which follow the fields of the geometry. Kernels change the values
#: of all these fields except `participants`. When a call begins, `done`, `arrived`, `opened` and
#: `refused` are set to zero, and `deadline` is computed.
_SHARED = _described(
    "int",
    participants="the largest number of participants",
    done="items that are done",
    arrived="items of the first phase that are done",
    opened="1 when the second phase may begin",
    refused="1 + the channel that was refused before anything was computed",
    deadline="when `limit` ends, on the system's monotonic clock",
)

# The number of cells of every head.
_CELLS = len((*_CALL, *_PROBLEM, *_SHARED)) + _NUMBERS

#: The number of int64 cells of a cache line.
LINE = 8


def slots(geometry: str = "") -> dict[Field, int]:
    """Map each field of a head to the number of its cell; "": those that all geometries have.

    Fields of all geometries have the same cells in each, so `_SHARED` has the cells after those of
    the geometry with the most fields.
    """
    before = [*_CALL, *_PROBLEM, *GEOMETRIES.get(geometry, ())]
    after = dict(zip(_SHARED, range(len((*_CALL, *_PROBLEM)) + _NUMBERS, _CELLS), strict=True))
    return {field: slot for slot, field in enumerate(before)} | after


def dtype_of(geometry: str) -> np.dtype:
    """Return the structured NumPy type of a record's head."""
    formats = {"address": "<i8", "int": "<i8", "float": "<f8"}
    described = slots(geometry)
    return np.dtype(
        {
            "names": [field.name for field in described],
            "formats": [formats[field.kind] for field in described],
            "offsets": [8 * slot for slot in described.values()],
            "itemsize": 8 * _CELLS,
        },
        align=True,
    )


#: Maps names of fields to the numbers of their cells, for those fields that the heads of all
#: geometries have.
SLOTS = {field.name: slot for field, slot in slots().items()}

#: The number of the cell where the claims begin. The claims are the cells in which participants
#: count the items that they take. First come the cells for the first phase, `LINE` cells for each
#: participant, then equally many cells for the second phase. A participant's first cell counts the
#: items that were claimed from its range of items. If a participant of the first phase is a thread
#: of the pool, the participant's second cell has the address of the thread's slot (see `slots`),
#: and its third cell has the state that the caller gave to the slot.
CLAIMED = -(-_CELLS // LINE) * LINE

# Increase this number when the meaning of a field or the use of scratch memory changes. It is a
# part of `LAYOUT`, which tells the records of different versions apart: a record may come from a
# function that another version of backnorm exported.
_MEANING = 5

# Examples of the sizes of scratch memory, for a few numbers of channels. `LAYOUT` also depends on
# these sizes. If a kernel was compiled from another version of this code, in which these sizes
# differ, it might use more scratch memory than its record has. Such a kernel has another `LAYOUT`,
# so it is not loaded.
_sizes = [
    *(table_pitch(count) for count in (1, 8, 9, 1000)),
    *(segments_own(3, count, in_float32=flag) for count in (1, 1000) for flag in (False, True)),
    *(
        columns_own(48, 1000, spread=spread, in_float32=flag)
        for spread in (False, True)
        for flag in (False, True)
    ),
]
_described_here = ([slots(name) for name in GEOMETRIES], CLAIMED, _MEANING, _sizes)

#: A digest of `_described_here`, that is, of everything on which a record's maker and a kernel must
#: agree.
LAYOUT = int.from_bytes(hashlib.sha256(repr(_described_here).encode()).digest()[:7], "little")

#: After all items are done and all other participants have left, the caller calls the kernel once
#: more. It then passes this number in place of its index as a participant.
JOINED = -1


def template(geometry: str, participants: int, own_bytes: int, scratch: int) -> np.ndarray:
    """Return the head of a record, with `LAYOUT`, participants and sizes, and the cells of its work
    queue.

    Parameters
    ----------
    geometry : {"segments", "columns"}
    participants : int
        The largest number of participants.
    own_bytes : int
        Bytes of memory of each participant, a multiple of 64.
    scratch : int
        Bytes of scratch memory that participants share, a multiple of 64.

    Returns
    -------
    numpy.ndarray
        int64. It begins with the head, of type `dtype_of(geometry)`, followed by the claims.
    """
    cells = np.zeros(CLAIMED + 2 * LINE * participants, np.int64)
    head = head_of(cells, geometry)
    head["layout"], head["participants"] = LAYOUT, participants
    head["scratch"], head["own"] = cells.nbytes, cells.nbytes + scratch
    head["own_bytes"] = own_bytes
    head["bytes"] = cells.nbytes + scratch + participants * own_bytes
    return cells


def head_of(cells: np.ndarray, geometry: str) -> np.ndarray:
    """Return the head of a record as a view: an array of one structured element."""
    kind = dtype_of(geometry)
    return cells[: kind.itemsize // 8].view(kind)
