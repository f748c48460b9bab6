"""Text for terminals, in which control characters in names are replaced by their codes."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class Output(io.FileIO):
    """Standard output. If the output is a pipe and its reader has closed it (as in ``| head -1``),
    further text is dropped.

    Any other error, such as a full disk, is raised once. It is not raised again when Python flushes
    the output at exit.
    """

    _is_lost = False

    def write(self, data: Any, /) -> int:
        """Write bytes; return their number."""
        if not self._is_lost:
            try:
                return super().write(data)
            except OSError as error:
                self._is_lost = True
                if not isinstance(error, BrokenPipeError):
                    raise OSError(error.errno, error.strerror, "standard output") from None
        return memoryview(data).nbytes


def plain(value: object) -> Text:
    """Return `value` as rich text without markup, its control characters written as escapes."""
    return Text(_visible(str(value)))


def warn(message: object) -> None:
    """Print one line on stderr."""
    print(f"backnorm: {_visible(' '.join(str(message).split()))}", file=sys.stderr)


def print_line(line: str) -> None:
    """Print a line on stdout and flush it."""
    print(line, flush=True)


def print_report(value: object, tables: Iterable[Table], as_json: bool) -> None:
    """If `as_json`, print `value` as JSON, with NaN and infinity as strings. Otherwise print
    `tables`, which show the same value.

    If stdout is not a terminal, a table may be 240 columns wide.
    """
    if as_json:
        print_line(json.dumps(_finite(value), indent=2, allow_nan=False))
        return
    console = Console(width=None if Console().is_terminal else 240)
    with console.capture() as capture:
        console.print(*tables)
    print_line(capture.get().removesuffix("\n"))


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(entry) for entry in value]
    return value


def _visible(text: str) -> str:
    # Escape sequences in names that were read from a file must not reach the terminal. Lone
    # surrogates must not reach it either, because `print` raises an error for them.
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
