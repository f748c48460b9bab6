"""Compiled kernels on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import backnorm
from backnorm import config
from backnorm.kernels.cpu import jit

_CODE = """
import json, time
import numpy as np
import backnorm
from backnorm.kernels.cpu import columns, channels
x = np.random.default_rng(0).standard_normal((50, 7), dtype=np.float32)
start = time.perf_counter()
g = backnorm.batch_norm_backward(x, x * x, x.mean(0), x.var(0), epsilon=1e-5)
first = time.perf_counter() - start
print(json.dumps({"first": first, "dx": float(g.dx[3, 2])}))
"""


def _process(folder, **environment):
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "BACKNORM_CACHE_DIR": str(folder), **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_second_process_loads_what_the_first_compiled(tmp_path):
    first = _process(tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert files
    second = _process(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files
    assert second["dx"] == first["dx"]
    assert second["first"] < first["first"]


def test_damaged_files_are_compiled_again(tmp_path):
    first = _process(tmp_path)
    for i, path in enumerate(sorted(tmp_path.iterdir())):
        path.write_bytes([b"", b"not a pickle", path.read_bytes()[:1000]][i % 3])
    assert _process(tmp_path)["dx"] == first["dx"]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_cannot_be_made_costs_nothing_but_time(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert _process(blocked / "cache")["dx"] == _process(tmp_path / "cache")["dx"]


def test_a_changed_source_is_another_kernel(monkeypatch, tmp_path):
    """The name of a cached kernel depends on the sources of all of them."""
    before = jit.SOURCES
    sources = tmp_path / "cpu"
    sources.mkdir()
    for path in Path(jit.__file__).parent.glob("*.py"):
        (sources / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(jit, "__file__", str(sources / "jit.py"))
    assert jit._digest_of_sources() == before
    (sources / "vector.py").write_text("changed = True\n")
    assert jit._digest_of_sources() != before


def test_the_cache_folder_must_be_absolute(monkeypatch):
    monkeypatch.setenv("BACKNORM_CACHE_DIR", "relative")
    with pytest.raises(backnorm.ArgumentValueError, match="BACKNORM_CACHE_DIR"):
        config.cache_directory()


def test_the_default_cache_folder_follows_the_xdg_variable(monkeypatch, tmp_path):
    monkeypatch.delenv("BACKNORM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.cache_directory() == tmp_path / "backnorm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.cache_directory() == tmp_path / ".cache" / "backnorm"
