"""All cases one after another, each in a process of its own; what was found, as table and file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from backnorm.cli.render import captioned_table, number_texts
from backnorm.cli.text import counted, plain
from benchmarks.child import Child, ChildEndedError
from benchmarks.environment import environment, now
from benchmarks.model import Environment, geometric_mean
from benchmarks.models.cases import Case, Outcome, Row, Variant
from benchmarks.turns import Settings

__all__ = ["SETTINGS", "Run", "models_table", "summary_lines"]

#: A step takes from a tenth of a second to several.
SETTINGS = Settings(rounds=5, samples=1, warm=0.0, least=0.0, limit=60.0)

# Seconds until a case is given up: compilers take minutes.
_PATIENCE = 1800.0


class Run:
    """Measures cases; `rows` has those that are done, also after an interruption."""

    def __init__(
        self, cases: Sequence[Case], variants: Sequence[Variant], threads: int, settings: Settings
    ) -> None:
        self.rows: list[Row] = []
        self._cases, self._variants, self._threads = cases, variants, threads
        self._settings, self._versions, self._date = settings, dict[str, str](), now()

    def environment(self) -> Environment:
        """Return where and when all that was."""
        return environment(self._threads, self._versions, self._date)

    def measure(self, advance: Callable[[str], None]) -> None:
        """Measure all cases; `advance` hears which is next."""
        for case in self._cases:
            advance(str(case))
            try:
                row: Row = self._answer("measure", case, self._variants, self._settings)
            except ChildEndedError as error:
                every = case.variants(self._variants)
                row = Row(case, tuple(Outcome(each, str(error)) for each in every))
            self.rows.append(Row(case, tuple(map(self._with_memory(case), row.outcomes))))

    def _with_memory(self, case: Case) -> Callable[[Outcome], Outcome]:
        def measured(outcome: Outcome) -> Outcome:
            if outcome.normalization is None:
                return outcome
            try:
                memory = self._answer("memory", case, outcome.variant)
            except ChildEndedError as error:
                return dataclasses.replace(outcome, detail=str(error))
            return dataclasses.replace(outcome, memory=memory)

        return measured

    def _answer(self, what: str, *arguments: Any) -> Any:
        """Return the answer of a new process.

        Raises
        ------
        ChildEndedError
        """
        child = Child("benchmarks.models.worker")
        try:
            child.send((self._threads, what, arguments))
            versions, found = child.receive(_PATIENCE)
            self._versions |= versions
            return found
        finally:
            child.stop()


def models_table(rows: Sequence[Row], where: Environment) -> Table:
    """Return a row for each variant of each case."""
    caption = (
        f"{where.cpu}, {counted(where.threads, 'thread')}. A training step: its time, and the "
        "median of its ratio to a step with the framework's own layers in the same turns; the same "
        "of normalisation, activations and additions, and of memory; how far the gradients are "
        "off those of float64."
    )
    table = captioned_table("Models", plain(caption), (0, 1, 0, 0))
    table.add_column("case", overflow="fold")
    table.add_column("variant")
    for heading in ("step", "ratio", "normalization", "memory", "error", "layers"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        own = row.outcomes[0]
        for number, outcome in enumerate(row.outcomes):
            case = plain(str(row.case)) if number == 0 else ""
            table.add_row(case, outcome.variant, *_texts(outcome, own))
    return table


def summary_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line for each variant: geometric mean and largest of its ratios."""
    found: dict[str, list[float]] = {}
    for row in rows:
        known: dict[str, Outcome] = {each.variant: each for each in row.outcomes}
        own = row.case.framework.variants[0]
        for outcome in row.outcomes:
            base = known.get(f"{own}-compiled" if "compiled" in outcome.variant else own)
            if outcome.variant.startswith("backnorm") and base and base.ratio and outcome.ratio:
                name = f"{outcome.variant} beside {base.variant}"
                found.setdefault(name, []).append(outcome.ratio / base.ratio)
    return [
        f"{name}: {geometric_mean(ratios):.2f} in the mean of "
        f"{counted(len(ratios), 'case')}, {max(ratios):.2f} at most"
        for name, ratios in found.items()
    ]


def _texts(outcome: Outcome, own: Outcome) -> list[str]:
    if outcome.step is None:
        return [outcome.detail, *[""] * 5]
    time, _ = number_texts(outcome.step.median, 0.0)
    return [
        time,
        _text(outcome.ratio, 1.0),
        _text(outcome.normalization, own.normalization),
        _text(outcome.memory, own.memory),
        "" if outcome.error is None else f"{outcome.error:.1e}",
        str(outcome.layers),
    ]


def _text(value: float | None, base: float | None) -> str:
    return "" if value is None or not base else f"{value / base:.2f}"
