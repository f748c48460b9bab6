"""The graphs and lines of oneDNN's benchdnn: all run, and what the tutorial says they print."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from backnorm.graph import override_graph, parse_graph
from backnorm.graph import run as run_module
from backnorm.graph.override import REFUSED
from scripts.benchdnn_graphs import LINES, suites

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorial/onednn-graph.md").read_text(encoding="utf-8")
COMMANDS = [line.split()[1:] for line in re.findall(r"^    (backnorm run graphs/.*)$", PAGE, re.M)]
FILES = [(suite, path) for suite, documents in suites().items() for path in documents]
LARGE = "96x192x71x71"
SMALL_LINES = [line for line in dict.fromkeys(LINES) if LARGE not in line]
LARGE_LINES = [line for line in dict.fromkeys(LINES) if LARGE in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("benchdnn")
    (command,) = re.findall(r"^    python (-m scripts\.benchdnn_graphs) graphs$", PAGE, re.M)
    subprocess.run([sys.executable, *command.split(), made / "graphs"], cwd=ROOT, check=True)
    return made


@pytest.fixture
def run(cli, folder, monkeypatch):
    """Run the command in the folder of the graphs, and return its JSON report and its notes."""
    monkeypatch.chdir(folder)

    def invoke(*arguments):
        result = cli(*arguments, "--json", "--repeat", 1)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout), result.stderr

    return invoke


def arguments_of(line):
    """Return the arguments of `backnorm run` for a line of benchdnn."""
    *overrides, case = shlex.split(line)
    return [f"graphs/3.13/{case.removeprefix('--case=')}", *overrides]


def test_suites_have_files_and_lines_of_their_releases():
    assert {suite: len(documents) for suite, documents in suites().items()} == {
        "3.13": 6,
        "3.2": 16,
        "graph-v0.9": 15,
    }
    assert (len(LINES), len(set(LINES))) == (37, 33)
    named = {
        kind: sum(f"/{kind}.json" in line for line in LINES) for kind in ("bnorm", "bnorm_bwd")
    }
    assert named == {"bnorm": 7, "bnorm_bwd": 7}
    text = json.dumps(suites()["graph-v0.9"])
    assert text.count("BatchNormTrainingBackprop") == 6
    assert text.count("ReLUBackprop") == 3


def test_tutorial_commands_print_documented_output(run):
    table = re.search(r"^\| file \| operator .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M)
    assert table is not None
    rows = [tuple(cell.strip() for cell in line[1:-1].split("|")) for line in table[1].splitlines()]
    printed = []
    for file, *options in [command[1:] for command in COMMANDS[:6]]:
        report, errors = run("run", file, *options)
        assert report["passed"]
        name = f"`{file.removeprefix('graphs/3.13/')}`"
        for step in report["steps"]:
            errors_of = f"{step['worst_ulp']:.4f}", f"{step['budget_used']:.1%}"
            printed.append((name, step["op"], step["layout"] or "", *errors_of))
            name = ""
        for line in errors.splitlines():
            assert line in PAGE
    assert rows == printed
    assert PAGE.count("backnorm: note:") == 1


def test_last_tutorial_commands_pass_check(run):
    assert len(COMMANDS) == 8
    for command in COMMANDS[6:]:
        assert run(*command)[0]["passed"]


@pytest.mark.parametrize(("suite", "path"), FILES)
def test_run_of_benchdnn_file_with_fewer_elements_passes(run, suite, path):
    shapes = "0:2x192x3x5"
    if "bn_bwd" in path:
        shapes = "0:2x32x3x5+1:2x32x3x5+3:2x32x3x5"
    elif "bnorm_bwd" in path:
        shapes = "0:2x192x3x5+1:2x192x3x5"
    elif "int8" in path:
        shapes = "0:2x3x5x64"
    file = f"graphs/{suite}/{path}"
    report, errors = run("run", file, "--in-shapes", shapes, "--random", 0, "--check")
    assert report["passed"]
    assert ("not the gradient" in errors) == ("bn_bwd_relu_bwd" in path)


@pytest.mark.parametrize("line", LINES)
def test_override_graph_accepts_benchdnn_line(line):
    file, *overrides = arguments_of(line)
    texts = dict(word[2:].split("=") for word in overrides)
    document = suites()["3.13"][file.removeprefix("graphs/3.13/")]
    names = {name.replace("-", "_"): text for name, text in texts.items()}
    program = override_graph(parse_graph(document), **names)
    assert program.results
    shapes = {key: tensor.shape for key, tensor in program.tensors.items()}
    if "in_shapes" in names:
        for entry in names["in_shapes"].split("+"):
            key, _, sizes = entry.partition(":")
            assert shapes[key] == tuple(map(int, sizes.split("x")))
    assert all(shapes[key] is not None for key in program.inputs)


@pytest.mark.long
@pytest.mark.parametrize("line", SMALL_LINES)
def test_run_of_usual_size_benchdnn_line_passes(run, line):
    assert run("run", *arguments_of(line), "--random", 0, "--check")[0]["passed"]


@pytest.mark.long
@pytest.mark.parametrize(("suite", "path"), FILES)
def test_run_of_benchdnn_file_passes(run, suite, path):
    assert run("run", f"graphs/{suite}/{path}", "--random", 0, "--check")[0]["passed"]


# 93 million elements.
@pytest.mark.sweep
@pytest.mark.parametrize("line", LARGE_LINES)
def test_run_of_large_benchdnn_line_passes_in_documented_memory(folder, line):
    code = (
        "import atexit, resource, sys; from backnorm.cli.app import main; "
        "usage = resource.RUSAGE_SELF; "
        "atexit.register(lambda: print(resource.getrusage(usage).ru_maxrss, file=sys.stderr)); "
        "main()"
    )
    file, *overrides = arguments_of(line)
    options = ["--random", "0", "--check", "--repeat", "1", "--json"]
    finished = subprocess.run(
        [sys.executable, "-c", code, "run", str(folder / file), *overrides, *options],
        capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    assert json.loads(finished.stdout)["passed"]
    kilobytes = int(finished.stderr.splitlines()[-1])
    # Gibibytes in float32 and in 16 bits. A ReLU is another step, with a result of its own.
    known = {"bnorm_bwd": (2.2, 1.8), "bn_relu": (1.55, 1.4), "bnorm": (1.1, 0.95)}
    most = next(pair for name, pair in known.items() if name in line)["--dt" in line]
    assert kilobytes / 2**20 < 1.05 * most


def test_run_of_relu_gradient_at_diff_dst_passes_without_note(cli, write_json):
    document = suites()["3.13"]["pattern/f32/bn_bwd_relu_bwd_fusion.json"]
    inputs = document["graph"][1]["inputs"]
    inputs[0], inputs[1] = inputs[1], inputs[0]
    result = cli("run", write_json(document), "--random", 0, "--check", "--json")
    report = json.loads(result.stdout)
    assert (report["passed"], report["notes"]) == (True, [])
    assert [step["op"] for step in report["steps"]] == ["ReLUBackward", "BatchNormTrainingBackward"]


@pytest.mark.parametrize("wrong", [-1e-30, 1e-3])
def test_check_of_relu_output_rejects_nonzero_value_in_place_of_zero(
    cli, write_json, monkeypatch, wrong
):
    right = run_module.run_step

    def changed(program, step, inputs, arithmetic):
        outputs = right(program, step, inputs, arithmetic)
        if step.op == "ReLU":
            y = outputs["dst"]
            y[np.unravel_index(int(np.argmin(y)), y.shape)] = wrong
        return outputs

    monkeypatch.setattr(run_module, "run_step", changed)
    file = write_json(suites()["3.13"]["pattern/f32/bn_relu_fusion.json"])
    shapes = "0:2x192x3x3"
    result = cli("run", file, "--in-shapes", shapes, "--random", 0, "--check")
    assert result.exit_code == 1
    assert "ELTWISE_0 dst: " in result.stderr


@pytest.mark.parametrize("option", REFUSED)
@pytest.mark.parametrize("value", ["", "=bnorm.json"])
def test_option_of_benchdnn_alone_is_refused_with_replacement(refused, option, value):
    line = refused("run", f"{option}{value}", "graph.json", "--check")
    assert line.endswith(f"{option}: is an option only of benchdnn; write {REFUSED[option]}")


def test_page_lists_options_of_benchdnn_that_are_refused():
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| options of benchdnn alone \| (.*) \|$", page, re.M)
    assert re.findall(r"`(--[a-z-]+)`", row) == [*REFUSED]


def test_run_of_line_with_types_by_id_changes_these_types(run):
    file = "graphs/3.13/op/f32/bnorm_bwd.json"
    shapes = "--in-shapes=0:2x192x3x5+1:2x192x3x5"
    ids = {"0": "bf16", "1": "bf16"}
    document = suites()["3.13"]["op/f32/bnorm_bwd.json"]
    ids[str(document["graph"][0]["outputs"][0]["id"])] = "bf16"
    types = "+".join(":".join(pair) for pair in ids.items())
    report, _ = run("run", file, shapes, f"--dt={types}", "--random", 0, "--check")
    assert report["passed"]
    (step,) = report["steps"]
    found = {each["port"]: each["dtype"] for each in (*step["inputs"], *step["outputs"])}
    assert [p for p, dtype in found.items() if dtype == "bfloat16"] == [
        "src", "diff_dst", "diff_src",
    ]  # fmt: skip
