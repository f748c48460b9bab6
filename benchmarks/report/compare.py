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

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from benchmarks.model import FLOOR, OURS, Cell, Condition, Environment, Outcome, Result, Row
from benchmarks.report.comparison_text import comparison_text
from benchmarks.report.figures import PROBLEM, distinct, outcomes
from benchmarks.report.words import label

__all__ = ["LEAST", "Comparison", "compare"]

#: Changes of less are never beyond noise.
LEAST = 0.03

# Standard error of the 20th percentile of n normal samples, times sqrt(n), over its distance from
# the median.
_PERCENTILE_ERROR = 1.7

# Facts about a run that do not bear on its times, or that times are already compared by.
_IDLE_FACTS = ("date", "versions", "gpu bandwidth")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two results have in common, and what not.

    Attributes
    ----------
    changes : DataFrame
        Every cell, contestant and form timed in both, changed or not: `before` and `after`, times
        over the floor's, or seconds where it is not `relative`; `factor`, after over before: below
        1 it became faster; `noise`, what abs(ln(factor)) has to exceed to be `beyond` it; and
        whether it is of the `control`, a peer whose version did not change.
    statuses : tuple of str
        Outcomes that changed their status, a line each.
    only_before, only_after : tuple of Cell
        Cells that one result lacks.
    warnings : tuple of str
        Differences in machine, condition, versions and settings that make comparing doubtful.
    conditions : tuple of Condition
        Those of both results.
    """

    changes: pd.DataFrame
    statuses: tuple[str, ...]
    only_before: tuple[Cell, ...]
    only_after: tuple[Cell, ...]
    warnings: tuple[str, ...]
    conditions: tuple[Condition, Condition]

    @property
    def ours(self) -> pd.DataFrame:
        """Changes of our own contestant."""
        return self.changes[self.changes.contestant == OURS]

    @property
    def slower(self) -> pd.DataFrame:
        """Our own cells that became slower beyond noise, the worst first."""
        found = self.ours[self.ours.beyond & (self.ours.factor > 1)]
        return found.sort_values("factor", ascending=False, kind="stable")

    @property
    def faster(self) -> pd.DataFrame:
        """Our own cells that became faster beyond noise, the best first."""
        found = self.ours[self.ours.beyond & (self.ours.factor < 1)]
        return found.sort_values("factor", kind="stable")

    def to_markdown(self) -> str:
        """Return the comparison as Markdown."""
        return comparison_text(self)


def compare(before: Result, after: Result) -> Comparison:
    """Return what changed from one result to another; the module says by what rule.

    Cells are matched by operation, shape, layout and type, not by suite; of a problem that a result
    has twice, the first counts.
    """
    old, new = ({_problem(row): row for row in distinct(each.rows)} for each in (before, after))
    changes = _changes(before, after)
    steady = {
        name
        for name in {*changes.contestant} - {OURS}
        if before.condition == after.condition
        and (versions := _versions(before.environment, name))
        and versions == _versions(after.environment, name)
    }
    changes["control"] = changes.contestant.isin(steady)
    return Comparison(
        changes=changes,
        statuses=tuple(line for key in new if key in old for line in _statuses(old[key], new[key])),
        only_before=tuple(row.cell for key, row in old.items() if key not in new),
        only_after=tuple(row.cell for key, row in new.items() if key not in old),
        warnings=tuple(_warnings(before, after)),
        conditions=(before.condition, after.condition),
    )


def _problem(row: Row) -> tuple[object, ...]:
    return tuple(getattr(row.cell, name) for name in PROBLEM)


def _changes(before: Result, after: Result) -> pd.DataFrame:
    """Return what was timed in both, relative to the floor if the condition is the same."""
    old, new = (_timed(result) for result in (before, after))
    both = new.merge(old, on=[*PROBLEM, "contestant", "form"], suffixes=("_after", "_before"))
    floor = both[both.contestant == FLOOR][[*PROBLEM, *_TIMES]]
    both = both[both.contestant != FLOOR].merge(
        floor, how="left", on=PROBLEM, suffixes=("", "_floor")
    )
    relative = both.median_before_floor.notna() & (before.condition == after.condition)
    spreads = (both.spread_before, both.spread_after)
    floors = (
        both.spread_before_floor.where(relative, 0),
        both.spread_after_floor.where(relative, 0),
    )
    changes = pd.DataFrame(
        {
            "cell": both.cell_after,
            "contestant": both.contestant,
            "form": both.form,
            "before": both.median_before / both.median_before_floor.where(relative, 1),
            "after": both.median_after / both.median_after_floor.where(relative, 1),
            "relative": relative,
            "noise": np.maximum(np.linalg.norm([*spreads, *floors], axis=0), np.log1p(LEAST)),
        }
    )
    changes["factor"] = changes.after / changes.before
    changes["beyond"] = np.log(changes.factor).abs() > changes.noise
    return changes


_TIMES = [f"{name}_{when}" for name in ("median", "spread") for when in ("before", "after")]


def _timed(result: Result) -> pd.DataFrame:
    """Return what was timed, with how far, in logarithms, a time may be from another run's."""
    frame = outcomes(distinct(result.rows))
    frame = frame[frame["median"].notna()]
    ratios = frame.p80 / frame["median"], frame["median"] / frame.p20
    spread = np.log(np.maximum(*ratios)) * (1 + _PERCENTILE_ERROR / np.sqrt(frame.samples))
    return frame.assign(spread=spread)[[*PROBLEM, "cell", "contestant", "form", "median", "spread"]]


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
        was, now = ("none" if value in (None, "") else value for value in (was, now))
        yield f"{what.replace('_', ' ')}: {was}, now {now}"
