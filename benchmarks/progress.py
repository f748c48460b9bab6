"""Progress of a run, on stderr and only where a person watches it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape

from backnorm.cli.progress import new_bar

__all__ = ["AdvanceTo", "weighted_progress"]

#: Say what is being done now, and how much is done.
AdvanceTo = Callable[[str, float], None]


@contextlib.contextmanager
def weighted_progress(total: float) -> Iterator[AdvanceTo]:
    """Show a bar of `total`, if stderr is a terminal; yield how to advance it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda *_: None
        return
    with new_bar(console) as bar:
        task = bar.add_task("", total=total)
        yield lambda what, done: bar.update(task, description=escape(what), completed=done)
