"""How the CPU computes a problem: a plan for this machine, and what is launched for it."""

from __future__ import annotations

import dataclasses
import functools

from backnorm.cpu.launch import Launch
from backnorm.cpu.plan import Plan, plan
from backnorm.layout import Extents
from backnorm.machine import Machine, detect
from backnorm.problem import Problem
from backnorm.threads import get_num_threads

__all__ = ["machine", "planned"]


def machine() -> Machine:
    """Return this machine, with the threads that a call may have here and now."""
    return _machine(get_num_threads())


def planned(
    problem: Problem, extents: Extents, machine: Machine, exchanged: bool
) -> tuple[Plan, Launch]:
    """Return the plan of a problem, and its kernels."""
    decided = plan(problem, extents, machine, exchanged=exchanged)
    return decided, Launch(problem, decided)


@functools.lru_cache(maxsize=64)
def _machine(threads: int) -> Machine:
    return dataclasses.replace(detect(), threads=threads)
