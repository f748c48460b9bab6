"""Write docs/record.md, the page of the record that every kernel takes, from its description.

With --check: say whether the page is current, and write nothing.

Usage: python scripts/make_record_page.py [--check]
"""

from __future__ import annotations

from pathlib import Path

from backnorm.cpu.record import CLAIMED, GEOMETRIES, LINE, SLOTS, fields
from generated import write_or_check

PAGE = Path(__file__).parent.parent / "docs" / "record.md"

_HEAD = """\
# The record

What a kernel on the CPU is called with: the address of one block of memory, its *record*, and the
number of a participant. This page is generated (`python scripts/make_record_page.py`) from
`backnorm/cpu/record.py`, as are the types by which Python fills a record in and kernels read it.

A record begins at a cache line. Its head is {head} fields of eight bytes; from byte {claimed} on
come the claims, a line of {line} bytes for each participant and phase; then scratch memory, as
large as the fields say.
"""


def page() -> str:
    """Return the page."""
    parts = [_HEAD.format(head=len(fields("floor")), claimed=8 * CLAIMED, line=8 * LINE)]
    parts.append(_table("Every kernel", [f for f in fields("floor") if f.name in SLOTS]))
    parts += [
        _table(f"Geometry `{name}`", list(numbers), first=_first(name))
        for name, numbers in GEOMETRIES.items()
    ]
    return "\n".join(parts)


def _first(geometry: str) -> int:
    names = [field.name for field in fields(geometry)]
    return names.index(GEOMETRIES[geometry][0].name, SLOTS["statistics"])


def _table(title: str, rows: list, first: int | None = None) -> str:
    lines = [f"## {title}", "", "| byte | field | type | meaning |", "|---|---|---|---|"]
    for k, field in enumerate(rows):
        slot = SLOTS[field.name] if first is None else first + k
        lines.append(f"| {8 * slot} | `{field.name}` | {field.kind} | {field.meaning} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    raise SystemExit(write_or_check({PAGE: page()}))
