"""The process that measures: ``python -m benchmarks.worker DESCRIPTOR``, started by `runner`.

Over the pipe come the contestants, the number of threads and the device, then a cell at a time with
its settings and who is excluded. Back go ("at", contestant) whenever somebody's code is about to
run, so that the other end knows who ended the process; ("ready", (versions, facts of the GPU)), or
("refused", arguments of the error) if there is no such device; and ("row", row).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from backnorm.errors import ArgumentError
from benchmarks.child import serve_parent
from benchmarks.device import Device
from benchmarks.peers.base import Contestant
from benchmarks.session import Session

__all__ = ["load", "serve"]


def serve(connection: Connection) -> None:
    """Measure cells until the other end closes the pipe."""
    places, threads, place = connection.recv()
    device: Device = load(place)()
    try:
        gpu = device.start(threads)
    except ArgumentError as error:
        # Errors do not survive being pickled: what they are made of does.
        connection.send(("refused", error.parts()))
        return
    kinds = {name: _kind(place) for name, place in places.items()}
    session = Session(kinds, threads, lambda name: connection.send(("at", name)), device)
    connection.send(("ready", (session.versions, gpu)))
    while True:
        try:
            cell, excluded, settings = connection.recv()
        except EOFError:
            return
        connection.send(("row", session.measure(cell, excluded, settings)))


def _kind(place: str) -> Callable[..., Contestant]:
    """Return a way to make a contestant, whose module is imported no sooner."""
    return lambda *device: load(place)(*device)


def load(place: str) -> Any:
    """Return what is defined at "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    serve_parent(serve)
