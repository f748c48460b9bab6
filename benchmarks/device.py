"""Where calls run, as a session sees it: memory, clocks, and what is particular to a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from benchmarks.environment import available_memory
from benchmarks.model import Cell, Condition, DeviceName, GpuFacts
from benchmarks.peers.base import Contestant, Data, Prepared
from benchmarks.turns import HOST, Watch

__all__ = ["PLACES", "Device", "Host"]

#: Every device, in the conditions that there are for it, and where it is defined.
PLACES: dict[tuple[DeviceName, Condition], str] = {
    ("cpu", "quiet"): "benchmarks.device:Host",
    ("cpu", "after-convolution"): "benchmarks.convolution:AfterConvolution",
    ("cuda", "quiet"): "benchmarks.cuda.nvidia:Cuda",
}


class Device(Protocol):
    """A device, in the process that measures.

    Attributes
    ----------
    watch : Watch
        Tells the times of a result; takes what `timed` returns.
    """

    watch: Watch[Any]

    def start(self, threads: int) -> GpuFacts | None:
        """Make it ready, before any contestant starts; return what is known of it if it is a GPU.

        Parameters
        ----------
        threads : int
            Those of each contestant, and so of whatever else it runs on the CPU.

        Raises
        ------
        ArgumentValueError
            If it is not there, or something is missing that it takes.
        """

    def make(self, kind: Callable[..., Contestant]) -> Contestant:
        """Return a contestant that runs here."""

    def free_memory(self) -> float:
        """Return the bytes that can still be taken; infinity where the system does not tell."""

    def hold(self, data: Data | None) -> None:
        """Bring a cell's arrays here for all contestants; with None, let go of those held."""

    def spoil(self, data: Data) -> None:
        """Fill with NaN the memory to which a call is about to write, or that it will be given."""

    def timed(self, cell: Cell, prepared: Prepared) -> Any:
        """Return a call in the form that `watch` takes."""

    def once(self, call: Any) -> tuple[Any, float]:
        """Make a call of `timed`; when it is done, return what it returned, and the seconds."""

    def whole_watch(self, cell: Cell) -> Watch[Any] | None:
        """Return what tells the time of a whole call if `watch` does not and the cell is small."""

    def survived(self) -> None:
        """Raise an error if the device is of no more use to this process after one."""


class Host:
    """The CPU: arrays where NumPy has them, calls that are done when they return."""

    watch: Watch[Any] = HOST

    def start(self, threads: int) -> None:
        """Do nothing."""

    def make(self, kind: Callable[..., Contestant]) -> Contestant:
        """Return a contestant."""
        return kind()

    def free_memory(self) -> float:
        """Return the bytes that the machine, or the container, can still give."""
        return available_memory()

    def hold(self, data: Data | None) -> None:
        """Do nothing: the arrays are here."""

    def spoil(self, data: Data) -> None:
        """Fill the output with NaN: all bits set is one in every type."""
        data.out.reshape(-1).view(np.uint8).fill(0xFF)

    def timed(self, cell: Cell, prepared: Prepared) -> Callable[[], Any]:
        """Return the bare call."""
        return prepared.call

    def once(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Make a call; return what it returned, and the seconds."""
        begin = time.perf_counter()
        returned = call()
        return returned, time.perf_counter() - begin

    def whole_watch(self, cell: Cell) -> None:
        """Return None: whole calls are all that is timed."""

    def survived(self) -> None:
        """Do nothing."""
