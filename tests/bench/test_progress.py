"""Progress of a run is for people: on a terminal, and nowhere else."""

from __future__ import annotations

import functools
import io

import pytest
from rich.console import Console
from rich.progress import Progress

from backnorm.cli import progress as bar
from benchmarks import progress as progress_module
from benchmarks.progress import weighted_progress


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


def test_the_time_left_follows_from_what_cells_weigh(screen, monkeypatch):
    stream, now = screen(True), 0.0
    monkeypatch.setattr(bar, "Progress", functools.partial(Progress, get_time=lambda: now))
    with weighted_progress(100.0) as advance:
        advance("a small one", 0.0)
        now = 10.0
        advance("a large [one]", 20.0)
    assert "a large [one]" in stream.getvalue()
    assert "0:40 left" in stream.getvalue()


def test_elsewhere_nothing_is_shown(screen):
    stream = screen(False)
    with weighted_progress(2.0) as advance:
        advance("a cell", 1.0)
    assert stream.getvalue() == ""
