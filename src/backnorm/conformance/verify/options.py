"""Options of the command as fields of records, and the options that say how a run is made.

Every option is declared in one place: the field of a record. The command has an option for each
field, and fills the record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from backnorm.errors import ArgumentValueError

__all__ = ["Operator", "Options", "option"]


def option(default: Any, text: str, **settings: Any) -> Any:
    """Return the field of a record that is an option of the command.

    Parameters
    ----------
    default
    text : str
        The text of ``--help``.
    settings
        Further arguments of `typer.Option`.
    """
    return field(default=default, metadata={"help": text, **settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """The operator of a specification: options of ``backnorm verify`` and ``cases export``.

    Raises
    ------
    ArgumentValueError
        If `op` has no dialect.
    """

    dialect: str | None = option(None, "The dialect of the operator whose arguments are passed.")
    op: str | None = option(
        None, "The operator of the dialect (default: the first of the operation)."
    )

    def __post_init__(self) -> None:
        if self.op is not None and self.dialect is None:
            raise ArgumentValueError("--op", "must be used with --dialect", came=self.op)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Operator):
    """How a subject is called and judged: the options of ``backnorm verify`` of the same names.

    Raises
    ------
    ArgumentValueError
        If an option excludes another, or needs one that is absent.
    """

    tensors: Literal["torch", "jax"] | None = option(
        None, "The tensors that the function gets (default: NumPy's arrays)."
    )
    device: str = option("cpu", "The device of the tensors, such as cuda or mps.")
    command: bool = option(
        False,
        "SUBJECT is a command. In it, {inputs} is replaced by a folder as cases export writes it, "
        "and {outputs} by a folder for the results, as judge reads it.",
    )
    solution: bool = option(
        False,
        "SUBJECT is a solution.json of flashinfer-bench or SOL-ExecBench, for a definition that "
        "cases export writes.",
    )
    timeout: float = option(30.0, "The time limit of the calls of a case, in seconds.", min=0.1)
    memory: int = option(0, "The memory limit of the subject, in MiB; 0: none.", min=0)
    any_order: bool = option(
        False, "Accept calls that differ in bits if both are right; the worse one is graded."
    )
    budget: float = option(
        0.0,
        "After the cases, draw random ones for this time, and shrink what fails; needs the package "
        "hypothesis (pip install hypothesis).",
        min=0,
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        Operator.__post_init__(self)
        for kind, is_given in (("--command", self.command), ("--solution", self.solution)):
            for name, came in (("--dialect", self.dialect), ("--tensors", self.tensors)):
                if is_given and came is not None:
                    raise ArgumentValueError(name, f"must be absent with {kind}", came=came)
        if self.command and self.solution:
            raise ArgumentValueError("--command", "must be absent with --solution")
        if self.device != "cpu" and self.tensors is None and not self.solution:
            raise ArgumentValueError("--device", "must be used with --tensors", came=self.device)
