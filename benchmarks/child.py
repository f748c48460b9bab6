"""A process that works for this one and may end at any time without harm to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["Child", "ChildEndedError", "serve_parent"]


# Benchmarks are not installed: whatever folder this process was started in, the other finds them.
_ROOT = Path(__file__).resolve().parents[1]


class ChildEndedError(Exception):
    """The process ended, or gave no sign of life; the message says how."""


class Child:
    """A process that runs ``python -m MODULE DESCRIPTOR``, and this end of the pipe to it.

    `module` hands what it does to `serve_parent`. What goes over the pipe is pickled, so `module`
    must be our own.

    Parameters
    ----------
    module : str
    variables : mapping of str to str, optional
        Environment variables beside those of this process.
    """

    def __init__(self, module: str, variables: Mapping[str, str] | None = None) -> None:
        self._pipe, other = Pipe()
        # The output of frameworks is dropped, but for the last line if the process ends.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self._process = subprocess.Popen(  # noqa: S603 (this interpreter, our own module)
            [sys.executable, "-m", module, str(other.fileno())],
            pass_fds=[other.fileno()],
            env=os.environ | (variables or {}) | {"PYTHONPATH": _search_path()},
            # Its end says that this process has ended, however it did.
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=self._said,
            # Ctrl-C is for this process, which then ends the other.
            start_new_session=True,
        )
        other.close()

    def send(self, value: object) -> None:
        """Send a value to the process.

        Raises
        ------
        ChildEndedError
        """
        try:
            self._pipe.send(value)
        except OSError:
            raise ChildEndedError(self._last_word()) from None

    def receive(self, patience: float) -> Any:
        """Return the next value that the process sends.

        Raises
        ------
        ChildEndedError
            If it has ended, or sends nothing for `patience` seconds.
        """
        try:
            if self._pipe.poll(patience):
                return self._pipe.recv()
        except (EOFError, OSError):
            raise ChildEndedError(self._last_word()) from None
        raise ChildEndedError(f"no answer in {patience:.0f} s")

    def stop(self) -> None:
        """End the process, in the middle of something if need be."""
        self._pipe.close()
        self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._said.close()

    def _last_word(self) -> str:
        """Return how the process ended, and the last line of what it said."""
        status = self._process.wait()
        how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1][:200]}" if lines else how


def _search_path() -> str:
    return os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))


def serve_parent(serve: Callable[[Connection], None]) -> None:
    """Call `serve` with the pipe to the process that started this one, which must not outlive it.

    A process that was killed cannot end those that it started.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(Connection(int(sys.argv[1])))


def _end_with_parent() -> None:
    """End this process when its standard input ends."""
    while os.read(0, 1):
        pass
    os._exit(1)
