"""The common parts of all commands: exit statuses, errors in one line, the number of threads.

Exit status: 0 success; 1 a check failed; 2 bad input, or results that cannot be written; 130
interrupted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

import backnorm
from backnorm.cli import text
from backnorm.errors import BacknormError

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The most threads of a call (default: backnorm.get_num_threads()).",
        show_default=False,
    ),
]


@contextlib.contextmanager
def exits_in_one_line() -> Iterator[None]:
    """Turn bad input, or an interruption, into one line on stderr and an exit status."""
    try:
        yield
    except KeyboardInterrupt:
        text.warn("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except (BacknormError, MemoryError) as error:
        message = str(error) or "there is not enough memory"
    except OSError as error:
        reason = error.strerror or str(error)
        message = reason if error.filename is None else f"{error.filename}: {reason}"
    else:
        return
    text.warn(f"error: {message}")
    raise typer.Exit(BAD_INPUT)


def begin(threads: int | None = None) -> None:
    """Set the number of threads, unless `threads` is None."""
    if threads is not None:
        backnorm.set_num_threads(threads)
