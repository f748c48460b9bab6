"""Show the progress of long work on stderr, if that is a terminal."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: A function that is called when a piece of work begins, with a description of the piece. The
#: previous piece then counts as done.
Advance = Callable[[str], None]


@contextlib.contextmanager
def progress(total: int) -> Iterator[Advance]:
    """Show a bar for `total` pieces of work; yield the function that advances it by a piece."""
    console, done = Console(stderr=True), itertools.count()
    with Progress(
        BarColumn(20),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # Drawing takes processor time, and the calls that run meanwhile may be timed.
        refresh_per_second=2,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, description=escape(what), completed=next(done))
