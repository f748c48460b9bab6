"""oneDNN as a contestant: right in every rank, in a process of its own."""

from __future__ import annotations

import dataclasses

import pytest

from backnorm.peers import onednn as onednn_library
from benchmarks.cells import Cell
from benchmarks.operators import OperatorRun
from benchmarks.peers.base import Missing
from benchmarks.peers.onednn import OneDnn
from benchmarks.turns import Settings
from tests.support.required import require

# All ranks; channels that fill vectors and channels that do not; one element of space.
SHAPES = ((33, 16), (9, 5, 7), (4, 16, 7, 9), (3, 5, 1, 1), (2, 17, 3, 5, 4), (2, 16, 2, 3, 2, 2))
ONEDNN = {"onednn": "benchmarks.peers.onednn:OneDnn"}


@pytest.fixture(scope="module")
def run():
    require(onednn_library.find() is not None, onednn_library.DISTRIBUTION)
    with OperatorRun(ONEDNN, "benchmarks.host:Host", 2, Settings(1, 1, 0.0, 0.0)) as run:
        yield run


@pytest.mark.peer
@pytest.mark.parametrize("op", ["backward", "forward", "inference"])
def test_measure_of_onednn_in_float32_is_accurate_in_all_ranks(run, op):
    for shape in SHAPES:
        for layout in ("NCX", "NXC"):
            row = run.measure(Cell("test", op, shape, layout, "float32"))
            assert row["notes"] == ""
            assert row["onednn.out"] > 0
    assert run.versions["oneDNN"].startswith("3.")


@pytest.mark.peer
def test_measure_of_onednn_in_other_types_is_timed_or_unsupported(run):
    cell = Cell("test", "backward", (4, 16, 7, 9), "NXC", "float64")
    row = run.measure(cell)
    assert row["notes"] == "onednn allocate unsupported: its statistics are float32, not float64"
    for dtype in ("bfloat16", "float16"):
        # Which of them a processor has an implementation of differs.
        row = run.measure(dataclasses.replace(cell, dtype=dtype))
        assert "onednn.out" in row or "unimplemented" in row["notes"]


def test_start_without_library_raises_missing_with_package_name(monkeypatch):
    monkeypatch.setattr(onednn_library, "find", lambda: None)
    with pytest.raises(Missing, match="onednn-cpu-gomp"):
        OneDnn().start(threads=1)
