"""Text for terminals: names from files are shown as they are, never acted upon."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["counted", "one_line", "plain", "print_json", "print_table", "warn"]


def counted(number: int, noun: str) -> str:
    """Return a number of things, whose plural is `noun` and an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def plain(value: object) -> Text:
    """Return `value` as text without markup or control characters."""
    return Text(_visible(str(value)))


def one_line(value: object) -> str:
    """Return the text of `value` on one line, without control characters."""
    return _visible(" ".join(str(value).split()))


def warn(message: object) -> None:
    """Print one line on stderr."""
    print(f"backnorm: {one_line(message)}", file=sys.stderr)


def print_table(table: Table) -> None:
    """Print a table on stdout, as wide as it needs to be where nobody watches."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(table)


def print_json(value: object) -> None:
    """Print `value` as JSON on stdout; NaN and infinity are not JSON and must not be in it."""
    print(json.dumps(value, indent=2, allow_nan=False))


def _visible(text: str) -> str:
    # Escape sequences in a file's names must not reach the terminal, nor lone surrogates print().
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
