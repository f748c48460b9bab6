"""One process's work: prepare all contestants on the same arrays, check them, time them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from benchmarks.accuracy import Examiner
from benchmarks.data import make_data
from benchmarks.device import Device, Host
from benchmarks.environment import available_memory
from benchmarks.model import FLOOR, OF_OURS, Cell, Form, Outcome, Row, Timing
from benchmarks.peers.base import Contestant, Data, Missing, Prepared, Unsupported
from benchmarks.turns import Settings, Watch, summary, take_turns

__all__ = ["Session"]

# What a cell may take of the memory that is left.
_SHARE = 0.8

# Arrays of x's size that all share.
_ARRAYS = 3

# Seconds above which a first call is made again: it may have compiled something.
_SLOW = 0.4

_Key = tuple[str, Form]


class Session:
    """The contestants of a run, started once, in this process.

    Parameters
    ----------
    contestants : mapping
        Ways to make them, by name: what `Device.make` takes.
    threads : int
    announce : callable
        Told the name of a contestant whenever something of it is about to run, and "" when the
        session itself is at work.
    device : Device, optional
        Started already; the CPU unless given.

    Attributes
    ----------
    versions : dict of str to str
        Of the packages that take part.
    """

    def __init__(
        self,
        contestants: Mapping[str, Callable[..., Contestant]],
        threads: int,
        announce: Callable[[str], None],
        device: Device | None = None,
    ) -> None:
        self.versions: dict[str, str] = {}
        self._device = device or Host()
        self._announce = announce
        self._started: dict[str, Contestant] = {}
        self._missing: dict[str, str] = {}
        self._kept: tuple[object, Data] | None = None
        for name, kind in contestants.items():
            announce(name)
            try:
                contestant = self._device.make(kind)
                self.versions |= contestant.start(threads)
            except Missing as reason:
                self._missing[name] = str(reason)
            else:
                self._started[name] = contestant
        announce("")
        # What frameworks have made so far lives on: collecting garbage need not look at it.
        gc.collect()
        gc.freeze()

    def measure(self, cell: Cell, excluded: Collection[str], settings: Settings) -> Row:
        """Return what becomes of every contestant in a cell, but for those excluded."""
        outcomes = [
            Outcome(name, "allocate", "missing", detail=reason)
            for name, reason in self._missing.items()
        ]
        playing = {n: c for n, c in self._started.items() if n not in excluded}
        try:
            data = self._data(cell)
        except Unsupported as error:
            outcomes += [_declined(name, "allocate", error) for name in playing]
            return Row(cell, tuple(outcomes))
        examiner = Examiner(cell, data)
        ready: dict[_Key, _Ready] = {}
        for name, contestant in playing.items():
            self._announce(name)
            outcomes += self._enter(contestant, cell, data, examiner, ready)
        timings = self._timed(ready, settings, self._device.watch)
        whole_watch = self._device.whole_watch(cell)
        whole = self._timed(ready, settings, whole_watch) if whole_watch else {}
        self._announce("")
        for key, entry in ready.items():
            timing = timings[key]
            outcomes.append(Outcome(*key, entry.status, timing, entry.detail, whole.get(key)))
        return Row(cell, tuple(outcomes))

    def _data(self, cell: Cell) -> Data:
        """Return the arrays of a cell: those of the one before if they are the same."""
        identity = (cell.shape, cell.layout, cell.dtype)
        if self._kept is None or self._kept[0] != identity:
            # First let go of the old ones, which a cycle may hold.
            self._kept = None
            gc.collect()
            self._device.hold(None)
            for free in (available_memory(), self._device.free_memory()):
                _require(_ARRAYS * cell.nbytes, free, "x, dy and the result")
            data = make_data(cell)
            self._device.hold(data)
            self._kept = identity, data
        return self._kept[1]

    def _enter(
        self,
        contestant: Contestant,
        cell: Cell,
        data: Data,
        examiner: Examiner,
        ready: dict[_Key, _Ready],
    ) -> list[Outcome]:
        """Prepare and check a contestant: its forms go to `ready`, or are outcomes already."""
        name = contestant.name
        try:
            free = self._device.free_memory()
            _require(contestant.temporaries * cell.nbytes, free, "what it needs besides")
            forms = contestant.prepare(cell, data)
        except Exception as error:  # whatever a framework may raise
            self._device.survived()
            return [_declined(name, "allocate", error)]
        outcomes = []
        for form, prepared in forms.items():
            if isinstance(prepared, Timing):
                outcomes.append(Outcome(name, form, "ok", prepared))
                continue
            call = self._device.timed(cell, prepared)
            try:
                self._device.spoil(data)
                ready[name, form] = _Ready(name, self._device, call, prepared, examiner)
            except Exception as error:  # likewise
                self._device.survived()
                outcomes.append(_declined(name, form, error))
        return outcomes

    def _timed(
        self, ready: Mapping[_Key, _Ready], settings: Settings, watch: Watch[Any]
    ) -> dict[_Key, Timing]:
        calls = {key: entry.call for key, entry in ready.items()}
        estimates = {key: entry.estimate for key, entry in ready.items()}
        gc.collect()
        gc.disable()
        try:
            samples = take_turns(
                calls, settings, lambda key: self._announce(key[0]), estimates, watch
            )
        finally:
            gc.enable()
        return {key: summary(samples[key]) for key in ready}


class _Ready:
    """A call that was made once: its verdict, and about how long it takes."""

    def __init__(
        self, name: str, device: Device, call: Any, prepared: Prepared, examiner: Examiner
    ) -> None:
        self.call = call
        returned, self.estimate = device.once(call)
        self.status: Literal["ok", "inaccurate"] = "ok"
        self.detail = ""
        if name != FLOOR:
            self.status, self.detail = examiner.examine(name, prepared.results(returned))
        del returned
        if self.estimate > _SLOW:
            self.estimate = device.once(call)[1]


def _declined(name: str, form: Form, error: Exception) -> Outcome:
    """Return the outcome of a contestant that raised an error."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, Unsupported):
        return Outcome(name, form, "unsupported", detail=text)
    # Ours may not raise any.
    status: Literal["crashed", "unsupported"] = "crashed" if name in OF_OURS else "unsupported"
    return Outcome(name, form, status, detail=f"{type(error).__name__}: {text}")


def _require(size: float, free: float, what: str) -> None:
    """Raise Unsupported if `size` bytes are too large a part of those that are free."""
    if size > _SHARE * free:
        raise Unsupported(f"{what} would take {size / 1e9:.1f} GB, and {free / 1e9:.1f} are free")
