"""The process that trains: ``python -m benchmarks.models.worker DESCRIPTOR``."""

from __future__ import annotations

from multiprocessing.connection import Connection

from benchmarks.child import serve_parent
from benchmarks.models import steps

__all__ = ["serve"]


def serve(connection: Connection) -> None:
    """Answer questions, a number of threads and what to measure, until the pipe is closed."""
    while True:
        try:
            threads, what, arguments = connection.recv()
        except EOFError:
            return
        case, *others = arguments
        trains = steps.module_of(case)
        versions = trains.start(threads)
        run = trains.memory if what == "memory" else steps.measure
        connection.send((versions, run(case, *others)))


if __name__ == "__main__":
    serve_parent(serve)
