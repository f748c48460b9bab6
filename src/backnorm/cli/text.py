"""Print text as it is: without markup, with control characters as escapes."""

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

from backnorm.errors import visible


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


class LiteralConsole(Console):
    """A console that prints each string as it is, also in tables: nothing in it is markup, and
    control characters are written as escapes.
    """

    def render_str(
        self, text: str, *, style: Any = "", justify: Any = None, overflow: Any = None, **_: Any
    ) -> Text:
        """Return a string as rich text."""
        return Text(visible(text), style=style, justify=justify, overflow=overflow)


def warn(message: object) -> None:
    """Print one line on stderr."""
    print(f"backnorm: {visible(' '.join(str(message).split()))}", file=sys.stderr)


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
    console = LiteralConsole(width=None if Console().is_terminal else 240)
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
