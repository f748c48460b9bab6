"""Jobs shared out to processes: compilation holds the interpreter's lock, so threads do not do."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue

from backnorm.warm.jobs import Job

__all__ = ["Outcome", "work_off"]

# Each takes some 200 MB, and more would wait for the longest job anyway.
_MOST_PROCESSES = 16

# The same modules as here, wherever they come from.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from backnorm.warm.worker import main; main()"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job.

    Attributes
    ----------
    job : Job
    used : tuple of str
        Files of the cache that its process has read or made up to then.
    made : tuple of str
        Files that it made in this job.
    error : str
        Why it failed; empty if it did not.
    """

    job: Job
    used: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    error: str = ""


def work_off(jobs: Sequence[Job], processes: int) -> Generator[Outcome]:
    """Run the jobs in up to `processes` processes; yield each outcome when it is there.

    The processes are gone when the iterator is exhausted or closed.
    """
    waiting: SimpleQueue[Job] = SimpleQueue()
    for job in jobs:
        waiting.put(job)
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    crew: list[_Worker] = []
    try:
        for _ in range(min(processes, len(jobs), _MOST_PROCESSES)):
            crew.append(_Worker(waiting, outcomes))  # noqa: PERF401 (those there are stopped)
        for _ in jobs:
            yield outcomes.get()
    finally:
        _drain(waiting)
        for worker in crew:
            worker.stop()


class _Worker:
    """A process, started again if it breaks down, and the thread that talks to it."""

    def __init__(self, waiting: SimpleQueue[Job], outcomes: SimpleQueue[Outcome]) -> None:
        self._waiting, self._outcomes = waiting, outcomes
        self._process = _start()
        self._stopped, self._lock = False, threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the process, in the middle of a job if need be."""
        with self._lock:
            self._stopped = True
            self._process.kill()
        self._thread.join()
        self._process.communicate()

    def _serve(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._outcomes.put(self._ask(self._waiting.get_nowait()))

    def _ask(self, job: Job) -> Outcome:
        with self._lock:
            if self._process.poll() is not None and not self._stopped:
                self._process.communicate()
                self._process = _start()
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            print(json.dumps(asdict(job)), file=requests, flush=True)
            answer = json.loads(answers.readline())
        except (OSError, ValueError):
            return Outcome(job, error=f"its process ended with status {self._process.wait()}")
        if "error" in answer:
            return Outcome(job, error=answer["error"])
        return Outcome(job, tuple(answer["used"]), tuple(answer["made"]))


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 (this interpreter, on our own module)
        [sys.executable, "-c", _START, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _drain(queue: SimpleQueue[Job]) -> None:
    with contextlib.suppress(Empty):
        while True:
            queue.get_nowait()
