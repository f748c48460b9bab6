"""The engine of the kernels (see `engines`): plans a problem for a machine."""

from __future__ import annotations

from backnorm_kernels.launch import Launch
from backnorm_kernels.plan import Plan, plan
from backnorm.layout import Extents
from backnorm.machine import Machine
from backnorm.problem import Problem


def planned(
    problem: Problem, extents: Extents, machine: Machine, exchanged: bool
) -> tuple[Plan, Launch]:
    """Return the plan of a problem for a machine, and the kernels of this plan."""
    decided = plan(problem, extents, machine, exchanged=exchanged)
    return decided, Launch(problem, decided)
