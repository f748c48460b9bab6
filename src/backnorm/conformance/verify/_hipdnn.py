"""Cases as bundles of hipDNN: a graph in JSON, and the raw elements of each of its tensors.

Source: ROCm/rocm-libraries, projects/hipdnn/docs/rfcs/0011_GoldenReferenceValidation.md, and the
loader of its test SDK, LoadGraphAndTensors.hpp: the bundle ``Name`` has the files ``Name.json`` and
``Name.tensor<uid>.bin``; the loader reads all tensors, and compares those that are outputs of a
node. Dimensions are in the order N, C, ..., and strides say how a tensor is stored. The nodes have
the tensors of ONNX Runtime's operators.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.verify._file_cases import FileCase, as_in_files, expected
from backnorm.conformance.verify.dialect_calls import shape_of_kept
from backnorm.conformance.verify.operations import RefusedError, operation_of
from backnorm.dialects.schema import OperatorSchema
from backnorm.dtypes import is_16_bit

_NAMES = {
    "x": "x", "dy": "dy", "gamma": "scale", "beta": "bias", "mean": "mean",
    "inverse_deviation": "inv_variance", "y": "y", "dx": "dx", "dgamma": "dscale", "dbeta": "dbias",
}  # fmt: skip
_NODES = {"backward": "BatchnormBackwardAttributes", "forward": "BatchnormAttributes"}
_TYPES = {"float32": "float", "float64": "double", "float16": "half", "bfloat16": "bfloat16"}
# The tensors of a forward node that cases do not have.
_ABSENT = {
    "inputs": ("prev_running_mean", "prev_running_variance", "momentum"),
    "outputs": ("next_running_mean", "next_running_variance"),
}


def as_bundle(case: Case, schema: OperatorSchema | None) -> FileCase:
    """Return a case as a bundle has it: its arrays have the axes N, C, ..., with any strides.

    Raises
    ------
    RefusedError
        If hipDNN has no such rank or type.
    """
    data = case.data
    if not 3 <= data.x.ndim <= 5:
        raise RefusedError(f"hipDNN has no layout of rank {data.x.ndim}")
    if is_16_bit(data.mean.dtype):
        raise RefusedError("hipDNN's per-channel tensors have 32 bits or more")
    if data.data_format == "NXC":
        x, dy = (np.moveaxis(array, -1, 1) for array in (data.x, data.dy))
        case = replace(case, data=replace(data, x=x, dy=dy, data_format="NCX"))
    found = as_in_files(case, schema)
    assert schema is not None
    named = {t.name: _NAMES[t.role] for t in schema.inputs if t.role in _NAMES}
    arrays = {named[name]: a for name, a in found.inputs.items() if name in named}
    kept = shape_of_kept(case)
    outputs = {_NAMES[role]: role for role in found.outputs.values() if role in _NAMES}
    return replace(
        found,
        inputs={name: a.reshape(kept) if a.ndim == 1 else a for name, a in arrays.items()},
        outputs=outputs,
        kept=frozenset(outputs) - {"dx", "y"},
    )


def write(folder: Path, cases: Iterable[FileCase], made_by: Mapping[str, Any]) -> None:
    """Write a bundle for each case."""
    for found in cases:
        name, results = found.case.name, expected(found)
        stem = folder / name / name
        stem.parent.mkdir(parents=True, exist_ok=True)
        arrays = dict(found.inputs)
        if operation_of(found.case).name == "forward":
            arrays["epsilon"] = np.full(1, found.case.data.epsilon, np.float32)
        inputs = len(arrays)
        for output, parts in results.items():
            arrays[output] = np.empty_like(parts["rounded"])
            if output not in found.kept:
                arrays[output] = np.empty_like(found.inputs["x"])
            arrays[output][...] = parts["rounded"]
        for uid, array in enumerate(arrays.values()):
            # "K": in the order of memory.
            Path(f"{stem}.tensor{uid}.bin").write_bytes(array.ravel(order="K").tobytes())
        graph = _graph(found.case, arrays, inputs)
        Path(f"{stem}.json").write_text(json.dumps(graph, indent=1) + "\n")


def _graph(case: Case, arrays: Mapping[str, np.ndarray], inputs: int) -> dict[str, Any]:
    operation = operation_of(case).name
    uids: list[tuple[str, Any]] = [(f"{n}_tensor_uid", uid) for uid, n in enumerate(arrays)]
    ends = {"inputs": dict(uids[:inputs]), "outputs": dict(uids[inputs:])}
    ends["inputs"]["peer_stats_tensor_uid"] = []
    if operation == "forward":
        for end, names in _ABSENT.items():
            ends[end] |= dict.fromkeys(f"{name}_tensor_uid" for name in names)
    return {
        "name": case.name,
        "io_data_type": _TYPES[str(case.data.x.dtype)],
        "intermediate_data_type": _TYPES[str(case.data.mean.dtype)],
        "compute_data_type": _TYPES[str(case.data.mean.dtype)],
        "tensors": [
            {
                "uid": uid,
                "name": name,
                "dims": list(array.shape),
                "strides": [stride // array.itemsize for stride in array.strides],
                "data_type": _TYPES[str(array.dtype)],
                "virtual": False,
            }
            | (
                {"value_type": "Float32Value", "value": float(array[0])}
                if name == "epsilon"
                else {}
            )
            for uid, (name, array) in enumerate(arrays.items())
        ],
        "nodes": [
            {
                "name": operation,
                "type": _NODES[operation],
                "compute_data_type": _TYPES[str(case.data.mean.dtype)],
                **ends,
            }
        ],
    }
