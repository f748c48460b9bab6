"""A subject that is a program: it reads a case's inputs from files, and writes its outputs."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from backnorm.conformance.battery import Case
from backnorm.conformance.verify._events import ended
from backnorm.conformance.verify._file_cases import as_in_files
from backnorm.conformance.verify.conventions import Inputs, Outputs
from backnorm.conformance.verify.files import export_inputs, reader
from backnorm.conformance.verify.names import OperationName
from backnorm.conformance.verify.operations import RefusedError
from backnorm.errors import ArgumentValueError


class CommandError(Exception):
    """A command ended with a status other than 0, or by a signal."""


class OfCommand:
    """A command line in which ``{inputs}`` and ``{outputs}`` stand for the paths of two folders.

    The folder of inputs is like one that :func:`backnorm.conformance.verify.export.export` writes,
    but it has only one case, and no expected results. The command writes its outputs in the format
    of the results that :func:`backnorm.conformance.verify.files.judge` reads. The command does not
    run in a shell.
    """

    def __init__(self, command: str, operation: OperationName) -> None:
        if operation == "layer":
            problem = "must be that of a function with --command"
            raise ArgumentValueError("--operation", problem, came=operation)
        self._words = shlex.split(command)
        if not all(any(f"{{{name}}}" in w for w in self._words) for name in ("inputs", "outputs")):
            # This text is a format string: the error's message shows ``{{`` and ``}}`` as single
            # braces.
            problem = "must be a command with {{inputs}} and {{outputs}}"
            raise ArgumentValueError("SUBJECT", problem, came=command)
        if shutil.which(self._words[0]) is None:
            raise ArgumentValueError("SUBJECT", "no such program", came=self._words[0])

    def __call__(self, inputs: Inputs, case: Case) -> Outputs:
        """Run the command on a case."""
        with tempfile.TemporaryDirectory(prefix="backnorm-command-") as place:
            folders = {name: Path(place, name) for name in ("inputs", "outputs")}
            export_inputs(folders["inputs"], case, inputs)
            (folders["outputs"] / case.name).mkdir(parents=True)
            words = [self._with_folders(word, folders) for word in self._words]
            done = subprocess.run(words, stderr=subprocess.PIPE, check=False)  # noqa: S603
            if done.returncode:
                last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
                raise CommandError(": ".join([ended(done.returncode), *last]))
            outcome = reader(folders["outputs"])(as_in_files(case))
        if outcome.fault is not None:
            raise RefusedError(outcome.text)
        return dict(outcome.outputs)

    @staticmethod
    def _with_folders(word: str, folders: dict[str, Path]) -> str:
        for name, folder in folders.items():
            word = word.replace(f"{{{name}}}", str(folder))
        return word
