"""Kernels as native functions, for callers in Python and elsewhere.

A `Stage` is machine code, ``int status(result*, error**, 0, record, index)``, and a template of its
record. Whoever calls it

1. copies the template and fills in the addresses (`record.ADDRESSES` slots), and SCRATCH: `space`
   float64, or 0 if there is one participant;
2. lets any number of others, up to `participants` - 1, call it with ``index`` 1, 2, ... at any time
   from then on (they wait until the table is filled, and do nothing if they come too late, so the
   copy must live until the last of them has returned), and calls it with index 0;
3. if the result is 0, waits until the cell `record.DONE` of the record equals that of ITEMS, and
   calls it with index -1.

The result is then 1, or -1 - c where channel c has a variance + epsilon that is not positive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from backnorm.kernels.cpu import columns, segments
from backnorm.kernels.cpu.jit import kernel, native
from backnorm.kernels.cpu.memory import address
from backnorm.kernels.cpu.record import (
    BETA,
    COUNT,
    CURSOR,
    DY,
    EPSILON,
    FAILED,
    FINISHES,
    FUSED,
    GAMMA,
    GEOMETRY,
    ITEMS,
    JOINED,
    MASK,
    MEAN,
    MOMENTUM,
    OUT,
    PREPARES,
    RESULT,
    RESULT_2,
    RUNNING_MEAN,
    RUNNING_VARIANCE,
    SCRATCH,
    SETTLES,
    SIDE,
    SPACE,
    STATISTICS,
    STREAMING,
    SUMMED,
    VARIANCE,
    Kind,
    X,
    call,
    call_off,
    cells_of,
    number_of,
)
from backnorm.kernels.cpu.threads import cells, summon, wait

__all__ = ["Stage"]

_ELEMENTS = {
    "float64": types.float64,
    "float32": types.float32,
    "float16": types.uint16,
    "bfloat16": types.int16,
}

_SLOTS = {
    "epsilon": EPSILON,
    "count": COUNT,
    "summed": SUMMED,
    "items": ITEMS,
    "streaming": STREAMING,
    "fused": FUSED,
    "prepares": PREPARES,
    "settles": SETTLES,
    "finishes": FINISHES,
    "statistics": STATISTICS,
}


def where(place):
    """Return an address as a number: of an array, of a number itself, 0 of None."""


@overload(where)
def _where(place):
    if isinstance(place, types.NoneType):
        return lambda place: 0
    if isinstance(place, types.Integer):
        return lambda place: place
    return lambda place: number_of(address(place))


@kernel
def _begin(
    function,
    record,
    x,
    dy,
    out,
    side,
    mask,
    mean,
    variance,
    gamma,
    beta,
    result,
    result_2,
    running_mean,
    running_variance,
    scratch,
):
    """Fill in the addresses and take part as the caller."""
    record[X] = where(x)
    record[DY] = where(dy)
    record[OUT] = where(out)
    record[SIDE] = where(side)
    record[MASK] = where(mask)
    record[MEAN] = where(mean)
    record[VARIANCE] = where(variance)
    record[GAMMA] = where(gamma)
    record[BETA] = where(beta)
    record[RESULT] = where(result)
    record[RESULT_2] = where(result_2)
    record[RUNNING_MEAN] = where(running_mean)
    record[RUNNING_VARIANCE] = where(running_variance)
    record[SCRATCH] = where(scratch)
    ended = call(function, where(record), 0)
    if ended == FAILED:
        call_off(cells_of(where(record)))
    return ended


@kernel
def _take_part(function, record, index):
    """Take part as another; 1 says that it is for this one to wake the caller."""
    return call(function, where(record), index)


class Stage:
    """A kernel, and a record with all but the addresses.

    Parameters
    ----------
    geometry : {"segments", "columns"}
    kind : (str, str, bool, bool)
        Name of the element type, and the rest of `record.Kind`.
    numbers : sequence of int
        The geometry's.
    space : int
        Float64 elements of the table and the partial sums.
    participants : int
        How many may take part at most.
    **slots
        Values of other slots of the record, by their names in lower case.

    Attributes
    ----------
    template : numpy.ndarray
        int64: the record.
    key : str
        Names the machine code, the same in every process.
    """

    def __init__(
        self,
        geometry: str,
        kind: tuple[str, str, bool, bool],
        numbers: Sequence[int],
        space: int,
        participants: int,
        **slots: float,
    ) -> None:
        self._kernel = {"segments": segments.run, "columns": columns.run}[geometry]
        self._kind = kind
        self.key = f"{geometry} {kind}"
        self.space, self.participants = space, participants
        template = np.zeros(CURSOR, np.int64)
        for name, value in slots.items():
            slot = _SLOTS[name]
            holder = template.view(np.float64) if slot == EPSILON else template
            holder[slot] = value
        template[SPACE] = space
        template[GEOMETRY : GEOMETRY + len(numbers)] = numbers
        self.template = np.concatenate([template, cells(participants)])
        self._function: int | None = None

    @property
    def function(self) -> int:
        """Address of the machine code, compiled if need be."""
        if self._function is None:
            element, operation, rectified, sided = self._kind
            kind = Kind(_ELEMENTS[element], operation, rectified, sided)
            self._function = native(self._kernel, kind, types.int64, types.int64)
            if self.participants > 1:
                # Now, and not in whatever thread happens to come first.
                _take_part.compile((types.int64, types.int64[::1], types.int64))
        return self._function

    def __call__(
        self,
        x: Any,
        dy: Any,
        out: Any,
        side: Any = 0,
        mask: Any = 0,
        mean: Any = 0,
        variance: Any = 0,
        gamma: Any = 0,
        beta: Any = 0,
        result: Any = 0,
        result_2: Any = 0,
        running_mean: Any = 0,
        running_variance: Any = 0,
        *,
        memory: np.ndarray | None = None,
        count: int | None = None,
        momentum: float | None = None,
    ) -> int:
        """Run the kernel; return the channel that was refused, or -1.

        Parameters
        ----------
        x, dy, out, ..., running_variance : array, int or None
            Arrays, or their addresses (0: none): see `record`.
        memory : float64 array, optional
            Of `space` elements.
        count : int, optional
            Elements of a channel that the sums in `memory` are over, instead of those here.
        momentum : float, optional
            Weight of the batch in the running statistics.
        """
        function = self._function or self.function
        record = self.template.copy()
        if momentum is not None:
            record.view(np.float64)[MOMENTUM] = momentum
        if count is not None:
            record[COUNT] = count
        if memory is None:
            memory = _memory(self.space, self.participants)
        done = None
        if self.participants > 1:
            done = summon(_take_part, (function, record), record[CURSOR:], self.participants - 1)
        ended = _begin(
            function,
            record,
            x,
            dy,
            out,
            side,
            mask,
            mean,
            variance,
            gamma,
            beta,
            result,
            result_2,
            running_mean,
            running_variance,
            memory,
        )
        if ended == 0:
            wait(done)
            ended = _take_part(function, record, JOINED)
        if ended == FAILED:
            raise MemoryError("no memory for the running sums of batch normalisation")
        refused: int = -1 if ended > 0 else -1 - ended
        return refused


def _memory(space: int, participants: int) -> np.ndarray | None:
    """Return memory for tables; None where the kernel takes it itself, which is quicker."""
    return np.empty(space) if participants > 1 else None
