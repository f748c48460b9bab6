"""What there is to compile: calls of the public operators on tiny arrays, on made-up machines.

Which kernels a call needs follows from its types, and from what the plan makes of its shape and of
the caches. So here are shapes and machines of every kind; the operators themselves are called,
and compile whatever they need.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from backnorm import execute, operators
from backnorm.dtypes import ELEMENT_TYPES, statistics_types
from backnorm.layout import Extents
from backnorm.machine import Machine
from backnorm.plan import Plan, plan
from backnorm.problem import Operation, Problem

__all__ = ["OPERATIONS", "Job", "job_of", "jobs"]

# (N, C, S): segments long, short, and in pieces; rows of channels wide, narrow, and of a tiny
# space; and two that are large enough for a second thread.
_SHAPES = (
    (2, 3, 64),
    (2, 3, 16),
    (1, 2, 4100),
    (1, 1, 5),
    (4, 64, 1),
    (5, 3, 1),
    (3, 5, 4),
    (2, 4, 8192),
    (16384, 4, 1),
)

# Everything fits in the caches of one, nothing in those of the other. To each an epsilon of its
# own, so that no plan that was made for one is remembered for the other.
_MACHINES = {1e-5: Machine(2, 1 << 30, 1 << 30, "large"), 2e-5: Machine(2, 0, 0, "small")}


@dataclass(frozen=True, slots=True)
class Job:
    """Calls that need the same large kernels.

    Attributes
    ----------
    operation : str
        A key of `OPERATIONS`.
    dtype : str
        Element type of x.
    geometry : str
        "segments" or "columns".
    """

    operation: str
    dtype: str
    geometry: str

    def __str__(self) -> str:
        """Return the job in a few words."""
        return f"{self.operation} {self.dtype} {self.geometry}"

    def run(self) -> None:
        """Make all the calls, which compiles what they need and is not there yet."""
        dtype = next(t for t in ELEMENT_TYPES if str(t) == self.dtype)
        for shape, epsilon in itertools.product(_SHAPES, _MACHINES):
            if _job(self.operation, dtype, shape, epsilon) != self:
                continue
            with _planned_for(_MACHINES[epsilon]):
                for statistics in statistics_types(dtype):
                    OPERATIONS[self.operation].call(_Arrays(shape, dtype, statistics, epsilon))


def jobs(dtypes: Iterable[np.dtype], operations: Iterable[str]) -> list[Job]:
    """Return everything that may have to be compiled for these types and operations.

    What takes longest comes first, and what needs kernels of another operation comes last: that
    evens out what the processes do, and keeps them from compiling the same.
    """
    every = itertools.product(operations, dtypes, _SHAPES, _MACHINES)
    found = {_job(*each) for each in every}
    order = list(OPERATIONS)
    return sorted(found, key=lambda job: (order.index(job.operation), job.geometry, job.dtype))


def job_of(plan: Plan) -> Job:
    """Return the job that compiles what `plan`, of a backward pass, runs."""
    return _described("backward" if plan.problem.training else "frozen", plan)


def _job(operation: str, dtype: np.dtype, shape: tuple[int, int, int], epsilon: float) -> Job:
    kind = OPERATIONS[operation]
    problem = Problem(kind.problem, shape, 1, dtype, dtype, training=kind.training)
    machine = _MACHINES[epsilon]
    return _described(operation, plan(problem, Extents(*shape), machine, exchanged=kind.exchanged))


def _described(operation: str, plan: Plan) -> Job:
    return Job(operation, str(plan.problem.dtype), type(plan.geometry).__name__.lower())


@contextlib.contextmanager
def _planned_for(machine: Machine) -> Iterator[None]:
    """Let the operators plan for another machine than this one."""
    namespace = vars(execute)
    original = namespace["plan"]

    @functools.wraps(original)
    def elsewhere(problem: Problem, extents: Extents, _: Machine, **options: bool) -> Plan:
        decided: Plan = original(problem, extents, machine, **options)
        return decided

    namespace["plan"] = elsewhere
    try:
        yield
    finally:
        namespace["plan"] = original


class _Arrays:
    """Arrays of a call: zeros and ones, which every operator takes."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: np.dtype,
        statistics: np.dtype,
        epsilon: float,
    ) -> None:
        self.x, self.dy = np.zeros(shape, dtype), np.ones(shape, dtype)
        self.zeros, self.ones = np.zeros(shape[1], statistics), np.ones(shape[1], statistics)
        self.optional = (None, self.ones)
        self.epsilon = epsilon


def _backward(given: _Arrays, *, training: bool) -> None:
    for gamma in given.optional:
        operators.batch_norm_backward(
            given.x,
            given.dy,
            given.zeros,
            given.ones,
            gamma,
            epsilon=given.epsilon,
            training=training,
        )


def _forward(given: _Arrays) -> None:
    for gamma, beta in itertools.product(given.optional, given.optional):
        operators.batch_norm_forward(given.x, gamma, beta, epsilon=given.epsilon)


def _inference(given: _Arrays) -> None:
    for gamma, beta in itertools.product(given.optional, given.optional):
        operators.batch_norm_inference(
            given.x, given.zeros, given.ones, gamma, beta, epsilon=given.epsilon
        )


def _phases(given: _Arrays) -> None:
    sums = operators.reduce(given.x, given.dy, given.zeros)
    for gamma, training in itertools.product(given.optional, (True, False)):
        operators.apply(
            given.x,
            given.dy,
            given.zeros,
            given.ones,
            gamma,
            sums,
            epsilon=given.epsilon,
            training=training,
        )


@dataclass(frozen=True, slots=True)
class _Kind:
    """Calls of a kind, and how they are planned."""

    call: Callable[[_Arrays], None]
    problem: Operation = "backward"
    training: bool = True
    exchanged: bool = False


#: What can be compiled ahead, longest first: the backward pass, the forward pass, the backward pass
#: with frozen statistics, `reduce` and `apply`, and inference.
OPERATIONS = {
    "backward": _Kind(functools.partial(_backward, training=True)),
    "forward": _Kind(_forward, "forward"),
    "frozen": _Kind(functools.partial(_backward, training=False), training=False),
    "phases": _Kind(_phases, exchanged=True),
    "inference": _Kind(_inference, "inference", exchanged=True),
}
