"""What a program is around its commands: streams and signals, errors in one line, exit status.

Exit status: 0 fine; 1 a check failed; 2 bad input, or results that cannot be written, said in one
line on stderr; 128 and the number of the signal that ended it (129 hung up, 130 interrupted, 143
terminated).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

import backnorm
from backnorm.cli import streams, text
from backnorm.cli.signals import signals
from backnorm.errors import BacknormError

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "Threads", "begin", "exits_in_one_line", "main"]

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130

# Typer has its own copy of click in some releases and depends on click in others; either way
# this is the base of the errors about the command line: BadParameter < UsageError < this.
_CommandLineError: Any = typer.BadParameter.__mro__[2]

Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads to use (default: all).", show_default=False)
]


def main(app: typer.Typer) -> None:
    """Run what the command line says of `app`, and exit."""
    streams.prepare()
    signals.watch()
    status = 0
    try:
        status = _status(app)
        signals.leave()
    # Also what became of a signal's exception in somebody else's hands.
    except BaseException:
        signals.leave()
        if signals.received is None:
            raise
    if signals.received is not None:
        status = 128 + signals.received
    sys.exit(status)


def _status(app: typer.Typer) -> int:
    """Run `app` and return its exit status; nothing is left to be printed then."""
    try:
        with exits_in_one_line():
            status: int | None = app(standalone_mode=False)
            sys.stdout.flush()
    except _CommandLineError as error:
        text.warn(f"error: {error.format_message()}")
        return BAD_INPUT
    except typer.Exit as end:
        return end.exit_code
    return status or 0


@contextlib.contextmanager
def exits_in_one_line() -> Iterator[None]:
    """Turn bad input, or an interruption, into one line on stderr and an exit status."""
    try:
        yield
    except KeyboardInterrupt:
        text.warn("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BacknormError as error:
        message = str(error)
    except OSError as error:
        reason = error.strerror or str(error)
        message = reason if error.filename is None else f"{error.filename}: {reason}"
    except MemoryError:
        message = "there is not enough memory"
    else:
        return
    text.warn(f"error: {message}")
    raise typer.Exit(BAD_INPUT)


def begin(threads: int | None = None) -> None:
    """Begin a command: all is imported, which nothing should interrupt."""
    signals.release()
    if threads is not None:
        backnorm.set_num_threads(threads)
