"""A subject that is a solution in the schema of flashinfer-bench: a JSON file with sources."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.verify._flashinfer import DEFINITIONS, extents, operands
from backnorm.conformance.verify.conventions import Inputs, OutputError, Outputs, by_name
from backnorm.conformance.verify.operations import OPERATIONS, RefusedError
from backnorm.conformance.verify.tensors import tensors_of
from backnorm.errors import ArgumentValueError
from backnorm.graph.strict_json import expect, read_json

#: Languages of flashinfer-bench and SOL-ExecBench whose entry point is a function of Python.
LANGUAGES = ("python", "triton", "pytorch")


class OfSolution:
    """The entry point of a solution, which gets tensors of PyTorch.

    It takes the inputs of its definition by position. In destination-passing style, it also takes
    the tensors to which it writes its results; otherwise it returns them.

    Parameters
    ----------
    path : Path
        The solution. The text of a source without `content` is read from the folder of the file.
    operation : {"backward", "forward"}
    device : str
        The device of the tensors, by PyTorch's name.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If the file is no solution of a definition that `cases export` writes, or in a language that
        is not run.
    """

    def __init__(self, path: Path, operation: str, device: str) -> None:
        solution: dict[str, Any] = expect(read_json(path), dict, str(path))
        try:
            name, spec = solution["definition"], solution["spec"]
            languages = spec.get("languages") or [spec["language"]]
            file, symbol = spec["entry_point"].split("::")
            sources = {each["path"]: each.get("content") for each in solution["sources"]}
            writes = spec.get("destination_passing_style", True)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentValueError(
                str(path), "must be a solution of flashinfer-bench",
                hint=f"{type(error).__name__}: {error}",
            ) from error  # fmt: skip
        self.writes = expect(writes, bool, "spec.destination_passing_style")
        _check("definition", name, DEFINITIONS)
        for language in languages:
            _check("spec.language", language, LANGUAGES)
        _check("spec.entry_point", file, sources)
        for source in map(PurePosixPath, sources):
            if source.is_absolute() or ".." in source.parts:
                problem = "must be a relative path without '..'"
                raise ArgumentValueError("sources.path", problem, came=str(source))
        known, *self._types = DEFINITIONS[name]
        if known != operation:
            raise ArgumentValueError(
                "definition", f"is not a {operation} pass", came=name, hint=f"--operation {known}"
            )
        self._names, self._tensors = OPERATIONS[operation].results, tensors_of("torch", device)
        # The sources stay on disk until the process ends, because Triton reads its kernels' text.
        self._folder = tempfile.TemporaryDirectory(prefix="backnorm-solution-")
        self._function = _imported(Path(self._folder.name), path.parent, sources, file, symbol)

    def __call__(
        self, inputs: Inputs, case: Case, memory: Mapping[str, np.ndarray] | None = None
    ) -> Outputs:
        """Call the entry point on a case; `memory` is that of the results."""
        data = case.data
        if [data.x.dtype, data.mean.dtype] != self._types:
            text = "the definition has x of {} and per-channel arrays of {}"
            raise RefusedError(text.format(*self._types))
        x = inputs["x"]
        assert x is not None
        shape = extents(case, x.shape)
        arguments = list(operands(inputs, case).values())
        if memory is not None:
            arguments += [a if a.ndim == 1 else a.reshape(shape) for a in memory.values()]
        with self._tensors.operands(arguments) as values:
            returned = self._function(*values)
        if memory is not None:
            return dict(memory)
        if isinstance(returned, tuple | list) and len(returned) != len(self._names):
            expected = ", ".join(self._names)
            raise OutputError(f"the solution returned {len(returned)} tensors; expected {expected}")
        found = by_name(self._names, returned)
        return {
            name: a.reshape(x.shape) if a is not None and a.shape == shape else a
            for name, a in found.items()
        }


def _check(argument: str, came: object, known: Any) -> None:
    if came not in known:
        raise ArgumentValueError(argument, "unknown", came=came, accepted=", ".join(known))


def _imported(
    folder: Path, origin: Path, sources: Mapping[str, str | None], file: str, symbol: str
) -> Callable[..., Any]:
    """Write the sources to a folder, and import the entry point from the package `solution` there.

    As in flashinfer-bench, modules of the package can import each other relatively, and as in
    SOL-ExecBench, by the names of their files.
    """
    for name, content in sources.items():
        target = folder / "solution" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((origin / name).read_text() if content is None else content)
    sys.path.insert(0, str(folder))
    # At the end: a source must not hide an installed module from other modules.
    sys.path.append(str(folder / "solution"))
    module = importlib.import_module(".".join(["solution", *Path(file).with_suffix("").parts]))
    function: Callable[..., Any] = getattr(module, symbol)
    return function
