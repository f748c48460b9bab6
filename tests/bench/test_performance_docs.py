"""The pages have the figures of the results in docs/bench."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from benchmarks.results import Result, read, write
from scripts import update_performance_docs as script

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/performance.md",
    *(
        f"docs/measurements/{name}.md"
        for name in ("training-steps", "operator", "slower", "machines")
    ),
)


def test_pages_equal_committed_files():
    found = script.pages(ROOT)
    assert [str(path.relative_to(ROOT)) for path in found] == [*PAGES]
    for path, text in found.items():
        assert path.read_text(encoding="utf-8") == text, path


def test_results_are_small_and_named_in_pages_unless_of_models():
    files = [path for path in (ROOT / "docs" / "bench").iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 1_000_000
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    read = script.BENCH.name + "/"
    for path in files:
        assert path.name.startswith("models-") or f"{read}{path.name}" in text, path


@pytest.fixture
def copied(tmp_path):
    """A folder with the results and the pages, whose results may be changed."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_readme_after_all_results_became_old_shows_no_number(copied, monkeypatch):
    monkeypatch.setattr(script, "SINCE", "9999")
    found = script.pages(copied)
    readme = _generated(found[copied / "README.md"], "numbers")
    assert readme.count("Not measured with this version.") == 2
    assert "|" not in readme
    performance = found[copied / "docs" / "performance.md"]
    assert "Not measured with this version." in _generated(performance, "steps")
    assert "backnorm (an earlier version)" in _generated(performance, "operator")


def test_pages_with_new_result_of_operator_show_it_first(copied):
    old = read(copied / script.BENCH / "zen5.json")
    where = old.environment | {"date": "9998-01-01", "microarchitecture": "sapphirerapids"}
    write(Result(where, old.frame), copied / script.BENCH / "new.json")
    found = script.pages(copied)
    assert "Sapphire Rapids, 2 threads" in _generated(found[copied / "README.md"], "numbers")
    operator = _generated(found[copied / "docs" / "performance.md"], "operator")
    assert "(sapphirerapids), 2 threads, 9998-01-01; backnorm (this version)" in operator
    machines = _generated(found[copied / script.MEASURED / "machines.md"], "machines")
    assert machines.index("Sapphire Rapids") < machines.index("AMD Zen 5")
    assert "new.json" in found[copied / script.MEASURED / "slower.md"]


def test_pages_with_new_result_of_models_have_its_rows(copied):
    old = read(copied / script.BENCH / "models-zen4.json")
    # The results of this version in docs/bench are of other processors.
    where = old.environment | {"date": "9998-01-01", "microarchitecture": "znver5"}
    write(
        Result(where, old.frame[old.frame.allocator == "default"]), copied / script.BENCH / "n.json"
    )
    found = script.pages(copied)
    readme = _generated(found[copied / "README.md"], "numbers")
    assert re.search(r"\| default +\| AMD Zen 5, 2 threads ", readme)
    performance = found[copied / "docs" / "performance.md"]
    assert "AMD Zen 5" in _generated(performance, "steps")
    # Nothing is known about the other allocators.
    (line,) = [x for x in _generated(performance, "choices").splitlines() if "AMD Zen 5" in x]
    assert line.count("none") == 4


def _generated(text, marker):
    return text.split(f"<!-- {marker}:begin -->")[1].split(f"<!-- {marker}:end -->")[0]


def test_pages_of_file_without_markers_raises_system_exit(tmp_path):
    shutil.copytree(ROOT / "docs" / "bench", tmp_path / "docs" / "bench")
    (tmp_path / "README.md").write_text("no markers")
    with pytest.raises(SystemExit, match="numbers:begin"):
        script.pages(tmp_path)
