"""Standard output and standard error, wherever they lead: a full disk, a reader that has left."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Any

__all__ = ["prepare"]

# For terminals that lack them. What else they lack is shown by its code.
_PLAIN = str.maketrans({"µ": "u", "\N{MULTIPLICATION SIGN}": "x", "·": "|", "±": "+-", "…": "..."})


def prepare() -> None:
    """Make standard streams that can be written to, whatever becomes of it.

    Streams that somebody has put in their place are left alone.
    """
    codecs.register_error("backnorm", _in_plain)
    for descriptor in range(3):
        _occupy(descriptor)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _Output(1, sys.stdout, "standard output")
    if sys.stderr is sys.__stderr__:
        sys.stderr = _Output(2, sys.stderr, None)


class _Output(io.TextIOWrapper):
    """A stream that takes any character, and drops what it is given once writing has failed.

    Parameters
    ----------
    descriptor : int
    like : io.TextIOWrapper or None
        Whose encoding and buffering it has.
    name : str or None
        What to call it in an error; without a name there is none.
    """

    def __init__(self, descriptor: int, like: Any, name: str | None) -> None:
        super().__init__(
            open(descriptor, "wb", closefd=False),  # noqa: SIM115 (closed by this)
            encoding=getattr(like, "encoding", "utf-8"),
            errors="backnorm",
            # A stream without any buffer (PYTHONUNBUFFERED) may write half of a text.
            line_buffering=like is not None and (like.line_buffering or like.write_through),
        )
        self._called = name

    def write(self, text: str, /) -> int:
        """Write `text`, or nothing."""
        try:
            return super().write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """Write what is still in the buffer, or nothing."""
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Lead to nowhere, also what is in the buffer; raise if somebody should know."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        # Who has left has read enough.
        if self._called is not None and not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, self._called) from None


def _in_plain(error: UnicodeError) -> tuple[str, int]:
    """Return characters that an encoding lacks in others; a handler of errors of codecs."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(c if c.isascii() else ascii(c)[1:-1] for c in text), error.end


def _occupy(descriptor: int) -> None:
    """Open a standard descriptor that is closed.

    Otherwise it would be that of the next file that is opened, and what is printed would be in it.
    """
    try:
        os.fstat(descriptor)
    except OSError:
        # The lowest that is free: those below are taken by now.
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
