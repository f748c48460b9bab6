"""Engines: what plans a problem and computes it on the CPU. This module chooses one.

=========  ==================================================================================
kernels    machine code for this processor, with threads: the distribution backnorm-kernels
numpy      NumPy's functions, on one thread, without a compiler: the package `numpy_engine`
=========  ==================================================================================

The default is kernels if backnorm-kernels is installed, else numpy. Both engines return results
within the same bounds (`backnorm.conformance.judge.budget`). Where the bounds allow it, their bits
may differ. An engine is a module with the function of `Engine`. Only this module imports
`backnorm_kernels`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Literal, NamedTuple, Protocol, cast, get_args

from backnorm import config, machine
from backnorm.errors import ArgumentValueError, MachineCodeError, shown
from backnorm.interfaces import Launch, Plan
from backnorm.layout import Extents
from backnorm.machine import Machine
from backnorm.problem import Problem
from backnorm.scalars import check_word
from backnorm.threads import get_num_threads

Name = Literal["kernels", "numpy"]

#: The command that installs the kernels, for messages.
_INSTALL = "the kernels: pip install ./kernels in a checkout of backnorm"

# Above this number of elements, a call with NumPy takes tenths of a second.
_LARGE = 1 << 22

_ACCEPTED = " or ".join(map(repr, get_args(Name)))

_chosen: ContextVar[Name | None] = ContextVar("backnorm_engine", default=None)

#: chosen(): the engine that the surrounding ``with engine(...)`` block sets, or None if there is no
#: such block. This engine is part of the cache key of every call.
chosen = _chosen.get


class Engine(Protocol):
    """The function of an engine."""

    def planned(
        self, problem: Problem, extents: Extents, machine: Machine, header: int
    ) -> tuple[Plan, Launch]:
        """Return the plan of a problem, which `explain` prints, and the stages that carry it out.

        Parameters
        ----------
        problem : Problem
        extents : Extents
            The memory form of x, dy and dx.
        machine : Machine
        header : int
            0: a stage takes the addresses of elements. `addresses.HEADER`: it takes the addresses
            of NumPy's array objects.
        """


class Place(NamedTuple):
    """The engine and the machine for which a call on the CPU is planned."""

    engine: Name
    machine: Machine


@contextlib.contextmanager
def engine(name: Name) -> Iterator[None]:
    """Compute with one engine in a ``with`` block; other threads are not affected.

    Parameters
    ----------
    name : {"kernels", "numpy"}
        kernels: machine code for this processor. numpy: NumPy's functions, on one thread.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If `name` is neither.
    MachineCodeError
        If `name` is "kernels", and backnorm-kernels is not installed.

    Notes
    -----
    An inner block has precedence over an outer one. Outside of blocks, the environment variable
    BACKNORM_ENGINE names the engine; the variable is read when first needed. If it is not set,
    kernels compute if the distribution backnorm-kernels is installed, else NumPy. The functions of
    NumPy arrays and the dialects use this engine. The adapters for PyTorch, JAX, TensorFlow and
    Keras need kernels: their calls raise an error if another engine computes. `engine` is also a
    decorator of functions, but not of coroutines.

    Examples
    --------
    >>> import backnorm
    >>> import numpy as np
    >>> x = np.ones((2, 3, 4), np.float32)
    >>> with backnorm.engine("numpy"):
    ...     print(backnorm.explain(x, x, x[0, :, 0], x[0, :, 0], epsilon=1e-5))
    backward float32 2x3x4, channel axis 1, statistics float32, arithmetic float64
      memory   outer 2, channels 3, inner 4
      engine   numpy, which computes in float64
      blocks   of 3 channels and 8 elements of each
    """
    word = check_word("name", name, accepted=_ACCEPTED)
    if word not in get_args(Name):
        raise ArgumentValueError("name", "unknown engine", came=shown(word), accepted=_ACCEPTED)
    _engine(cast("Name", word))
    token = _chosen.set(cast("Name", word))
    try:
        yield
    finally:
        _chosen.reset(token)


def current() -> Name:
    """Return the name of the engine that computes a call on NumPy arrays now."""
    return chosen() or _initial()


def place() -> Place:
    """Return the engine and the machine for which a call on NumPy arrays is planned now."""
    return Place(current(), this_machine())


def planned(
    problem: Problem, extents: Extents, place: Place, header: int = 0
) -> tuple[Plan, Launch]:
    """Return the plan of a problem, and the stages that carry it out (see `Engine`)."""
    if place.engine == "numpy" and problem.size > _LARGE and not (chosen() or config.engine()):
        _recommend_kernels()
    return _engine(place.engine).planned(problem, extents, place.machine, header)


def kernels(arrays: str) -> ModuleType:
    """Return the module `backnorm_kernels.engine`, for adapters that compute with kernels only.

    `arrays` says whose arrays they are, for the message of the error.

    Raises
    ------
    ArgumentValueError
        If another engine is chosen.
    MachineCodeError
        If backnorm-kernels is not installed.
    """
    if not are_kernels_installed():
        raise MachineCodeError(f"calls on {arrays} on the CPU need {_INSTALL}")
    if current() != "kernels":
        raise ArgumentValueError(
            "engine",
            f"calls on {arrays} on the CPU need kernels",
            came=repr(current()),
            accepted="'kernels'",
            hint="leave the block `with backnorm.engine(...)`, or unset BACKNORM_ENGINE",
        )
    return cast("ModuleType", _engine("kernels"))


def summary() -> str:
    """Return the name of the engine that computes calls on NumPy arrays; if it is the default
    because no kernels are installed, also what installs them.
    """
    if are_kernels_installed():
        return current()
    return f"{current()}, on one thread; faster: {_INSTALL}"


def facts() -> dict[str, object]:
    """Return facts about the engine for `backnorm info`, as plain values.

    Returns
    -------
    dict
        ``engine``: the name of the engine that computes calls on NumPy arrays. If kernels are
        installed, also ``threads_of`` and ``machine_code``; otherwise, these are None.
    """
    found = {"threads_of": None, "machine_code": None}
    if are_kernels_installed():
        found = cast("ModuleType", _engine("kernels")).facts()
    return {"engine": current(), **found}


def are_kernels_installed() -> bool:
    """Whether the distribution backnorm-kernels is installed."""
    return importlib.util.find_spec("backnorm_kernels") is not None


def this_machine() -> Machine:
    """Return this machine, with the number of threads that a call may use now."""
    return _machine(get_num_threads())


@functools.lru_cache(maxsize=64)
def _machine(threads: int) -> Machine:
    return dataclasses.replace(machine.detect(), threads=threads)


@functools.cache
def _engine(name: Name) -> Engine:
    """Import an engine, which takes time, when it is first needed."""
    if name == "numpy":
        from backnorm import numpy_engine

        return numpy_engine
    if not are_kernels_installed():
        raise MachineCodeError(f"the engine 'kernels' needs {_INSTALL}")
    from backnorm_kernels import engine as compiled

    return compiled


@functools.cache
def _initial() -> Name:
    """Return the value of BACKNORM_ENGINE, or the default if it is not set."""
    return config.engine() or ("kernels" if are_kernels_installed() else "numpy")


@functools.cache
def _recommend_kernels() -> None:
    warnings.warn(
        f"backnorm computes a large array with NumPy, on one thread; faster: {_INSTALL}",
        stacklevel=2,
    )
