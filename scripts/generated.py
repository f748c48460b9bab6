"""Write generated files, or name the outdated ones; common to all scripts that generate files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["between", "options", "write_or_check"]


def options(document: str | None, **lists: str) -> argparse.Namespace:
    """Return the options of the command line: `check`, and those that take a list of names, given
    with their help; None if they are absent.

    `document` is the docstring of the script.
    """
    parser = argparse.ArgumentParser(description=(document or "").partition("\n")[0])
    text = "name what is not current, and write nothing"
    parser.add_argument("--check", action="store_true", help=text)
    for name, text in lists.items():
        parser.add_argument(f"--{name}", nargs="*", metavar="PART", help=text)
    return parser.parse_args()


def write_or_check(texts: Mapping[Path, str], *, check: bool) -> int:
    """Write files; if `check`, name those that are not current, and write nothing.

    Return the exit status of the script.
    """
    stale = [
        path
        for path, text in texts.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if check:
        if stale:
            names = ", ".join(path.name for path in stale)
            print(
                f"not current: {names}; run python -m scripts.{Path(sys.argv[0]).stem}",
                file=sys.stderr,
            )
        return 1 if stale else 0
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
    return 0


def between(page: str, text: str, part: str, marker: str) -> str:
    """Return the text of a page with `part` between two markers."""
    begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"{page}: needs the lines {begin} and {end}, once and in this order")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{part.rstrip()}\n{end}{rest.split(end)[1]}"
