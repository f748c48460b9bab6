"""Export cases as files: as arrays with a manifest (`files`), or as problems of other projects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from backnorm.conformance.axes import BATCH_NORM
from backnorm.conformance.battery import Case
from backnorm.conformance.verify import _flashinfer, _hipdnn, _mlir
from backnorm.conformance.verify._file_cases import FileCase, as_in_files
from backnorm.conformance.verify.cases import Selection, selected
from backnorm.conformance.verify.dialect_calls import schema_of
from backnorm.conformance.verify.files import write_cases
from backnorm.conformance.verify.operations import OPERATIONS, RefusedError
from backnorm.dialects.schema import OperatorSchema
from backnorm.errors import ArgumentValueError

__all__ = ["FORMATS", "export"]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of exported cases.

    Attributes
    ----------
    write : callable
        Takes a folder, cases as the format has them, and what they were made by; writes the files.
    as_in_files : callable
        Takes a case and the rules of an operator, or None. Returns the case as the format has it,
        or raises RefusedError.
    dialect : str or None
        The dialect whose operators the format has; None: none, or the one that is asked for.
    is_problem : bool
        Whether other projects read the files; `judge` does not.
    """

    write: Callable[[Path, Iterable[FileCase], Mapping[str, Any]], None]
    as_in_files: Callable[[Case, OperatorSchema | None], FileCase] = as_in_files
    dialect: str | None = None
    is_problem: bool = True


#: The formats by name. The first four are file formats of arrays.
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        **{
            form: Format(partial(write_cases, form), is_problem=False)
            for form in ("raw", "npy", "npz", "safetensors")
        },
        "flashinfer": Format(_flashinfer.write, _flashinfer.as_problem),
        "hipdnn": Format(_hipdnn.write, _hipdnn.as_bundle, "onnxruntime"),
        "mlir": Format(_mlir.write, dialect="stablehlo"),
    }
)


def export(
    folder: Path,
    selection: Selection,
    *,
    form: str = "raw",
    dialect: str | None = None,
    op: str | None = None,
) -> tuple[int, Counter[str]]:
    """Write the cases of a selection to a folder.

    Parameters
    ----------
    folder : Path
        Created if it does not exist. Files of an earlier export are overwritten.
    selection : Selection
    form : str
        A name in `FORMATS`.
    dialect, op : str, optional
        The operator of a specification whose names, order and shapes the files have; without `op`,
        the dialect's first operator for the selection's operation.

    Returns
    -------
    int, Counter
        The number of cases that were written, and how many are refused for each reason.

    Raises
    ------
    ArgumentError
        If there is no such dialect or operator, if the format has a dialect of its own, if a format
        or a dialect is asked for that has batch normalisation alone, or if all cases are refused.
    """
    chosen = FORMATS[form]
    names_of = f"--format {form}" if chosen.is_problem else dialect and f"--dialect {dialect}"
    if names_of and OPERATIONS[selection.operation].normalization != BATCH_NORM:
        raise ArgumentValueError(
            "--operation", f"must be backward or forward with {names_of}", came=selection.operation
        )
    if chosen.is_problem and dialect is not None:
        raise ArgumentValueError("--dialect", f"must be absent with --format {form}", came=dialect)
    dialect = dialect or chosen.dialect
    schema = None if dialect is None else schema_of(dialect, op, selection.operation)
    refused: Counter[str] = Counter()
    written = 0

    def accepted() -> Iterator[FileCase]:
        nonlocal written
        for case in selected(selection):
            try:
                found = chosen.as_in_files(case, schema)
            except RefusedError as error:
                refused[str(error)] += 1
                continue
            written += 1
            yield found
        if refused and not written:
            raise ArgumentValueError(
                "--format" if chosen.is_problem else "--dialect",
                "all cases are refused" if chosen.is_problem else "the operator refuses all cases",
                came=next(iter(refused)),
            )

    made_by: dict[str, Any] = {"seed": selection.seed, "tier": selection.tier}
    made_by |= {"operation": selection.operation, "shapes": selection.shapes}
    if schema is not None:
        made_by |= {"dialect": schema.dialect, "op": schema.op}
    chosen.write(folder, accepted(), made_by)
    return written, refused
