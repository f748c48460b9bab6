"""What scripts that generate files have in common: they write, or say what is not current."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["write_or_check"]


def write_or_check(texts: Mapping[Path, str]) -> int:
    """Write files, or with --check say which are not current, and write nothing.

    Returns the exit status of the script that was started.
    """
    stale = [
        path
        for path, text in texts.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        if stale:
            names = ", ".join(path.name for path in stale)
            print(f"not current: {names}; run scripts/{Path(sys.argv[0]).name}", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
    return 0
