"""Cases as files have them: in backnorm's names, or in those of a specification's operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.judge import Quantity
from backnorm.conformance.ladder import Ladder
from backnorm.conformance.verify.dialect_calls import arguments, received, shape_of_kept
from backnorm.conformance.verify.operations import operation_of
from backnorm.dialects.schema import OperatorSchema
from backnorm.dtypes import rounded


@dataclass(frozen=True, slots=True)
class FileCase:
    """A case, and what its arrays and options are called in files.

    Attributes
    ----------
    case : Case
        The numbers by which results are judged: those that the files have.
    call : dict
        The operation and its options, as the manifest has them.
    inputs : mapping of str to numpy.ndarray
        The arrays by their names in files, in the operator's order.
    outputs : mapping of str to str
        The names in files of the results that are judged -> the names of the operation's results.
    kept : frozenset of str
        The results that have as many axes as x in files, and one axis in :mod:`backnorm`.
    """

    case: Case
    call: dict[str, Any]
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, Quantity]
    kept: frozenset[str] = frozenset()

    def like(self, output: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Return the element type and the shape that an output has in files."""
        name = self.outputs[output]
        dtype = operation_of(self.case).types(self.case, name)[0]
        is_kept, data = output in self.kept, self.case.data
        return dtype, shape_of_kept(self.case) if is_kept else data.like(name).shape


def as_in_files(case: Case, schema: OperatorSchema | None = None) -> FileCase:
    """Return a case as files have it.

    Parameters
    ----------
    case : Case
    schema : OperatorSchema, optional
        The rules of the operator whose names, order and shapes the files have; None: the names of
        the canonical operator.

    Raises
    ------
    RefusedError
        If the operator does not accept the case.
    """
    operation = operation_of(case)
    if schema is None:
        options = {**case.options, "epsilon": float(case.data.epsilon).hex()}
        inputs = {name: array for name, array in case.inputs.items() if array is not None}
        results: dict[str, Quantity] = {name: name for name in operation.results}
        return FileCase(case, {"operator": operation.name, **options}, inputs, results)
    passed, attributes = arguments(schema, case.inputs, case)
    call = {
        "operator": operation.name,
        "dialect": schema.dialect,
        "op": schema.op,
        "attributes": {
            spec.name: {
                "type": spec.type,
                "value": _plain(attributes[spec.name]),
            }
            for spec in schema.attributes
            if attributes.get(spec.name) is not None
        },
    }
    judged = {t.name: t for t in schema.outputs if t.role in operation.outputs}
    return FileCase(
        received(case, schema),
        call,
        {name: array for name, array in passed.items() if array is not None},
        {name: tensor.role for name, tensor in judged.items()},  # type: ignore[misc]
        frozenset(name for name, tensor in judged.items() if tensor.kind == "kept"),
    )


def expected(found: FileCase, ladder: Ladder | None = None) -> dict[str, dict[str, np.ndarray]]:
    """Return what each output is judged by, in the shape that it has in files.

    Returns
    -------
    dict
        By output: the exact value as a sum of two float64 (``high`` and ``low``), the sum of the
        magnitudes of its terms (``terms``), the exact value ``rounded`` to the output's type, and
        the bound of each rung, best rung first.
    """
    ladder = operation_of(found.case).ladder(found.case) if ladder is None else ladder
    every = {}
    for output, name in found.outputs.items():
        value, (dtype, shape) = ladder.value(name), found.like(output)
        values = {"high": value.hi, "low": value.lo, "terms": ladder.terms(name)}
        values["rounded"] = rounded(value.hi, dtype)
        # The bound of a variance is that of results above the exact value. `judge` allows results
        # below it less.
        bounds = ladder.allowances(name, dtype)
        parts = (*values.items(), *bounds.items())
        every[output] = {part: array.reshape(shape) for part, array in parts}
    return every


def _plain(value: Any) -> Any:
    """Return the value of an attribute for JSON: a float as a hexadecimal string."""
    if isinstance(value, float):
        return value.hex()
    return list(value) if isinstance(value, tuple) else value
