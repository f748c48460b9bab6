"""Turns and samples, on a clock that only the calls move."""

from __future__ import annotations

import itertools
import types

import pytest

from backnorm import steps
from backnorm.steps import order, take_turns
from benchmarks import turns
from benchmarks.turns import HostWatch, Settings, Timed, in_turns, timing


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
    for module in (turns, steps):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def settings(**changes):
    return Settings(
        **{"rounds": 1, "samples": 2, "warm": 0.0, "least": 0.0, "limit": 99, **changes}
    )


def one_turn(clock, seconds, chosen, known=0.0, before=None):
    return Timed(clock.call("a", seconds), HostWatch(before), known).turn(chosen)


def test_in_turns_returns_all_samples_of_each_call(clock):
    calls = {"a": clock.call("a", 0.125), "b": clock.call("b", 0.5)}
    samples = in_turns(calls, settings(rounds=3, warm=0.25))
    assert samples == {"a": [0.125] * 6, "b": [0.5] * 6}


def test_in_turns_changes_order_between_rounds(clock):
    calls = {"a": clock.call("a", 1.0), "b": clock.call("b", 1.0)}
    in_turns(calls, settings(rounds=2, samples=1, warm=1e-9))
    assert [name for name, _ in itertools.groupby(clock.log)] == ["a", "b", "a"]


def test_turn_excludes_warm_up_calls(clock):
    assert one_turn(clock, iter([8.0, 1.0, 2.0]), settings(warm=0.25)) == [1.0, 2.0]


def test_turn_of_long_call_skips_warm_up(clock):
    assert one_turn(clock, 6.0, settings(warm=0.25), known=6.0) == [6.0, 6.0]
    assert clock.log == ["a", "a"]


def test_turn_of_short_call_repeats_it_within_sample(clock):
    assert one_turn(clock, 0.25, settings(least=1.0)) == [0.25, 0.25]
    assert clock.log.count("a") == 1 + 2 * 4


def test_turn_stops_after_sample_that_exceeds_limit(clock):
    assert one_turn(clock, 1.0, settings(samples=5, limit=0.5)) == [1.0]


def test_turn_after_convolution_runs_untimed_convolution_before_each_call(clock):
    before = clock.call("convolution", 4.0)
    assert one_turn(clock, 0.125, settings(), before=before) == [0.125, 0.125]
    assert clock.log == ["convolution", "a"] * 3


def test_take_turns_stops_a_call_at_its_limit(clock):
    def turn():
        clock.now += 1.0
        return [1.0]

    assert take_turns({"a": turn, "b": lambda: [0.0]}, 5, limit=2.0) == {
        "a": [1.0, 1.0],
        "b": [0.0] * 5,
    }


def test_order_permutes_keys_and_changes_first_key():
    rounds = [order("abc", number) for number in range(4)]
    assert rounds[0] == ["a", "b", "c"]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len({each[0] for each in rounds[:3]}) == 3
    assert len({tuple(each) for each in rounds}) > 2


def test_timing_returns_median_and_percentiles():
    found = timing([float(number) for number in range(11)])
    assert (found.p20, found.median, found.p80) == (2.0, 5.0, 8.0)
