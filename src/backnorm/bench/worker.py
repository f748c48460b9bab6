"""The process that measures: ``python -m backnorm.bench.worker DESCRIPTOR``, started by `runner`.

Over the pipe come the contestants and the number of threads, then a cell at a time with its
settings and who is excluded. Back go ("at", contestant) whenever somebody's code is about to run,
so that the other end knows who ended the process; ("ready", versions); and ("row", row).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from backnorm.bench.peers.base import Contestant
from backnorm.bench.session import Session

__all__ = ["serve"]


def serve(connection: Connection) -> None:
    """Measure cells until the other end closes the pipe."""
    places, threads = connection.recv()
    session = Session(_makers(places), threads, lambda name: connection.send(("at", name)))
    connection.send(("ready", session.versions))
    while True:
        try:
            cell, excluded, settings = connection.recv()
        except EOFError:
            return
        connection.send(("row", session.measure(cell, excluded, settings)))


def _makers(places: Mapping[str, str]) -> dict[str, Callable[[], Contestant]]:
    def maker(place: str) -> Callable[[], Contestant]:
        module, _, name = place.partition(":")

        def make() -> Contestant:
            made: Any = getattr(importlib.import_module(module), name)()
            return made  # type: ignore[no-any-return]

        return make

    return {name: maker(place) for name, place in places.items()}


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
