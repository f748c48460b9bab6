"""Problems between unreadable pages: a seeded fuzz.

``python driver.py --seed 17`` computes one problem, ``python driver.py --first 0 --count 2000`` so
many, ``--processes 2`` in processes of their own, which may crash: the seed of a problem is in a
file before it is computed.

Each problem is called three times: twice in guarded memory, at two of the ends of a stretch, and
once in plain memory without any of what `guarded` changes but plans. An access beyond an array
ends the process, or changes bytes beside it. The three must agree to the bit, but for the bits of
NaN, and one of `JUDGED` problems of the package's own, up to `LARGEST` elements, is judged by the
oracle.

The last line of output is JSON: what was counted, and what was found.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import mmap
import random
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from dialect_problems import of_dialect
from guarded import Guarded
from problems import Problem, of_package
from wrong_kernels import MUTANTS
from xla_problems import of_xla

import backnorm
from backnorm.machine import Machine
from backnorm_kernels.plan import is_legal

JUDGED, LARGEST = 16, 4096

# Problems of a process; a crash ends no more than these.
CHUNK = 20_000

# Shares of the problems.
_DIALECTS, _XLA = 0.15, 0.06
_COUNTED = (
    "operation", "type", "statistics", "layout", "format", "rank", "values", "threads", "out",
    "dialect", "plan", "outcome", "arithmetic", "sums",
)  # fmt: skip


def problem_of(seed: int) -> Problem:
    """Return the problem of a seed."""
    rnd = random.Random(seed)
    kind = rnd.random()
    if kind < _DIALECTS:
        return of_dialect(seed, rnd)
    return of_xla(seed, rnd) if kind < _DIALECTS + _XLA else of_package(seed, rnd)


class Fuzz:
    """Computes problems, and counts what they were."""

    def __init__(self, guarded: Guarded) -> None:
        self.guarded = guarded
        self.counts: dict[str, collections.Counter[str]] = {
            name: collections.Counter() for name in (*_COUNTED, "judged")
        }

    def found(self, seed: int) -> Iterator[str]:
        """Yield what is wrong with the problem of a seed."""
        problem = problem_of(seed)
        self._prepare(problem)
        outcomes = []
        for end in problem.ends:
            self.guarded.arena.reset()
            with self.guarded.on(end) as arena:
                operands = {
                    name: one.guarded(arena, name) for name, one in problem.operands.items()
                }
                outcomes.append(_bits(_results(problem.call, operands)))
                yield from (f"{end}: {broken}" for broken in arena.broken())
        operands = {name: one.plain() for name, one in problem.operands.items()}
        results = _results(problem.expected or problem.call, operands)
        outcomes.append(_bits(results))
        yield from (
            f"{end}: other results than in plain memory"
            for end, outcome in zip(problem.ends, outcomes, strict=False)
            if not _are_same(outcome, outcomes[-1])
        )
        refused = isinstance(results, str)
        problem.tags["outcome"] = "refused" if refused else "results"
        problem.tags["plan"] = self._planned()
        for name, tag in problem.tags.items():
            self.counts[name][tag] += 1
        if not refused and self._is_judged(problem):
            self.counts["judged"][problem.tags["operation"]] += 1
            assert problem.verdicts is not None
            operands = {name: one.plain() for name, one in problem.operands.items()}
            for name, verdict in problem.verdicts(operands, results).items():
                if not verdict.passed:
                    yield f"{name}: {verdict.detail}"

    def _prepare(self, problem: Problem) -> None:
        guarded = self.guarded
        guarded.begin()
        backnorm.set_num_threads(problem.threads)
        guarded.machine = Machine(problem.threads, *problem.caches, "made up")
        guarded.change = _changed(guarded.forced, problem.seed) if problem.forces else None

    def _is_judged(self, problem: Problem) -> bool:
        if problem.verdicts is None or problem.seed % JUDGED:
            return False
        return problem.operands["x"].content.size <= LARGEST

    def _planned(self) -> str:
        if not self.guarded.plans:
            return "none"
        plan = self.guarded.plans[0]
        words = [type(plan.geometry).__name__.lower()]
        words += ["grouped"] * plan.grouped + ["streaming"] * plan.streaming
        return " ".join(words + ["forced"] * (self.guarded.change is not None))


def _changed(forced: Any, seed: int) -> Any:
    """Return what changes a plan to another legal one, the same in every call."""

    def change(plan: Any) -> Any:
        rnd = random.Random(seed)
        problem = plan.problem
        operation = f"relu {problem.operation}" if problem.relu else problem.operation
        cuts = [None]
        if rnd.random() < 0.4:
            cuts += [*forced.segments(plan.extents), *forced.columns(plan.extents)]
        cut = rnd.choice(cuts)
        found = forced.choices(forced.changed(plan, cut), operation)
        found.pop("offset")
        values = {name: rnd.choice(every) for name, every in found.items()}
        if problem.signature.is_phase:
            values.pop("grouped", None)
        for way in (values, {}):
            decided = forced.changed(plan, cut, **way)
            if is_legal(decided):
                return decided
        return plan

    return change


def _results(call: Any, operands: dict[str, Any]) -> tuple[Any, ...] | str:
    """Return what came of a call, or in which words it was refused."""
    try:
        found: tuple[Any, ...] = call(operands)
    except backnorm.BacknormError as error:
        return str(error)
    return found


def _bits(results: tuple[Any, ...] | str) -> Any:
    if isinstance(results, str):
        return results
    return [None if one is None else (one.shape, one.dtype, one.tobytes()) for one in results]


def _are_same(found: Any, expected: Any) -> bool:
    """Whether results are the same to the bit, or NaN both.

    Of two NaN the processor takes the first one's sign, and which that is the compiler may choose
    for every loop.
    """
    if found == expected:
        return True
    if isinstance(found, str) or isinstance(expected, str):
        return False
    return len(found) == len(expected) and all(map(_is_same, found, expected))


def _is_same(found: Any, expected: Any) -> bool:
    if found is None or expected is None or found[:2] != expected[:2]:
        return found is expected
    one, other = (np.frombuffer(each[2], each[1]) for each in (found, expected))
    numbers = ~np.isnan(one.astype(np.float64)), ~np.isnan(other.astype(np.float64))
    bits = f"u{found[1].itemsize}"
    return bool(
        (numbers[0] == numbers[1]).all()
        and (one.view(bits)[numbers[0]] == other.view(bits)[numbers[1]]).all()
    )


def compute(first: int, count: int, log: Path, mutant: str | None, only: dict[str, str]) -> int:
    """Compute problems in this process; return how many have something wrong.

    Of those between `first` and `first + count`, those with the tags of `only`.
    """
    warnings.simplefilter("error")
    log.write_bytes(struct.pack("q", first))
    with log.open("r+b") as file:
        cell = mmap.mmap(file.fileno(), 8)
    fuzz = Fuzz(Guarded())
    if mutant is not None:
        MUTANTS[mutant](fuzz.guarded)
    wrong = []
    for seed in range(first, first + count):
        if only and not only.items() <= problem_of(seed).tags.items():
            continue
        cell[:] = struct.pack("q", seed)
        try:
            found = list(fuzz.found(seed))
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            wrong.append({"seed": seed, "found": found[:4]})
    counts = {name: dict(counter.most_common()) for name, counter in fuzz.counts.items()}
    print(json.dumps({"computed": count, "counts": counts, "wrong": wrong}))
    return len(wrong)


def command(first: int, count: int, log: Path, mutant: str | None) -> list[str]:
    """Return the command that computes problems in a process."""
    found = [sys.executable, "-X", "faulthandler", __file__, "--first", str(first)]
    found += ["--count", str(count), "--log", str(log)]
    return found if mutant is None else [*found, "--mutant", mutant]


class Children:
    """Processes that compute problems, each so many; what they counted and found.

    A crash is found, too; the problems after it are computed by another process.
    """

    def __init__(self, first: int, count: int, mutant: str | None, folder: Path) -> None:
        self._next, self._end, self._mutant, self._folder = first, first + count, mutant, folder
        self._started = 0
        self.computed, self.wrong = 0, []
        self.counts: dict[str, collections.Counter[str]] = {}

    def run(self, processes: int) -> None:
        """Compute all problems, so many processes at a time."""
        running: list[Any] = []
        rest: list[tuple[int, int]] = []
        while running or rest or self._next < self._end:
            while len(running) < processes and (rest or self._next < self._end):
                running.append(self._begun(*(rest.pop() if rest else self._chunk())))
            ended = [child for child in running if child[0].poll() is not None]
            running = [child for child in running if child not in ended]
            for child in ended:
                rest += self._ended(*child)
            time.sleep(0.05)

    def _chunk(self) -> tuple[int, int]:
        first = self._next
        self._next = min(self._end, first + CHUNK)
        return first, self._next - first

    def _begun(self, first: int, count: int) -> Any:
        self._started += 1
        log = self._folder / f"seed-{self._started}"
        output = (self._folder / f"output-{self._started}").open("w+")
        child = subprocess.Popen(
            command(first, count, log, self._mutant), stdout=output, stderr=subprocess.STDOUT
        )
        return child, output, log, first, count

    def _ended(
        self, child: Any, output: Any, log: Path, first: int, count: int
    ) -> list[tuple[int, int]]:
        """Take what a process found; return the problems that it did not come to."""
        output.seek(0)
        said = output.read()
        output.close()
        try:
            found = json.loads(said.splitlines()[-1])
        except (ValueError, IndexError):
            seed = struct.unpack("q", log.read_bytes())[0] if log.exists() else first
            found = {"computed": seed + 1 - first, "counts": {}, "wrong": [
                {"seed": seed, "found": [f"ended with {child.returncode}", said[-2000:]]}
            ]}  # fmt: skip
        self.computed += found["computed"]
        self.wrong += found["wrong"]
        for name, counter in found["counts"].items():
            self.counts.setdefault(name, collections.Counter()).update(counter)
        left = first + found["computed"]
        print(f"{self.computed} problems, {len(self.wrong)} wrong", file=sys.stderr, flush=True)
        return [(left, first + count - left)] if left < first + count else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="compute this problem alone")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--log", type=Path, help="file for the seed of the problem")
    parser.add_argument("--only", nargs="*", default=(), metavar="TAG=VALUE")
    parser.add_argument("--mutant", choices=MUTANTS, help="let kernels go beyond their arrays")
    options = parser.parse_args()
    first, count = (options.first, options.count) if options.seed is None else (options.seed, 1)
    with tempfile.TemporaryDirectory() as folder:
        if not options.processes:
            faulthandler.enable()
            log = options.log or Path(folder) / "seed"
            only = dict(each.split("=") for each in options.only)
            return 1 if compute(first, count, log, options.mutant, only) else 0
        children = Children(first, count, options.mutant, Path(folder))
        begun = time.monotonic()
        children.run(options.processes)
        counts = {name: dict(counter.most_common()) for name, counter in children.counts.items()}
        found = {"computed": children.computed, "seconds": round(time.monotonic() - begun)}
        print(json.dumps({**found, "counts": counts, "wrong": children.wrong}))
        return 1 if children.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
