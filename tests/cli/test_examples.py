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
