"""Kernels read and write no memory beside an array: problems between unreadable pages.

See `driver`, which computes them in processes of their own: 2,000 in every run, a million in a
sweep. A failure names the seed; ``python driver.py --seed`` computes that problem alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import backnorm_kernels
from backnorm.dialects.registry import DIALECTS
from backnorm_kernels import levels, library
from tests.support.dtypes import ELEMENT_TYPES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")

_FOLDER = Path(__file__).parent
_MILLION = 1_000_000


def run(program, *arguments, timeout=280, **environment):
    return subprocess.run(
        [sys.executable, str(_FOLDER / program), *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def report(done):
    """Return what the driver counted, after it found nothing wrong."""
    found = json.loads(done.stdout.splitlines()[-1])
    wrong = [f"--seed {one['seed']}: {'; '.join(one['found'])}" for one in found["wrong"]]
    assert not wrong, "\n".join(wrong[:10])
    assert done.returncode == 0, done.stderr
    return found


def check_reach(found, least):
    """Check that problems of everything were among them, and how many at least."""
    counts = found["counts"]
    assert set(DIALECTS) | {"ours", "xla"} == set(counts["dialect"])
    assert {str(dtype) for dtype in ELEMENT_TYPES} == set(counts["type"])
    # Both of every type but float64.
    assert len(counts["arithmetic"]) == 2 * len(ELEMENT_TYPES) - 1
    for name in ("operation", "type", "layout", "format", "threads", "dialect", "arithmetic"):
        assert min(counts[name].values()) >= least, (name, counts[name])
    assert {"segments", "segments grouped", "columns", "columns streaming"} <= set(counts["plan"])
    # What is refused touches no array.
    assert counts["outcome"]["refused"] < found["computed"] / 10
    assert sum(counts["judged"].values()) > found["computed"] / 40


def test_kernels_of_2000_problems_do_not_access_memory_beyond_arrays():
    found = report(run("driver.py", "--count", 2000, "--processes", 1))
    assert found["computed"] == 2000
    check_reach(found, 3)


@pytest.mark.long
def test_guard_detects_kernels_that_access_memory_beyond_arrays():
    done = run("broken.py")
    found = json.loads(done.stdout.splitlines()[-1])
    missed = {name: outcome for name, outcome in found.items()
              if outcome not in ("crashed", "found")}  # fmt: skip
    assert found
    assert not missed, done.stderr


@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_kernels_of_a_million_problems_do_not_access_memory_beyond_arrays():
    jobs = len(os.sched_getaffinity(0))
    options = "--first", 10_000, "--count", _MILLION, "--processes", jobs
    found = report(run("driver.py", *options, timeout=7000))
    assert found["computed"] == _MILLION
    check_reach(found, _MILLION // 2000)


@pytest.mark.sweep
@pytest.mark.timeout(1700)
@pytest.mark.skipif(not levels.is_x86(), reason="levels are of x86-64")
@pytest.mark.parametrize("level", levels.LEVELS)
def test_machine_code_of_each_level_does_not_access_memory_beyond_arrays(level):
    """Loads and stores of the end of a row are others at every level."""
    if level not in library.supported()[1:]:
        pytest.skip("not a level below that of this processor")
    make = [sys.executable, "-m", "backnorm_kernels.build.make", "--level", level]
    subprocess.run(make, check=True, timeout=800)
    options = "--count", 20_000, "--processes", 1
    report(run("driver.py", *options, timeout=800, BACKNORM_CPU_LEVEL=level))


# Sources of kernels, what to write instead, and which problems are to show it.
_WRONG = {
    "whole vectors are loaded at the end of a row": (
        "memory.py",
        "raw = load_lanes(builder, pointer, stored, first, size)",
        "raw = builder.load(pointer, typ=stored, align=size)",
        ["operation=inference", "type=float32"],
    ),
    "whole vectors are stored at the end of a row": (
        "memory.py",
        "store_lanes(builder, vector, pointer, count, size)",
        "write_whole = builder.bitcast(pointer, vector.type.as_pointer())\n"
        "            builder.store(vector, write_whole, align=size)",
        ["operation=inference", "type=float32"],
    ),
    "bits of a mask are loaded where there are no elements": (
        "epilogue.py",
        "if count is not None:\n        # If count is 0",
        "if False:\n        # If count is 0",
        ["operation=relu backward", "type=float16"],
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("wrong", _WRONG)
def test_guard_detects_changed_sources_of_kernels(wrong, tmp_path):
    """The sources of a kernel are changed, and compiled when they are called."""
    file, right, other, only = _WRONG[wrong]
    package = tmp_path / "backnorm_kernels"
    of_package = Path(backnorm_kernels.__file__).parent
    shutil.copytree(of_package, package, ignore=shutil.ignore_patterns("lib"))
    # Of other sources, and therefore built once more.
    source = package / "kernels" / file
    text = source.read_text()
    assert text.count(right) == 1
    options = "--count", 2000, "--only", *only
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    source.write_text(text.replace(right, other))
    done = run("driver.py", *options, PYTHONPATH=path)
    if done.returncode == -signal.SIGSEGV:
        return
    found = [text for one in json.loads(done.stdout.splitlines()[-1])["wrong"]
             for text in one["found"]]  # fmt: skip
    assert found, done.stderr
    # And nothing else, such as a compiler's error.
    assert all("written to" in text or "other results" in text for text in found), found
