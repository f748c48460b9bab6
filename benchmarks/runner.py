"""Measures in another process, and goes on where a contestant has ended it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from backnorm.errors import ArgumentValueError, BacknormError
from benchmarks.child import Child, ChildEndedError
from benchmarks.device import PLACES
from benchmarks.model import Cell, Condition, DeviceName, GpuFacts, Outcome, Row
from benchmarks.turns import Settings

__all__ = ["Runner"]

# Seconds without a sign of life after which a contestant counts as hanging.
_PATIENCE = 300.0


class Runner:
    """Measures cells in a worker process that is started again whenever it ends.

    Parameters
    ----------
    contestants : mapping of str to str
        Name to "module:class", see :mod:`benchmarks.peers`.
    threads : int
        For each of them.
    device : {"cpu", "cuda"}
        Where all of them run.
    condition : {"quiet", "after-convolution"}
        What comes before the calls that are timed.
    patience : float
        Seconds that a contestant may take for a turn.

    Attributes
    ----------
    versions : dict of str to str
        Of the packages that took part, known after the first cell.
    gpu : GpuFacts or None
        Likewise, if the device is one.
    """

    def __init__(
        self,
        contestants: Mapping[str, str],
        threads: int,
        device: DeviceName = "cpu",
        condition: Condition = "quiet",
        *,
        patience: float = _PATIENCE,
    ) -> None:
        self.versions: dict[str, str] = {}
        self.gpu: GpuFacts | None = None
        self._contestants = dict(contestants)
        self._threads = threads
        self._place = PLACES[device, condition]
        self._patience = patience
        self._worker: _Worker | None = None
        # Those that cannot even be started.
        self._lost: dict[str, Outcome] = {}

    def __enter__(self) -> Runner:
        """Return itself; the worker is started for the first cell."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the worker."""
        self._stop()

    def start(self) -> None:
        """Start the worker, which otherwise happens for the first cell.

        Raises
        ------
        ArgumentValueError
            If the device is not there, or lacks what it takes.
        BacknormError
            If there is no starting the worker.
        """
        self._ready()

    def measure(self, cell: Cell, settings: Settings) -> Row:
        """Return what became of every contestant in a cell.

        Raises
        ------
        BacknormError
            As `start` does.
        """
        crashed: dict[str, Outcome] = {}
        while True:
            worker = self._ready()
            try:
                measured = worker.ask(cell, tuple(crashed), settings)
                break
            except _EndedError as end:
                self._stop()
                # Where nobody's code ran (memory gave out, say) nobody can play.
                names = [end.contestant] if end.contestant else list(self._contestants)
                crashed |= {name: _crashed(name, end) for name in names}
                if not end.contestant:
                    measured = Row(cell, ())
                    break
        outcomes = (*measured.outcomes, *({**self._lost, **crashed}).values())
        places = list(self._contestants)
        return Row(cell, tuple(sorted(outcomes, key=lambda o: places.index(o.contestant))))

    def _ready(self) -> _Worker:
        """Return the worker, started if there is none, without those that it does not survive."""
        while self._worker is None:
            playing = {n: p for n, p in self._contestants.items() if n not in self._lost}
            worker = _Worker(self._patience)
            try:
                versions, gpu = worker.start(playing, self._threads, self._place)
                self.versions |= versions
                self.gpu = gpu
                self._worker = worker
            except ArgumentValueError:
                worker.stop()
                raise
            except _EndedError as end:
                worker.stop()
                if not end.contestant:
                    raise BacknormError(f"the measuring process does not start: {end}") from None
                self._lost[end.contestant] = _crashed(end.contestant, end)
        return self._worker

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


class _EndedError(Exception):
    """The worker ended while a contestant's code ran (or, with no name, between)."""

    def __init__(self, contestant: str, reason: str) -> None:
        super().__init__(reason)
        self.contestant = contestant


def _crashed(name: str, end: _EndedError) -> Outcome:
    return Outcome(name, "allocate", "crashed", detail=str(end))


class _Worker:
    """The process that measures, and who is at work there."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._at = ""
        self._child = Child("benchmarks.worker")

    def start(
        self, contestants: Mapping[str, str], threads: int, place: str
    ) -> tuple[dict[str, str], GpuFacts | None]:
        """Start the contestants; return versions of what they use, and what the device is."""
        versions: dict[str, str]
        gpu: GpuFacts | None
        versions, gpu = self._answer((dict(contestants), threads, place))
        return versions, gpu

    def ask(self, cell: Cell, excluded: Collection[str], settings: Settings) -> Row:
        """Measure a cell."""
        row: Row = self._answer((cell, excluded, settings))
        return row

    def stop(self) -> None:
        """End the process, in the middle of something if need be."""
        self._child.stop()

    def _answer(self, question: object) -> Any:
        """Return the answer, taking notice of who is at work meanwhile."""
        self._at = ""
        try:
            self._child.send(question)
            while True:
                kind, value = self._child.receive(self._patience)
                if kind == "refused":
                    raise ArgumentValueError(**value)
                if kind != "at":
                    return value
                self._at = value
        except ChildEndedError as end:
            raise _EndedError(self._at, str(end)) from None
