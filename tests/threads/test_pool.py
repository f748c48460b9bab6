"""Threads of our own, in the situations that end other threading layers."""

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
def test_signals_come_before_or_after_a_call(drive, options):
    drive("signals", 300, *options)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options", [(), ("pinned",), ("torch",), ("torch", "pinned"), ("allocating",)]
)
def test_thousands_of_signals(drive, options):
    drive("signals", 2500, *options)


def test_forked_children_have_a_pool_of_their_own(drive):
    drive("forks", 20)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [(), ("torch",)])
def test_hundreds_of_forks(drive, options):
    drive("forks", 500, *options)


def test_sixteen_callers_at_once(drive):
    drive("crowd", 16, 20)


def test_a_system_that_refuses_threads_is_asked_again_later(drive):
    drive("refused")


def test_threads_follow_the_processors_of_their_caller(drive):
    drive("affinity")


@pytest.mark.parametrize("options", ["daemon", "daemon_raises", "atexit", "finaliser"])
def test_a_process_ends_whatever_its_threads_do(drive, options):
    drive("endings", options)
