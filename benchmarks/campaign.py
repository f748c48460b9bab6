"""A whole run: cells one after another, and what has been found so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.environment import environment, now
from benchmarks.model import (
    ITEMSIZE,
    OF_OURS,
    PASSES,
    Cell,
    Condition,
    DeviceName,
    GpuFacts,
    Result,
    Row,
)
from benchmarks.runner import Runner
from benchmarks.turns import Settings

__all__ = ["Campaign", "expected_seconds"]


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds that a run takes, for what it says of its progress.

    Attributes
    ----------
    start : float
        Starting the worker, for each contestant.
    cell, cell_element : float
        A cell beside the turns (the arrays, the oracle, compilers), and for each element of x.
    turns : float
        Turns of a round for each contestant: some have two forms.
    pass_element : float
        A call, for each element that it passes, on average.
    """

    start: float
    cell: float
    cell_element: float
    turns: float
    pass_element: float


_COSTS: dict[DeviceName, _Costs] = {
    # Measured with all contestants on two processors of an AMD EPYC (Zen 4).
    "cpu": _Costs(1.2, 0.2, 1e-8, 1.3, 2.8e-10),
    # Guessed, not measured: two compilers a cell, arrays that go there and back, and a call that
    # is little beside reading the L2 empty before it.
    "cuda": _Costs(4.0, 5.0, 3e-8, 3.0, 1e-11),
}

# Seconds of what comes before each call: measured with two threads of an Intel Xeon.
_BEFORE: dict[Condition, float] = {"quiet": 0.0, "after-convolution": 1.3e-3}


class Campaign:
    """Measures `cells`; `rows` holds what is done, also after an interruption.

    Parameters
    ----------
    cells : sequence of Cell
        Those on the same arrays side by side: the arrays are then made once.
    contestants : mapping of str to str
        See `Runner`.
    threads : int
    settings : Settings
        For 32 bits and more; narrower cells get half the rounds.
    device : {"cpu", "cuda"}
        Where all of it happens.
    condition : {"quiet", "after-convolution"}
        What comes before the calls that are timed. `settings` should be of the same one: see
        `benchmarks.turns.SETTINGS`.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        contestants: Mapping[str, str],
        threads: int,
        settings: Settings,
        device: DeviceName = "cpu",
        condition: Condition = "quiet",
    ) -> None:
        self.rows: list[Row] = []
        self.cells = cells
        self.contestants = contestants
        self.device = device
        self.condition = condition
        self._threads = threads
        self._settings = settings
        self._gpu: GpuFacts | None = None
        self._versions: dict[str, str] = {}
        self._date = now()

    def expected(self) -> list[float]:
        """Return about how many seconds each cell takes."""
        count = len(self.contestants)
        seconds = [
            expected_seconds(cell, self._for(cell), count, self.device, self.condition)
            for cell in self.cells
        ]
        start = _COSTS[self.device].start * count
        return [seconds[0] + start, *seconds[1:]] if seconds else []

    def check(self) -> None:
        """Ask whether device and condition can be had, where there is a doubt.

        Before anything is announced.

        Raises
        ------
        ArgumentValueError
            If one cannot, or lacks what it takes.
        """
        if (self.device, self.condition) != ("cpu", "quiet"):
            with Runner({}, self._threads, self.device, self.condition) as runner:
                runner.start()

    def run(self, advance: Callable[[str, float], None]) -> None:
        """Measure all cells; `advance` hears which is next, and the expected seconds so far."""
        done = 0.0
        with Runner(self.contestants, self._threads, self.device, self.condition) as runner:
            for cell, seconds in zip(self.cells, self.expected(), strict=True):
                advance(str(cell), done)
                self.rows.append(runner.measure(cell, self._for(cell)))
                self._versions |= runner.versions
                self._gpu = runner.gpu
                done += seconds

    def result(self) -> Result:
        """Return what has been measured so far."""
        return Result(
            environment(self._threads, self._versions, self._date),
            dataclasses.asdict(self._settings),
            tuple(self.rows),
            self._gpu,
            self.condition,
        )

    def failures(self) -> list[str]:
        """Return a line for each form in which ours is not what it has to be."""
        return [
            f"{row.cell}: {outcome.form}: {outcome.detail}"
            for row in self.rows
            for outcome in row.outcomes
            if outcome.contestant in OF_OURS and outcome.status in ("inaccurate", "crashed")
        ]

    def _for(self, cell: Cell) -> Settings:
        settings = self._settings
        if ITEMSIZE[cell.dtype] < 4:
            return dataclasses.replace(settings, rounds=max(1, settings.rounds // 2))
        return settings


def expected_seconds(
    cell: Cell,
    settings: Settings,
    contestants: int,
    device: DeviceName = "cpu",
    condition: Condition = "quiet",
) -> float:
    """Return about how long a cell takes with so many contestants."""
    costs = _COSTS[device]
    call = costs.pass_element * PASSES[cell.op] * cell.size + _BEFORE[condition]
    turn = max(settings.warm, call) + settings.samples * max(settings.least, call)
    each = min(settings.rounds * turn, settings.limit + turn)
    return costs.cell + costs.cell_element * cell.size + costs.turns * contestants * each
