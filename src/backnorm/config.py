"""Environment variables: this module reads every variable that backnorm reads.

=======================  ==================================================================
``BACKNORM_NUM_THREADS``  Initial limit of threads, an integer >= 1 (default and maximum: all
                          processors that this process may use).
``OMP_NUM_THREADS``       Initial limit of threads if BACKNORM_NUM_THREADS is not set and PyTorch is
                          not imported (PyTorch reads the variable itself). Only the first number
                          of a list is used. A value that is not an integer >= 1 is ignored.
``BACKNORM_CPU_LEVEL``    Processor level whose machine code is used: ``x86-64-v4-bf16``,
                          ``x86-64-v4``, ``x86-64-v3`` or ``x86-64`` (default: the highest level
                          that this processor supports).
``BACKNORM_ARITHMETIC``   ``float32`` or ``float64``: the arithmetic for float32 and 16-bit elements
                          in calls that do not set it (default: float32 for 16-bit elements, float64
                          for float32); read when first needed.
``BACKNORM_ENGINE``       ``kernels`` (default) or ``numpy``: what computes calls on NumPy arrays
                          (see `backnorm.engine`); read when first needed.
=======================  ==================================================================

Any other value of a BACKNORM variable is an error.
"""

from __future__ import annotations

import os
from typing import Literal, TypeVar

from backnorm.errors import ArgumentValueError

_Word = TypeVar("_Word", bound=str)


def initial_threads() -> int | None:
    """Return BACKNORM_NUM_THREADS, or None if it is not set."""
    text = os.environ.get("BACKNORM_NUM_THREADS")
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ArgumentValueError(
            "BACKNORM_NUM_THREADS",
            "environment variable must be an integer of 1 or more",
            came=repr(text),
            accepted="1, 2, 3, ...",
        )
    return value


def openmp_threads() -> int | None:
    """Return the first number of OMP_NUM_THREADS, or None if it is not a number >= 1."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def cpu_level() -> str | None:
    """Return BACKNORM_CPU_LEVEL, or None if it is not set; see `backnorm_kernels.library.level`."""
    return os.environ.get("BACKNORM_CPU_LEVEL")


def arithmetic() -> Literal["float32", "float64"] | None:
    """Return BACKNORM_ARITHMETIC, or None if it is not set."""
    problem = "environment variable must name the type that elements are computed in"
    return _word("BACKNORM_ARITHMETIC", problem, "float32", "float64")


def engine() -> Literal["kernels", "numpy"] | None:
    """Return BACKNORM_ENGINE, or None if it is not set."""
    problem = "environment variable must name what computes calls on NumPy arrays"
    return _word("BACKNORM_ENGINE", problem, "kernels", "numpy")


def _word(name: str, problem: str, *accepted: _Word) -> _Word | None:
    """Return a variable's value, or None if it is not set; raise if it is none of `accepted`."""
    text = os.environ.get(name)
    for word in accepted:
        if word == text:
            return word
    if text is None:
        return None
    raise ArgumentValueError(name, problem, came=repr(text), accepted=", ".join(accepted))
