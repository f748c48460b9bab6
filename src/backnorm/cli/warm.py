"""Compile kernels ahead, showing how far it is (`backnorm warm`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

import backnorm
from backnorm import config
from backnorm.cli.progress import progress
from backnorm.dtypes import ELEMENT_TYPES, FLOAT32
from backnorm.errors import ArgumentValueError
from backnorm.warm import records
from backnorm.warm.crew import work_off
from backnorm.warm.jobs import OPERATIONS, Job, jobs
from backnorm.warm.records import Size

__all__ = ["WarmOptions", "WarmReport", "Warmed", "run_warm", "warm_up"]


@dataclass(frozen=True, slots=True)
class WarmOptions:
    """What to compile: element types (none: float32), operations (none: all), or everything."""

    dtypes: Sequence[str]
    operations: Sequence[str]
    everything: bool
    prune: bool


@dataclass(frozen=True, slots=True)
class Warmed:
    """What became of some jobs.

    Attributes
    ----------
    compiled, present : int
        Kernels that were compiled, and that were there already.
    failures : tuple of str
        What could not be compiled, and why.
    """

    compiled: int
    present: int
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What a run of `backnorm warm` did, and what is in the cache after it.

    Attributes
    ----------
    warmed : Warmed
    seconds : float
    folder : str
    cache : Size
    removed : Size or None
        What was pruned; None if nothing was to be.
    """

    warmed: Warmed
    seconds: float
    folder: str
    cache: Size
    removed: Size | None

    @property
    def failures(self) -> tuple[str, ...]:
        """What could not be compiled, and why."""
        return self.warmed.failures

    def to_dict(self) -> dict[str, object]:
        """Return plain values."""
        return asdict(self.warmed) | {
            "seconds": self.seconds,
            "cache": {"folder": self.folder, **asdict(self.cache)},
            "removed": None if self.removed is None else asdict(self.removed),
        }

    def __str__(self) -> str:
        """Return the report, a fact a line."""
        warmed = self.warmed
        lines = [
            f"{_kernels(warmed.compiled)} compiled, {warmed.present} were there already, in "
            f"{self.seconds:.1f} s"
        ]
        if self.removed is not None:
            days = records.UNUSED_DAYS
            lines.append(f"{_amount(self.removed)} removed, not used for {days} days")
        return "\n".join([*lines, f"{self.folder}: {_amount(self.cache)}"])


def run_warm(options: WarmOptions) -> WarmReport:
    """Compile what the options ask for, then prune if they do.

    Raises
    ------
    ArgumentValueError
        If there is no such type or operation.
    OSError
        If the cache cannot be written.
    """
    begin = time.perf_counter()
    warmed = warm_up(_chosen(options))
    removed = records.prune() if options.prune else None
    seconds = time.perf_counter() - begin
    return WarmReport(warmed, seconds, str(config.cache_directory()), records.size(), removed)


def warm_up(wanted: Iterable[Job]) -> Warmed:
    """Compile what these jobs need and the cache lacks, in as many processes as we may use threads.

    Raises
    ------
    OSError
        If the cache cannot be written.
    """
    missing, used, made, failures = [], set[str](), set[str](), []
    for job in wanted:
        if records.ready(job):
            used.update(records.kernels_of(job))
        else:
            missing.append(job)
    if not missing:
        return Warmed(0, len(used), ())
    records.check_writable()
    with (
        progress(len(missing)) as advance,
        closing(work_off(missing, backnorm.get_num_threads())) as outcomes,
    ):
        advance("compiling")
        for outcome in outcomes:
            advance(f"compiled {outcome.job}")
            if outcome.error:
                failures.append(f"{outcome.job}: {outcome.error}")
                continue
            records.record(outcome.job, outcome.used + outcome.made)
            used.update(outcome.used)
            made.update(outcome.made)
    return Warmed(len(made), len(used - made), tuple(failures))


def _chosen(options: WarmOptions) -> list[Job]:
    types = {str(dtype): dtype for dtype in ELEMENT_TYPES}
    _check("--dtype", options.dtypes, types)
    _check("--op", options.operations, OPERATIONS)
    if options.everything:
        return jobs(ELEMENT_TYPES, OPERATIONS)
    dtypes = [types[name] for name in options.dtypes] or [FLOAT32]
    return jobs(dtypes, options.operations or OPERATIONS)


def _check(option: str, names: Sequence[str], known: Mapping[str, object]) -> None:
    for name in names:
        if name not in known:
            accepted = ", ".join(known)
            raise ArgumentValueError(option, "is not known", came=name, accepted=accepted)


def _amount(size: Size) -> str:
    return f"{_kernels(size.kernels)}, {size.nbytes / 1e6:.1f} MB"


def _kernels(number: int) -> str:
    return f"{number} kernel{'' if number == 1 else 's'}"
