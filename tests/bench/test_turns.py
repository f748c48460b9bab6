"""Turns and samples, on a clock that only the calls move."""

from __future__ import annotations

import itertools
import types

import pytest

from backnorm.bench import turns
from backnorm.bench.turns import HOST, Settings, order, summary, take_turns


class Clock:
    def __init__(self):
        self.now = 0.0
        self.log = []

    def call(self, name, seconds):
        def run():
            self.now += next(seconds) if hasattr(seconds, "__next__") else seconds
            self.log.append(name)

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(turns, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def timed(clock, seconds, settings, estimates=None):
    calls = {name: clock.call(name, value) for name, value in seconds.items()}
    estimates = estimates or dict.fromkeys(seconds, 1e-6)
    return take_turns(calls, settings, lambda key: clock.log.append(f"<{key}>"), estimates, HOST)


def test_every_call_gets_its_turns_and_samples(clock):
    settings = Settings(rounds=3, samples=2, warm=0.25, least=0.0, limit=99)
    samples = timed(clock, {"a": 0.125, "b": 0.5}, settings)
    assert samples == {"a": [0.125] * 6, "b": [0.5] * 6}


def test_a_turn_begins_with_calls_that_do_not_count(clock):
    settings = Settings(rounds=1, samples=1, warm=0.25, least=0.0, limit=99)
    timed(clock, {"a": 0.125, "b": 0.5}, settings)
    # 0.25 seconds' worth, or one call.
    assert clock.log == ["<a>", "a", "a", "a", "<b>", "b", "b"]


def test_the_warm_up_does_not_count(clock):
    settings = Settings(rounds=1, samples=2, warm=0.25, least=0.0, limit=99)
    assert timed(clock, {"a": iter([8.0, 1.0, 2.0])}, settings) == {"a": [1.0, 2.0]}


def test_long_calls_need_no_warm_up(clock):
    settings = Settings(rounds=1, samples=2, warm=0.25, least=0.0, limit=99)
    assert timed(clock, {"a": 6.0}, settings, {"a": 6.0}) == {"a": [6.0, 6.0]}
    assert clock.log == ["<a>", "a", "a"]


def test_short_calls_are_repeated_within_a_sample(clock):
    settings = Settings(rounds=1, samples=2, warm=0.0, least=1.0, limit=99)
    assert timed(clock, {"a": 0.25}, settings, {"a": 0.25}) == {"a": [0.25, 0.25]}
    assert clock.log.count("a") == 2 * 4


def test_whoever_has_used_up_his_time_gets_no_further_turn(clock):
    settings = Settings(rounds=9, samples=2, warm=0.0, least=0.0, limit=5.0)
    samples = timed(clock, {"slow": 1.0, "fast": 0.125}, settings)
    assert len(samples["slow"]) == 6
    assert len(samples["fast"]) == 18


def test_the_slowest_get_one_sample(clock):
    settings = Settings(rounds=9, samples=3, warm=0.0, least=0.0, limit=1.0)
    assert timed(clock, {"a": 8.0}, settings, {"a": 8.0}) == {"a": [8.0]}


def test_turns_are_announced_before_they_begin(clock):
    settings = Settings(rounds=2, samples=1, warm=0.0, least=0.0, limit=99)
    timed(clock, {"a": 1.0, "b": 1.0}, settings)
    assert clock.log == ["<a>", "a", "<b>", "b", "<b>", "b", "<a>", "a"]


def test_the_order_changes_from_round_to_round():
    keys = list("abcd")
    rounds = [order(keys, number) for number in range(8)]
    assert all(sorted(turn) == keys for turn in rounds)
    assert {turn[0] for turn in rounds} == set(keys)
    before = {(x, y) for turn in rounds for x, y in itertools.pairwise(turn)}
    assert all((y, x) in before for x, y in before)


def test_nobody_takes_turns():
    assert take_turns({}, Settings(), print, {}, HOST) == {}


def test_a_summary_has_median_and_percentiles():
    timing = summary([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert timing.median == 3.5
    assert timing.p20 == 2.0
    assert timing.p80 == 5.0
    assert timing.samples == 6
