"""The steps from a call to a kernel: check, plan, allocate, bind, run.

An `Executable` is a planned problem with the code that runs it. It is for arrays that are dense in
one particular order of their axes. `operation` returns a function that takes the arrays of a
framework. If this function is called with new metadata (shapes, types, options), it makes an
executable. Later calls with equal metadata find this executable in the call cache, and skip
validation and planning.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

from backnorm import arithmetics, engines
from backnorm.arrays import NUMPY
from backnorm.binding import caller, runner
from backnorm.interfaces import AnyArrays, Call, Launch, Results
from backnorm.layout import Order, adjacent, extents_of
from backnorm.problem import Problem, problem_of, variance_error
from backnorm.signature import SIGNATURES, Operation
from backnorm.threads import get_num_threads

# The call cache has at most this many entries. Few models have so many layers.
_MOST = 4096


class Calls(dict[Hashable, Any]):
    """The call cache: executables and functions of dialects, keyed by all metadata of a call."""

    def keep(self, key: Hashable, value: Any) -> None:
        """Add an entry; a full cache is emptied first."""
        if len(self) >= _MOST:
            self.clear()
        self[key] = value


#: The cache of all calls. A key contains metadata of arrays, but not the values of their elements.
#: There is one exception: if a call has a mask, its key contains the last bytes of the mask, which
#: say in which order of axes the mask's bits are.
CALLS = Calls()


class Executable:
    """A planned problem, ready to run on arrays that are dense in one order of axes.

    Attributes
    ----------
    problem : Problem
    order : tuple of int
        The order of axes in which x and the other data arrays are dense.
    plan : Plan or GpuPlan
    launch : Launch
    plain : callable
        Takes the signature's operands as kernels read them (None if absent), `out`, an array that a
        kernel can write the first result to, and the signature's numbers. Returns `Results`.
    """

    __slots__ = ("_arrays", "launch", "order", "plain", "plan", "problem")

    def __init__(
        self, problem: Problem, order: Order, arrays: AnyArrays, plan: Any, launch: Launch
    ) -> None:
        self.problem, self.order, self.plan, self.launch = problem, order, plan, launch
        self._arrays = arrays
        self.plain = self._bound()

    @property
    def stage(self) -> Any:
        """The stage that computes all results of the problem's operation."""
        return self.launch.stage(self.problem.operation)

    def run(self, *operands: object, out: object = None, **numbers: object) -> Results:
        """Return the results for arrays of any strides and byte order.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            For a bad `out`, or a channel whose variance + epsilon is not positive.
        """
        arrays, layout = self._arrays, (self.problem, self.order)
        ready = arrays.ready(operands, *layout)
        target = None if out is None else arrays.target(out, operands, *layout)
        results = self.plain(*ready, out=target, **numbers)
        results = arrays.finished(results, operands, ready, *layout)
        return results if out is None else (arrays.put(results[0], out), *results[1:])

    def into(self, operands: tuple[object, ...], out: object, **numbers: object) -> Results:
        """Run the operation on operands that kernels read in place, and return the results.

        The first result is written to `out`.
        """
        arrays = self._arrays
        target = arrays.target(out, operands, self.problem, self.order, in_place=True)
        results = self.plain(*operands, out=target, **numbers)
        return results if target is out else (arrays.put(results[0], out), *results[1:])

    def _bound(self) -> Call:
        problem, arrays, signature = self.problem, self._arrays, self.problem.signature
        # An empty batch does not change running statistics.
        moving = problem.running and problem.count > 0
        optional = {
            "gamma": problem.has_gamma,
            "beta": problem.has_beta,
            "residual": problem.residual,
            "mask": problem.relu,
            "running_mean": moving,
            "running_variance": moving,
        }
        options = "relu", "residual", "reproducible"
        make = runner(
            signature,
            arrays,
            tuple(o.name for o in signature.operands if optional.get(o.name, o.required)),
            tuple(name for name in options if getattr(problem, name)),
        )
        constants = arrays.values(problem, self.order)
        return make(self.stage, self._refuse, *constants, again=self._again)

    def _again(self, *operands: object, out: object = None, **numbers: object) -> Results:
        """Read and check all operands again, and run.

        A stage calls this method if an operand has no memory, which the operand's facts do not
        show (`Code.lost`).
        """
        read = self._arrays.read(operands, self.problem.signature)
        return self.run(*read, out=out, **numbers)

    def _refuse(self, variance: object, channel: int) -> None:
        # If the batch is empty, a forward pass may get the variance 0: there are no elements to
        # normalise.
        if not self.problem.operation.startswith("forward") or self.problem.count:
            raise variance_error(self._arrays.shown(variance), self.problem, channel)


def executable(
    problem: Problem,
    x: object = None,
    *,
    arrays: AnyArrays = NUMPY,
    exchanged: bool = False,
    place: Hashable = None,
) -> Executable:
    """Return the executable of a problem, for arrays whose axes are in memory in x's order.

    Parameters
    ----------
    problem : Problem
    x : array, optional
        None: the arrays are in row-major order.
    arrays : Arrays
    exchanged : bool
        Whether sums will be exchanged between the phases.
    place : hashable, optional
        A result of `Arrays.place`, by default that of x: for NumPy arrays the engine and the
        machine to plan for, on a GPU the device.
    """
    order = tuple(range(len(problem.shape))) if x is None else arrays.order_of(x)
    order = adjacent(problem.shape, problem.channel_axes, order)
    return _executable(problem, order, arrays, place or arrays.place(x), exchanged)


@functools.lru_cache(maxsize=1024)
def _executable(
    problem: Problem, order: Order, arrays: AnyArrays, place: Hashable, exchanged: bool
) -> Executable:
    extents = extents_of(problem.shape, problem.channel_axes, order)
    return Executable(problem, order, arrays, *arrays.planned(problem, extents, place, exchanged))


def settings() -> tuple[object, ...]:
    """Return the settings that plans depend on; they are part of the key of every call."""
    return get_num_threads(), arithmetics.chosen(), engines.chosen()


def forget() -> None:
    """Empty the caches, so that every call is validated and planned anew."""
    _executable.cache_clear()
    CALLS.clear()


def operation(name: Operation, arrays: AnyArrays = NUMPY, *, exchanged: bool = False) -> Call:
    """Return the function that runs an operation.

    The function takes the operands, the options, `out` and the numbers. The operands may be any
    objects that `arrays` can read. If an operand or an option is not valid, the function raises the
    error that `problem_of` raises for it.
    """
    signature = SIGNATURES[name]

    def first(
        key: Hashable | None,
        operands: tuple[object, ...],
        options: tuple[Any, ...],
        out: object,
        **numbers: object,
    ) -> Results:
        read = arrays.read(operands, signature)
        # If kernels cannot read the arrays in place, the plan also depends on the layouts of the
        # arrays, so the layouts are then part of the key.
        layouts = None if key is None else arrays.layouts(operands)
        copied = None if layouts is None else (key, layouts)
        cached = CALLS.get(copied)
        if cached is None:
            named = dict(zip(signature.options, options, strict=True))
            problem = problem_of(name, *arrays.described(read, signature), **named)
            cached = executable(problem, read[0], arrays=arrays, exchanged=exchanged)
            order = cached.order
            ready = arrays.ready(read, problem, order)
            if key is not None and arrays.are_plain(operands, order, ready):
                CALLS.keep(key, cached)
            elif copied is not None:
                CALLS.keep(copied, cached)
        return cached.run(*read, out=out, **numbers)

    return caller(signature, arrays)(CALLS, first, settings)
