"""Clocks for the two times of a call on a GPU: the device's, and that of a whole call.

The device's time is read off CUDA events. A call costs the host some microseconds (looking up the
operator, allocating, launching) before the device has anything to do. So before each measured
stretch the device is given work that keeps it busy until the host has queued the stretch whole;
events then meet a device that goes from one kernel to the next.

That work is reading several times as many bytes as the L2 cache holds, which also makes all
problems meet the same cache:

- A call on more than `SMALL` bytes of x is one stretch, so it finds the L2 without its inputs. The
  inputs of a backward pass were written long before, and a problem of 20 MB would otherwise be
  timed from a cache that it finds in no training. Inputs are not rotated instead, because that
  takes several times the memory, and leaves something of them in a cache as large as three arrays.
- Smaller calls are repeated in one stretch, after one that does not count: a pair of events costs
  as much as such a call, and what is left of it in a long stretch is little. They find their
  inputs in the L2, as they do in use, where the layer before has just written them.

The time of a whole call is the host's: many calls in a row, then wait for all. It is what the
device takes, or what the host takes for its part, whichever is longer.
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

#: Bytes of x up to which a problem is small: the host's part of a call shows.
SMALL = 1 << 20

# The host may take so many times as long as the slowest call took while it was watched (a call that
# took many times the fastest was interrupted), and so many seconds for the events themselves.
_MARGIN = 1.5
_INTERRUPTED = 5
_EVENTS = 2e-5

# Calls in one stretch: the device's queue takes a thousand launches, and a call is a few.
_MOST_QUEUED = 100

# Calls that the host's clock times instead of one, so that waiting for the last shows little.
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
    """Tells the device's time of a call.

    Calls that have a `finish` are not in PyTorch's stream, and its events do not see them. They are
    timed as whole calls, in long rows: the host's part of a call shows only where it is longer than
    the device's. The L2 is emptied before a row, not before a call.
    """

    def __init__(self, device: Cuda) -> None:
        self._device = device

    def warm(self, call: Queued, seconds: float) -> float:
        """Make calls for so long; return about how long one takes, and note the host's part."""
        begin = time.perf_counter()
        spent = []
        while True:
            start = time.perf_counter()
            returned = call.call()
            spent.append(time.perf_counter() - start)
            self._device.wait(call, returned)
            if time.perf_counter() - begin >= seconds:
                break
        # The host of a virtual machine takes three times as long for some calls as for others. If
        # the device had nothing to do before a call is queued, its time would be the host's.
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
        """Queue calls between two events behind work that lasts until they are queued."""
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
    """Tells the time of a whole call, dispatch included, as the host sees it."""

    def __init__(self, device: Cuda) -> None:
        self._device = device

    def warm(self, call: Queued, seconds: float) -> float:
        """Make calls for so long; return how long one takes."""
        begin = time.perf_counter()
        calls = 0
        while True:
            calls += _MANY
            _row(self._device, call, _MANY)
            warmed = time.perf_counter() - begin
            if warmed >= seconds:
                return warmed / calls

    def sample(self, call: Queued, loop: int) -> float:
        """Make `loop` calls many times over; return the seconds of one."""
        return _row(self._device, call, loop * _MANY)


def _row(device: Cuda, call: Queued, calls: int) -> float:
    """Make calls in a row, wait for the last, and return the seconds of one."""
    begin = time.perf_counter()
    for _ in itertools.repeat(None, calls - 1):
        call.call()
    device.wait(call, call.call())
    return (time.perf_counter() - begin) / calls
