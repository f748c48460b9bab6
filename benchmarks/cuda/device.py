"""What a run on a GPU shares: PyTorch, a cell's tensors, events, and the bandwidth of copying.

`TorchDevice` knows PyTorch and no more; what only an NVIDIA GPU can tell is in `nvidia`. So all of
this also runs where PyTorch has nothing but the CPU, with a made-up clock.
"""

from __future__ import annotations

import abc
import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.cuda.bandwidth import measure_copies
from benchmarks.cuda.watches import SMALL, DeviceWatch, Queued, WholeWatch
from benchmarks.model import Cell, GpuFacts, Timing
from benchmarks.peers.base import Contestant, Data, Prepared
from benchmarks.tensors import LayerTensors, layer_tensors

__all__ = ["Event", "TorchDevice"]

# What is read to empty the L2, in its sizes: its halves are filled unevenly, and what replaces what
# is not documented.
_FLUSH = 4
_LEAST_FLUSH = 1 << 20

# Blocks of x's size that hold NaN before a call: it allocates its result, and may take more.
_SPOILED = 2


class Event(Protocol):
    """A mark in the stream, as ``torch.cuda.Event`` is one."""

    def record(self) -> object:
        """Take the time when all that is in the stream so far is done."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds to another event; both have happened."""


class TorchDevice(abc.ABC):
    """A device of PyTorch's, in the process that measures.

    Attributes
    ----------
    place : str
        PyTorch's name of it.
    torch : module
        PyTorch, imported by `start`.
    copies : Timing
        Seconds for each byte read or written when memory is copied.
    watch : DeviceWatch
    """

    place: str

    def __init__(self) -> None:
        self.torch: Any = None
        self.copies: Timing
        self.watch: Any = DeviceWatch(self)
        self._held: LayerTensors | None = None
        self._ballast: Any = None
        self._sum: Any = None
        self._flush_seconds = 0.0

    @abc.abstractmethod
    def library(self) -> Any:
        """Import PyTorch and return it.

        Raises
        ------
        ArgumentValueError
            If it is not there, or has no such device.
        """

    @abc.abstractmethod
    def facts(self) -> GpuFacts:
        """Return what is known of the device; the bandwidth as 0."""

    @abc.abstractmethod
    def event(self) -> Event:
        """Return a new event."""

    @abc.abstractmethod
    def synchronise(self) -> None:
        """Wait until all that was asked of the device is done."""

    @abc.abstractmethod
    def free_memory(self) -> float:
        """Return the bytes that can still be taken."""

    def start(self, threads: int) -> GpuFacts:
        """Import PyTorch, and measure how fast memory is copied."""
        self.torch = self.library()
        self.torch.set_grad_enabled(False)
        facts = self.facts()
        self.copies = measure_copies(self, self.free_memory())
        size = max(_FLUSH * facts.cache, _LEAST_FLUSH)
        self._ballast = self.torch.zeros(size // 4, dtype=self.torch.float32, device=self.place)
        self._sum = self.torch.zeros((), dtype=self.torch.float32, device=self.place)
        self._flush_seconds = self._timed_flush()
        return dataclasses.replace(facts, bandwidth=1.0 / self.copies.median)

    def make(self, kind: Callable[..., Contestant]) -> Contestant:
        """Return a contestant that runs here."""
        return kind(self)

    @property
    def tensors(self) -> LayerTensors:
        """The tensors of the cell that is measured, the same for all contestants."""
        assert self._held is not None, "a cell is held before anybody prepares"
        return self._held

    def hold(self, data: Data | None) -> None:
        """Bring a cell's arrays here for all contestants; with None, let go of those held."""
        self._held = None if data is None else layer_tensors(self.torch, data, self.place)
        if data is None:
            gc.collect()
            self.release()

    @abc.abstractmethod
    def release(self) -> None:
        """Give memory that PyTorch keeps for later back to the device: others allocate, too."""

    def spoil(self, data: Data) -> None:
        """Fill with NaN the memory that PyTorch will give to the next call that allocates.

        It gives a block of the right size again, and the one before may have left right results.
        """
        blocks = [
            self.torch.full((data.x.nbytes,), 0xFF, dtype=self.torch.uint8, device=self.place)
            for _ in range(_SPOILED)
        ]
        del blocks

    def timed(self, cell: Cell, prepared: Prepared) -> Queued:
        """Return a call in the form that `watch` takes."""
        return Queued(prepared.call, prepared.finish, cold=cell.nbytes > SMALL)

    def once(self, call: Queued) -> tuple[Any, float]:
        """Make a call and wait for it; return what it returned, and the seconds."""
        begin = time.perf_counter()
        returned = call.call()
        self.wait(call, returned)
        return returned, time.perf_counter() - begin

    def wait(self, call: Queued, returned: Any) -> None:
        """Wait for a call that returned something, and for all before it."""
        if call.finish is not None:
            call.finish(returned)
        else:
            self.synchronise()

    def whole_watch(self, cell: Cell) -> WholeWatch | None:
        """Return the watch for whole calls, for small cells."""
        return WholeWatch(self) if cell.nbytes <= SMALL else None

    def survived(self) -> None:
        """Raise an error if one has left the device of no more use to this process."""
        self.synchronise()

    def flush(self, seconds: float) -> None:
        """Read more than the L2 holds, for `seconds` or longer, before whatever comes next.

        Read, not written: lines that wait to be written would take their time from the next call.
        """
        times = max(1, -int(-seconds // self._flush_seconds)) if self._flush_seconds else 1
        for _ in range(times):
            self.torch.sum(self._ballast, dim=0, out=self._sum)

    def _timed_flush(self) -> float:
        self.flush(0.0)
        start, end = self.event(), self.event()
        start.record()
        self.flush(0.0)
        end.record()
        self.synchronise()
        return start.elapsed_time(end) / 1e3
