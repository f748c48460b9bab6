"""Measurements that pages of the documentation quote; each is a module to run by hand.

``python -m benchmarks.studies.NAME`` prints a table in Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["arguments", "show"]


def arguments(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Parse the command line; options have the names, defaults and types of `defaults`."""
    parser = argparse.ArgumentParser(description=description)
    for name, value in defaults.items():
        if value is False:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


def show(rows: Iterable[Sequence[object]]) -> None:
    """Print a table row by row, with the headings first."""
    for number, row in enumerate(rows):
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        if number == 0:
            print("|---" * len(row) + "|")
