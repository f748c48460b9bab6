"""The input files of docs/examples do what docs/cli.md says."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = sorted((DOCS / "examples").glob("*.json"))
TENSORS = resources.files("backnorm") / "data/digits_batchnorm.npz"
GRADIENTS = {
    "call_ngraph": ("input_delta", "gamma_delta", "beta_delta"),
    "call_onednn_graph": ("diff_src", "diff_gamma", "diff_beta"),
    "call_tensorflow": ("dx", "dgamma", "dbeta"),
    "graph_backward": ("5", "6", "7"),
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_run_of_example_passes_check(cli, path):
    result = cli("run", path, "--tensors", TENSORS, "--random", 0, "--check", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["passed"]


def test_examples_of_all_dialects_have_the_same_bits(cli, tmp_path, read_npz):
    results = []
    for name, outputs in GRADIENTS.items():
        out = tmp_path / "out.npz"
        example = DOCS / "examples" / f"{name}.json"
        assert cli("run", example, "--tensors", TENSORS, "--out", out).exit_code == 0
        arrays = read_npz(out)
        results.append([arrays[port].tobytes() for port in outputs])
    assert all(result == results[0] for result in results)


def test_cli_page_names_all_examples_and_no_others():
    named = set(re.findall(r"examples/(\w+\.json)", (DOCS / "cli.md").read_text()))
    assert named == {path.name for path in EXAMPLES}


def commands(page, needle):
    """Return the arguments of the page's commands that have `needle`."""
    text = (DOCS / page).read_text(encoding="utf-8")
    lines = re.findall(r"^    backnorm (.*)$", text, re.MULTILINE)
    return [line.split() for line in lines if needle in line]


def test_cli_page_commands_write_golden_data_that_run_again(cli, tmp_path, read_npz, monkeypatch):
    (tmp_path / "docs").symlink_to(DOCS)
    monkeypatch.chdir(tmp_path)
    first, second = commands("cli.md", "golden.npz")
    for command in (first, second):
        result = cli(*command)
        assert result.exit_code == 0, result.output
    golden, again = read_npz("golden.npz"), read_npz("again.npz")
    assert {"x", "x_backprop"} <= set(golden)
    assert "x" not in again
    assert all(array.tobytes() == golden[name].tobytes() for name, array in again.items())


def test_tutorial_command_runs_known_operators_of_model(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = json.loads((DOCS / "examples" / "graph_training_step.json").read_text())
    model["graph"].append(
        {"id": 7, "kind": "Convolution", "inputs": [{"id": 20}], "outputs": [{"id": 0}]}
    )
    Path("model.json").write_text(json.dumps(model))
    (command,) = commands("tutorial/onednn-graph.md", "--only-known")
    result = cli(*command, "--json")
    assert result.exit_code == 0, result.output
    assert "backnorm: note: left out 1 operator: Convolution (1)\n" in result.stderr
    assert len(json.loads(result.stdout)["steps"]) == 2
    command.remove("--only-known")
    result = cli(*command)
    assert result.exit_code == 2
    assert "graph[2].kind: unknown operator; got 'Convolution'" in result.stderr
    assert "--only-known" in result.stderr
