"""Progress is for people: on stderr, on a terminal, and nowhere else."""

from __future__ import annotations

import functools
import io

import pytest
from rich.console import Console
from rich.progress import Progress

from backnorm.cli import progress as progress_module
from backnorm.cli.progress import progress, weighted_progress


@pytest.fixture
def screen(monkeypatch):
    stream = io.StringIO()

    def use(terminal):
        monkeypatch.setattr(
            progress_module,
            "Console",
            lambda **_: Console(file=stream, force_terminal=terminal, width=80),
        )
        return stream

    return use


def test_a_terminal_shows_what_is_being_done(screen):
    stream = screen(True)
    with progress(2) as advance:
        advance("reading [x]")
        advance("running")
    assert "running" in stream.getvalue()


def test_the_time_left_follows_from_what_is_done(screen, monkeypatch):
    stream, now = screen(True), 0.0
    monkeypatch.setattr(
        progress_module, "Progress", functools.partial(Progress, get_time=lambda: now)
    )
    with progress(4) as advance:
        advance("the first of four")
        now = 90.0
        advance("the second")
    assert "4:30 left" in stream.getvalue()


def test_the_time_left_follows_from_what_pieces_weigh(screen, monkeypatch):
    stream, now = screen(True), 0.0
    monkeypatch.setattr(
        progress_module, "Progress", functools.partial(Progress, get_time=lambda: now)
    )
    with weighted_progress(100.0) as advance:
        advance("a small one", 0.0)
        now = 10.0
        advance("a large [one]", 20.0)
    assert "a large [one]" in stream.getvalue()
    assert "0:40 left" in stream.getvalue()


def test_elsewhere_nothing_is_shown(screen):
    stream = screen(False)
    with progress(2) as advance:
        advance("reading")
    with weighted_progress(2.0) as advance:
        advance("a cell", 1.0)
    assert stream.getvalue() == ""


def test_the_command_is_silent_on_stderr(cli, write_json, npz, call):
    assert cli("run", write_json(call()), "--tensors", npz).stderr == ""
