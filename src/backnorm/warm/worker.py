"""A process that compiles: a job a line on standard input, what became of it a line back."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from backnorm import config
from backnorm.warm.jobs import Job

__all__ = ["main"]


class _Watch:
    """Sees which files of the cache this process reads, and which it puts there."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.join(folder, "")
        self.used: set[str] = set()
        self.made: set[str] = set()

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and (name := self._kernel(arguments[0])):
            self.used.add(name)
        elif event == "os.rename" and (name := self._kernel(arguments[1])):
            self.made.add(name)

    def _kernel(self, path: object) -> str | None:
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        inside = text.startswith(self._folder) and text.endswith(".nbc")
        return text[len(self._folder) :] if inside else None


def main() -> None:
    """Serve until standard input ends."""
    # An interruption is for the process that waits for this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever else is printed must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    watch = _Watch(config.cache_directory())
    sys.addaudithook(watch)
    for line in sys.stdin:
        watch.made.clear()
        answer: dict[str, object]
        try:
            Job(**json.loads(line)).run()
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        else:
            # A kernel that an earlier job has loaded is not read again: all of them are named.
            answer = {"used": sorted(watch.used), "made": sorted(watch.made)}
        print(json.dumps(answer), file=answers, flush=True)
