"""All cases one after another, each variant in a process of its own, as who trains has it.

In one process what an allocator keeps for one variant changes how many new pages another needs. So
the processes take turns, a step each. What was found, as a table.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from rich.table import Table

from backnorm.cli.render import captioned_table, number_texts
from backnorm.cli.text import counted, plain
from benchmarks.child import Child, ChildEndedError
from benchmarks.environment import environment, now
from benchmarks.model import Environment, geometric_mean
from benchmarks.models.cases import Case, Outcome, Row, Variant
from benchmarks.turns import Settings, summary, take_turns

__all__ = ["SETTINGS", "Run", "models_table", "summary_lines"]

#: A step takes from a tenth of a second to several.
SETTINGS = Settings(rounds=9, samples=1, warm=0.0, least=0.0, limit=math.inf)

# Seconds until an answer is given up: compilers take minutes.
_PATIENCE = 1800.0

# glibc's allocator keeps all memory that it was ever given, as the allocators do that PyTorch's
# guide to performance recommends. Left to itself it gives some back in some steps and not in
# others, of any variant: the same step of RegNetY takes 163 or 190 ms (Intel Xeon, 28,000 pages).
_KEEPING = {
    "GLIBC_TUNABLES": ":".join(
        f"glibc.malloc.{each}"
        for each in ("trim_threshold=1099511627776", "mmap_max=0", "arena_max=1")
    )
}

# Seconds between steps: OpenMP's threads spin for milliseconds after the last region of a process,
# on the processors that the next one wants.
_PAUSE = 0.05


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
                row = self._row(case)
            except ChildEndedError as error:
                every = case.variants(self._variants)
                row = Row(case, tuple(Outcome(each, str(error)) for each in every))
            self.rows.append(row)

    def _row(self, case: Case) -> Row:
        """Compare all variants in one process, and time each in a process of its own.

        Raises
        ------
        ChildEndedError
        """
        own, *_ = every = case.variants(self._variants)
        with self._child(case) as child:
            outcomes: dict[Variant, Outcome] = _answer(child, "compare", every)
        with ExitStack() as stack:
            children: dict[Variant, Child] = {}
            for variant in (each for each in every if not outcomes[each].detail):
                child = stack.enter_context(self._child(case))
                try:
                    memory = _answer(child, "begin", variant)
                except ChildEndedError as error:
                    if variant == own:
                        raise
                    outcomes[variant] = Outcome(variant, str(error))
                    continue
                outcomes[variant] = dataclasses.replace(outcomes[variant], memory=memory)
                children[variant] = child
            estimates = dict.fromkeys(children, 0.0)
            samples = take_turns(children, self._settings, lambda _: None, estimates, _WATCH)
            for variant, child in children.items():
                normalization = _answer(child, "normalization")
                known = outcomes[variant]
                outcomes[variant] = dataclasses.replace(
                    known,
                    step=summary(samples[variant]),
                    ratio=float(np.median(np.divide(samples[variant], samples[own]))),
                    normalization=normalization,
                    # A compiler's is not that of steps.
                    memory=None if normalization is None else known.memory,
                )
        return Row(case, tuple(outcomes[each] for each in every))

    @contextmanager
    def _child(self, case: Case) -> Iterator[Child]:
        """Give a new process for a case.

        Raises
        ------
        ChildEndedError
        """
        child = Child("benchmarks.models.worker", _KEEPING)
        try:
            child.send((self._threads, case))
            self._versions |= child.receive(_PATIENCE)
            yield child
        finally:
            child.stop()


def _answer(child: Child, what: str, *arguments: Any) -> Any:
    """Return what a process answers: see `worker.Work`.

    Raises
    ------
    ChildEndedError
    """
    child.send((what, *arguments))
    return child.receive(_PATIENCE)


class _Watch:
    """The clocks of processes that train."""

    def warm(self, call: Child, seconds: float) -> float:
        """Make a step."""
        return self.sample(call, 1)

    def sample(self, call: Child, loop: int) -> float:
        """Return the seconds of a step, in the mean of so many."""
        time.sleep(_PAUSE)
        return float(sum(_answer(call, "step") for _ in range(loop)) / loop)


_WATCH = _Watch()


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
