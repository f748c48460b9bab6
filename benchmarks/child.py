"""A child process that works for this process; its crash is an exception here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["Child", "ChildEndedError", "serve_parent"]

# Benchmarks are not installed, so the child needs their folder on its path.
_ROOT = Path(__file__).resolve().parents[1]


class ChildEndedError(Exception):
    """The process ended, or did not answer in time; the message says how."""


class Child:
    """A process that runs ``python -m MODULE DESCRIPTOR``, and this end of the pipe to it.

    `module` passes an object to `serve_parent`, and `ask` calls the methods of that object. Values
    are pickled, so `module` must be our own.

    Parameters
    ----------
    module : str
    variables : mapping of str to str, optional
        Environment variables besides those of this process.
    patience : float
        Seconds that an answer may take.
    """

    def __init__(
        self, module: str, variables: Mapping[str, str] | None = None, patience: float = 300.0
    ) -> None:
        self._patience = patience
        self._pipe, other = Pipe()
        # The output of frameworks is dropped, except for the last line if the process ends.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(  # noqa: S603 (this interpreter, our own module)
            [sys.executable, "-m", module, str(other.fileno())],
            pass_fds=[other.fileno()],
            env=os.environ | (variables or {}) | {"PYTHONPATH": path},
            # The child ends when this pipe closes, however this process ends.
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            # Ctrl-C must reach only this process, which then ends the child.
            start_new_session=True,
        )
        other.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the served object in the child, and return its result.

        Raises
        ------
        ChildEndedError
            If the process ends, or does not answer in time.
        """
        try:
            self._pipe.send((method, arguments))
            if self._pipe.poll(self._patience):
                return self._pipe.recv()
        except (EOFError, OSError):
            raise ChildEndedError(self._last_line()) from None
        raise ChildEndedError(f"no answer in {self._patience:.0f} s")

    def stop(self) -> None:
        """End the process at once, even during a call."""
        self._pipe.close()
        self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._output.close()

    def _last_line(self) -> str:
        """Return how the process ended, and the last line of its output."""
        status = self._process.wait()
        end = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return f"{end}: {lines[-1][:200]}" if lines else end


def serve_parent(served: object) -> None:
    """Call methods of an object for the parent process, until the parent closes the pipe.

    This process also ends if the parent is killed.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(served, method)(*arguments))


def _end_with_parent() -> None:
    """End this process when its standard input ends."""
    while os.read(0, 1):
        pass
    os._exit(1)
