"""Times of calls on a GPU, against a host and a device whose clocks only what they do moves."""

from __future__ import annotations

import math
import types

import pytest

from benchmarks.cuda import watches
from benchmarks.cuda.watches import DeviceWatch, Queued, WholeWatch

FLUSH = 70e-6


class Simulation:
    """A host that queues, and a device that does what is queued, one thing after the other."""

    def __init__(self, dispatch, work, *, own_stream=False, cold_work=None):
        self.now = 0.0
        self.idle_at = 0.0
        self.dispatch = dispatch
        self.work = work
        self.cold_work = cold_work or work
        self.cached = False
        self.flushes = 0
        self.calls = 0
        # Work in another stream, of which the events here see nothing.
        self.own_stream = own_stream
        self.other_idle_at = 0.0

    def queue(self, seconds):
        self.idle_at = max(self.idle_at, self.now) + seconds

    def call(self):
        self.now += self.dispatch
        self.calls += 1
        seconds = self.work if self.cached else self.cold_work
        self.cached = True
        if self.own_stream:
            self.other_idle_at = max(self.other_idle_at, self.now) + seconds
        else:
            self.queue(seconds)

    def finish(self, returned):
        self.now = max(self.now, self.other_idle_at)

    # What a watch asks of a device.

    def flush(self, seconds):
        times = max(1, math.ceil(seconds / FLUSH))
        self.flushes += times
        self.now += 5e-6 * times
        self.queue(FLUSH * times)
        self.cached = False

    def event(self):
        simulation = self

        class Event:
            def record(self):
                simulation.now += 1e-6
                simulation.queue(0.0)
                self.at = simulation.idle_at

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        return Event()

    def synchronise(self):
        self.now = max(self.now, self.idle_at, self.other_idle_at)

    def wait(self, call, returned):
        if call.finish:
            call.finish(returned)
        else:
            self.synchronise()

    def queued(self, *, cold):
        return Queued(self.call, self.finish if self.own_stream else None, cold)


@pytest.fixture
def simulated(monkeypatch):
    def simulate(*args, **options):
        simulation = Simulation(*args, **options)
        clock = types.SimpleNamespace(perf_counter=lambda: simulation.now)
        monkeypatch.setattr(watches, "time", clock)
        return simulation

    return simulate


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("loop", [1, 10, 1000])
@pytest.mark.parametrize("dispatch", [1e-6, 30e-6, 400e-6])
def test_device_watch_excludes_host_time(simulated, cold, loop, dispatch):
    simulation = simulated(dispatch, work=4e-6)
    watch, call = DeviceWatch(simulation), simulation.queued(cold=cold)
    assert watch.warm(call, 1e-3) == pytest.approx(4e-6)
    assert watch.sample(call, loop) == pytest.approx(4e-6)


def test_device_watch_without_lead_includes_host_time(simulated):
    """Check of the simulation: without the lead, the time is wrong."""
    simulation = simulated(30e-6, work=4e-6)
    simulation.flush = lambda seconds: None
    watch, call = DeviceWatch(simulation), simulation.queued(cold=False)
    watch.warm(call, 1e-3)
    assert watch.sample(call, 10) > 25e-6


def test_device_watch_flushes_cache_before_cold_calls(simulated):
    simulation = simulated(10e-6, work=10e-6, cold_work=50e-6)
    watch, call = DeviceWatch(simulation), simulation.queued(cold=True)
    watch.warm(call, 0.0)
    before = simulation.flushes
    assert watch.sample(call, 8) == pytest.approx(50e-6)
    assert simulation.flushes - before >= 8


def test_device_watch_keeps_cache_warm_for_small_calls(simulated):
    simulation = simulated(10e-6, work=10e-6, cold_work=50e-6)
    watch, call = DeviceWatch(simulation), simulation.queued(cold=False)
    watch.warm(call, 0.0)
    before = simulation.calls
    assert watch.sample(call, 8) == pytest.approx(10e-6)
    # One more than counts.
    assert simulation.calls - before == 9


def test_device_watch_queues_a_hundred_calls_at_most(simulated):
    simulation = simulated(10e-6, work=1e-6)
    watch, call = DeviceWatch(simulation), simulation.queued(cold=False)
    watch.warm(call, 0.0)
    before = simulation.calls
    watch.sample(call, 10**6)
    assert simulation.calls - before <= 101


@pytest.mark.parametrize("cold", [False, True])
def test_device_watch_times_other_streams_by_host_clock(simulated, cold):
    simulation = simulated(10e-6, work=100e-6, own_stream=True)
    watch, call = DeviceWatch(simulation), simulation.queued(cold=cold)
    assert watch.warm(call, 1e-3) == pytest.approx(100e-6, rel=0.02)
    assert watch.sample(call, 5) == pytest.approx(100e-6, rel=0.02)


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize(("dispatch", "work"), [(30e-6, 4e-6), (5e-6, 50e-6)])
def test_whole_watch_returns_longer_of_host_and_device_time(simulated, own_stream, dispatch, work):
    simulation = simulated(dispatch, work, own_stream=own_stream)
    watch, call = WholeWatch(simulation), simulation.queued(cold=False)
    assert watch.warm(call, 1e-3) == pytest.approx(max(dispatch, work), rel=0.1)
    assert watch.sample(call, 5) == pytest.approx(max(dispatch, work), rel=0.1)
    assert simulation.flushes == 0
