"""The process in which a subject runs: it is given the names of cases, and its events are read."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from backnorm.conformance.verify._events import (
    Calls,
    Event,
    Outcome,
    Prepares,
    Unusable,
    ended,
    read,
)
from backnorm.conformance.verify._segfault import last_access
from backnorm.conformance.verify.draws import TimeIsOverError
from backnorm.conformance.verify.job import Job
from backnorm.errors import ArgumentValueError

__all__ = ["outcomes_of_worker"]

# A worker that has not ended this many seconds after its last case is killed.
_GRACE = 0.3
# The time limit of a subject's import, and of making the data of a case, is at least this many
# seconds.
_PREPARATION = 120.0
# After this many seconds without an event, it is checked whether the worker has ended.
_PAUSE = 0.1


def outcomes_of_worker(
    job: Job, names: Iterator[str], folder: Path, *, ahead: int = 1, deadline: float = math.inf
) -> Generator[Outcome]:
    """Run a worker; yield the outcome of each case that it began.

    The worker has the names of up to `ahead` cases. When an outcome is yielded and the next one is
    asked for, the next name is taken from `names`, so it may depend on the outcome.

    Raises
    ------
    TimeIsOverError
        If the clock `time.monotonic` shows `deadline` before a case has ended.
    """
    reader, writer = os.pipe()
    order = {"job": asdict(job), "folder": str(folder), "events": writer}
    with (folder / "stderr").open("wb") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-m", "backnorm.conformance.verify._worker"],
            stdin=subprocess.PIPE,
            stdout=sys.__stderr__ if job.echo else errors,
            stderr=None if job.echo else errors,
            pass_fds=[writer],
            start_new_session=True,
        )
    os.close(writer)
    orders = worker.stdin
    assert orders is not None

    def send(lines: Iterable[str]) -> int:
        """Write lines to the worker; return their number."""
        text = [f"{line}\n".encode() for line in lines]
        # If the worker has ended, it can read no more.
        with contextlib.suppress(BrokenPipeError):
            orders.write(b"".join(text))
            orders.flush()
        return len(text)

    send((json.dumps(order),))
    left = send(itertools.islice(names, ahead))
    at: str | None = None
    is_ready = False
    try:
        for event in _events(reader, worker, job.timeout, deadline):
            match event:
                case Unusable(error):
                    raise ArgumentValueError(**error)
                case Prepares():
                    is_ready = True
                case Calls(case):
                    at = case
                case Outcome():
                    at = None
                    yield event
                    left += send(itertools.islice(names, 1)) - 1
                    if not left:
                        return
                case None:
                    os.killpg(worker.pid, signal.SIGKILL)
                    if at is not None:
                        yield Outcome(at, "hang", f"no result in {job.timeout:g} s")
                        return
        status = worker.wait()
        if at is not None:
            yield Outcome(at, "crash", ended(status, last_access(folder)))
        elif not is_ready:
            text = (folder / "stderr").read_text(errors="replace").strip().splitlines()
            if job.memory and text and text[-1].startswith("MemoryError"):
                # No case was begun: the caller says that the memory limit is too low.
                return
            raise ArgumentValueError(
                "SUBJECT", "cannot be imported", came=job.subject, hint=text[-1] if text else None
            )
    finally:
        os.close(reader)
        with contextlib.suppress(BrokenPipeError):
            orders.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(_GRACE)
        # Processes that the subject has started may still run, even if the worker has ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def _events(
    reader: int, worker: subprocess.Popen[bytes], timeout: float, deadline: float
) -> Iterator[Event | None]:
    """Yield the events that a worker writes to the file descriptor `reader`. If the calls of a case
    exceed the time limit, or their preparation exceeds its own, yield None and stop. At the
    deadline, raise an error.
    """
    preparation = max(timeout, _PREPARATION)
    rest, limit, started = b"", preparation, time.monotonic()
    while True:
        # The end of the worker may not end the pipe, because a process that the subject has forked
        # holds the pipe open, too.
        has_ended = worker.poll() is not None
        ready, _, _ = select.select([reader], [], [], 0 if has_ended else _PAUSE)
        data = os.read(reader, 1 << 16) if ready else b""
        if not data:
            if ready or has_ended:
                return
            if time.monotonic() - started > limit:
                yield None
                return
            if time.monotonic() > deadline:
                raise TimeIsOverError
            continue
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            event = read(line)
            limit = timeout if isinstance(event, Calls) else preparation
            yield event
        started = time.monotonic()
