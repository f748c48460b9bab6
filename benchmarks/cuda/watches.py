"""Clocks for the two times of a call on a GPU: the device's time, and that of a whole call.

CUDA events measure the device's time. A call costs the host some microseconds (looking up the
operator, allocating, launching) before the device has work. So before each measured stretch of
calls the device gets other work, which lasts until the host has queued the whole stretch. Then the
device runs the kernels of the stretch without gaps.

The other work is reading several times as many bytes as the L2 cache holds. It also determines the
state of the cache:

- A call on more than `SMALL` bytes of x is one stretch, and the L2 has none of its inputs. In
  training the inputs of a backward pass were written long before the pass, so a warm L2 would make
  a problem of 20 MB too fast. Inputs are not rotated instead, because rotation takes several times
  the memory, and a cache as large as three arrays would still hold some of them.
- Smaller calls are repeated in one stretch, after an untimed call, because a pair of events costs
  as much as such a call. In a long stretch that cost is small. The L2 has the inputs of these
  calls, as in a network, where the layer before has just written them.

The time of a whole call is measured by the host: it makes many calls in a row, then waits for all.
This is the larger of the device's time and the host's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.cuda.device import Cuda

__all__ = ["SMALL", "DeviceWatch", "Queued", "WholeWatch"]

#: Bytes of x up to which a problem is small, so that the host's part of a call is noticeable.
SMALL = 1 << 20

# The device's other work lasts `_MARGIN` times the slowest observed dispatch of the calls, plus
# `_EVENTS` seconds for the events. A dispatch of more than `_INTERRUPTED` times the fastest was
# interrupted, and is ignored.
_MARGIN = 1.5
_INTERRUPTED = 5
_EVENTS = 2e-5

# The most calls of a stretch: the device's queue holds a thousand launches, a call makes a few.
_MOST_QUEUED = 100

# Calls that the host's clock times together, so that the wait for the last adds little to each.
_MANY = 20


@dataclass(slots=True)
class Queued:
    """A call that only queues work.

    Attributes
    ----------
    call : callable
    finish : callable or None
        As in `Prepared`.
    cold : bool
        Whether it is timed with an L2 that does not hold its inputs.
    dispatch : float
        Seconds that the host takes; measured by `DeviceWatch.warm`.
    """

    call: Callable[[], Any]
    finish: Callable[[Any], Any] | None
    cold: bool
    dispatch: float = 0.0


class DeviceWatch:
    """Measures the device's time of a call.

    Calls that have a `finish` are not in PyTorch's stream, so its events cannot time them. They are
    timed as whole calls, in long rows, where the host's part matters only if it is longer than the
    device's. The L2 is emptied before each row, not before each call.
    """

    def __init__(self, device: Cuda) -> None:
        self._device = device

    def warm(self, call: Queued, seconds: float) -> float:
        """Make calls for `seconds`; store `dispatch`; return the approximate seconds of a call."""
        begin = time.perf_counter()
        spent = []
        while True:
            start = time.perf_counter()
            returned = call.call()
            spent.append(time.perf_counter() - start)
            self._device.wait(call, returned)
            if time.perf_counter() - begin >= seconds:
                break
        # On a virtual machine some dispatches take three times as long as others. If the device had
        # no work until a call is queued, the events would measure the host.
        fastest = min(spent)
        call.dispatch = max(each for each in spent if each <= _INTERRUPTED * fastest)
        return self.sample(call, 1)

    def sample(self, call: Queued, loop: int) -> float:
        """Make `loop` calls; return the seconds of one."""
        if call.finish is not None:
            self._device.flush(0.0)
            self._device.synchronise()
            return _row(self._device, call, loop * _MANY)
        loop = min(loop, _MOST_QUEUED)
        if call.cold:
            pairs = [self._stretch(call, 1) for _ in range(loop)]
        else:
            pairs = [self._stretch(call, loop)]
        self._device.synchronise()
        milliseconds = sum(float(start.elapsed_time(end)) for start, end in pairs)
        return milliseconds / 1e3 / loop

    def _stretch(self, call: Queued, loop: int) -> tuple[Any, Any]:
        """Queue calls between two events, after other work that lasts until they are queued."""
        self._device.flush(_MARGIN * (loop + 1) * call.dispatch + _EVENTS)
        start, end = self._device.event(), self._device.event()
        if not call.cold:
            call.call()
        start.record()
        for _ in itertools.repeat(None, loop):
            call.call()
        end.record()
        return start, end


class WholeWatch:
    """Measures the time of a whole call, dispatch included, by the host's clock."""

    def __init__(self, device: Cuda) -> None:
        self._device = device

    def warm(self, call: Queued, seconds: float) -> float:
        """Make calls for `seconds`; return the seconds of one."""
        begin = time.perf_counter()
        calls = 0
        while True:
            calls += _MANY
            _row(self._device, call, _MANY)
            warmed = time.perf_counter() - begin
            if warmed >= seconds:
                return warmed / calls

    def sample(self, call: Queued, loop: int) -> float:
        """Make `loop * _MANY` calls; return the seconds of one."""
        return _row(self._device, call, loop * _MANY)


def _row(device: Cuda, call: Queued, calls: int) -> float:
    """Make calls in a row, wait for the last, and return the seconds of one."""
    begin = time.perf_counter()
    for _ in itertools.repeat(None, calls - 1):
        call.call()
    device.wait(call, call.call())
    return (time.perf_counter() - begin) / calls
