"""Built libraries: the same bytes each time, and no unwanted symbols."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from backnorm_kernels import levels, library
from backnorm_kernels.build import demand, make, sources
from backnorm_kernels.build.demand import file_of
from backnorm_kernels.kinds import LIBRARIES, OF_ALL, PROBE, THREADS, XLA

_X86 = levels.is_x86()
x86 = pytest.mark.skipif(not _X86, reason="compiles for x86-64")
linux = pytest.mark.skipif(sys.platform != "linux", reason="libraries of Linux")

#: A library of kernels, and one that takes little time to build.
_CHEAP = ("float64_in_float64", XLA)
_LEVEL = "x86-64-v3" if _X86 else levels.HOST


def _build(folder, level, *names, cwd=None):
    done = subprocess.run(
        demand.command(level, folder, *names),
        env=demand.environment(level),
        capture_output=True,
        text=True,
        timeout=280,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return {name: file_of(name, level, folder).read_bytes() for name in names}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """Return libraries that one process built, one after the other."""
    return _build(tmp_path_factory.mktemp("group"), _LEVEL, *_CHEAP)


@pytest.mark.long
@pytest.mark.parametrize("name", _CHEAP)
def test_build_in_another_process_and_folder_has_the_same_bytes(name, group, tmp_path):
    """The bytes do not depend on the folder, or on what the process built before."""
    folder = tmp_path / "another" / "place"
    assert _build(folder, _LEVEL, name, cwd=tmp_path)[name] == group[name]
    assert [path.name for path in (folder / _LEVEL).iterdir()] == [file_of(name, "", folder).name]


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_build_of_many_libraries_has_the_bytes_of_separate_builds(tmp_path):
    names = [name for name in LIBRARIES if "float32" in name and "bfloat" not in name]
    together = _build(tmp_path / "together", _LEVEL, *names)
    for name in names[::-1]:
        assert _build(tmp_path / "alone", _LEVEL, name)[name] == together[name]


@pytest.fixture(
    params=[
        "this processor",
        pytest.param("lowest level", marks=[pytest.mark.long, x86]),
    ]
)
def libraries(request):
    """Return names and paths: all of this processor that are built, some of the lowest level."""
    if request.param == "this processor":
        every = [(n, file_of(n, level, library.FOLDER)) for level, n in make.of_this_processor()]
        return [(name, path) for name, path in every if path.exists()]
    names = (PROBE, *_CHEAP)
    built = request.getfixturevalue("built")
    return list(zip(names, built("x86-64", *names), strict=True))


@linux
def test_library_requires_only_glibc_up_to_2_28(libraries, tool):
    for name, path in libraries:
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", tool("readelf", "-dW", path))
        assert set(needed) <= {"libc.so.6", "libm.so.6"}, name
        for line in tool("nm", "-D", "--undefined-only", path).splitlines():
            symbol = re.fullmatch(r"\s*[Uw] (\w+)@GLIBC_(\d+)\.([\d.]+)", line)
            assert symbol, f"{name}: {line}"
            assert (int(symbol[2]), float(symbol[3])) <= (2, 28), f"{name}: {line}"


@linux
def test_library_exports_its_functions_only(libraries, tool):
    special = {
        PROBE: {"bn_cpuid", "bn_xgetbv"} if _X86 else set(),
        THREADS: {"bn_member", "bn_run", "bn_threads", "bn_work"},
        XLA: {"bn_environment", "bn_xla_handler", "bn_xla_task"},
    }
    for name, path in libraries:
        listed = tool("nm", "-D", "--defined-only", path).splitlines()
        functions = {kind.symbol for kind in LIBRARIES[name].kinds} | special.get(name, set())
        assert {line.split()[-1] for line in listed} == {"bn_layout"} | functions, name


@linux
def test_library_has_no_executable_stack_and_no_build_paths(libraries, tool):
    """The stack is not executable, code is not relocated, and no path of the builder remains."""
    for name, path in libraries:
        assert re.search(r"GNU_STACK.* RW ", tool("readelf", "-lW", path)), name
        dynamic = tool("readelf", "-dW", path)
        assert not re.search(r"TEXTREL|RPATH|RUNPATH|\(INIT|\(FINI", dynamic), name
        # Neither the builder's folders, nor names by which a kernel could raise an exception.
        code = path.read_bytes()
        for word in (str(library.FOLDER.parents[3]), str(Path.home()), ".py", "numba", "Py_"):
            assert word.encode() not in code, f"{name}: {word}"


# Registers and instructions that a level lacks.
_BEYOND = {
    "x86-64-v3": (r"%zmm", r"%[xy]mm(1[6-9]|2\d|3[01])\b", r"%k[0-7]\b"),
    "x86-64": (
        r"%[yz]mm",
        r"\tv(?!err|erw)\w+",
        r"\t(andn|bextr|bls\w+|[lt]zcnt|popcnt|movbe|crc32|rorx|mulx|sarx|shlx|shrx|pdep|pext)\b",
        r"\t(movddup|haddp[sd]|addsubp[sd]|pshufb|palignr|pabs\w|psign\w|phadd\w+|pmulhrsw)\b",
        r"\t(round[ps][sd]|pblend\w*|blendv?p[sd]|pcmpgtq|pcmpeqq|pmov[sz]x\w+|ptest|pmulld)\b",
        r"\t(p(min|max)(sb|uw|[su]d)|insertps|extractps|pinsr[bdq]|pextr[bdq]|packusdw)\b",
    ),
}


@x86
@pytest.mark.long
@pytest.mark.parametrize(
    ("level", "names"),
    [
        ("x86-64-v3", ("float32_in_float64", *_CHEAP)),
        ("x86-64", ("float16_in_float32", *_CHEAP)),
    ],
)
def test_library_has_no_instructions_above_its_level(level, names, built, tool):
    for name, path in zip(names, built(level, *names), strict=True):
        code = tool("objdump", "-d", "--no-show-raw-insn", path)
        assert "%xmm" in code or name == XLA
        pattern = re.compile("|".join(_BEYOND[level]))
        beyond = [line for line in code.splitlines() if pattern.search(line)]
        assert not beyond, f"{name}: {beyond[:5]}"


def test_of_levels_lists_libraries_of_each_level():
    wanted = make.of_levels(levels.LEVELS)
    assert len(set(wanted)) == len(wanted)
    for name in OF_ALL:
        assert [level for level, each in wanted if each == name] == [
            "x86-64" if _X86 else levels.HOST
        ]
    for level in ("x86-64-v4", "x86-64-v3", "x86-64"):
        assert {name for of, name in wanted if of == level} >= LIBRARIES.keys() - set(OF_ALL)
    special = {name for of, name in wanted if of == "x86-64-v4-bf16"}
    assert special == {name for name in LIBRARIES if "bfloat16" in name}


def test_of_this_processor_lists_each_library_at_best_level():
    wanted = make.of_this_processor()
    assert sorted(name for _, name in wanted) == sorted(LIBRARIES)
    for level, name in wanted:
        assert level == library.levels_of(name)[0]
        if name in OF_ALL or not _X86:
            assert level == ("x86-64" if _X86 else levels.HOST)
            continue
        # The best that has libraries of the element type.
        having = [
            each
            for each in levels.below(library.level())
            if levels.LEVELS[each].elements is None
            or set(name.split("_")) & set(levels.LEVELS[each].elements)
        ]
        assert level == having[0]


def test_missing_does_not_list_built_library(tmp_path):
    wanted = [(_LEVEL, XLA), ("x86-64" if _X86 else levels.HOST, PROBE)]
    assert make.missing(wanted, tmp_path) == wanted
    built = list(make.build_all(wanted[1:], tmp_path, jobs=1))
    assert [(level, name) for level, name, _ in built] == wanted[1:]
    assert make.missing(wanted, tmp_path) == wanted[:1]


def test_missing_lists_damaged_library(built, tmp_path):
    (whole,) = built(_LEVEL, XLA)
    path = file_of(XLA, _LEVEL, tmp_path)
    path.parent.mkdir()
    path.write_bytes(whole.read_bytes())
    assert make.missing([(_LEVEL, XLA)], tmp_path) == []
    path.write_bytes(whole.read_bytes()[:-100])
    assert make.missing([(_LEVEL, XLA)], tmp_path) == [(_LEVEL, XLA)]


def test_build_that_fails_raises_error_with_compiler_output(tmp_path, monkeypatch):
    monkeypatch.setattr(
        demand, "command", lambda *_: [sys.executable, "-c", "raise SystemExit('no such thing')"]
    )
    with pytest.raises(demand.BuildError, match=f"compiling xla for {_LEVEL} failed: no such"):
        demand.build(XLA, _LEVEL, tmp_path)
    monkeypatch.setattr(make, "command", demand.command)
    with pytest.raises(RuntimeError, match="no such thing"):
        list(make.build_all([(_LEVEL, XLA)], tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_build_without_working_linker_raises_build_error(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    # The linker of the package ziglang is hidden too.
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'ziglang' else find(name, *rest)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    expected = "no linker found: no command no-such" if "no" in compiler else "linking .* failed"
    with pytest.raises(demand.BuildError, match=expected):
        demand.build(XLA, _LEVEL, tmp_path / "lib")
    assert not list((tmp_path / "lib" / _LEVEL).iterdir() if "no" not in compiler else ())


def test_build_without_numba_raises_error_with_install_command(tmp_path, monkeypatch):
    monkeypatch.setattr(demand.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(demand.BuildError, match=r"pip install --group kernels, .* make kernels"):
        demand.build(XLA, _LEVEL, tmp_path)


# Where the compiler begins to read, for each kind of library.
_COMPILER = ("build/compile.py", "build/frontend.py")
_ROOTS = {
    "float64_in_float64": (*_COMPILER, "kernels/segments.py", "kernels/columns.py"),
    XLA: (*_COMPILER, "kernels/xla_handler.py"),
    THREADS: (*_COMPILER, "kernels/team.py"),
    PROBE: _COMPILER[:1],
}
_CPU = Path(library.__file__).parent
# The names of files, and not what is in them.
_BESIDE = {"build/sources.py", "build/__init__.py", "kernels/__init__.py", "__init__.py"}


def _imported(path):
    """Return the modules of this folder that a file imports when it is itself imported."""
    found = set()
    for node in ast.parse((_CPU / path).read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("backnorm_kernels"):
            below = "/".join(node.module.split(".")[1:])
            found |= {f"{below}.py"} if below else set()
            found |= {f"{below}/{alias.name}.py".lstrip("/") for alias in node.names}
    return {path for path in found if (_CPU / path).exists()} - _BESIDE


def _closure(roots):
    found, left = set(), [*roots]
    while left:
        path = left.pop()
        left += _imported(path) - found
        found.add(path)
    return found


def _anew(name):
    """Return the digest of a library made of the sources as they are now."""
    return sources.digest.__wrapped__(name)


@pytest.fixture
def copied_sources(tmp_path, monkeypatch):
    folder = tmp_path / "backnorm_kernels"
    shutil.copytree(_CPU, folder, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    monkeypatch.setattr(sources, "_CPU", folder)
    return folder


@pytest.mark.parametrize("name", _ROOTS)
def test_library_digest_changes_with_each_of_its_sources(name, copied_sources):
    before = _anew(name)
    assert before == sources.digest(name)
    used = _closure(_ROOTS[name])
    if name == PROBE:
        # Its code is for every processor of the kind, and calls no kernel.
        used -= {"kinds.py", "levels.py"}
    for path in sorted(used):
        text = (copied_sources / path).read_text()
        (copied_sources / path).write_text(text + "# changed\n")
        assert _anew(name) != before, path
        (copied_sources / path).write_text(text)


@pytest.mark.parametrize("path", ["stage.py", "launch.py", "threads.py", "library.py", "xla.py"])
def test_library_digest_does_not_depend_on_python_runtime_modules(path, copied_sources):
    (copied_sources / path).write_text("# changed\n")
    for name in LIBRARIES:
        assert _anew(name) == sources.digest(name)


def test_library_digest_does_not_depend_on_handler_of_xla_or_threads(copied_sources):
    (copied_sources / "kernels" / "xla_handler.py").write_text("# changed\n")
    (copied_sources / "kernels" / "pool.py").write_text("# changed\n")
    changed = {name for name in LIBRARIES if _anew(name) != sources.digest(name)}
    assert changed == {XLA, THREADS}


@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_library_digest_changes_with_version_of_compiler(package, monkeypatch):
    version = sources.metadata.version
    monkeypatch.setattr(
        sources.metadata, "version", lambda name: "9.9" if name == package else version(name)
    )
    for name in LIBRARIES:
        assert _anew(name) != sources.digest(name)


def test_library_digest_without_compiler_differs(monkeypatch):
    def absent(name):
        raise sources.metadata.PackageNotFoundError(name)

    before = sources.digest(XLA)
    monkeypatch.setattr(sources.metadata, "version", absent)
    assert _anew(XLA) != before


@pytest.mark.parametrize("jobs", [1, 2, 16])
def test_groups_have_each_library_once_and_a_group_for_each_job(jobs):
    wanted = make.of_levels(levels.LEVELS)
    groups = make._groups(wanted, jobs)
    assert sorted((level, name) for level, names in groups for name in names) == sorted(wanted)
    for level in levels.LEVELS:
        libraries = sum(each == level for each, _ in wanted)
        assert sum(each == level for each, _ in groups) == min(jobs, libraries)


def test_compiler_environment_overrides_inherited_variables(monkeypatch):
    monkeypatch.setenv("NUMBA_CPU_NAME", "another")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+another")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    for name, level in levels.LEVELS.items():
        found = demand.environment(name)
        assert found["NUMBA_CPU_NAME"] == level.processor
        assert "another" not in found["NUMBA_CPU_FEATURES"]
        assert found["NUMBA_CPU_FEATURES"]
        assert found["PYTHONHASHSEED"] == "0"
        assert found["PYTHONPATH"].split(os.pathsep)[0] == str(_CPU.parent)
