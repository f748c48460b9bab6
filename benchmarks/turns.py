"""Time several calls in turns, so that other load on the machine slows all of them alike."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from backnorm.steps import Key, take_turns

__all__ = ["SETTINGS", "HostWatch", "Settings", "Timed", "Timing", "Watch", "in_turns", "median",
           "timing"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to measure.

    Attributes
    ----------
    rounds : int
        Turns of each call, unless `limit` ends them.
    samples : int
        Samples of a turn.
    warm : float
        Seconds of untimed calls at the beginning of a turn: at least one call, but none of a call
        that takes 20 times as long. Untimed calls load the cache with the call's data. Meanwhile
        OpenMP's threads of the last contestant stop spinning, which takes some milliseconds.
    least : float
        The least seconds of a sample: shorter calls are repeated in a loop.
    limit : float
        Seconds of turns after which a call gets no further turn. A turn ends after a sample that
        takes this long.
    """

    rounds: int = 4
    samples: int = 3
    warm: float = 0.02
    least: float = 1e-4
    limit: float = 0.4


#: The usual settings of each condition. After a convolution a sample is one call, so there are more
#: turns and samples.
SETTINGS = {
    "quiet": Settings(),
    "after-convolution": Settings(rounds=10, samples=5, least=0.0),
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median, 20th and 80th percentile of its samples."""

    median: float
    p20: float
    p80: float


class Watch(Protocol):
    """A clock for calls."""

    def warm(self, call: Any, seconds: float) -> float:
        """Make calls for `seconds`, at least one; return the approximate seconds of one."""

    def sample(self, call: Any, loop: int) -> float:
        """Make `loop` calls and return the seconds of one."""


class HostWatch:
    """The clock of this process, for calls that are complete when they return.

    Parameters
    ----------
    before : callable, optional
        Called before each timed call; the time of `before` does not count.
    """

    def __init__(self, before: Callable[[], object] | None = None) -> None:
        self._before = before

    def warm(self, call: Callable[[], object], seconds: float) -> float:
        """Make calls for `seconds`, at least one; return the approximate seconds of one."""
        begin = time.perf_counter()
        taken = []
        while True:
            taken.append(self.sample(call, 1))
            if time.perf_counter() - begin >= seconds:
                return sum(taken) / len(taken)

    def sample(self, call: Callable[[], object], loop: int) -> float:
        """Make `loop` calls and return the seconds of one."""
        if self._before is None:
            start = time.perf_counter()
            for _ in itertools.repeat(None, loop):
                call()
            return (time.perf_counter() - start) / loop
        taken = 0.0
        for _ in range(loop):
            self._before()
            start = time.perf_counter()
            call()
            taken += time.perf_counter() - start
        return taken / loop


class Timed:
    """A call with the clock that times it.

    Parameters
    ----------
    call : object
        The call, in the form that `watch` takes.
    watch : Watch
    seconds : float
        The time of an earlier call; 0 if unknown.
    """

    def __init__(self, call: Any, watch: Watch, seconds: float = 0.0) -> None:
        self._call, self._watch, self._seconds = call, watch, seconds

    def turn(self, settings: Settings) -> list[float]:
        """Return the samples of a turn, in seconds a call."""
        samples: list[float] = []
        collects = gc.isenabled()
        gc.disable()
        try:
            # A call that is much longer than the warm-up needs no warm-up.
            if self._seconds < 20 * settings.warm or not self._seconds:
                self._seconds = self._watch.warm(self._call, settings.warm)
            loop = max(1, math.ceil(settings.least / max(self._seconds, 1e-9)))
            for _ in range(settings.samples):
                samples.append(self._watch.sample(self._call, loop))
                if samples[-1] * loop >= settings.limit:
                    break
        finally:
            if collects:
                gc.enable()
        return samples


def in_turns(
    calls: Mapping[Key, Callable[[], object]], settings: Settings
) -> dict[Key, list[float]]:
    """Return samples of calls in this process, in seconds a call."""
    watch = HostWatch()
    timed = {key: Timed(call, watch) for key, call in calls.items()}
    turns = {key: (lambda each=each: each.turn(settings)) for key, each in timed.items()}
    return take_turns(turns, settings.rounds, settings.limit)


def timing(samples: Sequence[float]) -> Timing:
    """Return median, 20th and 80th percentile."""
    p20, middle, p80 = np.percentile(np.asarray(samples), (20, 50, 80))
    return Timing(float(middle), float(p20), float(p80))


def median(samples: Iterable[float]) -> float:
    """Return the median."""
    return float(np.median(list(samples)))
