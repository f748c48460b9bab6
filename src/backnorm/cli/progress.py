"""Progress of long work, on stderr and only where a person watches it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

__all__ = ["Advance", "new_bar", "progress"]

#: Say what is being done now, and that what was said before is done.
Advance = Callable[[str], None]


@contextlib.contextmanager
def progress(total: int) -> Iterator[Advance]:
    """Show a bar of `total` pieces of work, if stderr is a terminal; yield how to advance it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with new_bar(console) as bar:
        task = bar.add_task("", total=total)
        started = False

        def advance(what: str) -> None:
            nonlocal started
            bar.update(task, description=escape(what), advance=1 if started else 0)
            started = True

        yield advance


def new_bar(console: Console) -> Progress:
    """Return a bar with a description and times, not yet shown."""
    return Progress(
        BarColumn(20),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        _TimeLeftColumn(),
        console=console,
        transient=True,
        # Seldom: it takes processor time from what is done, which may be timed.
        refresh_per_second=2,
    )


class _TimeLeftColumn(ProgressColumn):
    """The time left if the rest goes on as it did so far: pieces take seconds, not moments."""

    def render(self, task: Task) -> Text:
        if not task.completed or task.total is None or task.elapsed is None:
            return Text()
        left = task.elapsed * (task.total - task.completed) / task.completed
        return Text(f"{int(left) // 60}:{int(left) % 60:02} left")
