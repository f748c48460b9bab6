"""The steps from a call to a kernel: check, plan, allocate, run.

An `Executable` is a planned problem with the stage that computes it. It is for arrays that are
dense in one particular order of their axes. `compute` runs an operation on the arrays of a
framework. If it is called with new metadata (shapes, types, options), it makes an executable. Later
calls with equal metadata find this executable in the call cache, and skip validation and planning.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backnorm import arithmetics, engines
from backnorm.arrays import NUMPY
from backnorm.interfaces import ADDRESSES, AnyArrays, Launch, Operands, Results
from backnorm.layout import Order, adjacent, extents_of
from backnorm.options import Options
from backnorm.problem import Problem, variance_error
from backnorm.signature import SIGNATURES, Operation
from backnorm.threads import get_num_threads

# The call cache has at most this many entries. Few models have so many layers.
_MOST = 4096

#: The numbers of a call by their names: see `interfaces.Launch`.
Numbers = Mapping[str, Any]

#: The numbers of most calls.
NO_NUMBERS: Numbers = {}

#: Exceptions that can be raised while an executable is looked up: when the facts of an object that
#: is not an array are read, and when a key with an unhashable option is hashed.
NO_FACTS = (AttributeError, TypeError, RuntimeError)


class Calls(dict[Hashable, Any]):
    """The call cache: executables and calls of dialects, keyed by all metadata of a call."""

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
    stage : callable
        Computes all results of the problem's operation: see `Launch`.
    """

    __slots__ = ("_arrays", "_fields", "_forms", "_rest", "order", "plan", "problem", "stage")

    def __init__(
        self, problem: Problem, order: Order, arrays: AnyArrays, plan: Any, launch: Launch
    ) -> None:
        self.problem, self.order, self.plan = problem, order, plan
        self.stage = launch.stage(problem.operation)
        self._arrays = arrays
        signature, forms = problem.signature, arrays.forms(problem, order)
        made = [
            result
            for result in signature.results
            if result.field and (result.option is None or getattr(problem, result.option))
        ]
        self._forms = tuple(forms[result.kind] for result in made)
        # The other results are the last ones: a number, or None.
        self._rest = tuple(
            problem.count if result.kind == "count" else None
            for result in signature.results[len(made) :]
        )
        absent = {
            "gamma": not problem.has_gamma,
            "beta": not problem.has_beta,
            "mask": not problem.relu,
            "residual": not problem.residual,
            # An empty batch does not change running statistics.
            "running_mean": not (problem.running and problem.count),
            "running_variance": not (problem.running and problem.count),
        }
        fields = ["" if absent.get(each.name) else each.field for each in signature.operands]
        fields += [result.field for result in made]
        # `_fields` picks, for each name in `ADDRESSES`, the address of an operand or result, or the
        # address behind these, which stands for an absent array.
        self._fields = operator.itemgetter(
            *[fields.index(name) if name in fields else len(fields) for name in ADDRESSES]
        )

    def plain(
        self, operands: Operands[Any], target: Any = None, numbers: Numbers = NO_NUMBERS
    ) -> Results:
        """Return the results for operands that kernels read in place.

        Parameters
        ----------
        operands : sequence of arrays
        target : array, optional
            Memory to which a kernel can write the first result.
        numbers : mapping
            See `interfaces.Launch`.
        """
        arrays, forms = self._arrays, self._forms
        addresses = arrays.addresses(operands)
        if addresses is None:
            return run(self.problem, operands, target, numbers, arrays=arrays)
        if target is None:
            results = arrays.new(forms, operands)
        else:
            results = [target, *arrays.new(forms[1:], operands)]
        of_results = arrays.addresses(results)
        assert of_results is not None, "a new array has memory"
        every = (*addresses, *of_results, arrays.absent)
        refused = self.stage(self._fields(every), **numbers)
        if refused >= 0:
            self._refuse((*operands, *results), refused)
        return (*results, *self._rest)

    def into(self, operands: Operands[Any], out: Any, numbers: Numbers = NO_NUMBERS) -> Results:
        """Return the results for operands that kernels read in place, the first in `out`."""
        arrays = self._arrays
        target = arrays.target(out, operands, self.problem, self.order)
        results = self.plain(operands, target, numbers)
        return results if target is out else (arrays.put(results[0], out), *results[1:])

    def run(
        self, operands: Operands[Any], out: Any = None, numbers: Numbers = NO_NUMBERS
    ) -> Results:
        """Return the results for arrays that may have to be copied: see the function `run`."""
        arrays, layout = self._arrays, (self.problem, self.order)
        ready = arrays.ready(operands, *layout)
        target = None if out is None else arrays.target(out, operands, *layout)
        results = self.plain(ready, target, numbers)
        results = arrays.finished(results, operands, ready, *layout)
        return results if out is None else (arrays.put(results[0], out), *results[1:])

    def _refuse(self, arrays: Operands[Any], channel: int) -> None:
        """Raise the error for a channel whose variance + epsilon is not positive."""
        problem, signature = self.problem, self.problem.signature
        names = [*signature.names, *(result.name for result in signature.results)]
        # Phases that only sum have no variance. If the batch is empty, a forward pass may get the
        # variance 0: there are no elements to normalise.
        empty = problem.operation.startswith("forward") and not problem.count
        if "variance" in names and not empty:
            variance = self._arrays.shown(arrays[names.index("variance")])
            raise variance_error(variance, problem, channel)


def executable(
    problem: Problem,
    x: object = None,
    *,
    arrays: AnyArrays = NUMPY,
    place: Hashable = None,
) -> Executable:
    """Return the executable of a problem, for arrays whose axes are in memory in x's order.

    Parameters
    ----------
    problem : Problem
    x : array, optional
        None: the arrays are in row-major order.
    arrays : Arrays
    place : hashable, optional
        A result of `Arrays.place`, by default that of x: for NumPy arrays the engine and the
        machine to plan for, on a GPU the device.
    """
    order = tuple(range(len(problem.shape))) if x is None else arrays.order_of(x)
    order = adjacent(problem.shape, problem.channel_axes, order)
    return _executable(problem, order, arrays, place or arrays.place(x))


@functools.lru_cache(maxsize=1024)
def _executable(problem: Problem, order: Order, arrays: AnyArrays, place: Hashable) -> Executable:
    extents = extents_of(problem.shape, problem.channel_axes, order)
    return Executable(problem, order, arrays, *arrays.planned(problem, extents, place))


def run(
    problem: Problem,
    operands: Sequence[Any],
    out: Any = None,
    numbers: Numbers = NO_NUMBERS,
    *,
    arrays: AnyArrays = NUMPY,
) -> Results:
    """Return the results of a problem for arrays of any strides and byte order.

    Parameters
    ----------
    problem : Problem
    operands : sequence
        The operands of the signature, None for an absent one.
    out : array, optional
        Memory for the first result.
    numbers : mapping
        See `interfaces.Launch`.
    arrays : Arrays

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        For an operand that is not an array, a bad `out`, or a channel whose variance + epsilon is
        not positive.
    """
    read = arrays.read(operands, problem.signature)
    return executable(problem, read[0], arrays=arrays).run(read, out, numbers)


def settings() -> tuple[object, ...]:
    """Return the settings that plans depend on; they are part of the key of every call."""
    return get_num_threads(), arithmetics.chosen(), engines.chosen()


def forget() -> None:
    """Empty the caches, so that every call is validated and planned anew."""
    _executable.cache_clear()
    CALLS.clear()


def compute(
    operation: Operation,
    operands: Operands[Any],
    options: Options,
    out: Any = None,
    *,
    arrays: AnyArrays = NUMPY,
    **numbers: Any,
) -> Results:
    """Run an operation, and return its results.

    Parameters
    ----------
    operation : str
    operands : sequence
        The operands of the signature, None for an absent one. They may be any objects that `arrays`
        can read.
    options : Options
    out : array, optional
        Memory for the first result.
    arrays : Arrays
    **numbers
        See `interfaces.Launch`.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `Arrays.checked` and `Executable.run`.
    """
    key: Hashable
    try:
        key = (
            operation,
            arrays,
            options,
            # Calls with the options True, 1 and 1.0 would otherwise have equal keys.
            *map(type, options),
            settings(),
            *arrays.facts(operands, SIGNATURES[operation].mask),
        )
        found = CALLS.get(key)
    except NO_FACTS:
        key = found = None
    except Exception:
        # The exception comes from a signal handler, or from a method of an option, such as
        # `__hash__`. If it comes from an option, `planned` raises its own error for this option,
        # because it checks the options.
        planned(operation, operands, options, arrays)
        raise
    if found is None:
        found = planned(operation, operands, options, arrays)
        if key is not None and all(type(operand) in arrays.classes for operand in operands):
            CALLS.keep(key, found)
    results: Results
    if out is None:
        results = found.plain(operands, None, numbers)
    else:
        results = found.into(operands, out, numbers)
    return results


@dataclass(frozen=True, slots=True)
class _Copying:
    """A problem whose arrays kernels cannot read in place. In each call, the order of axes is found
    anew, and arrays are copied if necessary.
    """

    problem: Problem
    arrays: AnyArrays

    def plain(
        self, operands: Operands[Any], target: None = None, numbers: Numbers = NO_NUMBERS
    ) -> Results:
        return run(self.problem, operands, None, numbers, arrays=self.arrays)

    def into(self, operands: Operands[Any], out: Any, numbers: Numbers = NO_NUMBERS) -> Results:
        return run(self.problem, operands, out, numbers, arrays=self.arrays)


def planned(
    operation: Operation, operands: Operands[Any], options: Options, arrays: AnyArrays
) -> Executable | _Copying:
    """Check a call, and return what runs it and later calls on operands with equal facts.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `Arrays.checked`.
    """
    problem, read = arrays.checked(operation, operands, options)
    found = executable(problem, read[0], arrays=arrays)
    ready = arrays.ready(read, problem, found.order)
    return found if all(map(operator.is_, operands, ready)) else _Copying(problem, arrays)
