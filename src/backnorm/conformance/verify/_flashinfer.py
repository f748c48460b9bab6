"""Cases as problems in the schema of flashinfer-bench, which SOL-ExecBench reads, too.

Source: flashinfer_bench.data of flashinfer-bench 0.1.2, and docs/definition.md and docs/workload.md
of NVIDIA/SOL-ExecBench. A definition has one rank and one element type for each tensor. So x is
(N, C, L), where N is the product of the axes before the channels, and L of those after them. This
is a view of x in both layouts. The folder of a definition has ``definition.json``,
``workload.jsonl`` with a line for each case, and the arrays of each case.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.verify._file_cases import FileCase, as_in_files
from backnorm.conformance.verify.dialect_calls import Inputs
from backnorm.conformance.verify.operations import OPERATIONS, RefusedError, operation_of
from backnorm.dialects.schema import OperatorSchema
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, statistics_types
from backnorm.tensor_files import write_tensors

# A description of each pass and of its arrays.
_ABOUT = {
    "backward": "Gradients of batch normalisation with respect to x, gamma and beta. mean and "
    "variance (biased) are those of the batch, or constants if training is false.",
    "forward": "Batch normalisation in training; variance is biased.",
}
_SCALARS = {
    "epsilon": {"shape": None, "dtype": "float32"},
    "training": {"shape": None, "dtype": "bool"},
}


def _name(operation: str, dtype: np.dtype, statistics: np.dtype) -> str:
    types = [str(dtype)] if dtype == statistics else [str(dtype), str(statistics)]
    return "_".join(["batch_norm", operation, *types])


#: The names of all definitions -> the operation, and the types of x and of per-channel arrays.
DEFINITIONS: Mapping[str, tuple[str, np.dtype, np.dtype]] = MappingProxyType(
    {
        _name(operation, dtype, statistics): (operation, dtype, statistics)
        for operation in _ABOUT
        for dtype in (FLOAT32, BFLOAT16, FLOAT16)
        for statistics in statistics_types(dtype)
    }
)


def extents(case: Case, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the sizes N, C and L of an array with the layout of a case's x."""
    axis = case.data.channel_axis
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def operands(inputs: Inputs, case: Case) -> dict[str, Any]:
    """Return the arguments of `run` by name. For gamma and beta that are None: ones and zeros."""
    x = inputs["x"]
    assert x is not None
    shape = extents(case, x.shape)
    found: dict[str, Any] = {}
    for name, array in inputs.items():
        if array is None:
            found[name] = np.full(shape[1], float(name == "gamma"), case.data.mean.dtype)
        else:
            found[name] = array if array.ndim == 1 else array.reshape(shape)
    found["epsilon"] = float(case.data.epsilon)
    if operation_of(case).name == "backward":
        found["training"] = case.training
    return found


def as_problem(case: Case, schema: OperatorSchema | None = None) -> FileCase:
    """Return a case as files of a problem have it.

    Raises
    ------
    RefusedError
        If flashinfer-bench has no such element type.
    """
    found = as_in_files(case, schema)
    if _name_of(case) not in DEFINITIONS:
        raise RefusedError(f"flashinfer-bench has no {case.data.x.dtype}")
    return replace(found, inputs=operands(case.inputs, case))


def write(folder: Path, cases: Iterable[FileCase], made_by: Mapping[str, Any]) -> None:
    """Write a folder for each definition that cases have."""
    lines: dict[str, list[str]] = {}
    for found in cases:
        name = _name_of(found.case)
        place = folder / name
        if name not in lines:
            place.mkdir(parents=True, exist_ok=True)
            text = json.dumps(_definition(name, found), indent=2) + "\n"
            (place / "definition.json").write_text(text)
        file = f"{found.case.name}.safetensors"
        arrays = {n: a for n, a in found.inputs.items() if n not in _SCALARS}
        write_tensors(place / file, arrays)
        workload = {
            "uuid": found.case.name,
            "axes": dict(zip("NCL", found.inputs["x"].shape, strict=True)),
            "inputs": {
                name: {"type": "safetensors", "path": file, "tensor_key": name}
                if name in arrays
                else {"type": "scalar", "value": value}
                for name, value in found.inputs.items()
            },
        }
        lines.setdefault(name, []).append(json.dumps(workload) + "\n")
    for name, each in lines.items():
        (folder / name / "workload.jsonl").write_text("".join(each))


def _name_of(case: Case) -> str:
    return _name(operation_of(case).name, case.data.x.dtype, case.data.mean.dtype)


def _definition(name: str, found: FileCase) -> dict[str, Any]:
    operation, dtype, statistics = DEFINITIONS[name]
    data = {"shape": ["N", "C", "L"], "dtype": str(dtype)}
    channel = {"shape": ["C"], "dtype": str(statistics)}
    code = resources.files("backnorm.conformance.verify") / "include" / f"run_{operation}.py"
    return {
        "name": name,
        "op_type": "batch_norm",
        "description": _ABOUT[operation],
        "axes": {
            "N": {"type": "var", "description": "the product of the axes before the channels"},
            "C": {"type": "var", "description": "channels"},
            "L": {"type": "var", "description": "the product of the axes after the channels"},
        },
        "inputs": {
            name: _SCALARS.get(name) or (data if np.ndim(value) == 3 else channel)
            for name, value in found.inputs.items()
        },
        "outputs": {
            name: data if name in ("dx", "y") else channel for name in OPERATIONS[operation].results
        },
        "reference": code.read_text(),
    }
