"""Build the libraries of this processor, or of given levels, with a process for each processor.

`make kernels` runs this module.

``python -m backnorm_kernels.build.make [--level NAME]... [--all-levels] [--only PATTERN] [--jobs N]
[--into FOLDER]``
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from fnmatch import fnmatch
from pathlib import Path

from backnorm_kernels.build.demand import command, environment, file_of, levels_here
from backnorm_kernels.kinds import LIBRARIES, OF_ALL
from backnorm_kernels.levels import FOLDER, HOST, LEVELS, has, is_x86, levels_of
from backnorm_kernels.seal import is_whole

_NAMES = [name for name in LIBRARIES if name not in OF_ALL]

Wanted = list[tuple[str, str]]


def of_levels(levels: Iterable[str]) -> Wanted:
    """Return (level, name) of every library of the given levels."""
    every = [(level, name) for level in levels for name in _NAMES if has(level, name)]
    return [*((levels_of(name, "")[0], name) for name in OF_ALL), *every]


def of_this_processor() -> Wanted:
    """Return (level, name) of every library that this processor uses."""
    best = levels_here()[0]
    return [(levels_of(name, best)[0], name) for name in (*OF_ALL, *_NAMES)]


def missing(wanted: Wanted, folder: Path) -> Wanted:
    """Return the libraries that `folder` lacks, or that are damaged there."""
    return [(level, name) for level, name in wanted if not is_whole(file_of(name, level, folder))]


def build_all(
    wanted: Wanted, folder: Path, jobs: int | None = None
) -> Iterator[tuple[str, str, float]]:
    """Build libraries; yield the level, the name and the CPU seconds of each when it is done.

    Raises
    ------
    RuntimeError
        If a library could not be built; the message has the output of the compiler.
    """
    jobs = _processors() if jobs is None else max(1, jobs)
    done: list[tuple[str, str, float]] = []
    with ThreadPoolExecutor(jobs) as crew:
        pending = {
            crew.submit(_build, level, names, folder, done)
            for level, names in _groups(wanted, jobs)
        }
        try:
            while pending or done:
                while done:
                    yield done.pop(0)
                ended, pending = wait(pending, timeout=0.05)
                for future in ended:
                    future.result()
        finally:
            for future in pending:
                future.cancel()


def _processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _groups(wanted: Wanted, jobs: int) -> list[tuple[str, list[str]]]:
    """Return groups of libraries, the largest group first; one process builds each group.

    A group has libraries of one level, because they share functions, which a process translates
    only once. The libraries of a level make a group for each job (a process that builds).
    """
    groups: dict[tuple[str, int], list[str]] = {}
    dealt: Counter[str] = Counter()
    # Libraries of 16-bit types take the longest.
    for level, name in sorted(wanted, key=lambda each: "16" not in each[1]):
        groups.setdefault((level, dealt[level] % jobs), []).append(name)
        dealt[level] += 1
    ordered = sorted(groups.items(), key=lambda group: len(group[1]), reverse=True)
    return [(level, names) for (level, _), names in ordered]


def _build(level: str, names: list[str], folder: Path, done: list[tuple[str, str, float]]) -> None:
    process = subprocess.Popen(  # noqa: S603 (this interpreter, our own module)
        command(level, folder, *names),
        env=environment(level),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        said = json.loads(line)
        done.append((level, said["name"], said["seconds"]))
    _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"compiling {', '.join(names)} for {level} failed:\n{errors}")


def main(arguments: list[str] | None = None) -> int:
    """Build the missing libraries, showing progress; return the exit status."""
    parser = argparse.ArgumentParser(prog="make kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--level", action="append", choices=[*LEVELS, HOST], default=[])
    parser.add_argument("--all-levels", action="store_true")
    parser.add_argument("--only", default="*", help="names of libraries, such as 'float32_*'")
    parser.add_argument("--into", type=Path, default=FOLDER)
    parser.add_argument("--jobs", type=int)
    options = parser.parse_args(arguments)
    levels = options.level or (tuple(LEVELS) if options.all_levels and is_x86() else ())
    try:
        every = of_levels(levels) if levels else of_this_processor()
        wanted = [built for built in every if built[1] in OF_ALL or fnmatch(built[1], options.only)]
        build_missing(wanted, options.into, options.jobs)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def build_missing(wanted: Wanted, folder: Path, jobs: int | None = None) -> None:
    """Build the libraries that a folder lacks, showing progress: see `build_all`."""
    absent = missing(wanted, folder)
    if not absent:
        print(f"nothing to compile, all {len(wanted)} libraries are there")
        return
    start, total = time.perf_counter(), 0.0
    with _progress(len(absent)) as advance:
        for level, name, seconds in build_all(absent, folder, jobs):
            total += seconds
            advance(f"{name}, {level}: {seconds:.1f} s")
    for level, name in absent:
        # Delete libraries that were built from other versions of the sources: nothing loads them
        # any more.
        for other in set((folder / level).glob(f"{name}-*.so")) - {file_of(name, level, folder)}:
            other.unlink(missing_ok=True)
    elapsed = time.perf_counter() - start
    print(f"{len(absent)} libraries in {elapsed:.0f} s, {total:.0f} s of processor time")


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after each library: it moves a progress bar or prints a line."""
    if not (sys.stdout.isatty() and importlib.util.find_spec("rich")):
        numbers = itertools.count(1)
        yield lambda what: print(f"{next(numbers):3}/{count} {what}", flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}")) as progress:
        task = progress.add_task("", total=count)
        yield lambda what: progress.update(task, advance=1, description=what)


if __name__ == "__main__":
    sys.exit(main())
