"""What the options ask for: measured, shown, written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import backnorm
from backnorm.cli.progress import progress
from backnorm.cli.text import counted, warn
from backnorm.errors import ArgumentValueError
from backnorm.files import check_writable
from benchmarks.campaign import Campaign
from benchmarks.cells import chosen, representative, select, words
from benchmarks.device import PLACES
from benchmarks.environment import environment, now
from benchmarks.model import CONDITIONS, DEVICES, FLOOR, OF_OURS, Environment, Result
from benchmarks.peers import CONTESTANTS, peers
from benchmarks.plans import Trials, misses_table, try_plans, write_trials
from benchmarks.report import compare, prepare, read_result, write_report
from benchmarks.table import bench_table, summary_lines
from benchmarks.turns import SETTINGS, Settings

__all__ = [
    "BenchOptions",
    "BenchReport",
    "PlansReport",
    "comparison",
    "run_bench",
    "run_plans",
    "settings_for",
]

_Name = TypeVar("_Name", bound=str)

# What `--peers` takes for nobody.
_NONE = "none"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to time, beside whom, where, and for how long; lists are as typed, with commas."""

    suites: str
    ops: str
    dtypes: str
    layouts: str
    peers: str
    quick: bool
    out: Path | None
    settings: Settings
    device: str = "cpu"
    condition: str = "quiet"


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What came of it.

    Attributes
    ----------
    result : Result
    failures : list of str
        Where ours is not exact, a line each.
    written : list of Path
    interrupted : bool
        Whether `result` is but the beginning.
    """

    result: Result
    failures: list[str]
    written: list[Path]
    interrupted: bool

    def table(self) -> Table:
        """Return a row a cell."""
        return bench_table(self.result)

    def summary(self) -> list[str]:
        """Return lines on all cells together, and on where to find more."""
        return [*summary_lines(self.result), *(f"wrote {path}" for path in self.written)]


def settings_for(
    condition: str, rounds: int | None, samples: int | None, warm: float, limit: float
) -> Settings:
    """Return how long to measure: what is usual in a condition for what is None.

    Raises
    ------
    ArgumentValueError
        If there is no such condition, or there are no end of seconds.
    """
    for option, seconds in (("--warm-up", warm), ("--limit", limit)):
        if not math.isfinite(seconds):
            raise ArgumentValueError(option, "must be finite", came=seconds, accepted="seconds")
    usual = SETTINGS[_one_of("--condition", condition, CONDITIONS)]
    return replace(
        usual,
        rounds=usual.rounds if rounds is None else rounds,
        samples=usual.samples if samples is None else samples,
        warm=warm,
        limit=limit,
    )


def run_bench(options: BenchOptions) -> BenchReport:
    """Measure what the options ask for, as far as one lets it, and write it where they say.

    Raises
    ------
    BacknormError
        For a name that is not known, a device or condition that cannot be had, or if the measuring
        process does not start.
    OSError
        If the report cannot be written.
    """
    campaign = _campaign(options)
    campaign.check()
    if options.out is not None:
        # Now, and not after all the work.
        prepare(options.out)
    expected = sum(campaign.expected())
    warn(f"{len(campaign.cells)} cells, about {_duration(expected)}")
    interrupted = False
    try:
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=expected)
            campaign.run(lambda what, done: bar.update(task, description=what, completed=done))
    except KeyboardInterrupt:
        interrupted = True
    result = campaign.result()
    written = []
    if options.out is not None and result.rows:
        written = write_report(result, options.out)
    return BenchReport(result, campaign.failures(), written, interrupted)


@dataclass(frozen=True, slots=True)
class PlansReport:
    """What came of the candidates of all cells; `interrupted`: of the first of them."""

    trials: list[Trials]
    environment: Environment
    interrupted: bool

    def table(self) -> Table:
        """Return a row for each cell whose plan is not good enough."""
        return misses_table(self.trials, self.environment)

    def summary(self) -> str:
        """Return how many those are, in a line."""
        missed = sum(each.is_miss for each in self.trials)
        tried = sum(each.number for each in self.trials)
        return f"{missed} of {counted(len(self.trials), 'cell')} missed, {tried} plans tried"


def run_plans(wanted: tuple[str, str, str, str], out: Path | None) -> PlansReport:
    """Try all plans of the cells of these suites, operations, types and layouts, as typed.

    Raises
    ------
    BacknormError
        For a name that is not known, or a file that cannot be written.
    """
    suites, ops, dtypes, layouts = map(words, wanted)
    cells = select(suites, ops, dtypes, layouts)
    if out is not None:
        check_writable(out)
    trials, interrupted = [], False
    where = environment(backnorm.get_num_threads(), {"backnorm": backnorm.__version__}, now())
    try:
        with progress(len(cells)) as advance:
            for cell in cells:
                advance(str(cell))
                trials.append(try_plans(cell))
    except KeyboardInterrupt:
        interrupted = True
    if out is not None:
        write_trials(trials, where, out)
    return PlansReport(trials, where, interrupted)


def comparison(before: Path, after: Path) -> str:
    """Return how two results differ, as Markdown."""
    return compare(read_result(before), read_result(after)).to_markdown()


def _campaign(options: BenchOptions) -> Campaign:
    device = _one_of("--device", options.device, DEVICES)
    condition = _one_of("--condition", options.condition, CONDITIONS)
    possible = [known for known in CONDITIONS if (device, known) in PLACES]
    if condition not in possible:
        raise ArgumentValueError(
            "--condition",
            f"is not for --device {device}",
            came=repr(condition),
            accepted=", ".join(possible),
        )
    wanted = chosen("--peers", words(options.peers), (*peers(device), _NONE))
    contestants = {
        name: place
        for name, place in CONTESTANTS[device].items()
        if name in (*OF_OURS, FLOOR) or name in wanted
    }
    if options.quick:
        cells = representative(device)
    else:
        cells = select(
            words(options.suites),
            words(options.ops),
            words(options.dtypes),
            words(options.layouts),
            device,
        )
    threads = backnorm.get_num_threads()
    return Campaign(cells, contestants, threads, options.settings, device, condition)


def _one_of(option: str, name: str, accepted: Sequence[_Name]) -> _Name:
    for known in accepted:
        if name == known:
            return known
    raise ArgumentValueError(option, "unknown", came=repr(name), accepted=", ".join(accepted))


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
