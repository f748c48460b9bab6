"""Show the progress of long work on stderr, if that is a terminal."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: A function that is called when a piece of work begins, with a description of the piece. When the
#: function is called again, the previous piece counts as done.
Advance = Callable[[str], None]


@contextlib.contextmanager
def progress(total: int) -> Iterator[Advance]:
    """Show a bar for `total` pieces of work; yield the function that advances the bar."""
    console, done = Console(stderr=True), itertools.count()
    with Progress(
        BarColumn(20),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # The bar is drawn seldom, because drawing takes processor time, and calls that run at the
        # same time may be timed.
        refresh_per_second=2,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, description=escape(what), completed=next(done))
