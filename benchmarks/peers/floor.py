"""The floor: a kernel that only moves the memory that a cell's operation moves."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

import backnorm
from backnorm.addresses import address_of
from backnorm_kernels.kinds import Kind
from backnorm_kernels.plan import Plan
from backnorm_kernels.record import ADDRESSES
from backnorm_kernels.scratch import LANES
from backnorm_kernels.stage import Stage
from benchmarks.cells import FLOOR, Cell, Form
from benchmarks.peers.base import Contestant, Data, Prepared, Unsupported

__all__ = ["Floor", "move", "stage_of"]

# Bytes of a float64. The floor treats all memory as float64.
_UNIT = 8

# The most elements of an item. GB/s of a backward pass over 160 MB (AMD EPYC, 2 threads) by the
# size of an item: 32 KiB 43, 64 KiB 67, 128 KiB 76, 256 KiB 77, 512 KiB 78, 1 MiB 80. Over 5 MB,
# 512 KiB is the fastest.
_ITEM = 1 << 16

# The fewest items of a thread. With several items, all threads end at about the same time.
_ITEMS = 4

# The addresses of absent arrays.
_ABSENT = (0,) * (len(ADDRESSES) - 3)


class Floor(Contestant):
    """Two plain loops over the memory, with the threads and stores of our plan."""

    name = FLOOR
    temporaries = 0.0

    def start(self, threads: int) -> dict[str, str]:
        """Set our number of threads."""
        backnorm.set_num_threads(threads)
        return {}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the form "out"; there is no result to judge."""
        if cell.nbytes < _UNIT:
            raise Unsupported("less memory than the floor moves at a time")
        plan = backnorm.explain(*data.backward_inputs, **data.options)
        assert isinstance(plan, Plan)
        x, dy, out = map(_flat, (data.x, data.dy, data.out))
        source = dy if cell.op == "backward" else None
        call = functools.partial(
            move,
            x,
            source,
            out,
            reads_first=cell.op != "inference",
            streaming=plan.streaming,
            threads=plan.threads,
        )
        return {"out": Prepared(call, lambda _: {})}


def _flat(array: np.ndarray) -> np.ndarray:
    memory = array.reshape(-1).view(np.uint8)
    return memory[: memory.size // _UNIT * _UNIT].view(np.float64)


def move(
    x: np.ndarray,
    dy: np.ndarray | None,
    out: np.ndarray,
    *,
    reads_first: bool,
    streaming: bool,
    threads: int,
) -> None:
    """Read x and dy (if `reads_first`), then read both again and write as many bytes to `out`.

    Parameters
    ----------
    x, dy, out : numpy.ndarray
        Contiguous float64, of one length. The values of `out` have no meaning afterwards.
    reads_first : bool
        Whether to read the arrays once before, as a reduction does.
    streaming : bool
        Whether stores bypass the caches.
    threads : int
    """
    stage = stage_of(x.size, reads_first, streaming, threads)
    addresses = (0 if array is None else address_of(array) for array in (x, dy, out))
    stage(*addresses, *_ABSENT)


class _Moving(Stage):
    """A stage whose kernel is the one of `moving`."""

    def __init__(self, numbers: Mapping[str, int], **fields: int) -> None:
        # Importing the module compiles the kernel.
        from benchmarks.peers import moving

        kind = Kind("segments", "float64", "float64", "backward")
        super().__init__(kind, numbers, channels=0, partial=0, own=LANES, **fields)
        self._function = moving.run.address


@functools.cache
def stage_of(size: int, reads_first: bool, streaming: bool, threads: int) -> Stage:
    """Return the stage that moves `size` elements: see `move`."""
    even = -(-size // (_ITEMS * threads * LANES)) * LANES
    share = max(1, min(_ITEM, even))
    items = -(-size // share)
    summed = items if reads_first else 0
    return _Moving(
        {"inner": size, "share": share},
        participants=max(1, min(threads, items)),
        streaming=streaming,
        summed=summed,
        items=summed + items,
    )
