"""A comparison finds what changed, and only that."""

from __future__ import annotations

import dataclasses
import math

import pytest

from benchmarks.model import Cell, Outcome, Result, Row
from benchmarks.report import compare

from .synthetic import environment, squeezed, timing

CELL = Cell("resnet50", "backward", (50, 64, 112, 112), "NCX", "float32")


def outcome(contestant, seconds, form="out", **options):
    return Outcome(contestant, form, "ok", timing(seconds, **options))


def run(ours=1.0, floor=0.5, torch=2.0, cell=CELL, settings=None, spread=0.02, **changes):
    outcomes = [outcome("backnorm", ours, spread=spread)]
    if floor:
        outcomes.append(outcome("floor", floor, spread=spread))
    if torch:
        outcomes.append(outcome("torch", torch, "allocate", spread=spread))
    return Result(environment(**changes), settings or {}, (Row(cell, tuple(outcomes)),))


def test_a_result_beside_itself_has_not_changed(result):
    comparison = compare(result, result)
    assert len(comparison.changes) > 300
    assert not comparison.changes.beyond.any()
    assert comparison.warnings == comparison.statuses == ()
    assert comparison.only_before == comparison.only_after == ()
    assert "0 became slower and 0 faster" in comparison.to_markdown()


def test_a_slower_machine_is_not_a_slower_operator():
    comparison = compare(run(), run(ours=3.0, floor=1.5, torch=6.0))
    assert comparison.slower.empty


@pytest.mark.parametrize(("ours", "slower"), [(1.5, True), (0.5, False)])
def test_a_change_beyond_the_spread_is_found(ours, slower):
    comparison = compare(run(), run(ours=ours))
    found = comparison.slower if slower else comparison.faster
    assert found.factor.tolist() == [pytest.approx(ours)]
    assert found.before.tolist() == [pytest.approx(2.0)]
    heading = "## Slower" if slower else "## Faster"
    line = squeezed(comparison.to_markdown()).split(heading)[1].splitlines()[4]
    assert line == (f"| {CELL} | backnorm (out) | 2.00 | {ours * 2:.2f} | {ours:.2f} | ±6 % |")


def test_the_spread_decides_what_is_noise():
    assert len(compare(run(), run(ours=1.2)).slower) == 1
    assert compare(run(), run(ours=1.2, spread=0.2)).slower.empty


def test_few_samples_make_the_noise_larger():
    def noise(samples):
        row = Row(CELL, (outcome("backnorm", 1.0, spread=0.1, samples=samples),))
        result = Result(environment(), {}, (row,))
        return compare(result, result).changes.noise[0]

    assert noise(5) > noise(15) > noise(100) > math.sqrt(2) * math.log(1.1)


def test_steady_times_still_differ_between_runs():
    assert compare(run(spread=0), run(ours=1.02, spread=0)).slower.empty
    assert len(compare(run(spread=0), run(ours=1.04, spread=0)).slower) == 1


def test_without_a_floor_seconds_are_compared_and_marked():
    comparison = compare(run(floor=None), run(ours=1.5))
    assert comparison.slower.relative.tolist() == [False]
    assert "| 1000 ms | 1500 ms |" in squeezed(comparison.to_markdown())


def test_peers_of_the_same_version_are_the_control():
    comparison = compare(run(), run(torch=4.0))
    changes = comparison.changes
    assert changes.contestant[changes.control].tolist() == ["torch"]
    text = comparison.to_markdown()
    assert "Control: 1 of 1 times of peers" in text
    assert "## Peers, beyond noise" in text
    unknown = compare(run(versions={}), run(versions={}))
    assert not unknown.changes.control.any()
    newer = compare(run(), run(versions={"backnorm": "0.2.0", "torch": "2.14.0"}))
    assert not newer.changes.control.any()


def test_different_circumstances_are_warned_of():
    kind = {"cpu": "another", "microarchitecture": "znver5"}
    after = run(threads=1, versions={"backnorm": "0.2.0"}, settings={"rounds": 3}, **kind)
    warnings = compare(run(settings={"rounds": 15}), after).warnings
    assert "microarchitecture: none, now znver5" in warnings
    assert "cpu: AMD EPYC 9R14 (made up), now another" in warnings
    assert "threads: 2, now 1" in warnings
    assert "version of torch: 2.13.0, now none" in warnings
    assert "setting rounds: 15, now 3" in warnings
    assert not any("backnorm" in warning or "date" in warning for warning in warnings)


def test_between_conditions_times_themselves_are_compared():
    after = dataclasses.replace(run(ours=1.5, floor=5.0, torch=2.1), condition="after-convolution")
    comparison = compare(run(), after)
    assert "condition: quiet, now after-convolution" in comparison.warnings
    changes = comparison.changes
    assert changes[["contestant", "relative", "factor"]].to_numpy().tolist() == [
        ["backnorm", False, 1.5],
        ["torch", False, pytest.approx(1.05)],
    ]
    # What PyTorch loses is the condition's doing, not noise.
    assert not changes.control.any()
    text = squeezed(comparison.to_markdown())
    assert (
        "The conditions differ: before, calls in a row (quiet); after, each call right after a "
        "convolution (after-convolution)."
    ) in text
    assert "| backnorm (out) | 1 | 1.50 |" in text
    assert "| PyTorch (allocate) | 1 | 1.05 |" in text
    assert f"| {CELL} | backnorm (out) | 1000 ms | 1500 ms | 1.50 |" in text
    assert "Control" not in text


def test_within_a_condition_a_comparison_is_as_ever():
    before, after = (
        dataclasses.replace(run(ours=ours), condition="after-convolution") for ours in (1.0, 1.5)
    )
    comparison = compare(before, after)
    assert comparison.warnings == ()
    assert comparison.slower.relative.tolist() == [True]
    assert comparison.to_markdown() == compare(run(), run(ours=1.5)).to_markdown()


def test_suites_do_not_matter_and_other_cells_are_listed():
    renamed = dataclasses.replace(CELL, suite="other")
    assert len(compare(run(), run(cell=renamed)).changes) == 2
    elsewhere = dataclasses.replace(CELL, layout="NXC")
    comparison = compare(run(), run(cell=elsewhere))
    assert (comparison.only_before, comparison.only_after) == ((CELL,), (elsewhere,))
    assert f"## Only after\n\n- {elsewhere}\n" in comparison.to_markdown()


def test_a_changed_status_is_told():
    before = run()
    row = before.rows[0]
    crashed = Outcome("torch", "allocate", "crashed", None, "signal SIGSEGV")
    after = dataclasses.replace(before, rows=(Row(CELL, (*row.outcomes[:2], crashed)),))
    assert compare(before, after).statuses == (
        f"{CELL}, PyTorch (allocate): ok, now crashed (signal SIGSEGV)",
    )


def test_runs_that_differ_by_their_own_spread_pass_in_a_minority_of_cells(rng):
    """The worst that the rule has to meet: all samples of a run share one shift."""
    sigma = 0.05

    def measured():
        rows = []
        for extent in range(300):
            cell = dataclasses.replace(CELL, shape=(1, extent + 1))
            times = [
                # The 80th percentile of normal numbers lies 0.84 sigma above their median.
                timing(math.exp(shift), spread=math.expm1(0.84 * sigma))
                for shift in rng.normal(0, sigma, 2)
            ]
            names = ("backnorm", "floor")
            outcomes = (Outcome(n, "out", "ok", t) for n, t in zip(names, times, strict=True))
            rows.append(Row(cell, tuple(outcomes)))
        return Result(environment(), {}, tuple(rows))

    changes = compare(measured(), measured()).changes
    assert changes.beyond.sum() < 0.3 * len(changes)
