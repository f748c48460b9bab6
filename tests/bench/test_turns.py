"""Turns and samples, on a clock that only the calls move."""

from __future__ import annotations

import dataclasses
import itertools
import types

import pytest

from benchmarks import turns
from benchmarks.turns import HOST, SETTINGS, AfterWatch, Settings, order, summary, take_turns


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


def timed(clock, seconds, settings, estimates=None, watch=HOST):
    calls = {name: clock.call(name, value) for name, value in seconds.items()}
    estimates = estimates or dict.fromkeys(seconds, 1e-6)
    return take_turns(calls, settings, lambda key: clock.log.append(f"<{key}>"), estimates, watch)


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


def after_convolution(clock, seconds=4.0):
    return AfterWatch(clock.call("convolution", seconds))


def test_after_a_convolution_every_call_has_one_before_it_that_does_not_count(clock):
    settings = Settings(rounds=2, samples=2, warm=5.0, least=0.0, limit=99)
    samples = timed(clock, {"a": 0.125, "b": 0.5}, settings, watch=after_convolution(clock))
    assert samples == {"a": [0.125] * 4, "b": [0.5] * 4}
    # The warm-up of 5 seconds counts the convolutions: two of 4.
    pairs = ["convolution", "a"] * 4, ["convolution", "b"] * 4
    assert clock.log == ["<a>", *pairs[0], "<b>", *pairs[1], "<b>", *pairs[1], "<a>", *pairs[0]]


def test_after_a_convolution_a_sample_is_one_call_however_short(clock):
    settings = dataclasses.replace(SETTINGS["after-convolution"], limit=1e9)
    seconds = iter([1e-6 * (n + 1) for n in range(1000)])
    samples = timed(clock, {"a": seconds}, settings, watch=after_convolution(clock))
    assert len(samples["a"]) == settings.rounds * settings.samples
    # A call of warm-up and the samples, in each turn.
    assert clock.log.count("a") == clock.log.count("convolution")
    assert clock.log.count("a") == settings.rounds * (1 + settings.samples)
    assert len(set(samples["a"])) == len(samples["a"])


def test_calls_in_a_loop_have_each_their_own_convolution(clock):
    watch = after_convolution(clock)
    assert watch.sample(clock.call("a", iter([1.0, 2.0])), 2) == 1.5
    assert clock.log == ["convolution", "a"] * 2


def test_a_warm_up_after_convolutions_tells_how_long_a_call_takes(clock):
    watch = after_convolution(clock)
    assert watch.warm(clock.call("a", iter([3.0, 1.0])), 10.0) == 2.0
    assert clock.log == ["convolution", "a"] * 2


def test_convolutions_use_up_the_time_of_whom_they_precede(clock):
    settings = Settings(rounds=9, samples=2, warm=0.0, least=0.0, limit=30.0)
    samples = timed(clock, {"a": 1.0}, settings, watch=after_convolution(clock, 9.0))
    # 20 seconds a turn.
    assert len(samples["a"]) == 4


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
