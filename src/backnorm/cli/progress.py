"""Show the progress of long work on stderr, if that is a terminal."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from backnorm.errors import visible


class Advance(Protocol):
    """A function that is called when a piece of work begins."""

    def __call__(self, what: str, done: int | None = None, total: int | None = None) -> None:
        """Show the description of the piece, the number of finished pieces (by default one more
        than at the previous call) and the number of all pieces (by default as before).
        """


@contextlib.contextmanager
def progress(total: int | None = None) -> Iterator[Advance]:
    """Show a bar for `total` pieces of work; yield the function that advances the bar."""
    console, numbers = Console(stderr=True), itertools.count()
    with Progress(
        BarColumn(20),
        TextColumn("{task.description}", markup=False),
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

        def advance(what: str, done: int | None = None, total: int | None = None) -> None:
            completed = next(numbers) if done is None else done
            bar.update(task, description=visible(what), completed=completed, total=total)

        yield advance
