"""Libraries of machine code: the choice of one, and messages about missing or damaged ones.

Whatever a file is, a process that loads it must live on: the worst are tried in processes of
their own.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import backnorm
from backnorm_kernels import levels, library
from backnorm_kernels.build import demand
from backnorm_kernels.kinds import PROBE, XLA, Kind
from tests.support import internals

x86 = pytest.mark.skipif(not levels.is_x86(), reason="there is one level elsewhere")

# A library of kernels.
KERNELS = "float64_in_float64"

# Takes libraries from a folder. Threads are not among them.
_BEGIN = """
import sys
from pathlib import Path
import numpy as np
import backnorm
from backnorm_kernels import library
from backnorm_kernels.kinds import THREADS
library.load(THREADS)
library.FOLDER = Path(sys.argv[1])
x = np.arange(60000.0).reshape(100, 6, 100)
def call(threads=1):
    backnorm.set_num_threads(threads)
    y = backnorm.batch_norm_forward(x, epsilon=1e-5).y
    np.testing.assert_allclose(y.mean((0, 2)), 0, atol=1e-9)
"""

_REFUSED = """
try:
    library.load("xla")
except backnorm.errors.MachineCodeError as error:
    print(error)
"""

# A package has no sources; its libraries are known by name, whatever their digest.
_PACKAGE = """
library._FROM_SOURCES = False
# The checkout has asked for the library of the threads.
for name in [name for name in sys.modules if name.startswith("backnorm_kernels.build")]:
    del sys.modules[name]
"""


def _run(code, folder, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _BEGIN + code, folder],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture
def copied(tmp_path):
    """Return a folder with copies of a few libraries, and the path of a library that is small."""
    for name in (PROBE, KERNELS, XLA):
        library.load(name)
        path = library.path_of(name)
        if path is not None:
            place = tmp_path / path.parent.name / path.name
            place.parent.mkdir(exist_ok=True)
            shutil.copy(path, place)
    return SimpleNamespace(folder=tmp_path, path=place)


def _other_library():
    import ml_dtypes._ml_dtypes_ext as extension

    return Path(extension.__file__).read_bytes()


def _noise(code):
    drawn = random.Random(3)
    changed = bytearray(code)
    for _ in range(50):
        changed[drawn.randrange(len(changed))] = drawn.randrange(256)
    return bytes(changed)


_DAMAGED = {
    "empty": lambda code: b"",
    "one byte": lambda code: code[:1],
    "half of its header": lambda code: code[:40],
    "its header": lambda code: code[:64],
    "all headers": lambda code: code[:900],
    "the first page": lambda code: code[:4096],
    "half": lambda code: code[: len(code) // 2],
    "all but a kilobyte": lambda code: code[:-1024],
    "all but a byte": lambda code: code[:-1],
    "zeros": lambda code: bytes(len(code)),
    "zeros after the headers": lambda code: code[:4096] + bytes(len(code) - 4096),
    "noise": _noise,
    "one bit": lambda code: code[:5000] + bytes([code[5000] ^ 1]) + code[5001:],
    "text": lambda code: b"# machine code\n",
    "another library": lambda code: _other_library(),
}


# A process each.
_FEW = ("empty", "half", "noise", "another library")


@pytest.mark.parametrize(
    "damage",
    [pytest.param(damage, marks=[] if damage in _FEW else pytest.mark.long) for damage in _DAMAGED],
)
def test_load_of_damaged_library_raises_machine_code_error(damage, copied):
    code = copied.path.read_bytes()
    # A new file: this process has the old one loaded.
    copied.path.unlink()
    copied.path.write_bytes(_DAMAGED[damage](code))
    said = _run(_REFUSED, copied.folder)
    assert str(copied.path) in said
    assert "make kernels" in said


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX's")
@pytest.mark.parametrize(
    "obstacle", ["folder", "pipe", "link to nothing", "link to itself", "device"]
)
def test_load_of_library_that_is_no_regular_file_raises_machine_code_error(obstacle, copied):
    copied.path.unlink()
    make = {
        "folder": copied.path.mkdir,
        "pipe": lambda: os.mkfifo(copied.path),
        "link to nothing": lambda: copied.path.symlink_to("nothing"),
        "link to itself": lambda: copied.path.symlink_to(copied.path),
        "device": lambda: copied.path.symlink_to("/dev/zero"),
    }
    make[obstacle]()
    assert str(copied.path) in _run(_PACKAGE + _REFUSED, copied.folder)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_load_of_unreadable_library_raises_machine_code_error(copied):
    copied.path.chmod(0)
    assert str(copied.path) in _run(_REFUSED, copied.folder)


def test_load_of_intact_library_returns_working_kernel(copied):
    assert _run("call()\nprint('done')", copied.folder) == "done"


def test_load_of_library_of_other_layout_raises_machine_code_error(copied):
    code = "library.level()\nlibrary.LAYOUT += 1"
    said = _run(code + _REFUSED, copied.folder)
    assert "another version" in said
    assert "make kernels" in said


def test_package_loads_its_libraries_without_importing_compiler(copied):
    for path in copied.folder.glob("*/*.so"):
        path.rename(path.with_stem(path.stem.rpartition("-")[0] + "-0123456789abcdef"))
    code = """
call()
assert not [name for name in sys.modules if name.startswith("backnorm_kernels.build")]
print(library.digest("xla"))
"""
    assert _run(_PACKAGE + code, copied.folder) == "0123456789abcdef"


def test_package_that_lacks_library_raises_error_with_remedy(copied):
    copied.path.unlink()
    code = """
assert not [name for name in sys.modules if name.startswith("backnorm_kernels.build")]
"""
    said = _run(_PACKAGE + _REFUSED + code, copied.folder)
    assert copied.path.parent.name in said
    assert "BACKNORM_BUILD_LEVELS=all" in said
    assert not copied.path.exists()


def test_package_without_libraries_raises_error_with_remedy(tmp_path):
    said = _run(_PACKAGE + _REFUSED, tmp_path)
    assert "found: none" in said
    assert "BACKNORM_BUILD_LEVELS=all" in said


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Return what puts empty files of libraries into a folder that is looked into."""
    internals.libraries_in(monkeypatch, tmp_path)

    def put(level, name):
        path = tmp_path / level / f"{name}-{library.digest(name)}.so"
        path.parent.mkdir(exist_ok=True)
        path.touch()
        return path

    return put


@x86
def test_path_of_returns_library_of_best_level_for_its_kind(made_up, monkeypatch):
    monkeypatch.setattr(library, "level", lambda: "x86-64-v4-bf16")
    special = Kind("columns", "bfloat16", "float32", "forward").library
    usual = Kind("columns", "float16", "float32", "forward").library
    paths = {
        (level, name): made_up(level, name) for name in (special, usual) for level in levels.LEVELS
    }
    assert library.path_of(special) == paths["x86-64-v4-bf16", special]
    assert library.path_of(usual) == paths["x86-64-v4", usual]
    monkeypatch.setattr(library, "level", lambda: "x86-64-v3")
    assert library.path_of(special) == paths["x86-64-v3", special]
    assert library.path_of(usual) == paths["x86-64-v3", usual]


@x86
def test_path_of_missing_library_returns_lower_level_only_in_package(made_up, monkeypatch):
    monkeypatch.setattr(library, "level", lambda: "x86-64-v4-bf16")
    below = made_up("x86-64-v3", XLA)
    made_up("x86-64", XLA)
    assert library.path_of(XLA) is None
    internals.without_sources(monkeypatch)
    assert library.path_of(XLA) == below


def test_path_of_library_with_other_digest_returns_none(made_up):
    path = made_up(library.levels_of(XLA)[0], XLA)
    assert library.path_of(XLA) == path
    path.rename(path.with_stem("xla-0123456789abcdef"))
    assert library.path_of(XLA) is None


@pytest.mark.parametrize(
    "wanted", ["x86-64-v9", "X86-64", "", "host " if levels.is_x86() else "v3"]
)
def test_level_with_unknown_name_raises_argument_value_error(wanted, monkeypatch):
    monkeypatch.setenv("BACKNORM_CPU_LEVEL", wanted)
    with pytest.raises(backnorm.ArgumentValueError, match="does not exist") as caught:
        library.level.__wrapped__()
    assert str(caught.value).startswith("BACKNORM_CPU_LEVEL: ")
    assert f"got {wanted!r}" in str(caught.value)
    assert f"expected {', '.join(library.supported())}" in str(caught.value)


def test_level_unsupported_by_processor_raises_argument_value_error(monkeypatch):
    monkeypatch.setenv("BACKNORM_CPU_LEVEL", "x86-64-v4")
    monkeypatch.setattr(library, "supported", lambda: ("x86-64-v3", "x86-64"))
    with pytest.raises(backnorm.ArgumentValueError, match="this processor does not have") as caught:
        library.level.__wrapped__()
    assert "expected x86-64-v3, x86-64" in str(caught.value)


def test_level_returns_best_or_value_of_environment_variable(monkeypatch):
    monkeypatch.delenv("BACKNORM_CPU_LEVEL", raising=False)
    assert library.level.__wrapped__() == library.supported()[0]
    for level in library.supported():
        monkeypatch.setenv("BACKNORM_CPU_LEVEL", level)
        assert library.level.__wrapped__() == level


def test_forward_with_unknown_cpu_level_raises_argument_value_error(copied):
    code = """
try:
    backnorm.batch_norm_forward(x, epsilon=1e-5)
except backnorm.ArgumentValueError as error:
    print(error)
"""
    assert _run(code, copied.folder, BACKNORM_CPU_LEVEL="v9").startswith("BACKNORM_CPU_LEVEL: ")


def test_load_in_concurrent_threads_builds_library_once(copied, monkeypatch):
    built = []
    code = copied.path.read_bytes()
    copied.path.unlink()

    def build(name, level, folder):
        built.append(name)
        time.sleep(0.2)
        copied.path.write_bytes(code)

    monkeypatch.setattr(demand, "build", build)
    loaded = internals.no_library_loaded(monkeypatch, copied.folder)
    threads = [threading.Thread(target=library.load, args=(XLA,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [XLA]
    assert loaded.keys() == {XLA}


@pytest.mark.long
def test_load_in_concurrent_processes_succeeds_and_leaves_one_file(copied):
    copied.path.unlink()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _BEGIN + "library.load('xla')", copied.folder],
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    assert list(copied.path.parent.glob(f"{XLA}-*")) == [copied.path]


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_load_in_forked_child_during_build_in_parent_does_not_deadlock(copied):
    copied.path.unlink()
    code = """
import faulthandler, fcntl, os, threading, time
from backnorm_kernels.build import demand
begun, build = threading.Event(), demand.build
def slow(*arguments):
    begun.set()
    build(*arguments)
demand.build = slow
# The thread that builds is in the middle of saying so while the child is made: nobody reads.
end, stderr = os.pipe()
os.dup2(stderr, 2)
os.write(2, b" " * fcntl.fcntl(2, fcntl.F_GETPIPE_SZ))
building = threading.Thread(target=library.load, args=("xla",))
building.start()
begun.wait()
time.sleep(0.5)
child = os.fork()
if child == 0:
    # A deadlock is said with the place that it is at; a busy machine may need half a minute.
    faulthandler.dump_traceback_later(120, file=1, exit=True)
    call(threads=2)
    library.load("xla")
    os._exit(0)
threading.Thread(target=lambda: [*iter(lambda: os.read(end, 65536), b"")], daemon=True).start()
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
building.join()
call(threads=2)
sys.exit(status)
"""
    # Where it is set, stderr has no buffer, and no lock.
    _run(code, copied.folder, PYTHONUNBUFFERED="")
