"""`python -m benchmarks plans`: all candidates of a cell, and which would have been best."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest

import backnorm
from benchmarks import options, plans
from benchmarks.environment import environment, now
from benchmarks.model import Cell, Timing
from benchmarks.turns import Settings

SMALL = Cell("small", "backward", (8, 16, 8, 8), "NCX", "float32")


@pytest.fixture
def hasty(monkeypatch):
    """Let every candidate have a sample, and no more."""
    for name in ("_FIRST", "_SECOND", "_LAST"):
        monkeypatch.setattr(plans, name, Settings(rounds=1, samples=1, warm=0.0, least=0.0))


def trials(factor, **changes):
    chosen = {"group": 4, "grouped": True, "threads": 1}
    timing = Timing(1e-3, 1e-3, 1e-3, 3)
    return plans.Trials(SMALL, 7, chosen, chosen | changes, timing, timing, factor)


def table_of(found):
    table = plans.misses_table(found, environment(1, {}, now()))
    return list(
        zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)
    )


@pytest.mark.parametrize("op", ["backward", "forward", "inference"])
@pytest.mark.parametrize(("layout", "dtype"), [("NCX", "float32"), ("NXC", "float16")])
def test_all_candidates_are_timed_and_the_quickest_is_the_best(
    op, layout, dtype, hasty, monkeypatch
):
    timed = []

    def timing(calls, settings, announce, estimates, watch):
        timed.append(list(calls))
        for call in calls.values():
            call()
        # The third is the quickest, by a factor of two.
        return {key: [1.0 if key == 2 else 2.0, 3.0 if key == 2 else 6.0] for key in calls}

    monkeypatch.setattr(plans, "take_turns", timing)
    found = plans.try_plans(Cell("small", op, (8, 16, 8, 8), layout, dtype))
    every, some, last = timed
    assert every == list(range(found.number))
    assert found.number >= 3
    assert {0, 2} <= set(some) <= set(every)
    assert len(some) <= 6
    assert last == [0, 2]
    assert found.factor == 2.0
    assert found.is_miss
    assert found.better()


def test_what_is_timed_is_real(hasty):
    found = plans.try_plans(SMALL)
    assert found.number > 3
    assert found.chosen_timing.median > 0
    assert found.chosen.keys() == found.best.keys() >= {"group", "share", "grouped", "threads"}


def test_a_candidate_of_other_bits_is_found(hasty, monkeypatch):
    original = plans.Launch
    made = itertools.count()

    def launch(problem, decided):
        # The second has another epsilon.
        if next(made) == 1:
            problem = dataclasses.replace(problem, epsilon=0.5)
        return original(problem, decided)

    monkeypatch.setattr(plans, "Launch", launch)
    with pytest.raises(AssertionError, match="other bits"):
        plans.try_plans(SMALL)


def test_misses_are_shown_the_worst_first():
    rows = table_of([trials(1.2, group=16), trials(1.04, group=2), trials(1.5, grouped=False)])
    assert [row[2] for row in rows] == ["1.50", "1.20"]
    assert [row[3] for row in rows] == ["grouped yes -> no", "group 4 -> 16"]


def test_the_command_shows_and_writes_what_it_found(cli, hasty, monkeypatch, tmp_path):
    monkeypatch.setattr(options, "select", lambda *_: [SMALL])
    file = tmp_path / "plans.json"
    result = cli("plans", "--suite", "small", "--out", file)
    assert result.exit_code == 0, result.output
    assert "of 1 cell missed, " in result.stdout
    written = json.loads(file.read_text())
    assert written["environment"]["threads"] == backnorm.get_num_threads()
    (row,) = written["rows"]
    assert (row["op"], row["shape"]) == ("backward", [8, 16, 8, 8])
    assert np.isfinite(row["factor"])


def test_unknown_names_are_refused(cli):
    result = cli("plans", "--suite", "resnet51")
    assert result.exit_code == 2
    assert "--suite: unknown" in result.stderr
