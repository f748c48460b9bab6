"""Export cases as files, for tests in any language, and judge results that are read from files.

The exported folder has ``manifest.json`` and a folder for each case. The folder of a case has the
input arrays of the case. It also has four things for each element of an output: the exact value as
a sum of two float64 (``high`` and ``low``); T, the sum of the magnitudes of the element's terms;
the bound of the absolute error on each rung; and the exact value rounded to the output's type. So a
test that reads these files need not compute any bound itself. Raw arrays are little-endian, in C
order. Exports of the same selection of cases have the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

import backnorm
from backnorm.conformance.battery import Case
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import RUNGS, GradientLadder
from backnorm.conformance.verify.cases import DTYPES, TIERS, Selection, check_names, selected
from backnorm.conformance.verify.proof import catches
from backnorm.conformance.verify.run import Job, Results, Status, Verdict, absent, graded
from backnorm.dtypes import element_type, rounded
from backnorm.errors import ArgumentValueError
from backnorm.graph.strict_json import expect_integer, expect_object, read_json
from backnorm.tensor_files import read_array, read_tensors, write_tensors

__all__ = ["FORMATS", "export", "judge"]

#: The file formats of arrays.
FORMATS = ("raw", "npy", "npz", "safetensors")

_VERSION = 1
_NO_RESULT = "the case has no result"


def export(folder: Path, selection: Selection, *, form: str = "raw") -> int:
    """Write the cases of a selection to a folder; return their number.

    Parameters
    ----------
    folder : Path
        Created if it does not exist. Files of an earlier export are overwritten.
    selection : Selection
    form : {"raw", "npy", "npz", "safetensors"}
    """
    folder.mkdir(parents=True, exist_ok=True)
    described: list[dict[str, Any]] = []
    lines: list[str] = []
    for case in selected(selection):
        ladder = GradientLadder.of(*case.operands, **case.options)
        arrays = _arrays(case, ladder)
        _write(folder / case.name, arrays, form)
        described.append({**_described(case, arrays, form), "catches": catches(case, ladder)})
        lines += _lines(case, arrays)
    made_by = {"seed": selection.seed, "tier": selection.tier}
    _write_manifest(folder, described, lines, form, made_by)
    headers = resources.files("backnorm.conformance.verify") / "include"
    for name in ("backnorm_cases.hpp", "backnorm_subject.h"):
        (folder / name).write_bytes((headers / name).read_bytes())
    return len(described)


def export_inputs(folder: Path, case: Case, inputs: Mapping[str, np.ndarray | None]) -> None:
    """Write one case as raw files with these inputs, without the exact results and bounds."""
    folder.mkdir()
    arrays = {name: np.ascontiguousarray(a) for name, a in inputs.items() if a is not None}
    _write(folder / case.name, arrays, "raw")
    described = [_described(case, arrays, "raw")]
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


def _arrays(case: Case, ladder: GradientLadder) -> dict[str, np.ndarray]:
    """Return the arrays of a case, by the names of their files (without extensions)."""
    arrays = {name: array for name, array in case.inputs.items() if array is not None}
    for name in GRADIENTS:
        value = ladder.value(name)
        arrays |= {
            f"{name}.high": value.hi,
            f"{name}.low": value.lo,
            f"{name}.terms": ladder.terms(name),
            name: rounded(value.hi, ladder.element_type(name)),
        }
        bounds = ladder.allowances(name)
        arrays |= {f"{name}.{rung}": bound for rung, bound in bounds.items()}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _described(case: Case, arrays: Mapping[str, np.ndarray], form: str) -> dict[str, Any]:
    files = {
        name: {
            "file": f"{case.name}/{name}.{_ending(form)}",
            "dtype": str(element_type(array.dtype)),
            "shape": list(array.shape),
            "sha256": hashlib.sha256(_bytes(array)).hexdigest(),
        }
        for name, array in arrays.items()
    }
    return {
        "name": case.name,
        "call": {
            "operator": "backward",
            "training": case.training,
            "data_format": case.data.data_format,
            "epsilon": float(case.data.epsilon).hex(),
        },
        "inputs": {name: files[name] for name in case.inputs if name in files},
        "outputs": {
            output: {
                part.partition(".")[2] or "rounded": entry
                for part, entry in files.items()
                if part == output or part.startswith(f"{output}.")
            }
            for output in GRADIENTS
        },
    }


def _lines(case: Case, arrays: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield tab-separated lines, one for the call and one for each array."""
    axis, epsilon = case.data.channel_axis, float(case.data.epsilon).hex()
    yield f"{case.name}\tcall\t{int(case.training)}\t{axis}\t{epsilon}\n"
    for name, array in arrays.items():
        shape = "x".join(map(str, array.shape))
        yield f"{case.name}\t{name}\t{element_type(array.dtype)}\t{shape}\n"


def _write(folder: Path, arrays: Mapping[str, np.ndarray], form: str) -> None:
    folder.mkdir(exist_ok=True)
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
        A folder that has a folder for each case, with ``dx.bin`` and so on (or .npy); or one .npz
        or .safetensors file with arrays that are named ``case/output``. If a case has no results,
        a file ``unsupported.txt`` in its folder can give the reason.

    Raises
    ------
    ArgumentError
        If the manifest is damaged or has another format or version, if a file of results is
        damaged, or if there are no results.
    OSError
        If a file cannot be read.
    """
    selection, names = _of_manifest(cases / "manifest.json")
    if not results.exists():
        raise ArgumentValueError("RESULTS", "no such file or folder", came=str(results))
    found = Results(Job(str(results), selection, files=True))
    read = reader(results)
    for case in selected(selection):
        if case.name in names:
            found.verdicts += _judged(case, read, found)
    if all(verdict.text.endswith(_NO_RESULT) for verdict in found.verdicts):
        raise ArgumentValueError(
            "RESULTS", "has no result of any case", came=str(results),
            accepted="CASE/OUTPUT, such as realistic-float32-float32-NCX/dx",
        )  # fmt: skip
    return found


def _of_manifest(path: Path) -> tuple[Selection, set[str]]:
    """Return a selection that has the cases of a manifest, and the names of these cases."""
    manifest = expect_object(read_json(path), str(path))
    if manifest.get("format") != "backnorm-cases" or manifest.get("format_version") != _VERSION:
        raise ArgumentValueError(
            "CASES", "must have a manifest of this version", came=manifest.get("format_version"),
            accepted=_VERSION,
        )  # fmt: skip
    cases: Any = manifest.get("cases")
    made_by: Any = manifest.get("made_by")
    try:
        names = {entry["name"] for entry in cases}
        dtypes = {entry["inputs"]["x"]["dtype"] for entry in cases}
        tier, seed = made_by["tier"], made_by["seed"]
    except (LookupError, TypeError) as error:
        raise ArgumentValueError(str(path), "must be a manifest that cases export wrote") from error
    check_names(f"{path}: dtype", tuple(dtypes), DTYPES)
    check_names(f"{path}: tier", [tier], TIERS)
    seed = expect_integer(seed, f"{path}: seed", high=sys.maxsize)
    return Selection(tier, tuple(sorted(dtypes)), seed=seed), names


def _judged(case: Case, read: Any, found: Results) -> Iterator[Verdict]:
    known = str(case.data.x.dtype), case.data.data_format
    outputs, text = read(case)
    if not outputs:
        status: Status = "refused" if text else "not_written"
        for output in GRADIENTS:
            reason = text or f"no {output}; {_NO_RESULT}"
            yield Verdict(case.name, output, *known, status, reason)
        return
    if case.name.startswith("diagnostic"):
        found.outputs[case.name] = outputs
    grades = graded(case, outputs)
    for name in GRADIENTS:
        yield Verdict(case.name, name, *known, *grades.get(name) or absent(case, name, GRADIENTS))


def reader(results: Path) -> Callable[[Case], tuple[dict[str, np.ndarray], str]]:
    """Return a function that reads the outputs of a case from `results`, which is a file or a
    folder.

    This function returns two values: the outputs by name, and a text. The text is empty unless the
    tested program does not support the case; it then says why.
    """
    if results.is_dir():
        return partial(_of_folder, results)
    arrays = read_tensors(results)

    def of_file(case: Case) -> tuple[dict[str, np.ndarray], str]:
        named = {o: arrays[f"{case.name}/{o}"] for o in GRADIENTS if f"{case.name}/{o}" in arrays}
        return {o: _typed(o, a, case) for o, a in named.items()}, ""

    return of_file


def _of_folder(results: Path, case: Case) -> tuple[dict[str, np.ndarray], str]:
    place = results / case.name
    outputs: dict[str, np.ndarray] = {}
    refused = place / "unsupported.txt"
    if refused.is_file():
        return {}, refused.read_text(errors="replace").strip() or "unsupported"
    for output in GRADIENTS:
        expected = case.data.like(output)
        if (place / f"{output}.npy").is_file():
            array = read_array(place / f"{output}.npy")
        elif (place / f"{output}.bin").is_file():
            data = (place / f"{output}.bin").read_bytes()
            array = np.frombuffer(data, np.uint8)
            if len(data) == expected.nbytes:
                array = array.view(expected.dtype.newbyteorder("<")).reshape(expected.shape)
        else:
            continue
        outputs[output] = _typed(output, array, case)
    return outputs, ""


def _typed(output: str, array: np.ndarray, case: Case) -> np.ndarray:
    """Return an array; if the output is bfloat16, uint16 elements are reinterpreted as bfloat16."""
    dtype = case.data.like(output).dtype
    if str(dtype) == "bfloat16" and array.dtype == np.uint16:
        return array.view(dtype)
    return array
