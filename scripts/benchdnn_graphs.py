"""Write benchdnn's graphs that contain batch normalisation, and list the lines that run them.

Shapes, types, attributes and ids are those of oneDNN's tests/benchdnn/inputs/graph; the files
themselves are generated. There are three sets of files:

    3.13        the 6 files of oneDNN 3.8 to 3.13, whose types are an option (--dt)
    3.2         the 16 files of oneDNN 3.2 to 3.6, one for each type
    graph-v0.9  the 15 files of oneDNN Graph 0.9, with older names of two operators

`LINES` are the 37 lines of the harness files of oneDNN 3.13 that name these graphs. Run from the
repository root:

    python -m scripts.benchdnn_graphs FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SHAPE, CHANNELS = [2, 192, 71, 71], [192]
SMALL, SMALL_CHANNELS = [1, 32, 28, 28], [32]
QUANTISED, QUANTISED_CHANNELS = [1, 56, 56, 64], [64]

_TYPES = ("f32", "bf16", "f16")
_OLDER = {"BatchNormTrainingBackward": "BatchNormTrainingBackprop", "ReLUBackward": "ReLUBackprop"}
_UNKNOWN = -(2**63)

_NORM = {"data_format": ("string", "NCX"), "epsilon": ("f32", 0.0625)}
_QUANTISATION = {"zps": ("s64[]", [0]), "qtype": ("string", "per_tensor"), "axis": ("s64", -1)}


class _File:
    """Builds a graph file from operators and descriptions of their tensors."""

    def __init__(self, data_type: str, *, unknown: Sequence[int] = ()) -> None:
        self.type, self.unknown = data_type, unknown
        self.operators: list[dict[str, object]] = []

    def add(
        self,
        kind: str,
        name: str,
        attributes: Mapping[str, tuple[str, object]],
        inputs: Mapping[int, tuple[list[int], str]],
        outputs: Mapping[int, tuple[list[int], str]],
    ) -> None:
        """Add an operator; tensors are id -> (shape, type)."""
        self.operators.append(
            {
                "id": len(self.operators),
                "name": name,
                "kind": kind,
                "attrs": {n: {"type": t, "value": v} for n, (t, v) in attributes.items()},
                "inputs": [self._tensor(id_, *tensor) for id_, tensor in inputs.items()],
                "outputs": [self._tensor(id_, *tensor) for id_, tensor in outputs.items()],
            }
        )

    def _tensor(self, id_: int, shape: list[int], data_type: str) -> dict[str, object]:
        stride = [1]
        for size in reversed(shape[1:]):
            stride.insert(0, stride[0] * size)
        known = id_ not in self.unknown
        return {
            "id": id_,
            "dtype": data_type,
            "shape": shape,
            "stride": stride if known else [_UNKNOWN],
            "layout_type": "strided" if known else "undef",
            "property_type": "undef",
        }

    def document(self, version: str) -> dict[str, object]:
        """Return the file's JSON."""
        return {
            "version": version,
            "engine_kind": "cpu",
            "fpmath_mode": "strict",
            "graph": self.operators,
        }


def _inference(file: _File) -> None:
    data, channels = (SHAPE, file.type), (CHANNELS, "f32")
    inputs = {0: data, 1: channels, 2: channels, 3: channels, 4: channels}
    file.add("BatchNormInference", "BNORM_0", _NORM, inputs, {5: data})


def _forward(file: _File) -> None:
    data, channels = (SHAPE, file.type), (CHANNELS, "f32")
    inputs = {0: data, 1: channels, 2: channels, 3: channels, 4: channels}
    outputs = {5: data, 6: channels, 7: channels, 8: channels, 9: channels}
    file.add("BatchNormForwardTraining", "BNORM_0", _NORM, inputs, outputs)


def _backward(file: _File) -> None:
    data, channels = (SHAPE, file.type), (CHANNELS, "f32")
    inputs = {0: data, 1: data, 2: channels, 3: channels, 4: channels}
    outputs = {5: data, 6: channels, 7: channels}
    file.add("BatchNormTrainingBackward", "BNORM_0", _NORM, inputs, outputs)


def _relu(file: _File) -> None:
    data = (SHAPE, file.type)
    _inference(file)
    file.add("ReLU", "ELTWISE_0", {}, {5: data}, {6: data})


def _relu_backward(file: _File) -> None:
    """Add ReLUBackward, joined to the `src` of the backward pass."""
    data, channels = (SMALL, file.type), (SMALL_CHANNELS, "f32")
    file.add("ReLUBackward", "ELTWISE_0", {"use_dst": ("bool", 0)}, {0: data, 1: data}, {2: data})
    inputs = {2: data, 3: data, 4: channels, 5: channels, 6: channels}
    outputs = {7: data, 8: channels, 9: channels}
    file.add("BatchNormTrainingBackward", "BNORM_0", _NORM, inputs, outputs)


def _int8(file: _File) -> None:
    """Add Dequantize, inference, ReLU and Quantize, with our own names of operators."""
    integers, data, channels = (QUANTISED, "s8"), (QUANTISED, "f32"), (QUANTISED_CHANNELS, "f32")
    norm = {"data_format": ("string", "NXC"), "epsilon": ("f32", 1.001e-5)}
    scale = ("f32[]", [0.629168])
    file.add(
        "Dequantize", "dequantize", {"scales": scale} | _QUANTISATION, {0: integers}, {1: data}
    )
    inputs = {1: data, 2: channels, 3: channels, 4: channels, 5: channels}
    file.add("BatchNormInference", "norm", norm, inputs, {6: data})
    file.add("ReLU", "relu", {}, {6: data}, {7: data})
    scale = ("f32[]", [1.73474])
    file.add("Quantize", "quantize", {"scales": scale} | _QUANTISATION, {7: data}, {8: integers})


_INT8 = "pattern/int8/int8_bnorm_relu_fusion.json"
_FILES = {
    "op/{}/bnorm.json": _inference,
    "op/{}/bnorm_bwd.json": _backward,
    "op/{}/bnorm_fwd_d.json": _forward,
    "pattern/{}/bn_relu_fusion.json": _relu,
    "pattern/{}/bn_bwd_relu_bwd_fusion.json": _relu_backward,
}


def _documents(types: Sequence[str], version: str) -> dict[str, dict[str, object]]:
    found = {}
    for path, add in _FILES.items():
        for data_type in types:
            file = _File(data_type)
            add(file)
            found[path.format(data_type)] = file.document(version)
    return found


def _quantised() -> dict[str, dict[str, object]]:
    file = _File("f32", unknown=(1, 6, 7))
    _int8(file)
    return {_INT8: file.document("3.1.0")}


def _in_older_words(document: dict[str, object]) -> dict[str, object]:
    text = json.dumps(document)
    for name, older in _OLDER.items():
        text = text.replace(f'"{name}"', f'"{older}"')
    found: dict[str, object] = json.loads(text)
    return found


def suites() -> dict[str, dict[str, dict[str, object]]]:
    """Return set -> path -> JSON."""
    v09 = _documents(_TYPES, "3.0.0")
    return {
        "3.13": _documents(_TYPES[:1], "3.0.0") | _quantised(),
        "3.2": _documents(_TYPES, "3.0.0") | _quantised(),
        "graph-v0.9": {path: _in_older_words(document) for path, document in v09.items()},
    }


def _lines() -> Iterator[str]:
    """Yield the lines of the harness files, first of op, then of pattern, without --reset."""
    nxc = "--op-attrs=0:data_format:NXC"
    x, x_and_dy = "--in-shapes=0:2x71x71x192", "--in-shapes=0:2x71x71x192+1:2x71x71x192"
    for dt in ("", "--dt=bf16 ", "--dt=f16 "):
        yield f"{dt}--in-shapes=0:2x192 --case=op/f32/bnorm_fwd_d.json"
        yield f"{dt}--in-shapes=0:2x192x71 --case=op/f32/bnorm_fwd_d.json"
        yield f"{dt}{x} {nxc} --case=op/f32/bnorm.json"
        yield f"{dt}{x} {nxc} --case=op/f32/bnorm_fwd_d.json"
        yield f"{dt}{x_and_dy} {nxc} --case=op/f32/bnorm_bwd.json"
    # The files of continuous integration repeat four of these lines.
    yield f"{x} {nxc} --case=op/f32/bnorm_fwd_d.json"
    yield f"{x_and_dy} {nxc} --case=op/f32/bnorm_bwd.json"
    yield f"--dt=bf16 {x} {nxc} --case=op/f32/bnorm.json"
    yield f"--dt=f16 {x} {nxc} --case=op/f32/bnorm.json"
    # Lines with large shapes.
    large, epsilon = "96x192x71x71", "--op-attrs=0:epsilon:0.0625"
    forward = f"--in-shapes=0:{large}+1:192+2:192+3:192+4:192 {epsilon}"
    backward = f"--in-shapes=0:{large}+1:{large}+2:192+3:192+4:192 {epsilon}"
    yield f"{backward} --case=op/f32/bnorm_bwd.json"
    for dt in ("--dt=bf16 ", "--dt=f16 "):
        yield f"{dt}{forward} --case=op/f32/bnorm_fwd_d.json"
        yield f"{dt}{forward} --case=op/f32/bnorm.json"
        yield f"{dt}{backward} --case=op/f32/bnorm_bwd.json"
    for dt in ("", "--dt=bf16 ", "--dt=f16 "):
        yield f"{dt}--case=pattern/f32/bn_bwd_relu_bwd_fusion.json"
        yield f"{dt}--case=pattern/f32/bn_relu_fusion.json"
        yield f"{dt}{forward} --case=pattern/f32/bn_relu_fusion.json"
    parameters = "+2:64+3:64+4:64+5:64"
    yield f"--in-shapes=0:1x56x56x64{parameters} --op-attrs=1:data_format:NXC --case={_INT8}"
    yield f"--in-shapes=0:1x64x56x56{parameters} --op-attrs=1:data_format:NCX --case={_INT8}"


#: The lines of oneDNN 3.13 that run these graphs.
LINES = tuple(_lines())


def write(folder: Path) -> None:
    """Write all files into folders of `folder`, named after their sets."""
    for suite, documents in suites().items():
        for name, document in documents.items():
            path = folder / suite / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
