"""`models`: the variants of a case are judged in one process, then timed in turns, each in its own.

In a common process, the allocator would reuse pages of one variant for another.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from backnorm.steps import take_turns
from benchmarks.child import Child, ChildEndedError
from benchmarks.models.cases import Case
from benchmarks.turns import timing

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


class ModelsRun:
    """Measures cases.

    Parameters
    ----------
    variants : sequence of str
    threads, rounds : int
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
        self, variants: Sequence[str], threads: int, rounds: int, patience: float = 1800.0
    ) -> None:
        self.versions: dict[str, str] = {}
        self._variants, self._threads = variants, threads
        self._rounds, self._patience = rounds, patience

    def measure(self, case: Case) -> dict[str, Any]:
        """Return the row of a case.

        Returns
        -------
        dict
            The fields of the case, with the shape as text; "layers", the number of our layers, and
            "fused", how many of them `convert` fused in any variant. For each right variant:
            "VARIANT.step", ".p20" and ".p80", seconds of a step; ".ratio", the median over turns of
            the ratio of its step to that with the framework's own layers;
            ".normalization", seconds of an eager step in normalisation, activations and additions;
            ".memory", bytes that its first steps take; ".error", the distance of its gradients
            from float64. "notes": why other variants were not timed.
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
        with ExitStack() as stack:
            children: dict[str, Child] = {}
            memory: dict[str, int] = {}
            for name in (each for each in every if not judged[each].detail):
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
            for name, child in children.items():
                normalization = child.ask("normalization")
                step = timing(samples[name])
                for number in ("layers", "fused"):
                    row[number] = max(row[number], getattr(judged[name], number))
                row |= {
                    f"{name}.step": step.median,
                    f"{name}.p20": step.p20,
                    f"{name}.p80": step.p80,
                    f"{name}.ratio": float(np.median(np.divide(samples[name], samples[own]))),
                    f"{name}.normalization": normalization,
                    # The memory of compiled steps includes that of the compiler.
                    f"{name}.memory": None if normalization is None else memory[name],
                    f"{name}.error": judged[name].error,
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
