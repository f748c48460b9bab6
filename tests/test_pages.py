"""The code of the README and of the pages that need no framework runs, and prints what they say."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec

import pytest

from backnorm.engines import are_kernels_installed
from tests.support.required import require

from .support.pages import ROOT, blocks, pages, pages_of, run

# Pages that print a plan of the kernels.
_OF_KERNELS = {"docs/explanation/speed.md"}


@pytest.mark.parametrize("page", pages_of(None))
def test_code_blocks_of_page_run(page, tmp_path, monkeypatch):
    if any("benchmarks" in block.code for block in blocks(page)):
        require(find_spec("pandas"), "pandas, which writes the tables of benchmarks")
    if page in _OF_KERNELS and not are_kernels_installed():
        pytest.skip("backnorm-kernels is not installed")
    # The files that pages read, and where they write.
    shutil.copytree(ROOT / "docs" / "examples", tmp_path / "docs" / "examples")
    shutil.copy(ROOT / "docs" / "bench" / "zen5.json", tmp_path / "result.json")
    monkeypatch.chdir(tmp_path)
    run(page)


def test_code_blocks_of_all_pages_are_found():
    named = pages()
    # The frameworks whose checks run the code of their pages.
    assert set(named.values()) == {None, "torch", "jax", "tensorflow"}
    assert {"README.md", "docs/pytorch.md", "docs/jax.md", "docs/tensorflow.md"} <= named.keys()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        page = path.relative_to(ROOT).as_posix()
        # An indented block, or one of another spelling, would be read and never run.
        fences = re.findall(r"^[ >]*```+ *\{? *\.?py", path.read_text(encoding="utf-8"), re.M)
        assert len(fences) == len(blocks(page)), page


def test_files_named_in_readme_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"\]\(([^)#:]+)", text) + re.findall(r"(?:docs|src)/[\w./-]+\w", text)
    assert named
    for name in named:
        assert (ROOT / name).exists(), name


def test_pages_do_not_install_backnorm_by_name():
    # The name is not registered: another project could be installed under it.
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install (?:-\S+ )*['\"]?backnorm\b", text), path
