"""Which plan would have been best: all candidates of a cell in turns, beside the one chosen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from backnorm.arrays import NUMPY
from backnorm.cli.render import captioned_table, number_texts
from backnorm.cli.text import counted, plain
from backnorm.cpu import engine
from backnorm.cpu.launch import Launch
from backnorm.cpu.plan import SCHEDULE, Plan
from backnorm.executable import Executable
from backnorm.layout import extents_of
from backnorm.problem import problem_of
from backnorm.signature import SIGNATURES
from benchmarks.candidates import candidates
from benchmarks.data import make_data
from benchmarks.environment import write_rows
from benchmarks.model import Cell, Environment, Timing
from benchmarks.peers.base import Data
from benchmarks.turns import HOST, Settings, summary, take_turns

__all__ = ["ENOUGH", "Trials", "misses_table", "try_plans", "write_trials"]

#: How much slower than the best a plan may be and count as good.
ENOUGH = 1.05

# All candidates, a sample each turn; then the best of them beside the one chosen; then the best
# alone, in samples that it was not picked by.
_MOST, _FINALISTS = math.inf, 5
_FIRST = Settings(rounds=3, samples=1, warm=0.002, limit=_MOST)
_SECOND = Settings(rounds=6, samples=2, warm=0.01, limit=_MOST)
_LAST = Settings(rounds=10, samples=3, warm=0.01, limit=_MOST)


@dataclasses.dataclass(frozen=True, slots=True)
class Trials:
    """What came of the candidates of a cell.

    Attributes
    ----------
    cell : Cell
    number : int
        How many were tried.
    chosen, best : dict
        The numbers of the plan that was chosen, and of the quickest.
    chosen_timing, best_timing : Timing
    factor : float
        By how much the plan that was chosen takes longer: the median over turns.
    """

    cell: Cell
    number: int
    chosen: dict[str, Any]
    best: dict[str, Any]
    chosen_timing: Timing
    best_timing: Timing
    factor: float

    @property
    def is_miss(self) -> bool:
        """Whether the plan that was chosen is not good enough."""
        return self.factor > ENOUGH

    def better(self) -> str:
        """Return what is different in the quickest plan."""
        return ", ".join(
            f"{name} {_text(value)} -> {_text(self.best[name])}"
            for name, value in self.chosen.items()
            if value != self.best[name]
        )


def try_plans(cell: Cell) -> Trials:
    """Time all candidates of a cell in turns.

    Raises
    ------
    AssertionError
        If one of them gives other bits than the plan that is chosen.
    """
    data = make_data(cell)
    plans, calls = [], []
    expected: list[bytes] = []
    for decided, call in _calls(cell, data):
        found = [np.ascontiguousarray(each).tobytes() for each in call() if each is not None]
        expected = expected or found
        if found != expected:
            raise AssertionError(f"{cell}: other bits by {decided}")
        plans.append(decided)
        calls.append(call)
    samples = _timed(calls, range(len(calls)), _FIRST)
    quickest = sorted(samples, key=lambda k: float(np.median(samples[k])))[:_FINALISTS]
    samples = _timed(calls, {0, *quickest}, _SECOND)
    best = min(samples, key=lambda k: _factor(samples[k], samples[0]))
    samples = _timed(calls, {0, best}, _LAST)
    return Trials(
        cell,
        len(plans),
        _numbers(plans[0]),
        _numbers(plans[best]),
        summary(samples[0]),
        summary(samples[best]),
        _factor(samples[0], samples[best]),
    )


def misses_table(trials: Iterable[Trials], environment: Environment) -> Table:
    """Return a row for each cell whose plan is not good enough."""
    caption = (
        f"{environment.cpu}, {counted(environment.threads, 'thread')}. Cells in which the plan "
        f"that is chosen takes more than {ENOUGH - 1:.0%} longer than the best of its candidates."
    )
    table = captioned_table("Plans", plain(caption), (0, 1, 0, 0))
    table.add_column("cell", overflow="fold")
    for heading in ("time", "factor"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("better", overflow="fold")
    for each in sorted(trials, key=lambda each: -each.factor):
        if each.is_miss:
            time, _ = number_texts(each.chosen_timing.median, 0.0)
            table.add_row(plain(str(each.cell)), time, f"{each.factor:.2f}", plain(each.better()))
    return table


def write_trials(trials: Sequence[Trials], environment: Environment, path: Path) -> None:
    """Write all of them to a JSON file, whole or not at all."""
    rows = [found.pop("cell") | found for found in map(dataclasses.asdict, trials)]
    write_rows(rows, environment, path)


def _calls(cell: Cell, data: Data) -> Iterable[tuple[Plan, Callable[[], Any]]]:
    """Yield the candidates, and a call of each."""
    signature = SIGNATURES[cell.op]
    operands = [getattr(data, operand.name, None) for operand in signature.operands]
    problem = problem_of(cell.op, *operands, **data.options)
    order = tuple(range(data.x.ndim))
    extents = extents_of(problem.shape, problem.channel_axes, order)
    for decided in candidates(problem, extents, engine.machine()):
        found = Executable(problem, order, NUMPY, decided, Launch(problem, decided))
        yield decided, partial(found.plain, *operands, out=data.out)


def _timed(
    calls: Sequence[Callable[[], Any]], numbers: Iterable[int], settings: Settings
) -> dict[int, list[float]]:
    chosen: Mapping[int, Callable[[], Any]] = {k: calls[k] for k in sorted(numbers)}
    return take_turns(chosen, settings, lambda key: None, dict.fromkeys(chosen, 0.0), HOST)


def _factor(samples: Sequence[float], others: Sequence[float]) -> float:
    """Return how much longer samples take than others of the same turns."""
    return float(np.median(np.divide(samples, others)))


def _numbers(decided: Plan) -> dict[str, Any]:
    of_plan = {name: getattr(decided, name) for name in SCHEDULE}
    return dataclasses.asdict(decided.geometry) | of_plan


def _text(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
