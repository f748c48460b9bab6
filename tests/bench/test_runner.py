"""A contestant that ends the process costs the others nothing."""

from __future__ import annotations

import dataclasses

import pytest

from backnorm.errors import ArgumentValueError, BacknormError
from benchmarks.campaign import Campaign
from benchmarks.device import PLACES
from benchmarks.model import CONDITIONS, Cell
from benchmarks.runner import Runner

pytestmark = pytest.mark.usefixtures("fakes")


def places(*kinds):
    names = {"Right": "torch", "Wrong": "jax", "Ours": "backnorm", "WrongOurs": "backnorm"}
    return {names.get(kind, "tensorflow"): f"fakes:{kind}" for kind in kinds}


def statuses(row):
    return {outcome.contestant: outcome.status for outcome in row.outcomes}


def test_outcomes_come_in_the_order_of_the_contestants(cell, hasty):
    with Runner(places("Wrong", "Right"), 2) as runner:
        row = runner.measure(cell, hasty)
        assert row.cell == cell
        assert [o.contestant for o in row.outcomes] == ["jax", "torch"]
        assert statuses(row) == {"jax": "inaccurate", "torch": "ok"}
        assert runner.versions == {"right": "1.2"}


def test_a_crash_is_reported_and_the_others_are_measured(cell, hasty):
    elsewhere = dataclasses.replace(cell, layout="NXC")
    with Runner(places("Right", "SegfaultingAtNXC"), 1) as runner:
        assert statuses(runner.measure(cell, hasty)) == {"torch": "ok", "tensorflow": "ok"}
        row = runner.measure(elsewhere, hasty)
        assert statuses(row) == {"torch": "ok", "tensorflow": "crashed"}
        assert row.outcomes[1].detail == "ended by SIGSEGV: goodbye"
        # The next cell may go well again.
        assert statuses(runner.measure(cell, hasty)) == {"torch": "ok", "tensorflow": "ok"}


def test_whoever_crashes_at_the_start_is_left_out_for_good(cell, hasty):
    with Runner(places("Right", "ExitingAtStart"), 1) as runner:
        for _ in range(2):
            row = runner.measure(cell, hasty)
            assert statuses(row) == {"torch": "ok", "tensorflow": "crashed"}
            assert row.outcomes[1].detail == "exit status 7"


@pytest.mark.long
def test_whoever_hangs_is_ended(cell, hasty):
    with Runner(places("Right", "Hanging"), 1, patience=10.0) as runner:
        row = runner.measure(cell, hasty)
    assert statuses(row) == {"torch": "ok", "tensorflow": "crashed"}
    assert row.outcomes[1].detail == "no answer in 10 s"


def test_a_worker_that_does_not_start_is_an_error(cell, hasty, monkeypatch, tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        Runner(places("Right"), 1) as runner,
        pytest.raises(BacknormError, match="does not start: exit status 1: ImportError: broken"),
    ):
        runner.measure(cell, hasty)


def test_a_campaign_measures_its_cells(cell, hasty):
    narrow = dataclasses.replace(cell, dtype="float16")
    heard = []
    campaign = Campaign([cell, narrow], places("Ours", "Right"), 1, hasty)
    campaign.run(lambda what, done: heard.append((what, done)))
    assert [what for what, _ in heard] == [str(cell), str(narrow)]
    assert heard[0][1] == 0.0
    assert 0.0 < heard[1][1] < sum(campaign.expected())
    result = campaign.result()
    # Half the rounds for 16 bits.
    assert [row.outcomes[0].timing.samples for row in result.rows] == [4, 2]
    assert campaign.failures() == []
    assert result.environment.versions == {"right": "1.1"}
    assert result.environment.threads == 1
    assert result.settings["rounds"] == 2


def test_a_campaign_keeps_what_it_has_when_interrupted(cell, hasty):
    campaign = Campaign([cell, cell], places("Right"), 1, hasty)

    def interrupted(what, done):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        campaign.run(interrupted)
    assert len(campaign.result().rows) == 1


def test_a_campaign_knows_where_ours_fails(cell, hasty):
    campaign = Campaign([cell], places("WrongOurs"), 1, hasty)
    campaign.run(lambda *_: None)
    (failure,) = campaign.failures()
    assert failure.startswith("backward (2,3,4,5) NCX float32: allocate: dgamma")


def test_larger_cells_are_expected_to_take_longer(hasty):
    small, large = (Cell("s", "backward", (n, 64, 8, 8), "NCX", "float32") for n in (1, 4096))
    campaign = Campaign([small, small, large], places("Right"), 1, hasty)
    first, second, third = campaign.expected()
    # The first includes the start.
    assert second < third
    assert second < first


AFTER = ("cpu", "after-convolution")


def test_a_campaign_measures_in_the_condition_that_it_records(cell, hasty, monkeypatch):
    monkeypatch.setitem(PLACES, AFTER, "fakes:Expensive")
    campaign = Campaign([cell], places("Right"), 3, hasty, *AFTER)
    campaign.check()
    campaign.run(lambda *_: None)
    result = campaign.result()
    assert result.condition == "after-convolution"
    (outcome,) = result.rows[0].outcomes
    # A second for each thread.
    assert outcome.timing.median == 3.0
    assert Campaign([cell], {}, 1, hasty).result().condition == "quiet"


def test_a_condition_that_cannot_be_had_is_refused_in_its_own_words(cell, hasty, monkeypatch):
    monkeypatch.setitem(PLACES, AFTER, "fakes:WithoutPyTorch")
    with pytest.raises(ArgumentValueError) as refusal:
        Campaign([cell], places("Right"), 1, hasty, *AFTER).check()
    assert str(refusal.value) == (
        "--condition after-convolution: PyTorch, whose convolution it is, is not installed; "
        "got no torch; accepted: quiet; or after-convolution where PyTorch is installed; "
        "pip install torch"
    )


def test_convolutions_are_expected_to_take_their_time(cell, hasty):
    quiet, after = (
        sum(Campaign([cell], places("Right"), 1, hasty, "cpu", condition).expected())
        for condition in CONDITIONS
    )
    assert quiet < after


@pytest.mark.long
@pytest.mark.peer
def test_calls_are_timed_after_a_convolution_of_pytorch(cell, hasty):
    pytest.importorskip("torch")
    with Runner(places("Right"), 1, *AFTER) as runner:
        (outcome,) = runner.measure(cell, hasty).outcomes
    assert (outcome.status, outcome.timing.samples) == ("ok", 4)
