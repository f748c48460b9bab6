"""The committed performance pages are what the committed result gives."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.model import geometric_mean
from benchmarks.report import read_result
from benchmarks.report.figures import cells
from benchmarks.report.words import TIMES

from .synthetic import squeezed

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    path = ROOT / "scripts" / "update_performance_docs.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path, script):
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/performance.md"):
        (tmp_path / name).write_text(f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n")
    return tmp_path


def write(pages):
    for path, text in pages.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_what_is_committed_is_current(script):
    path = ROOT / script.RESULT
    if not path.exists():
        pytest.skip(f"{script.RESULT} is not committed yet")
    assert script.stale(read_result(path), ROOT) == []


def test_the_committed_pages_have_the_markers(script):
    for name in ("README.md", "docs/performance.md"):
        text = (ROOT / name).read_text()
        assert text.count(script.BEGIN) == text.count(script.END) == 1


def test_pages_are_written_once_and_then_current(script, checkout, result):
    assert script.stale(result, checkout) == list(script.pages(result, checkout))
    write(script.pages(result, checkout))
    assert script.stale(result, checkout) == []
    readme = (checkout / "README.md").read_text()
    assert readme.startswith("before\n")
    assert readme.endswith("after\n")
    assert "\nold\n" not in readme


def test_the_readme_shows_the_best_and_the_worst_cell_of_every_kind(script, checkout, result):
    write(script.pages(result, checkout))
    readme = squeezed((checkout / "README.md").read_text())
    lines = readme.splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith(("| up to", "| larger"))]
    kinds = {}
    frame = cells(result)
    chosen = frame[(frame.op == "backward") & (frame.dtype == "float32")]
    for row in chosen.row:
        size = sum(row.cell.nbytes > cache for cache in result.caches)
        kinds.setdefault((size, row.cell.layout), []).append(row.ratio())
    assert len(rows) == len(kinds) > 3
    for columns, (_, ratios) in zip(rows, sorted(kinds.items()), strict=True):
        assert columns[2] == str(len(ratios))
        assert columns[3] == f"**{geometric_mean(ratios):.2f}**"
        assert columns[4].startswith(f"{min(ratios):.2f}: ")
        assert columns[5].startswith(f"{max(ratios):.2f}: ")
    lost = chosen.lost.sum()
    assert lost
    assert f"a peer is faster in {lost}." in readme


def test_the_page_holds_every_shape_with_losing_cells_visible(script, checkout, result):
    write(script.pages(result, checkout))
    page = squeezed((checkout / "docs" / "performance.md").read_text())
    assert "| 50x2048x7x7 |".replace("x", TIMES) in page
    assert "| backward (32,10) NCX float32 |" in page
    assert "| geometric mean |" in page
    assert "**4.38** (slower)" in page
    assert "| 1x4x2x2 |".replace("x", TIMES) in page


def test_plots_that_the_pages_name_exist(script, checkout, result):
    write(script.pages(result, checkout))
    assert "](docs/bench/sweep.svg)" in (checkout / "README.md").read_text()
    page = (checkout / "docs" / "performance.md").read_text()
    for name in ("ratio-backward-float32", "roofline-float32", "sweep"):
        assert f"](bench/{name}.svg)" in page
        assert (checkout / "docs" / "bench" / f"{name}.svg").exists()


def test_a_plot_of_another_release_of_matplotlib_is_left_alone(script, checkout, result):
    write(script.pages(result, checkout))
    path = checkout / "docs" / "bench" / "sweep.svg"
    drawn = path.read_text()
    path.write_text(drawn.replace("Matplotlib v", "Matplotlib v9"))
    assert script.stale(result, checkout) == []
    path.write_text(drawn.replace("cache", "store"))
    assert script.stale(result, checkout) == [path]


def test_a_page_without_markers_is_refused(script, checkout, result):
    (checkout / "README.md").write_text("no markers")
    with pytest.raises(SystemExit, match="bench:begin"):
        script.pages(result, checkout)
