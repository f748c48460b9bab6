"""A whole run: cells one after another, and what has been found so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from backnorm.bench.environment import environment, now
from backnorm.bench.model import ITEMSIZE, OURS, PASSES, Cell, Result, Row
from backnorm.bench.runner import Runner
from backnorm.bench.turns import Settings

__all__ = ["Campaign", "expected_seconds"]

# Seconds, measured with all contestants on two processors of an AMD EPYC (Zen 4).
# Starting the worker, for each contestant.
_START = 1.2

# A cell beside the turns: the arrays, the oracle, JAX's compiler; and for each element of x.
_CELL, _CELL_ELEMENT = 0.2, 1e-8

# Turns of a round for each contestant (some have two forms), and a call's time for each element
# that it passes, on average.
_TURNS, _PASS_ELEMENT = 1.3, 2.8e-10


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
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        contestants: Mapping[str, str],
        threads: int,
        settings: Settings,
    ) -> None:
        self.rows: list[Row] = []
        self.cells = cells
        self.contestants = contestants
        self._threads = threads
        self._settings = settings
        self._versions: dict[str, str] = {}
        self._date = now()

    def expected(self) -> list[float]:
        """Return about how many seconds each cell takes."""
        count = len(self.contestants)
        seconds = [expected_seconds(cell, self._for(cell), count) for cell in self.cells]
        return [seconds[0] + _START * count, *seconds[1:]] if seconds else []

    def run(self, advance: Callable[[str, float], None]) -> None:
        """Measure all cells; `advance` hears which is next, and the expected seconds so far."""
        done = 0.0
        with Runner(self.contestants, self._threads) as runner:
            for cell, seconds in zip(self.cells, self.expected(), strict=True):
                advance(str(cell), done)
                self.rows.append(runner.measure(cell, self._for(cell)))
                self._versions |= runner.versions
                done += seconds

    def result(self) -> Result:
        """Return what has been measured so far."""
        return Result(
            environment(self._threads, self._versions, self._date),
            dataclasses.asdict(self._settings),
            tuple(self.rows),
        )

    def failures(self) -> list[str]:
        """Return a line for each form in which ours is not what it has to be."""
        return [
            f"{row.cell}: {outcome.form}: {outcome.detail}"
            for row in self.rows
            for outcome in row.outcomes
            if outcome.contestant == OURS and outcome.status in ("inaccurate", "crashed")
        ]

    def _for(self, cell: Cell) -> Settings:
        settings = self._settings
        if ITEMSIZE[cell.dtype] < 4:
            return dataclasses.replace(settings, rounds=max(1, settings.rounds // 2))
        return settings


def expected_seconds(cell: Cell, settings: Settings, contestants: int) -> float:
    """Return about how long a cell takes with so many contestants."""
    call = _PASS_ELEMENT * PASSES[cell.op] * cell.size
    turn = max(settings.warm, call) + settings.samples * max(settings.least, call)
    each = min(settings.rounds * turn, settings.limit + turn)
    return _CELL + _CELL_ELEMENT * cell.size + _TURNS * contestants * each
