"""Read the arguments of `grade_backward` and `grade_forward`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from backnorm.conformance.judge import Quantity
from backnorm.dtypes import element_type
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.problem import problem_of
from backnorm.scalars import as_array
from backnorm.signature import SIGNATURES, Operation


def read_operands(
    operation: Operation, operands: Mapping[str, object], **options: Any
) -> dict[str, Any]:
    """Return the operands of a call as arrays, or raise the errors of :func:`problem_of`."""
    read = {n: None if a is None else as_array(n, a) for n, a in operands.items()}
    problem_of(operation, *SIGNATURES[operation].arranged(read), **options)
    return read


def read_results(
    argument: str,
    results: object,
    expected: Mapping[Quantity, tuple[tuple[int, ...], np.dtype | None]],
) -> dict[Quantity, np.ndarray]:
    """Check the results that a caller passes in one argument, and return them by name.

    Parameters
    ----------
    argument : str
        The name of the argument that holds all results.
    results : tuple of arrays, or a mapping from their names to arrays
    expected : mapping
        Shape and element type of each result; None: any type.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        The error names the result that is missing, or has another shape or type.
    """
    accepted = f"a tuple ({', '.join(expected)})"
    if isinstance(results, Mapping):
        results = tuple(results.get(name) for name in expected)
    if not isinstance(results, tuple | list):
        came = type(results).__name__
        raise ArgumentTypeError(argument, "must be a tuple", came=came, accepted=accepted)
    if len(results) != len(expected):
        came, problem = f"{len(results)} results", f"must have {len(expected)} results"
        raise ArgumentValueError(argument, problem, came=came, accepted=accepted)
    read: dict[Quantity, np.ndarray] = {}
    for (name, (shape, dtype)), result in zip(expected.items(), results, strict=True):
        array = as_array(name, result)
        if array.shape != shape:
            came, shapes = f"shape {array.shape}", f"shape {shape}"
            raise ArgumentValueError(name, "has the wrong shape", came=came, accepted=shapes)
        if dtype is not None and element_type(array.dtype) != element_type(dtype):
            came, types = str(array.dtype), str(dtype)
            raise ArgumentTypeError(name, "has the wrong element type", came=came, accepted=types)
        read[name] = array
    return read
