"""The memory of this process, and for which of it huge pages were requested."""

from __future__ import annotations

from pathlib import Path


def mapped_memory():
    """Yield for each mapping the address where it begins, the address behind its end, and whether
    huge pages were requested for it.
    """
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
        elif words[0] == "VmFlags:":
            yield begin, end, "hg" in words
