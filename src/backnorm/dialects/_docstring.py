"""Read the parts of a NumPy-style docstring."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any


def sections(documented: Any) -> dict[str, str]:
    """Return the sections of a docstring by their titles; the first section's title is empty.

    Without docstrings (``python -OO``) all sections are empty.
    """
    sections: dict[str, str] = {}
    title, lines = "", (inspect.getdoc(documented) or "").splitlines()
    found: list[str] = []
    for k, line in enumerate(lines):
        if line and k + 1 < len(lines) and lines[k + 1] == "-" * len(line):
            sections[title] = "\n".join(found).strip()
            title, found = line, []
        elif not (line and line == "-" * len(line)):
            found.append(line)
    sections[title] = "\n".join(found).strip()
    return sections


def entries_of(section: str) -> dict[str, str]:
    """Return {name: text in one line} for the parameters or results that a section describes."""
    entries: dict[str, list[str]] = {}
    text: list[str] = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            text = []
            entries |= dict.fromkeys(line.partition(" : ")[0].split(", "), text)
        elif line:
            text.append(line.strip())
    return {name: " ".join(text) for name, text in entries.items()}


def bullets(section: str) -> Iterator[str]:
    """Yield the items of a list, each as one line."""
    for item in f"\n{section}".split("\n- ")[1:]:
        yield " ".join(item.split())
