"""Numbers of things, literal text, and progress on a terminal."""

from __future__ import annotations

import functools
import io
import re

import pytest
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from backnorm.cli import progress as progress_module
from backnorm.cli.progress import progress
from backnorm.cli.text import LiteralConsole
from backnorm.errors import counted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 threads"), (1, "1 thread"), (2, "2 threads"), (21, "21 threads")]
)
def test_counted_uses_the_singular_for_one(number, text):
    assert counted(number, "thread") == text


def test_literal_console_prints_markup_and_control_characters_as_text():
    literal = "[/x] [red]a[/red] :smile: \x1b[31m\r\udcff"
    shown = r"[/x] [red]a[/red] :smile: \x1b[31m\r\udcff"
    console = LiteralConsole(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    table = Table(literal, title=literal, caption=literal)
    table.add_row(literal)
    console.print(literal)
    console.print(table)
    lines = re.sub(r"\x1b\[\d*m", "", console.file.getvalue()).splitlines()
    assert lines[0] == shown
    assert sum(shown in line for line in lines) == 5


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


def test_progress_on_a_terminal_shows_work_and_time_left(screen, monkeypatch):
    stream, now = screen(True), 0.0
    monkeypatch.setattr(
        progress_module, "Progress", functools.partial(Progress, get_time=lambda: now)
    )
    with progress(4) as advance:
        for piece in range(3):
            advance(f"piece {piece} [/x] :smile:")
            now += 20.0
    assert "piece 2 [/x] :smile:" in stream.getvalue()
    assert "0:00:40" in stream.getvalue()


def test_progress_without_terminal_shows_nothing(screen):
    stream = screen(False)
    with progress(2) as advance:
        advance("reading")
    assert stream.getvalue() == ""
