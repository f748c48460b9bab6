"""`models`: the variants of a case are judged in one process, then timed in turns, each in its own.

In a common process, the allocator would reuse pages of one variant for another. Two processes that
make the same steps differ, because their memory lies in different physical pages. So each variant
is timed in several processes, one after another.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import geometric_mean
from typing import Any, NamedTuple

import numpy as np

from backnorm.steps import take_turns
from benchmarks.child import Child, ChildEndedError
from benchmarks.models.cases import Case
from benchmarks.turns import median, timing

__all__ = ["ModelsRun"]

# With these settings glibc's allocator never returns memory to the system, like the allocators that
# PyTorch's guide to performance recommends. With its defaults the allocator returns memory in some
# steps only, in any variant: the same step of RegNetY takes 163 ms, or 190 ms if it gets 28,000 new
# pages (Intel Xeon). With `hugetlb=1` the allocator requests huge pages for its heap (glibc 2.35).
_KEEPING = "trim_threshold=1099511627776", "mmap_max=0", "arena_max=1"
_SETTINGS: dict[str, tuple[str, ...]] = {
    "keeping": _KEEPING,
    "default": (),
    "huge": (*_KEEPING, "hugetlb=1"),
}
_VARIABLES = {
    allocator: {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{each}" for each in settings)}
    for allocator, settings in _SETTINGS.items()
}

# Seconds between steps: OpenMP's threads spin for milliseconds after the last region of a process,
# on processors that the next process needs.
_PAUSE = 0.05


class _Measured(NamedTuple):
    """Measurements of a process, with the meaning of the fields of a row."""

    samples: list[float]
    memory: int
    normalization: float | None


class ModelsRun:
    """Measures cases.

    Parameters
    ----------
    variants : sequence of str
    threads : int
    processes : int
        Processes of each variant.
    rounds : int
        Turns of each process.
    patience : float
        Seconds that an answer may take; compilers take minutes.

    Attributes
    ----------
    versions : dict of str to str
        The versions of the packages.
    """

    #: The module that child processes run.
    worker = "benchmarks.models.worker"

    def __init__(
        self,
        variants: Sequence[str],
        threads: int,
        processes: int,
        rounds: int,
        patience: float = 1800.0,
    ) -> None:
        self.versions: dict[str, str] = {}
        self._variants, self._threads = variants, threads
        self._processes, self._rounds, self._patience = processes, rounds, patience

    def measure(self, case: Case) -> dict[str, Any]:
        """Return the row of a case.

        Returns
        -------
        dict
            The fields of the case, with the shape as text; "layers", the number of our layers, and
            "fused", how many of them `convert` fused in any variant. For each right variant:
            "VARIANT.step", ".p20" and ".p80", seconds of a step in all turns; ".ratio", the ratio
            of its step to that with the framework's own layers: a median over the turns of each
            process, ".ratio.1" and so on, and their geometric mean; ".normalization", seconds of an
            eager step in normalisation, activations and additions; ".memory", bytes that its first
            steps take; ".error", the distance of its gradients from float64. "notes": why other
            variants were not timed.
        """
        row = dataclasses.asdict(case) | {"shape": ",".join(map(str, case.shape))}
        row |= {"layers": 0, "fused": 0}
        notes: list[str] = []
        try:
            self._fill(row, case, notes)
        except ChildEndedError as end:
            notes.append(str(end))
        return row | {"notes": "; ".join(notes)}

    def _fill(self, row: dict[str, Any], case: Case, notes: list[str]) -> None:
        """Add what was measured to a row.

        Raises
        ------
        ChildEndedError
        """
        own, *_ = every = case.variants(self._variants)
        with self._child(case) as child:
            judged = child.ask("judge", every)
        notes += [f"{name}: {each.detail}" for name, each in judged.items() if each.detail]
        timed = [name for name in every if not judged[name].detail]
        if not timed:
            return
        found: list[dict[str, _Measured]] = []
        for _ in range(self._processes):
            found.append(self._in_turns(case, timed, notes))
            # A variant whose process has ended gets no other one.
            timed = [*found[-1]]
        for name in timed:
            measured = [each[name] for each in found]
            step = timing([sample for each in measured for sample in each.samples])
            ratios = [median(np.divide(each[name].samples, each[own].samples)) for each in found]
            for number in ("layers", "fused"):
                row[number] = max(row[number], getattr(judged[name], number))
            known = [each.normalization for each in measured if each.normalization is not None]
            row |= {
                f"{name}.step": step.median,
                f"{name}.p20": step.p20,
                f"{name}.p80": step.p80,
                f"{name}.ratio": geometric_mean(ratios),
                **{f"{name}.ratio.{k}": ratio for k, ratio in enumerate(ratios, 1)},
                f"{name}.normalization": median(known) if known else None,
                # The memory of compiled steps includes that of the compiler.
                f"{name}.memory": median(each.memory for each in measured) if known else None,
                f"{name}.error": judged[name].error,
            }

    def _in_turns(
        self, case: Case, variants: Sequence[str], notes: list[str]
    ) -> dict[str, _Measured]:
        """Return what was measured in a new process of each variant, the framework's layers first.

        A variant whose process ends before the first turn is noted and left out.

        Raises
        ------
        ChildEndedError
        """
        own, *_ = variants
        with ExitStack() as stack:
            children: dict[str, Child] = {}
            memory: dict[str, int] = {}
            for name in variants:
                child = stack.enter_context(self._child(case))
                try:
                    memory[name] = child.ask("begin", name)
                except ChildEndedError as end:
                    if name == own:
                        raise
                    notes.append(f"{name}: {end}")
                    continue
                children[name] = child
            turns = {name: partial(_turn, child) for name, child in children.items()}
            samples = take_turns(turns, self._rounds)
            return {
                name: _Measured(samples[name], memory[name], child.ask("normalization"))
                for name, child in children.items()
            }

    @contextmanager
    def _child(self, case: Case) -> Iterator[Child]:
        """Yield a new process for a case.

        Raises
        ------
        ChildEndedError
        """
        child = Child(self.worker, _VARIABLES[case.allocator], self._patience)
        try:
            self.versions |= child.ask("start", self._threads, case)
            yield child
        finally:
            child.stop()


def _turn(child: Child) -> list[float]:
    time.sleep(_PAUSE)
    return [child.ask("step")]
