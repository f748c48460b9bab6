"""The committed performance pages are what the committed result gives."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from backnorm.errors import ArgumentValueError
from benchmarks.model import geometric_mean
from benchmarks.report import read_result, write_result
from benchmarks.report.figures import cells
from benchmarks.report.layouts import layout_cells, layout_tables, limits_table
from benchmarks.report.tables import markdown
from benchmarks.report.words import TIMES

from . import synthetic, synthetic_gpu
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
    with (tmp_path / "docs/performance.md").open("a") as page:
        page.write(f"{script.BEGIN_MACHINES}\n{script.END_MACHINES}\nend\n")
    (tmp_path / "docs/bench").mkdir()
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
    assert text.count(script.BEGIN_MACHINES) == text.count(script.END_MACHINES) == 1


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


def machines(script, checkout, result):
    """Write the pages; return the headings of the machines, and what follows each."""
    write(script.pages(result, checkout))
    page = squeezed((checkout / "docs" / "performance.md").read_text())
    assert page.endswith(f"{script.END_MACHINES}\nend\n")
    parts = page.split(script.BEGIN_MACHINES)[1].split(script.END_MACHINES)[0].split("### ")[1:]
    return dict(part.split("\n\n", 1) for part in parts)


def test_results_beside_are_machines_the_newest_first(script, checkout, result):
    folder = checkout / "docs" / "bench"
    days = {"b.json": "2026-11-20", "a.json": "2026-11-19", "c.json": "2026-11-30"}
    for name, day in days.items():
        kind = {"microarchitecture": "znver5"} if name == "a.json" else {}
        other = synthetic.environment(cpu=name, threads=1, date=f"{day}T01:00:00+00:00", **kind)
        write_result(dataclasses.replace(result, environment=other), folder / name)
    write_result(synthetic_gpu.result(), folder / "gpu.json")
    (folder / "other.json").write_text('{"environment": {}, "rows": []}')
    found = machines(script, checkout, result)
    assert [*found] == [
        "AMD EPYC 9R14 (made up), 2 threads, 2026-11-21",
        "c.json, 1 thread, 2026-11-30",
        "b.json, 1 thread, 2026-11-20",
        "a.json (znver5), 1 thread, 2026-11-19",
        "Cells above the limits",
    ]


def test_a_machine_is_told_with_its_tables(script, checkout, result):
    found = machines(script, checkout, result)
    where, limits = found
    assert found[where].startswith(
        "1 MiB a core, 32 MiB shared; calls in a row; backnorm 0.1.0, numpy 2.4.6, "
        f"torch 2.13.0, jax 0.10.2. All {len(cells(result))} cells: "
        "[bench/result.json](bench/result.json).\n"
    )
    frame = layout_cells(result)
    (table,) = layout_tables(frame)
    assert squeezed(markdown(table)) in found[where]
    assert squeezed(markdown(limits_table({where: frame}))) in found[limits]


def test_results_of_one_machine_and_day_are_told_apart(script, checkout, result):
    write_result(result, checkout / "docs" / "bench" / "before.json")
    first, second, _ = machines(script, checkout, result)
    assert second == f"{first}, before.json"


def test_a_new_result_beside_makes_the_page_stale(script, checkout, result):
    write(script.pages(result, checkout))
    write_result(result, checkout / "docs" / "bench" / "before.json")
    assert script.stale(result, checkout) == [checkout / "docs" / "performance.md"]


def test_a_broken_result_beside_is_named(script, checkout, result):
    path = checkout / "docs" / "bench" / "broken.json"
    path.write_text('{"schema": "backnorm.bench/1"}')
    with pytest.raises(ArgumentValueError, match=r"broken\.json"):
        script.pages(result, checkout)
