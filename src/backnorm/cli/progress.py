"""Progress of long work, on stderr and only where a person watches it."""

from __future__ import annotations

import contextlib
import itertools
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

__all__ = ["Advance", "AdvanceTo", "progress", "weighted_progress"]

#: Say what is being done now, and that what was said before is done.
Advance = Callable[[str], None]
#: Say what is being done now, and how much is done.
AdvanceTo = Callable[[str, float], None]


@contextlib.contextmanager
def progress(total: int) -> Iterator[Advance]:
    """Show a bar of `total` pieces of work, if stderr is a terminal; yield how to advance it."""
    with weighted_progress(total) as advance_to:
        begun = itertools.count()
        yield lambda what: advance_to(what, next(begun))


@contextlib.contextmanager
def weighted_progress(total: float) -> Iterator[AdvanceTo]:
    """Show the same for work whose pieces are not alike; `total` is in any unit."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda *_: None
        return
    with _new_bar(console) as bar:
        task = bar.add_task("", total=total)
        yield lambda what, done: bar.update(task, description=escape(what), completed=done)


def _new_bar(console: Console) -> Progress:
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
