"""`operator`: each contestant in its own process, judged in every cell, then timed in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from backnorm.steps import take_turns
from benchmarks.cells import ITEMSIZE, OF_OURS, Cell, Form
from benchmarks.child import Child, ChildEndedError
from benchmarks.environment import available_memory
from benchmarks.peers.base import ARRAYS, SHARE, Verdict
from benchmarks.turns import Settings, timing

__all__ = ["DeviceRefusedError", "OperatorRun"]

# An estimate of a contestant's temporaries, in arrays of x's size.
_TEMPORARIES = 2


class DeviceRefusedError(Exception):
    """The device is missing or does not meet a requirement; the message says which."""


class OperatorRun:
    """Measures cells.

    Parameters
    ----------
    contestants : mapping of str to str
        Name to "module:class", see :mod:`benchmarks.peers`.
    place : str
        "module:class" of the device.
    threads : int
        The number of threads of each contestant.
    settings : Settings
        For types of 32 bits and more; narrower types get half the rounds.
    patience : float
        Seconds that a contestant may take for a turn.

    Attributes
    ----------
    versions, device : dict
        Versions of the packages, and facts of the device; known after the first cell.
    failures : list of str
        A line for each cell and form in which a contestant of ours is inaccurate or crashes.
    """

    def __init__(
        self,
        contestants: Mapping[str, str],
        place: str,
        threads: int,
        settings: Settings,
        patience: float = 300.0,
    ) -> None:
        self.versions: dict[str, str] = {}
        self.device: dict[str, Any] = {}
        self.failures: list[str] = []
        self._contestants = contestants
        self._place, self._threads, self._patience = place, threads, patience
        self._settings = settings
        self._children: dict[str, Child] = {}
        # Contestants that are missing or whose process ends during its start.
        self._lost: dict[str, Verdict] = {}

    def __enter__(self) -> OperatorRun:
        """Return self; processes start with the first cell."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        for name in list(self._children):
            self._stop(name)

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Return the row of a cell.

        Returns
        -------
        dict
            The fields of the cell, with the shape as text. For each contestant and form with right
            results: "NAME.FORM", the median seconds; "NAME.FORM.spread", the 80th percentile less
            the 20th, over the median; and on a GPU, for small cells, "NAME.FORM.whole", the seconds
            of a whole call. "notes": why others have no time.

        Raises
        ------
        DeviceRefusedError
        """
        size = len(self._contestants) * (ARRAYS + _TEMPORARIES) * cell.nbytes
        # If memory is short, each contestant makes its arrays again for each turn.
        self._keeps = size <= SHARE * available_memory()
        ready: list[tuple[str, Verdict]] = []
        others: dict[str, list[Verdict]] = {}
        for name in self._contestants:
            for verdict in self._judged(name, cell):
                if verdict.status == "ok":
                    ready.append((name, verdict))
                else:
                    others.setdefault(name, []).append(verdict)
        settings = self._settings
        if ITEMSIZE[cell.dtype] < 4:
            settings = dataclasses.replace(settings, rounds=max(1, settings.rounds // 2))
        crashed: dict[str, Verdict] = {}
        turns = {
            (name, each.form, whole): partial(
                self._turn, name, crashed, (each.form, settings, whole)
            )
            for name, each in ready
            for whole in ((False, True) if each.whole else (False,))
            if each.timing is None
        }
        samples = take_turns(turns, settings.rounds, settings.limit)
        times = {key: timing(found) for key, found in samples.items() if key[0] not in crashed}
        times |= {(name, each.form, False): each.timing for name, each in ready if each.timing}
        row: dict[str, Any] = dataclasses.asdict(cell)
        row["shape"] = ",".join(map(str, cell.shape))
        for (name, form, whole), each in times.items():
            if whole:
                row[f"{name}.{form}.whole"] = each.median
            else:
                row[f"{name}.{form}"] = each.median
                row[f"{name}.{form}.spread"] = (each.p80 - each.p20) / each.median
        for name, verdict in crashed.items():
            others.setdefault(name, []).append(verdict)
        return row | {"notes": "; ".join(self._notes(cell, others))}

    def _judged(self, name: str, cell: Cell) -> list[Verdict]:
        """Return the verdicts on the forms of a contestant."""
        try:
            if name not in self._lost and name not in self._children:
                self._start(name)
            if name in self._lost:
                return [self._lost[name]]
            verdicts: list[Verdict] = self._children[name].ask("prepare", cell)
            if not self._keeps:
                self._children[name].ask("release")
        except ChildEndedError as end:
            self._stop(name)
            return [Verdict("allocate", "crashed", str(end))]
        return verdicts

    def _turn(
        self, name: str, crashed: dict[str, Verdict], operands: tuple[Form, Settings, bool]
    ) -> list[float]:
        """Return the samples of a turn; none if the contestant's process has ended."""
        if name in crashed:
            return []
        try:
            samples: list[float] = self._children[name].ask("turn", *operands)
            if not self._keeps:
                self._children[name].ask("release")
        except ChildEndedError as end:
            self._stop(name)
            crashed[name] = Verdict(operands[0], "crashed", str(end))
            return []
        return samples

    def _start(self, name: str) -> None:
        """Start the process of a contestant; add the contestant to `_lost` if that fails.

        Raises
        ------
        DeviceRefusedError
        """
        child = self._children[name] = Child("benchmarks.worker", patience=self._patience)
        try:
            answer = child.ask("start", self._place, self._contestants[name], self._threads)
        except ChildEndedError as end:
            answer = Verdict("allocate", "crashed", str(end))
        if isinstance(answer, Verdict):
            self._stop(name)
            if answer.status == "refused":
                raise DeviceRefusedError(answer.detail)
            self._lost[name] = answer
        else:
            versions, self.device = answer
            self.versions |= versions

    def _stop(self, name: str) -> None:
        self._children.pop(name).stop()

    def _notes(self, cell: Cell, verdicts: Mapping[str, list[Verdict]]) -> Iterator[str]:
        """Yield a line for each form without a time; add faults of ours to `failures`."""
        for name, of_name in verdicts.items():
            for verdict in of_name:
                detail = verdict.detail.replace(";", ",")
                line = f"{name} {verdict.form} {verdict.status}: {detail}"
                yield line
                if name in OF_OURS and verdict.status in ("inaccurate", "crashed"):
                    self.failures.append(f"{cell}: {line}")
