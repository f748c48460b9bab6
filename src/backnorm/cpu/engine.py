"""The CPU engine: describes this machine, plans a problem for it and returns the kernels."""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

from backnorm.cpu.launch import Launch
from backnorm.cpu.plan import Plan, plan
from backnorm.interfaces import A, Arrays
from backnorm.layout import Extents
from backnorm.machine import Machine, detect
from backnorm.problem import Problem
from backnorm.threads import get_num_threads


def machine() -> Machine:
    """Return this machine, with the number of threads that a call may use now."""
    return _machine(get_num_threads())


class CpuArrays(Arrays[A, Machine], Protocol[A]):
    """The adapter for arrays (of NumPy, or of a framework) that CPU kernels read and write."""

    def place(self, x: A | None) -> Machine:
        """Return this machine."""
        return machine()

    def planned(
        self, problem: Problem, extents: Extents, place: Machine, exchanged: bool
    ) -> tuple[Plan, Launch]:
        """Return the plan of a problem for a machine, and the kernels of this plan."""
        decided = plan(problem, extents, place, exchanged=exchanged)
        return decided, Launch(problem, decided)


@functools.lru_cache(maxsize=64)
def _machine(threads: int) -> Machine:
    return dataclasses.replace(detect(), threads=threads)
