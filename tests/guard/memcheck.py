"""The problems of the fuzz under Valgrind's memcheck, in memory that is as NumPy hands it out.

``python memcheck.py --first 0 --count 500`` runs itself under Valgrind with the kernels of the
lowest level of processors, whose instructions Valgrind knows. Beside reads and writes outside of
arrays memcheck sees decisions that depend on memory that nobody has written to. Of its errors those
count that have one of our kernels on their stack; Python's own are many.

The last line of output is JSON: how many problems were computed, and the errors.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from xml.etree import ElementTree

FOLDER = "/backnorm_kernels/lib/"
# Valgrind's own limit of 1000 different errors would be reached by Python alone.
OPTIONS = (
    "--error-limit=no",
    "--leak-check=no",
    "--num-callers=40",
    "--partial-loads-ok=no",
    "--xml=yes",
)


def compute(first: int, count: int) -> None:
    """Compute problems in this process."""
    from driver import problem_of

    import backnorm

    warnings.simplefilter("error")
    for seed in range(first, first + count):
        problem = problem_of(seed)
        backnorm.set_num_threads(problem.threads)
        operands = {name: one.plain() for name, one in problem.operands.items()}
        try:
            (problem.expected or problem.call)(operands)
        except backnorm.BacknormError:
            continue


def go_wrong() -> None:
    """Have a kernel read beyond an array, so that it is seen that this is seen."""
    import numpy as np

    from backnorm.dtypes import FLOAT32
    from backnorm.executable import executable
    from backnorm.problem import Problem

    found = executable(Problem("reduce", (4, 5, 300), (1,), FLOAT32, FLOAT32, arithmetic="float64"))
    x = np.ones(4 * 5 * 300 - 1, np.float32)
    found.plain((x, x, None, np.ones(5, np.float32)))


def errors(report: Path) -> dict[str, int]:
    """Return Valgrind's words for the errors in our kernels, and how often each came."""
    found: collections.Counter[str] = collections.Counter()
    root = ElementTree.parse(report).getroot()
    times = {
        pair.findtext("unique"): int(pair.findtext("count", "1"))
        for pair in root.iterfind("errorcounts/pair")
    }
    for error in root.iterfind("error"):
        # With --xml=yes Valgrind looks for leaks whatever it is told; the stack of a thread that
        # lives to the end is one.
        if (error.findtext("kind") or "").startswith("Leak_"):
            continue
        frames = [frame for stack in error.findall("stack")[:1] for frame in stack]
        ours = [f for f in frames if FOLDER in (f.findtext("obj") or "")]
        if ours:
            what = error.findtext("what") or error.findtext("xwhat/text")
            where = Path(ours[0].findtext("obj") or "").name, ours[0].findtext("fn") or "?"
            found[f"{what} in {' '.join(where)}"] += times.get(error.findtext("unique"), 1)
    return dict(found)


def main() -> int:
    """Run Valgrind, or what it runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--wrong", action="store_true", help="only read beyond an array")
    parser.add_argument("--inside", action="store_true", help="in this process, without Valgrind")
    options = parser.parse_args()
    if options.inside:
        if options.wrong:
            go_wrong()
        else:
            compute(options.first, options.count)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = ["valgrind", *OPTIONS, f"--xml-file={report}", sys.executable, __file__]
        command += [*sys.argv[1:], "--inside"]
        environment = {"BACKNORM_CPU_LEVEL": "x86-64", "PYTHONMALLOC": "malloc"}
        done = subprocess.run(command, env={**os.environ, **environment}, check=False)
        found = errors(report)
    print(json.dumps({"computed": 0 if options.wrong else options.count, "errors": found}))
    return 1 if found or done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
