"""The pages have the figures of the results in docs/bench."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

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


def test_pages_of_file_without_markers_raises_system_exit(tmp_path):
    shutil.copytree(ROOT / "docs" / "bench", tmp_path / "docs" / "bench")
    (tmp_path / "README.md").write_text("no markers")
    with pytest.raises(SystemExit, match="numbers:begin"):
        script.pages(tmp_path)
