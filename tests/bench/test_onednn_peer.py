"""oneDNN as a contestant: right on every cell it takes, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import onednn_library
from benchmarks.peers.base import Missing
from benchmarks.peers.onednn import OneDnn
from tests.required import require

pytestmark = pytest.mark.peer

_DRIVER = "tests.bench.drivers.onednn_driver"


@pytest.fixture(scope="module")
def report():
    require(onednn_library.find() is not None, onednn_library.DISTRIBUTION)
    done = subprocess.run(
        [sys.executable, "-m", _DRIVER],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_it_tells_its_own_version(report):
    assert report["versions"]["oneDNN"].startswith("3.")


@pytest.mark.parametrize("op", ["backward", "forward", "inference"])
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_float32_is_right_in_every_rank(report, op, layout):
    cells = {
        name: result
        for name, result in report["cells"].items()
        if name.startswith(op) and name.endswith(f"{layout} float32")
    }
    assert len(cells) == 6
    names = {"backward": {"dx", "dgamma", "dbeta"}, "forward": {"y", "mean", "variance"}}
    for name, errors in cells.items():
        assert set(errors) == names.get(op, {"y"}), name
        assert max(errors.values()) <= 1, name


def test_half_precision_is_right_or_declined_with_the_librarys_own_word(report):
    """Which of them a processor has an implementation of differs."""
    for name, result in report["cells"].items():
        if name.endswith("float16"):
            declined = isinstance(result, str)
            assert "unimplemented" in result if declined else max(result.values()) <= 1, name


def test_float64_is_declined(report):
    declined = [result for name, result in report["cells"].items() if name.endswith("float64")]
    assert len(declined) == 36
    assert set(declined) == {"its statistics are float32, not float64"}


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(onednn_library, "find", lambda: None)
    with pytest.raises(Missing, match="onednn-cpu-gomp"):
        OneDnn().start(threads=1)
