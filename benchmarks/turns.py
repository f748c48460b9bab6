"""Timing several calls in turns, so that whatever else the machine does falls on all of them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from benchmarks.model import Condition, Timing

__all__ = [
    "HOST",
    "SETTINGS",
    "AfterWatch",
    "Settings",
    "Watch",
    "order",
    "summary",
    "take_turns",
]

Key = TypeVar("Key", bound=Hashable)
Call = TypeVar("Call")
_Call = TypeVar("_Call", contravariant=True)


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to measure.

    Attributes
    ----------
    rounds : int
        Turns that each call gets, unless its time is up.
    samples : int
        Samples of a turn.
    warm : float
        Seconds of calls at the beginning of a turn that do not count, one call at the least:
        OpenMP's threads spin for some milliseconds after their last region and would take a
        processor from whoever comes next, and the cache must hold the call's own data.
    least : float
        Seconds of a sample at the least: shorter calls are repeated in a loop.
    limit : float
        Seconds after which a call gets no further turn; and no further sample of its first turn
        if a single sample takes that long.
    """

    rounds: int = 4
    samples: int = 3
    warm: float = 0.02
    least: float = 1e-4
    limit: float = 0.4


#: What is usual in each condition.
SETTINGS: dict[Condition, Settings] = {
    "quiet": Settings(),
    # A second call in a row would be quiet, so a sample is one call however short it is, and more
    # samples make up for that. More turns rather than longer ones: `limit` then spares long calls
    # most of them.
    "after-convolution": Settings(rounds=10, samples=5, least=0.0),
}


@dataclass(slots=True)
class _State:
    """What one call has spent, and its samples."""

    spent: float = 0.0
    estimate: float = 0.0
    samples: list[float] = field(default_factory=list)


class Watch(Protocol[_Call]):
    """What seconds are read from."""

    def warm(self, call: _Call, seconds: float) -> float:
        """Make calls for so long, one at the least; return about how long one takes."""

    def sample(self, call: _Call, loop: int) -> float:
        """Make `loop` calls and return the seconds of one."""


def take_turns(
    calls: Mapping[Key, Call],
    settings: Settings,
    announce: Callable[[Key], None],
    estimates: Mapping[Key, float],
    watch: Watch[Call],
) -> dict[Key, list[float]]:
    """Return samples, in seconds a call, of every call.

    Parameters
    ----------
    calls : mapping
        What to time, by a key; such as `watch` takes.
    settings : Settings
    announce : callable
        Told whose turn begins, before anything of it runs.
    estimates : mapping
        Seconds of an earlier call, by key; more than none.
    watch : Watch
    """
    states = {key: _State(estimate=estimates[key]) for key in calls}
    for number in range(settings.rounds):
        for key in order(list(calls), number):
            state = states[key]
            if state.samples and state.spent >= settings.limit:
                continue
            announce(key)
            _turn(calls[key], state, settings, watch)
    return {key: state.samples for key, state in states.items()}


def order(keys: Sequence[Key], number: int) -> list[Key]:
    """Return the order of round `number`.

    It begins with another key each time, and every other round goes backwards, so that nobody
    always follows the same neighbour.
    """
    start = number % max(1, len(keys))
    step = -1 if number % 2 else 1
    return [keys[(start + step * i) % len(keys)] for i in range(len(keys))]


def summary(samples: Sequence[float]) -> Timing:
    """Return median, 20th and 80th percentile."""
    p20, median, p80 = np.percentile(np.asarray(samples), (20, 50, 80))
    return Timing(float(median), float(p20), float(p80), len(samples))


def _turn(call: Call, state: _State, settings: Settings, watch: Watch[Call]) -> None:
    begin = time.perf_counter()
    # A call so long that what went before does not show in it is its own warm-up.
    if state.estimate < 20 * settings.warm:
        state.estimate = watch.warm(call, settings.warm)
    loop = max(1, math.ceil(settings.least / max(state.estimate, 1e-9)))
    for _ in range(settings.samples):
        state.samples.append(watch.sample(call, loop))
        if state.samples[-1] * loop >= settings.limit:
            break
    state.spent += time.perf_counter() - begin


class _HostWatch:
    """The clock of this process, for calls that are done when they return."""

    def warm(self, call: Callable[[], Any], seconds: float) -> float:
        begin = time.perf_counter()
        calls = 0
        while True:
            call()
            calls += 1
            warmed = time.perf_counter() - begin
            if warmed >= seconds:
                return warmed / calls

    def sample(self, call: Callable[[], Any], loop: int) -> float:
        start = time.perf_counter()
        for _ in itertools.repeat(None, loop):
            call()
        return (time.perf_counter() - start) / loop


#: Times calls that are done when they return.
HOST = _HostWatch()


class AfterWatch:
    """The clock of this process, for calls that are each timed right after another one.

    Parameters
    ----------
    before : callable
        Called before each call; its time does not count.
    """

    def __init__(self, before: Callable[[], Any]) -> None:
        self._before = before

    def warm(self, call: Callable[[], Any], seconds: float) -> float:
        """Make calls, and those before them, for so long; return how long one call takes."""
        begin = time.perf_counter()
        taken = []
        while True:
            taken.append(self._once(call))
            if time.perf_counter() - begin >= seconds:
                return sum(taken) / len(taken)

    def sample(self, call: Callable[[], Any], loop: int) -> float:
        """Make `loop` calls, each right after what comes before it; return the seconds of one."""
        return sum(self._once(call) for _ in range(loop)) / loop

    def _once(self, call: Callable[[], Any]) -> float:
        self._before()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
