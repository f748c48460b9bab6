"""The interfaces that an executable uses: the `Arrays` of a framework, and `Launch`.

A `Launch` has the kernels of a planned problem. The engines `cpu` and `gpu` each have a subclass of
`Launch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from backnorm.layout import Extents, Order
from backnorm.options import Options
from backnorm.problem import Metadata, Problem, problem_of
from backnorm.signature import SIGNATURES, Kind, Operation, Signature

#: The arrays whose addresses a stage takes, in this order. `backnorm_kernels.record` describes
#: them.
ADDRESSES = (
    "x",
    "dy",
    "out",
    "residual",
    "mask",
    "mean",
    "variance",
    "gamma",
    "beta",
    "result",
    "result_2",
    "running_mean",
    "running_variance",
    "exchanged",
)

A = TypeVar("A")
P = TypeVar("P", bound=Hashable)

#: The results of an operation, in the order of its signature. They are arrays of the framework;
#: only the result `count`, the number of elements, is an int. A result that the options exclude is
#: None.
Results = tuple[Any, ...]

#: The operands of a call, in the order of the signature. An absent operand is None.
Operands = Sequence[A | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How an engine computes a problem. ``print`` it to read the decisions.

    Attributes
    ----------
    problem : Problem
    extents : Extents
        The memory form of x, dy and dx.
    """

    problem: Problem
    extents: Extents


def summary(problem: Problem, extents: Extents) -> tuple[str, str]:
    """Return the first lines of a printed plan: the problem, and the memory form of x."""
    shape = "x".join(map(str, problem.shape))
    axes = ", ".join(map(str, problem.channel_axes))
    return (
        f"{problem.operation} {problem.dtype} {shape}, channel axis {axes}, "
        f"statistics {problem.statistics_dtype}, arithmetic {problem.arithmetic}",
        f"  memory   outer {extents.outer}, channels {extents.channels}, inner {extents.inner}",
    )


class Launch:
    """The kernels of a planned problem, as stages.

    A stage takes the addresses of the arrays that `ADDRESSES` names, in that order, and numbers as
    keyword arguments: `momentum`, the weight of the batch in the running statistics; `sums`, the
    two float64 arrays of sums or moments that a second phase is computed from; and `count`, the
    number of elements per channel that were summed. A stage returns the index of the first channel
    with an invalid variance, or -1. The `Launch` of a framework may lack a stage that none of the
    framework's operations uses.

    Attributes
    ----------
    whole
        Sums every channel, then writes the output and the per-channel results.
    write
        Writes the output from given statistics or sums.
    sum
        Writes the sums, or mean and variance, of every channel.
    write_and_finish
        Writes the output and the per-channel results from given sums or moments.
    sum_and_solve
        Sums every channel, then writes the per-channel results and the coefficients.
    """

    __slots__ = ()
    whole: Any
    write: Any
    sum: Any
    write_and_finish: Any
    sum_and_solve: Any

    def stage(self, operation: Operation) -> Any:
        """Return the stage that computes all results of an operation."""
        match operation:
            case "forward" | "backward":
                return self.whole
            case "inference" | "apply":
                return self.write
            case "reduce" | "reduce_forward":
                return self.sum
            case "apply_forward":
                return self.write_and_finish
            case "forward_coefficients" | "backward_coefficients":
                return self.sum_and_solve


class Arrays(ABC, Generic[A, P]):
    """The arrays of a framework (type A), and the machine or device that calls are planned for (P).

    Each subclass has only one instance, which is a part of cache keys.
    The methods that this class defines are for arrays that kernels read and write in place. If a
    framework's arrays need copies, the framework's class overrides these methods.

    Attributes
    ----------
    classes : tuple of type
        The classes of operands whose facts can be trusted, among them the class of None. A subclass
        may override its shape.
    absent
        The address that stands for an absent array.
    """

    classes: ClassVar[tuple[type, ...]]
    absent: ClassVar[Any] = 0

    @abstractmethod
    def place(self, x: A | None) -> P:
        """Return the machine (for CPUs) or the GPU for which a call is planned."""

    @abstractmethod
    def planned(self, problem: Problem, extents: Extents, place: P) -> tuple[Any, Launch]:
        """Return the engine's plan of a problem, and the kernels that carry out the plan."""

    @abstractmethod
    def facts(self, operands: Sequence[Any], mask: int | None) -> Sequence[Hashable]:
        """Return everything about the operands on which a call depends, except the values of their
        elements: a part of the call's key. `mask` is the position of the mask, or None.

        Raises
        ------
        AttributeError, TypeError, RuntimeError
            If an operand is not an array.
        """

    @abstractmethod
    def order_of(self, x: A) -> Order:
        """Return the order of axes in which the array that kernels read (x or a copy) is dense."""

    @abstractmethod
    def forms(self, problem: Problem, order: Order) -> Mapping[Kind, Any]:
        """Return the form of each kind of results, for arrays that are dense in this order."""

    @abstractmethod
    def new(self, forms: Sequence[Any], operands: Operands[A]) -> list[A]:
        """Return a new array of each form. `operands` are in the form that kernels read."""

    @abstractmethod
    def addresses(self, arrays: Operands[A]) -> list[Any] | None:
        """Return the address of each array (for None, anything); None if an array has lost its
        memory, which its facts do not show.
        """

    def read(self, operands: Sequence[Any], signature: Signature) -> Operands[A]:
        """Return the operands as arrays of type A; raise if one is missing or not an array."""
        return operands

    def described(self, read: Operands[A], signature: Signature) -> Operands[A | Metadata]:
        """Return, for each operand, the object whose shape and element type are validated."""
        return read

    def checked(
        self, operation: Operation, operands: Sequence[Any], options: Options
    ) -> tuple[Problem, Operands[A]]:
        """Return the problem of a call, and its operands as arrays.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            As `read` and `problem_of`.
        """
        signature = SIGNATURES[operation]
        read = self.read(operands, signature)
        return problem_of(operation, *self.described(read, signature), **options._asdict()), read

    def ready(self, read: Operands[A], problem: Problem, order: Order) -> Operands[A]:
        """Return the operands in the form that kernels read: the operands themselves, or copies."""
        return read

    def target(self, out: A, operands: Operands[A], problem: Problem, order: Order) -> A | None:
        """Return `out` in a form that a kernel can write to; None if the result must be copied.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            If the first result cannot be written to `out`. `out` may be any object.
        """
        return out

    def put(self, result: A, out: A) -> A:
        """Copy the first result to `out`, unless a kernel has written it there; return `out`."""
        return result

    def finished(
        self,
        results: Results,
        operands: Operands[A],
        ready: Operands[A],
        problem: Problem,
        order: Order,
    ) -> Results:
        """Return a kernel's results with the axis order and element types that callers expect."""
        return results

    def shown(self, channels: A) -> np.ndarray:
        """Return a per-channel array as a one-dimensional NumPy array, for an error message."""
        return np.asarray(channels).reshape(-1)


#: `Arrays` of any framework. Executables use this type, because their code does not depend on the
#: type parameters A and P.
AnyArrays = Arrays[Any, Any]
