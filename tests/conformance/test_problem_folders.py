"""Cases in the formats of flashinfer-bench and hipDNN, and solutions of flashinfer-bench."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from safetensors.numpy import load_file

from backnorm.cli.app import app
from backnorm.conformance.verify._solution import OfSolution
from backnorm.conformance.verify.cases import Selection
from backnorm.conformance.verify.export import export
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.run import verify
from backnorm.errors import ArgumentError
from tests.support.pages import ROOT
from tests.support.required import require

from .test_verify_page import lines_of, printed

PAGE = (ROOT / "docs/how-to/problem-folders.md").read_text("utf-8")
SCREENS = re.findall(r"^```console\n\$ (backnorm .+)\n((?:(?!```).*\n)+)^```", PAGE, re.M)

FEW = ("realistic-*", "no-gamma-*", "frozen-*", "grid-0x5x4-*", "grid-epsilon-*")


@pytest.fixture(name="app")
def command():
    """Return the command that `refused` runs."""
    return app


@pytest.fixture
def solution(tmp_path):
    """Write the files of the page's solution, and return a function that changes the solution."""
    path = tmp_path / "solution.json"
    (tmp_path / "kernel.py").write_text(
        re.search(r"^```text\n(import .+?)^```", PAGE, re.M | re.S)[1]
    )
    text = re.search(r"^```json\n(.+?)^```", PAGE, re.M | re.S)[1]

    def changed(spec=(), **fields):
        values = json.loads(text) | fields
        values["spec"] |= dict(spec)
        path.write_text(json.dumps(values))
        return path

    changed()
    return changed


@pytest.mark.parametrize(("command", "screen"), SCREENS)
@pytest.mark.usefixtures("solution")
def test_page_screen_is_what_the_command_prints(command, screen, tmp_path):
    if "--solution" in command:
        require(find_spec("torch"), "torch")
    assert printed(command, tmp_path) == lines_of(screen)


# What flashinfer-bench itself makes of the folders. It is no dependency: the test uses its readers,
# which need neither its kernels nor a GPU.
READER = """
import sys
from pathlib import Path
from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
from flashinfer_bench.compile.builders.python_builder import PythonBuilder
from flashinfer_bench.data import Definition, Solution, Workload, load_json_file, load_jsonl_file

for folder in map(Path, sys.argv[1:]):
    definition = load_json_file(Definition, folder / "definition.json")
    source = {"path": "main.py", "content": definition.reference}
    spec = {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::run"}
    spec["destination_passing_style"] = False
    solution = Solution(
        name=folder.name, definition=definition.name, author="-", spec=spec, sources=[source]
    )
    run = PythonBuilder().build(definition, solution)
    for workload in load_jsonl_file(Workload, folder / "workload.jsonl"):
        tensors = load_safetensors(definition, workload, folder)
        results = run(*gen_inputs(definition, workload, "cpu", tensors))
        shapes = [tuple(each.shape) for each in results]
        assert shapes == [tuple(each) for each in definition.get_output_shapes(workload.axes)]
        assert [each.dtype for each in results] == definition.torch_output_dtypes
        print(folder.name, workload.uuid)
"""


@pytest.mark.peer
@pytest.mark.parametrize("operation", ["backward", "forward"])
def test_flashinfer_bench_reads_problems_and_runs_their_references(operation, tmp_path):
    if not (find_spec("flashinfer_bench") and find_spec("torch")):
        pytest.skip(
            "not installed: flashinfer-bench "
            "(pip install --no-deps flashinfer-bench docstring-parser)"
        )
    number, _ = export(tmp_path, Selection(only=FEW, operation=operation), form="flashinfer")
    done = subprocess.run(
        [sys.executable, "-c", READER, *sorted(tmp_path.iterdir())], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == number > 10


@pytest.mark.parametrize("operation", ["backward", "forward"])
def test_problem_has_the_rules_of_its_schema(operation, tmp_path):
    number, refused = export(
        tmp_path, Selection(dtypes=("float64", "bfloat16"), only=FEW, operation=operation),
        form="flashinfer",
    )  # fmt: skip
    assert set(refused) == {"flashinfer-bench has no float64"}
    lines = 0
    for folder in tmp_path.iterdir():
        definition = json.loads((folder / "definition.json").read_text())
        assert definition["name"] == folder.name
        (run,) = (
            each for each in ast.parse(definition["reference"]).body
            if isinstance(each, ast.FunctionDef)
        )  # fmt: skip
        inputs = definition["inputs"]
        assert [each.arg for each in run.args.args] == list(inputs)
        assert not {*inputs} & {*definition["outputs"], *definition["axes"]}
        for line in (folder / "workload.jsonl").read_text().splitlines():
            workload = json.loads(line)
            lines += 1
            assert list(workload["axes"]) == list(definition["axes"])
            for name, each in workload["inputs"].items():
                if inputs[name]["shape"] is None:
                    assert each["type"] == "scalar"
                    continue
                array = load_file(folder / each["path"])[each["tensor_key"]]
                assert list(array.shape) == [workload["axes"][a] for a in inputs[name]["shape"]]
                assert str(array.dtype) == inputs[name]["dtype"]
    assert lines == number


def reference(folder, *, writes):
    """Return a source whose function `run` is the reference of a definition."""
    definition = json.loads((folder / "definition.json").read_text())
    code = definition["reference"]
    if writes:
        code = code.replace("def run(", "def compute(")
        count = len(definition["inputs"])
        code += f"\n\ndef run(*a):\n    for out, r in zip(a[{count}:], compute(*a[:{count}])):\n"
        code += "        out.copy_(r)\n"
    return {"path": "package/main.py", "content": code}


@pytest.mark.peer
@pytest.mark.parametrize(
    ("operation", "types", "writes"),
    [("backward", "bfloat16_float32", True), ("forward", "float32", False)],
)
def test_verify_of_reference_as_solution_has_no_finding(
    operation, types, writes, solution, tmp_path
):
    require(find_spec("torch"), "torch")
    selection = Selection(
        dtypes=tuple(types.split("_")[:1]), only=(*FEW, "diagnostic-*"), operation=operation
    )
    export(tmp_path / "problems", selection, form="flashinfer")
    name = f"batch_norm_{operation}_{types}"
    # One module of the package imports the other.
    entry = {"path": "main.py", "content": "from .package.main import run"}
    path = solution(
        {"entry_point": "main.py::run", "destination_passing_style": writes, "language": "triton"},
        definition=name,
        sources=[entry, reference(tmp_path / "problems" / name, writes=writes)],
    )
    results = verify(Job(str(path), selection, solution=True))
    assert not findings(results)
    judged = [v for v in results.verdicts if v.status != "refused"]
    assert len(judged) >= 20
    assert {v.status for v in judged} <= {"exact", "float64", "float32"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"definition": "gemm"}, "definition: unknown; got gemm; expected batch_norm_backward_"),
        ({"spec": {"language": "cuda"}}, "spec.language: unknown; got cuda; expected python, "),
        ({"spec": {"languages": ["triton", "cutlass"]}}, "spec.language: unknown; got cutlass"),
        ({"spec": {"entry_point": "other.py::run"}}, "spec.entry_point: unknown; got other.py"),
        ({"spec": {"entry_point": "run"}}, "must be a solution of flashinfer-bench"),
        ({"sources": [{}]}, "must be a solution of flashinfer-bench; KeyError: 'path'"),
        ({"spec": {"destination_passing_style": "false"}}, "spec.destination_passing_style: has "),
        ({"sources": [{"path": "kernel.py"}, {"path": "../x.py"}]}, "sources.path: must be a "),
        ({"definition": "batch_norm_forward_float32"},
         "definition: is not a backward pass; got batch_norm_forward_float32; "
         "--operation forward"),
    ],
)  # fmt: skip
def test_unusable_solution_is_refused(change, says, solution):
    with pytest.raises(ArgumentError) as caught:
        OfSolution(solution(**change), "backward", "cpu")
    assert says in str(caught.value)


# What hipDNN's own writers give to graphs: ROCm/rocm-libraries at
# 7f1b2ca9b6f299752a26c17d29f966ff2c66e810, projects/hipdnn/tools/dnn-benchmarking/src/
# dnn_benchmarking/tools/convert_miopen_shapes/bnorm.py and tensors.py.
TENSOR = {"uid", "name", "dims", "strides", "data_type", "virtual"}
SCALAR = TENSOR | {"value_type", "value"}
GRAPH = {"compute_data_type", "io_data_type", "intermediate_data_type", "tensors", "nodes"}
NODES = {
    "backward": (
        "BatchnormBackwardAttributes",
        {"dy", "x", "mean", "inv_variance", "scale", "peer_stats"},
        {"dx", "dscale", "dbias"},
    ),
    "forward": (
        "BatchnormAttributes",
        {"x", "scale", "bias", "epsilon", "peer_stats", "prev_running_mean",
         "prev_running_variance", "momentum"},
        {"y", "mean", "inv_variance", "next_running_mean", "next_running_variance"},
    ),
}  # fmt: skip
TYPES = {"float": np.float32, "bfloat16": np.uint16}


def loaded(path):
    """Return the graph and the tensors of a bundle, as hipDNN's loader does: ROCm/rocm-libraries at
    010daa4c4f80b8d531b3b15274add6bb9fc646c9, LoadGraphAndTensors.hpp of the test SDK.
    """
    graph, tensors = json.loads(path.read_text()), {}
    for each in graph["tensors"]:
        dtype = TYPES[each["data_type"]]
        data = np.fromfile(path.with_suffix(f".tensor{each['uid']}.bin"), dtype)
        assert data.size == np.prod(each["dims"])
        strides = [stride * data.itemsize for stride in each["strides"]]
        tensors[each["uid"]] = np.lib.stride_tricks.as_strided(data, each["dims"], strides)
    return graph, tensors


def computed(
    operation, x, scale, *, dy=None, bias=None, epsilon=None, mean=None, inv_variance=None
):
    """Return what the node computes, by the names of its outputs, in float64."""
    axes = tuple(k for k in range(x.ndim) if k != 1)
    count = x.size / x.shape[1]
    if operation == "forward":
        mean = x.mean(axes, keepdims=True)
        inv_variance = 1 / np.sqrt(x.var(axes, keepdims=True) + epsilon)
        y = scale * (x - mean) * inv_variance + bias
        return {"y": y, "mean": mean, "inv_variance": inv_variance}
    normalized = (x - mean) * inv_variance
    dscale, dbias = ((dy * each).sum(axes, keepdims=True) for each in (normalized, 1))
    dx = scale * inv_variance * (dy - (dbias + normalized * dscale) / count)
    return {"dx": dx, "dscale": dscale, "dbias": dbias}


@pytest.mark.parametrize("operation", ["backward", "forward"])
def test_bundle_has_the_graph_of_hipdnn_and_the_results_of_its_node(operation, tmp_path):
    only = ("realistic-*", "no-gamma-*", "frozen-*", "grid-4x7-*", "grid-epsilon-*")
    selection = Selection(dtypes=("float32", "bfloat16"), only=only, operation=operation)
    number, refused = export(tmp_path, selection, form="hipdnn")
    assert "hipDNN has no layout of rank 2" in refused
    assert "hipDNN's per-channel tensors have 32 bits or more" in refused
    paths = [folder / f"{folder.name}.json" for folder in tmp_path.iterdir()]
    assert len(paths) == number >= 8
    for path in paths:
        graph, tensors = loaded(path)
        assert graph.keys() == GRAPH | {"name"}
        for each in graph["tensors"]:
            assert each.keys() == (SCALAR if each["name"] == "epsilon" else TENSOR)
        (node,) = graph["nodes"]
        kind, *ends = NODES[operation]
        assert node["type"] == kind
        for end, names in zip(("inputs", "outputs"), ends, strict=True):
            assert node[end].keys() == {f"{name}_tensor_uid" for name in names}
        inputs, outputs = (
            {name.removesuffix("_tensor_uid"): uid for name, uid in node[end].items()}
            for end in ("inputs", "outputs")
        )
        assert inputs.pop("peer_stats") == []
        x = tensors[inputs["x"]]
        # Channels-last tensors have channels at distance 1.
        assert (x.strides[1] == x.itemsize) == path.stem.endswith("NXC")
        assert tensors[next(iter(outputs.values()))].strides == x.strides
        if x.dtype != np.float32:
            continue
        wide = {n: tensors[uid].astype(float) for n, uid in inputs.items() if uid is not None}
        for name, value in computed(operation, **wide).items():
            found = tensors[outputs[name]]
            np.testing.assert_array_max_ulp(found, value.astype(np.float32), 1)


@pytest.mark.parametrize("form", ["flashinfer", "hipdnn", "mlir"])
def test_problems_are_deterministic_and_have_no_other_dialect(form, refused, tmp_path):
    selection = Selection(dtypes=("float32",), only=("realistic-*",))
    for name in ("one", "two"):
        assert export(tmp_path / name, selection, form=form)[0] == 2
    one, two = (
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*.*")
        }
        for name in ("one", "two")
    )
    assert one == two
    options = ("--format", form, "--dialect", "aten")
    line = refused("cases", "export", tmp_path / "none", *options)
    assert f"--dialect: must be absent with --format {form}; got aten" in line


def test_export_of_cases_that_a_format_refuses_writes_nothing(refused, tmp_path):
    folder = tmp_path / "modules"
    line = refused("cases", "export", folder, "--format", "mlir", "--only", "frozen-*")
    assert "--format: all cases are refused; got the operator has no frozen statistics" in line
    assert not folder.exists()
