"""The pool of threads in situations that end processes of other threading layers."""

from __future__ import annotations

import pytest

from backnorm import machine

two = pytest.mark.skipif(machine.processors() < 2, reason="needs two processors")
pytestmark = [two, pytest.mark.skipif("sys.platform != 'linux'", reason="the pool is Linux's")]


@pytest.mark.parametrize(
    "options",
    [
        (),
        *(pytest.param((options,), marks=pytest.mark.long) for options in ("pinned", "allocating")),
    ],
)
def test_calls_interrupted_by_signals_stop_writing_and_keep_results(drive, options):
    drive("signals", 300, *options)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options", [(), ("pinned",), ("torch",), ("torch", "pinned"), ("allocating",)]
)
def test_calls_interrupted_by_thousands_of_signals_stop_writing_and_keep_results(drive, options):
    drive("signals", 2500, *options)


def test_forked_children_use_their_own_pool(drive):
    drive("forks", 20)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [(), ("torch",)])
def test_hundreds_of_forked_children_use_their_own_pool(drive, options):
    drive("forks", 500, *options)


def test_pool_with_16_callers_computes_same_bits_within_thread_limit(drive):
    drive("crowd", 16, 20)


def test_pool_retries_later_when_system_refuses_threads(drive):
    drive("refused")


def test_pool_threads_follow_affinity_of_caller(drive):
    drive("affinity")


@pytest.mark.parametrize(
    "options", ["daemon", "daemon_raises", "atexit", "finaliser", "late_finaliser"]
)
def test_process_with_computing_threads_or_exit_handlers_exits_with_0(drive, options):
    drive("endings", options)
