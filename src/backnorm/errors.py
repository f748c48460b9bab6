"""The errors of backnorm.

Every error raised on purpose is a :class:`BacknormError` and, for bad arguments, also the
built-in ``ValueError`` or ``TypeError`` that the case calls for, so both
``except backnorm.BacknormError`` and ``except ValueError`` work.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "BacknormError",
    "MachineCodeError",
]


class BacknormError(Exception):
    """Base of every error that backnorm raises on purpose."""


class MachineCodeError(BacknormError, RuntimeError):
    """There is no machine code for this processor, or it cannot be used; the message says why."""


class ArgumentError(BacknormError):
    """A bad argument: which one, what came, what is accepted.

    Parameters
    ----------
    argument : str
        The argument in the caller's own words (a dialect uses its own names).
    problem : str
        What is wrong, as a clause, e.g. ``"must have the shape of x"``.
    came : object, optional
        What came; shown as is.
    accepted : object, optional
        What would have been accepted.
    hint : str, optional
        How to mend it.
    """

    def __init__(
        self,
        argument: str,
        problem: str,
        *,
        came: object = None,
        accepted: object = None,
        hint: str | None = None,
    ) -> None:
        self.argument = argument
        self.problem = problem
        self.came = came
        self.accepted = accepted
        self.hint = hint
        details = []
        if came is not None:
            details.append(f"got {came}")
        if accepted is not None:
            details.append(f"accepted: {accepted}")
        if hint is not None:
            details.append(hint)
        super().__init__(f"{argument}: {problem}" + (f"; {'; '.join(details)}" if details else ""))


class ArgumentValueError(ArgumentError, ValueError):
    """An argument of the right type with a value, shape or layout that is not accepted."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of a type, or with an element type, that is not accepted."""
