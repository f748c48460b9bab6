"""Progress is for people: on stderr, on a terminal, and nowhere else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from backnorm.cli import progress as progress_module
from backnorm.cli.progress import progress


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


def test_elsewhere_nothing_is_shown(screen):
    stream = screen(False)
    with progress(2) as advance:
        advance("reading")
    assert stream.getvalue() == ""


def test_the_command_is_silent_on_stderr(cli, write_json, npz, call):
    assert cli("run", write_json(call()), "--tensors", npz).stderr == ""
