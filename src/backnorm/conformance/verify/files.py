"""Cases as files of arrays, for tests in any language, and verdicts on results that are files.

The exported folder has ``manifest.json`` and a folder for each case. The folder of a case has the
input arrays of the case. It also has four things for each element of an output: the exact value as
a sum of two float64 (``high`` and ``low``); T, the sum of the magnitudes of the element's terms;
the bound of the absolute error on each rung; and the exact value rounded to the output's type. So a
test that reads these files need not compute any bound itself. Raw arrays are little-endian, in C
order. Exports of the same selection of cases have the same bytes.

The arrays have backnorm's names, or those of a specification's operator (see `_file_cases`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

import backnorm
from backnorm.conformance.battery import Case
from backnorm.conformance.ladder import RUNGS, GradientLadder, Ladder
from backnorm.conformance.verify._events import Outcome
from backnorm.conformance.verify._file_cases import FileCase, as_in_files, expected
from backnorm.conformance.verify.cases import (
    DTYPES,
    TIERS,
    Selection,
    check_names,
    recipes,
)
from backnorm.conformance.verify.dialect_calls import schema_of
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.operations import OPERATIONS, catches, operation_of
from backnorm.conformance.verify.run import Results
from backnorm.dialects.schema import OperatorSchema
from backnorm.errors import ArgumentValueError
from backnorm.graph.strict_json import expect, read_json
from backnorm.tensor_files import read_array, read_tensors, write_tensors

__all__ = ["judge"]

_VERSION = 1


def write_cases(
    form: str, folder: Path, cases: Iterable[FileCase], made_by: Mapping[str, Any]
) -> None:
    """Write arrays in a file format, the manifest, and the headers that read them."""
    described: list[dict[str, Any]] = []
    lines: list[str] = []
    for found in cases:
        case, ladder = found.case, operation_of(found.case).ladder(found.case)
        arrays = _arrays(found, ladder)
        _write(folder / case.name, arrays, form)
        described.append(_described(found, arrays, form))
        if isinstance(ladder, GradientLadder):
            described[-1]["catches"] = catches(case, ladder)
        lines += _lines(case, arrays)
    folder.mkdir(parents=True, exist_ok=True)
    _write_manifest(folder, described, lines, form, made_by)
    headers = resources.files("backnorm.conformance.verify") / "include"
    for name in ("backnorm_cases.hpp", "backnorm_subject.h"):
        (folder / name).write_bytes((headers / name).read_bytes())


def export_inputs(folder: Path, case: Case, inputs: Mapping[str, np.ndarray | None]) -> None:
    """Write one case as raw files with these inputs, without the exact results and bounds."""
    folder.mkdir()
    arrays = {name: np.ascontiguousarray(a) for name, a in inputs.items() if a is not None}
    _write(folder / case.name, arrays, "raw")
    described = [_described(as_in_files(case), arrays, "raw")]
    _write_manifest(folder, described, list(_lines(case, arrays)), "raw", {})


def _write_manifest(
    folder: Path,
    described: list[dict[str, Any]],
    lines: list[str],
    form: str,
    made_by: Mapping[str, Any],
) -> None:
    manifest = {
        "format": "backnorm-cases",
        "format_version": _VERSION,
        "made_by": {"backnorm": backnorm.__version__, **made_by},
        "storage": form,
        "rungs": list(RUNGS),
        "cases": described,
    }
    (folder / "manifest.json").write_bytes((json.dumps(manifest, indent=1) + "\n").encode())
    # `manifest.tsv` is for programs that cannot read JSON. It has one line for each call, and one
    # line for each array.
    (folder / "manifest.tsv").write_bytes("".join(lines).encode())


def _arrays(found: FileCase, ladder: Ladder) -> dict[str, np.ndarray]:
    """Return the arrays of a case, by the names of their files (without extensions)."""
    arrays = dict(found.inputs)
    for output, parts in expected(found, ladder).items():
        arrays |= {
            output if part == "rounded" else f"{output}.{part}": array
            for part, array in parts.items()
        }
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _described(found: FileCase, arrays: Mapping[str, np.ndarray], form: str) -> dict[str, Any]:
    files = {
        name: {
            "file": f"{found.case.name}/{name}.{_ending(form)}",
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "sha256": hashlib.sha256(_bytes(array)).hexdigest(),
        }
        for name, array in arrays.items()
    }
    return {
        "name": found.case.name,
        "call": found.call,
        "inputs": {name: files[name] for name in found.inputs},
        "outputs": {
            output: {
                part.partition(".")[2] or "rounded": entry
                for part, entry in files.items()
                if part == output or part.startswith(f"{output}.")
            }
            for output in found.outputs
        },
    }


def _lines(case: Case, arrays: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield tab-separated lines, one for the call and one for each array."""
    axis, epsilon = case.data.channel_axis, float(case.data.epsilon).hex()
    yield f"{case.name}\tcall\t{int(case.training)}\t{axis}\t{epsilon}\n"
    for name, array in arrays.items():
        shape = "x".join(map(str, array.shape))
        yield f"{case.name}\t{name}\t{array.dtype.name}\t{shape}\n"


def _write(folder: Path, arrays: Mapping[str, np.ndarray], form: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if form in ("raw", "npy"):
        for name, array in arrays.items():
            path = folder / f"{name}.{_ending(form)}"
            if form == "raw":
                path.write_bytes(_bytes(array))
            else:
                np.save(path, _plain(array), allow_pickle=False)
    elif form == "npz":
        write_tensors(folder / "arrays.npz", {n: _plain(a) for n, a in arrays.items()})
    else:
        write_tensors(folder / "arrays.safetensors", arrays)


def _ending(form: str) -> str:
    return {"raw": "bin"}.get(form, form)


def _plain(array: np.ndarray) -> np.ndarray:
    """Return bfloat16 arrays as uint16, because NumPy's file formats do not support bfloat16."""
    return array.view(np.uint16) if str(array.dtype) == "bfloat16" else array


def _bytes(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def judge(cases: Path, results: Path) -> Results:
    """Return verdicts on results that another program has written to files.

    Parameters
    ----------
    cases : Path
        A folder that :func:`export` wrote; the cases are generated again from its manifest.
    results : Path
        A folder that has a folder for each case, with a .bin or .npy file for each output, such as
        ``dx.bin``; or one .npz or .safetensors file with arrays that are named ``case/output``.
        Outputs have the names that they have in the manifest. If a case has no results, a file
        ``unsupported.txt`` in its folder can give the reason.

    Raises
    ------
    ArgumentError
        If the manifest is damaged or has another format or version, if a file of results is
        damaged, or if there are no results.
    OSError
        If a file cannot be read.
    """
    selection, names, schema = _of_manifest(cases / "manifest.json")
    if not results.exists():
        raise ArgumentValueError("RESULTS", "no such file or folder", came=str(results))
    dialect, op = (None, None) if schema is None else (schema.dialect, schema.op)
    known = {recipe.name: recipe for recipe in recipes(selection) if recipe.name in names}
    found = Results(Job(str(results), selection, files=True, dialect=dialect, op=op), recipes=known)
    read = reader(results)
    is_empty = True
    for recipe in known.values():
        file_case = as_in_files(recipe.case(selection.seed), schema)
        outcome = read(file_case)
        is_empty &= outcome.fault is None and all(a is None for a in outcome.outputs.values())
        found.add(outcome, file_case.case)
    if is_empty:
        raise ArgumentValueError(
            "RESULTS", "has no result of any case", came=str(results),
            accepted="CASE/OUTPUT, such as realistic-float32-float32-NCX/dx",
        )  # fmt: skip
    return found


def _of_manifest(path: Path) -> tuple[Selection, set[str], OperatorSchema | None]:
    """Return a selection that has the cases of a manifest, their names, and the rules of the
    operator whose names the files have.
    """
    manifest = expect(read_json(path), dict, str(path))
    if manifest.get("format") != "backnorm-cases" or manifest.get("format_version") != _VERSION:
        raise ArgumentValueError(
            "CASES", "must have a manifest of this version", came=manifest.get("format_version"),
            accepted=_VERSION,
        )  # fmt: skip
    cases: Any = manifest.get("cases")
    made_by: Any = manifest.get("made_by")
    try:
        names = {entry["name"] for entry in cases}
        # The first input of every operator is data.
        dtypes = {next(iter(entry["inputs"].values()))["dtype"] for entry in cases}
        tier, seed = made_by["tier"], made_by["seed"]
        shapes = tuple(tuple(map(int, shape)) for shape in made_by.get("shapes", ()))
        operation = made_by.get("operation", "backward")
        schema = None
        if "dialect" in made_by:
            schema = schema_of(made_by["dialect"], made_by["op"], operation)
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise ArgumentValueError(str(path), "must be a manifest that cases export wrote") from error
    check_names(f"{path}: dtype", tuple(dtypes), DTYPES)
    check_names(f"{path}: tier", [tier], TIERS)
    check_names(f"{path}: operation", [operation], OPERATIONS)
    if expect(seed, int, f"{path}: seed") < 0:
        raise ArgumentValueError(f"{path}: seed", "must not be negative", came=seed)
    dtypes_in_order = tuple(sorted(dtypes))
    selection = Selection(tier, dtypes_in_order, seed=seed, shapes=shapes, operation=operation)
    return selection, names, schema


def reader(results: Path) -> Callable[[FileCase], Outcome]:
    """Return a function that reads the outputs of a case from `results`, which is a file or a
    folder.
    """
    if results.is_dir():
        return partial(_of_folder, results)
    arrays = read_tensors(results)

    def of_file(found: FileCase) -> Outcome:
        keys = {output: f"{found.case.name}/{output}" for output in found.outputs}
        named = {output: arrays[key] for output, key in keys.items() if key in arrays}
        return _outcome(named, found)

    return of_file


def _of_folder(results: Path, found: FileCase) -> Outcome:
    place = results / found.case.name
    outputs: dict[str, np.ndarray] = {}
    refused = place / "unsupported.txt"
    if refused.is_file():
        text = refused.read_text(errors="replace").strip() or "unsupported"
        return Outcome(found.case.name, "refused", text)
    for output in found.outputs:
        dtype, shape = found.like(output)
        if (place / f"{output}.npy").is_file():
            array = read_array(place / f"{output}.npy")
        elif (place / f"{output}.bin").is_file():
            data = (place / f"{output}.bin").read_bytes()
            array = np.frombuffer(data, np.uint8)
            if len(data) == math.prod(shape) * dtype.itemsize:
                array = array.view(dtype.newbyteorder("<")).reshape(shape)
        else:
            continue
        outputs[output] = array
    return _outcome(outputs, found)


def _outcome(arrays: Mapping[str, np.ndarray], found: FileCase) -> Outcome:
    """Return the outputs in files by the names of the operation's results.

    If an output is bfloat16, its 16-bit elements are reinterpreted as bfloat16. Per-channel arrays
    with as many axes as x get one axis.
    """
    outputs: dict[str, np.ndarray | None] = dict.fromkeys(found.outputs.values())
    for output, array in arrays.items():
        dtype, shape = found.like(output)
        if str(dtype) == "bfloat16" and array.dtype in (np.dtype(np.uint16), np.dtype("V2")):
            array = array.view(dtype)
        if output in found.kept and array.shape == shape:
            array = array.reshape(-1)
        outputs[found.outputs[output]] = array
    return Outcome(found.case.name, outputs=outputs)
