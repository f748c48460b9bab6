"""Two results side by side: what changed beyond noise.

The value of a contestant in a cell is its time over the floor's in the same cell of the same run.
Contestants and the floor take turns, so what the machine was like on that day (clock, neighbours,
memory) meets both and cancels; raw seconds would report the machine. Only where a run has no floor
for a cell are seconds compared, and marked.

So are they where the conditions of the runs differ (`Result.condition`): the floor met another one,
too, and what a condition costs would cancel with it. The machine does not cancel then.

A change is *beyond noise* if the logarithms of the two values differ by more than the spreads of
all times involved, added in quadrature because they are independent, and by more than `LEAST`:

- The spread of a time is the larger of ln(p80/median) and ln(median/p20), not divided by the root
  of the number of samples: a run's samples share what differs between runs (where pages lie, what
  the neighbours do), so more of them make the median surer for this run but not for the next.
- Few samples estimate their own percentiles badly. The 20th percentile of n normal samples has the
  standard error 1.43 sigma/sqrt(n), which is 1.7/sqrt(n) of the spread (0.84 sigma), so the spread
  is taken 1 + 1.7/sqrt(n) times: 1.8 for 5 samples, 1.4 for 15, 1.2 for 100.
- `LEAST` is what medians of two runs of the same code differ by even where each run is steady.

No rule is right in every cell. Where samples are independent, an unchanged cell passes once in
thousands; where all samples of a run share one shift as large as their spread, once in five. Peers
are the control: their versions are known, so where these did not change, none of their cells should
have. The comparison says how many did; as large a part of our own is to be doubted. Between two
conditions there is no control: every contestant meets the other one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from benchmarks.model import (
    FLOOR,
    OURS,
    Cell,
    Condition,
    Environment,
    Form,
    Outcome,
    Result,
    Row,
    Timing,
)
from benchmarks.report.comparison_text import comparison_text
from benchmarks.report.figures import distinct, find, problem
from benchmarks.report.words import label

__all__ = ["LEAST", "Change", "Comparison", "compare"]

#: Changes of less are never beyond noise.
LEAST = 0.03

# Standard error of the 20th percentile of n normal samples, times sqrt(n), over its distance from
# the median.
_PERCENTILE_ERROR = 1.7

# Facts about a run that do not bear on its times, or that times are already compared by.
_IDLE_FACTS = ("date", "versions", "gpu bandwidth")


@dataclass(frozen=True, slots=True)
class Change:
    """One contestant in one cell, in both runs.

    Attributes
    ----------
    cell : Cell
    contestant : str
    form : {"out", "allocate"}
    before, after : float
        Time over the floor's; seconds if not `relative`.
    relative : bool
    noise : float
        What |ln(after/before)| has to exceed.
    """

    cell: Cell
    contestant: str
    form: Form
    before: float
    after: float
    relative: bool
    noise: float

    @property
    def factor(self) -> float:
        """After over before: below 1 it became faster."""
        return self.after / self.before

    @property
    def beyond_noise(self) -> bool:
        """Whether the change is more than the times' spread explains."""
        return abs(math.log(self.factor)) > self.noise


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two results have in common, and what not.

    Attributes
    ----------
    changes : tuple of Change
        Every cell, contestant and form timed in both, changed or not.
    control : tuple of Change
        Those of peers whose versions did not change.
    statuses : tuple of str
        Outcomes that changed their status, a line each.
    only_before, only_after : tuple of Cell
        Cells that one result lacks.
    warnings : tuple of str
        Differences in machine, condition, versions and settings that make comparing doubtful.
    conditions : tuple of Condition
        Those of both results.
    """

    changes: tuple[Change, ...]
    control: tuple[Change, ...]
    statuses: tuple[str, ...]
    only_before: tuple[Cell, ...]
    only_after: tuple[Cell, ...]
    warnings: tuple[str, ...]
    conditions: tuple[Condition, Condition]

    @property
    def ours(self) -> list[Change]:
        """Those of our own contestant."""
        return [change for change in self.changes if change.contestant == OURS]

    @property
    def slower(self) -> list[Change]:
        """Our own cells that became slower beyond noise, the worst first."""
        return sorted(
            (c for c in self.ours if c.beyond_noise and c.factor > 1), key=lambda c: -c.factor
        )

    @property
    def faster(self) -> list[Change]:
        """Our own cells that became faster beyond noise, the best first."""
        return sorted(
            (c for c in self.ours if c.beyond_noise and c.factor < 1), key=lambda c: c.factor
        )

    def to_markdown(self) -> str:
        """Return the comparison as Markdown."""
        return comparison_text(self)


def compare(before: Result, after: Result) -> Comparison:
    """Return what changed from one result to another; the module says by what rule.

    Cells are matched by operation, shape, layout and type, not by suite; of a problem that a result
    has twice, the first counts.
    """
    old = {problem(row.cell): row for row in distinct(before.rows)}
    new = {problem(row.cell): row for row in distinct(after.rows)}
    both = [(old[key], new[key]) for key in new if key in old]
    conditions = before.condition, after.condition
    same = conditions[0] == conditions[1]
    changes = tuple(change for pair in both for change in _changes(*pair, same))
    steady = {
        name
        for name in {change.contestant for change in changes} - {OURS}
        if same
        and (versions := _versions(before.environment, name))
        and versions == _versions(after.environment, name)
    }
    return Comparison(
        changes=changes,
        control=tuple(change for change in changes if change.contestant in steady),
        statuses=tuple(line for pair in both for line in _statuses(*pair)),
        only_before=tuple(row.cell for key, row in old.items() if key not in new),
        only_after=tuple(row.cell for key, row in new.items() if key not in old),
        warnings=tuple(_warnings(before, after)),
        conditions=conditions,
    )


def _changes(before: Row, after: Row, same: bool) -> Iterator[Change]:
    """Return the changes of a cell, relative to the floor if the condition is the same."""
    floors = _timing(before, FLOOR, "out"), _timing(after, FLOOR, "out")
    for outcome in after.outcomes:
        old, new = _timing(before, outcome.contestant, outcome.form), outcome.timing
        if outcome.contestant == FLOOR or old is None or new is None:
            continue
        values, times = (old.median, new.median), [old, new]
        relative = False
        if same and floors[0] and floors[1]:
            values = old.median / floors[0].median, new.median / floors[1].median
            times += [floors[0], floors[1]]
            relative = True
        noise = max(math.hypot(*map(_spread, times)), math.log1p(LEAST))
        yield Change(after.cell, outcome.contestant, outcome.form, *values, relative, noise)


def _spread(timing: Timing) -> float:
    """Return how far, in logarithms, a time may be from that of another run."""
    half = max(math.log(timing.p80 / timing.median), math.log(timing.median / timing.p20))
    return half * (1 + _PERCENTILE_ERROR / math.sqrt(timing.samples))


def _statuses(before: Row, after: Row) -> Iterator[str]:
    old = {(o.contestant, o.form): o for o in before.outcomes}
    new = {(o.contestant, o.form): o for o in after.outcomes}
    for key in dict.fromkeys((*old, *new)):
        was, now = old.get(key), new.get(key)
        if (was and was.status) != (now and now.status):
            yield f"{after.cell}, {label(*key)}: {_status(was)}, now {_status(now)}"


def _status(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not in the run"
    return outcome.status + (f" ({outcome.detail})" if outcome.detail else "")


def _timing(row: Row, contestant: str, form: Form) -> Timing | None:
    outcome = find(row, contestant, form)
    return outcome.timing if outcome else None


def _versions(environment: Environment, contestant: str) -> dict[str, str]:
    """Return the versions of a contestant's packages: jaxlib is JAX's, too."""
    return {
        name: version
        for name, version in environment.versions.items()
        if name.lower().startswith(contestant)
    }


def _warnings(before: Result, after: Result) -> Iterator[str]:
    facts = _facts(before), _facts(after)
    for name in dict.fromkeys((*facts[0], *facts[1])):
        if name not in _IDLE_FACTS:
            yield from _difference(name, *(each.get(name) for each in facts))
    versions = before.environment.versions, after.environment.versions
    for name in dict.fromkeys((*versions[0], *versions[1])):
        # Ours is expected to differ: the heading tells it.
        if name != OURS:
            yield from _difference(f"version of {name}", *(v.get(name) for v in versions))
    for name in dict.fromkeys((*before.settings, *after.settings)):
        was, now = before.settings.get(name), after.settings.get(name)
        yield from _difference(f"setting {name}", was, now)


def _facts(result: Result) -> dict[str, object]:
    """Return what is known of where a result is from."""
    gpu = asdict(result.gpu) if result.gpu else {}
    facts = {f"gpu {name}": value for name, value in gpu.items()}
    where = {"device": result.device, "condition": result.condition}
    return {**where, **facts, **asdict(result.environment)}


def _difference(what: str, was: object, now: object) -> Iterator[str]:
    if was != now:
        was, now = ("none" if value is None else value for value in (was, now))
        yield f"{what.replace('_', ' ')}: {was}, now {now}"
