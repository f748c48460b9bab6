"""The reference of the documentation names every public name, and nothing else."""

from __future__ import annotations

import importlib.util
import re
import zlib

import pytest

from .support.pages import ROOT


@pytest.fixture(scope="module")
def check():
    path = ROOT / "scripts" / "site" / "check.py"
    spec = importlib.util.spec_from_file_location("check_site", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_pages_list_all_public_names_once(check):
    pages = (ROOT / "docs" / "reference").glob("*.md")
    named = [
        name
        for page in pages
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(named) == len(set(named))
    public = check.public_names()
    assert {"backnorm.reduce", "backnorm.dialects.cudnn.BatchNormalizationBackward"} < public
    assert public - {*named} == set(), "names of __all__ that docs/reference lacks"
    assert {*named} - public == set(), "names of docs/reference that no __all__ has"


def test_site_check_finds_missing_names_and_external_resources(check, tmp_path):
    lines = [f"{name} py:function 1 a.html#$ -" for name in sorted(check.public_names())]
    site = tmp_path / "site"
    site.mkdir()
    (site / "objects.inv").write_bytes(b"#\n" * 4 + zlib.compress("\n".join(lines[1:]).encode()))
    assert check.missing(site) == [lines[0].split()[0]]
    (site / "page.html").write_text(
        '<link rel="canonical" href="https://a.org/"><a href="https://b.org">b</a>'
        '<script src="main.js"></script><img src=pictures/a.svg>'
    )
    (site / "style.css").write_text("a { background: url(b.svg) }")
    assert check.fetched(site) == []
    (site / "page.html").write_text('<script async src="https://c.org/c.js"></script>')
    (site / "style.css").write_text('@import "//d.org/d.css"; b { src: url(https://e.org/f) }')
    assert [what.split(": ")[0] for what in check.fetched(site)] == [
        "page.html",
        "style.css",
        "style.css",
    ]
