"""The interfaces that an executable uses: the `Arrays` of a framework, and `Launch`.

A `Launch` has the kernels of a planned problem. The engines `cpu` and `gpu` each have a subclass of
`Launch`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from backnorm.layout import Extents, Order
from backnorm.problem import Metadata, Problem
from backnorm.signature import Operation, Signature

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

#: A function that runs an operation. It takes the operands, the options, `out` and the numbers.
Call = Callable[..., Results]

#: The operands of a call, in the order of the signature. An absent operand is None.
Operands = Sequence[A | None]


class Code(NamedTuple):
    """Python expressions on a framework's arrays, from which the code of an executable is made.

    ``{}`` stands for the name of the variable that holds the array.

    Attributes
    ----------
    arrays : str
        The name of the kind of arrays, so that kinds with equal facts have different keys.
    facts : str
        A tuple of everything that validation reads: the array's part of a cache key.
    address : str
        The address of the first element, as the kernels take it.
    constants : tuple of str
        Names of the values that an executable provides for `new`.
    new : mapping of str to str
        The allocation of a result, by its name or kind, from the constants and the operands.
    absent : str
        The address of an array that is absent.
    header : int
        If `address` is the address of a Python object: the offset in bytes at which the object
        stores the address of its elements. Else 0.
    stage : str
        The callable of a stage. Calling a bound method takes half the time of calling an object.
    channel_facts : str
        The facts of a per-channel array, if fewer than `facts` suffice.
    mask_facts : str
        The facts of a mask, if more than `facts` are needed.
    lost : str
        Whether an operand has lost its memory; its facts do not show this. ``{0}`` is the
        operand's name, ``{1}`` its kind. Empty if the memory of arrays cannot be freed.
    known_address : str
        The address of an operand that `lost` has already read.
    """

    arrays: str
    facts: str
    address: str
    constants: tuple[str, ...]
    new: Mapping[str, str]
    absent: str = "0"
    header: int = 0
    stage: str = "stage"
    channel_facts: str = ""
    mask_facts: str = ""
    lost: str = ""
    known_address: str = ""


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

    A stage takes the addresses of the arrays that `ADDRESSES` names, in that order, and
    the numbers of the signature as keyword arguments. A stage returns the index of the first
    channel with an invalid variance, or -1. The `Launch` of a framework may lack a stage that none
    of the framework's operations uses.

    Attributes
    ----------
    complete
        Sums every channel, then writes the output and the per-channel results.
    apply
        Writes the output from given statistics or sums.
    sum_all
        Writes the sums, or mean and variance, of every channel.
    finish
        Writes the output and the per-channel results from given sums or moments.
    reduce
        Sums every channel, then writes the per-channel results and the coefficients.
    """

    __slots__ = ()
    complete: Any
    apply: Any
    sum_all: Any
    finish: Any
    reduce: Any

    def stage(self, operation: Operation) -> Any:
        """Return the stage that computes all results of an operation."""
        match operation:
            case "forward" | "backward":
                return self.complete
            case "inference" | "apply":
                return self.apply
            case "reduce" | "reduce_forward":
                return self.sum_all
            case "apply_forward":
                return self.finish
            case "forward_coefficients" | "backward_coefficients":
                return self.reduce


class Arrays(Protocol[A, P]):
    """The arrays of a framework (type A), and the machine or device that calls are planned for (P).

    Each class that implements this protocol has only one instance, because cache keys depend on the
    instance. The methods that this class defines are for arrays that kernels read and write in
    place. If a framework's arrays need copies, the framework's class overrides these methods.

    Attributes
    ----------
    code : Code
    names : dict
        The global names of the code.
    """

    code: ClassVar[Code]
    names: ClassVar[dict[str, Any]]

    def __hash__(self) -> int:
        return id(self)

    def place(self, x: A | None) -> P:
        """Return the machine (for CPUs) or the GPU for which a call is planned."""

    def planned(
        self, problem: Problem, extents: Extents, place: P, exchanged: bool
    ) -> tuple[Any, Launch]:
        """Return the engine's plan of a problem, and the kernels that carry out the plan.

        `exchanged` says whether devices or processes will exchange sums between the two phases.
        """

    def values(self, problem: Problem, order: Order) -> tuple[object, ...]:
        """Return the values of `code.constants` for arrays that are dense in this order."""

    def order_of(self, x: A) -> Order:
        """Return the order of axes in which the array that kernels read (x or a copy) is dense."""

    def read(self, operands: Sequence[Any], signature: Signature) -> Operands[A]:
        """Return the operands as arrays of type A; raise if one is missing or not an array."""
        return operands

    def described(self, read: Operands[A], signature: Signature) -> Operands[A | Metadata]:
        """Return, for each operand, the object whose shape and element type are validated."""
        return read

    def ready(self, read: Operands[A], problem: Problem, order: Order) -> Operands[A]:
        """Return the operands in the form that kernels read: the operands themselves, or copies."""
        return read

    def are_plain(self, operands: Sequence[Any], order: Order, ready: Operands[A] = ()) -> bool:
        """Whether kernels can read these operands in place, and also the operands of every other
        call with equal facts.
        """
        return all(map(operator.is_, operands, ready or operands))

    def layouts(self, operands: Sequence[Any]) -> Hashable:
        """Return facts about the operands' memory layouts that are not yet in the key of the call
        cache.

        The facts are added to the key if kernels cannot read the operands in place. If this method
        returns None, the executable of the call is not kept in the call cache.
        """
        return ()

    def target(
        self, out: A, operands: Operands[A], problem: Problem, order: Order, in_place: bool = False
    ) -> A | None:
        """Return `out` in a form that a kernel can write to; None if the result must be copied.

        `in_place` says whether kernels read all operands in place.

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
