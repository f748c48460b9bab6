"""The process that trains: ``python -m benchmarks.models.worker DESCRIPTOR``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from benchmarks.child import serve_parent
from benchmarks.models import steps
from benchmarks.models.cases import Case, Outcome, Variant

__all__ = ["Work", "serve"]


class Work:
    """What such a process does for a case, when it is asked."""

    def __init__(self, case: Case) -> None:
        self._trainer: steps.Trainer = steps.module_of(case).Trainer(case)

    def compare(self, variants: Sequence[Variant]) -> dict[Variant, Outcome]:
        """Return which variants may be timed: see `steps.compare`."""
        return steps.compare(self._trainer, variants)

    def begin(self, variant: Variant) -> int:
        """Make the first steps of a variant, until no step needs new memory.

        Return by how many bytes resident memory grew in the very first.
        """
        self._step = self._trainer.step(variant)
        grown = steps.growth(self._step)
        steps.reserve(self._step, grown)
        return grown

    def step(self) -> float:
        """Return the seconds of a step."""
        start = time.perf_counter()
        self._step()
        return time.perf_counter() - start

    def normalization(self) -> float | None:
        """Return the seconds of a step in normalisation, activations and additions, if known."""
        return self._step.normalization()


def serve(connection: Connection) -> None:
    """Answer a number of threads and a case by versions, then names of what to do by its results.

    Until the pipe is closed.
    """
    try:
        threads, case = connection.recv()
        connection.send(steps.module_of(case).start(threads))
        work = Work(case)
        while True:
            what, *arguments = connection.recv()
            connection.send(getattr(work, what)(*arguments))
    except EOFError:
        return


if __name__ == "__main__":
    serve_parent(serve)
