"""One way from a call to a kernel: check, plan, allocate, bind, run, refuse.

An `Executable` is a problem on arrays that lie in memory in one order: planned, with the code that
runs it. `operation` returns a function of a framework's arrays. Its first call with certain
metadata makes an executable; a repeated call finds it in the call cache, and skips validation and
planning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from backnorm.allocation import LARGE
from backnorm.arithmetics import chosen
from backnorm.arrays import NUMPY
from backnorm.binding import caller, runner
from backnorm.layout import Order, adjacent, extents_of
from backnorm.problem import Problem, problem_of, variance_error
from backnorm.signature import SIGNATURES, Operation
from backnorm.threads import get_num_threads

__all__ = [
    "CALLS",
    "Calls",
    "Executable",
    "executable",
    "forget",
    "operation",
]

# The stage that gives all results of an operation.
_STAGES = {
    "forward": "complete",
    "backward": "complete",
    "inference": "apply",
    "apply": "apply",
    "reduce": "sum_all",
    "reduce_forward": "sum_all",
    "apply_forward": "finish",
    "apply_backward": "finish",
    "forward_coefficients": "reduce",
    "backward_coefficients": "reduce",
    "activation_backward": "apply",
}

# More than the layers of any model.
_MOST = 4096


class Calls(dict[Hashable, Any]):
    """The call cache: executables by everything that validation reads."""

    def keep(self, key: Hashable, value: Any) -> None:
        """Add an entry; a full cache is emptied first."""
        if len(self) >= _MOST:
            self.clear()
        self[key] = value


#: The cache of all calls. A key is metadata; values of arrays are never part of it, except for the
#: order of bits that a mask ends with.
CALLS = Calls()


class Executable:
    """A problem on arrays that lie in memory in one order, ready to run.

    Attributes
    ----------
    problem : Problem
    order : tuple of int
        The order of axes in which x and arrays like it are dense.
    plan : Plan or GpuPlan
    launch : Launch
        The CPU's, or a GPU's with the same methods.
    plain : callable
        Takes the operands of the signature as kernels read them, None where absent; `out`, an array
        of that kind to write the first result to; and the numbers. Returns the results of the
        signature, None for those that were not asked for.
    """

    __slots__ = ("_arrays", "_signature", "launch", "order", "plain", "plan", "problem")

    def __init__(
        self, problem: Problem, order: Order, arrays: Any, decided: Any, launch: Any
    ) -> None:
        self.problem, self.order, self.plan, self.launch = problem, order, decided, launch
        self._arrays, self._signature = arrays, SIGNATURES[problem.operation]
        self.plain = self._bound()

    @property
    def stage(self) -> Any:
        """The stage of the kernel that computes all results."""
        return getattr(self.launch, _STAGES[self.problem.operation])

    def run(self, *operands: Any, out: Any = None, **numbers: Any) -> tuple[Any, ...]:
        """Return the results for arrays of any strides and byte order.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            For a bad `out`, or a channel whose variance + epsilon is not positive.
        """
        ready = self.ready(operands)
        target = None
        if out is not None:
            context = self._signature, self.problem, self.order
            target = self._arrays.target(out, operands, *context)
        found = self.plain(*ready, out=target, **numbers)
        results: tuple[Any, ...]
        results = self._arrays.finished(found, operands, ready, self._signature, self.order)
        return results if out is None else (self._arrays.put(results[0], out), *results[1:])

    def into(self, operands: tuple[Any, ...], out: Any, **numbers: Any) -> tuple[Any, ...]:
        """Return the results for operands that kernels read in place, the first in `out`."""
        context = self._signature, self.problem, self.order
        target = self._arrays.target(out, operands, *context, in_place=True)
        results = self.plain(*operands, out=target, **numbers)
        return results if target is out else (self._arrays.put(results[0], out), *results[1:])

    def ready(self, operands: Sequence[Any]) -> list[Any]:
        """Return the operands as kernels read them: themselves, or copies."""
        found: list[Any]
        found = self._arrays.ready(operands, self._signature, self.problem, self.order)
        return found

    def _bound(self) -> Callable[..., tuple[Any, ...]]:
        problem, arrays, signature = self.problem, self._arrays, self._signature
        # An empty batch leaves running statistics as they are.
        moving = problem.running and problem.count > 0
        optional = {
            "gamma": problem.has_gamma,
            "beta": problem.has_beta,
            "residual": problem.residual,
            "mask": problem.relu,
            "running_mean": moving,
            "running_variance": moving,
        }
        make = runner(
            signature,
            arrays.code,
            arrays.names,
            present=[o.name for o in signature.operands if optional.get(o.name, o.required)],
            options=[
                name for name in ("relu", "residual", "reproducible") if getattr(problem, name)
            ],
            large=problem.size * problem.dtype.itemsize >= LARGE,
        )
        constants = arrays.values(problem, self.order)
        bound: Callable[..., tuple[Any, ...]]
        bound = make(self.stage, self._refuse, *constants, again=self._again)
        return bound

    def _again(self, *operands: Any, out: Any = None, **numbers: Any) -> tuple[Any, ...]:
        """Return what `run` does for arrays some of which have no memory: raise, or copy them."""
        read = self._arrays.read(operands, self._signature)
        return self.run(*read, out=out, **numbers)

    def _refuse(self, variance: Any, channel: int) -> None:
        # The variance of no elements is 0, and nothing is divided by it.
        if not self.problem.operation.startswith("forward") or self.problem.count:
            raise variance_error(self._arrays.shown(variance), self.problem, channel)


def executable(
    problem: Problem,
    x: Any = None,
    *,
    arrays: Any = NUMPY,
    exchanged: bool = False,
    place: Any = None,
) -> Executable:
    """Return the executable of a problem for arrays that lie in memory as x does.

    Parameters
    ----------
    problem : Problem
    x : array, optional
        None: in row-major order.
    arrays
        What to know of the framework's arrays: see `arrays.NumPy`.
    exchanged : bool
        Whether sums will be exchanged between the phases.
    place : Machine, optional
        To plan for instead of this one; on a GPU, the device.
    """
    order = tuple(range(len(problem.shape))) if x is None else arrays.order_of(x)
    order = adjacent(problem.shape, problem.channel_axes, order)
    return _executable(problem, order, arrays, place or arrays.place(x), exchanged)


@functools.lru_cache(maxsize=1024)
def _executable(
    problem: Problem, order: Order, arrays: Any, place: Any, exchanged: bool
) -> Executable:
    extents = extents_of(problem.shape, problem.channel_axes, order)
    return Executable(problem, order, arrays, *arrays.planned(problem, extents, place, exchanged))


def forget() -> None:
    """Empty the caches: every call is validated and planned again."""
    _executable.cache_clear()
    CALLS.clear()


def operation(
    name: Operation, arrays: Any = NUMPY, *, exchanged: bool = False
) -> Callable[..., tuple[Any, ...]]:
    """Return the function that runs an operation: of its operands, options, `out` and numbers.

    The operands may be anything that can be read as arrays. It raises what `problem_of` raises.
    """
    signature = SIGNATURES[name]

    def first(
        key: Hashable | None,
        operands: tuple[Any, ...],
        options: tuple[Any, ...],
        out: Any,
        **numbers: Any,
    ) -> tuple[Any, ...]:
        read = arrays.read(operands, signature)
        # Arrays that kernels cannot read as they are: what is planned depends on how they lie.
        layouts = None if key is None else arrays.layouts(operands)
        copied = None if layouts is None else (key, layouts)
        found = CALLS.get(copied)
        if found is None:
            named = dict(zip(signature.options, options, strict=True))
            problem = problem_of(name, *arrays.described(read, signature), **named)
            found = executable(problem, read[0], arrays=arrays, exchanged=exchanged)
            if key is not None and arrays.are_plain(operands, found.order, found.ready(read)):
                CALLS.keep(key, found)
            elif copied is not None:
                CALLS.keep(copied, found)
        return found.run(*read, out=out, **numbers)

    make = caller(signature, arrays.code, arrays.names)
    made: Callable[..., tuple[Any, ...]] = make(CALLS, first, get_num_threads, chosen)
    return made
