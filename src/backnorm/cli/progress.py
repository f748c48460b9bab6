"""Progress of long work, on stderr and only where a person watches it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Advance", "progress"]

#: Say what is being done now, and that what was said before is done.
Advance = Callable[[str], None]


@contextlib.contextmanager
def progress(total: int) -> Iterator[Advance]:
    """Show a bar of `total` pieces of work, if stderr is a terminal; yield how to advance it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (BarColumn(20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        started = False

        def advance(what: str) -> None:
            nonlocal started
            bar.update(task, description=escape(what), advance=1 if started else 0)
            started = True

        yield advance
