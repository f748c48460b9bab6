"""Run the cases as pytest tests.

::

    import backnorm.conformance.pytest as bn

    @bn.cases(dtypes=["float32", "bfloat16"], at_least="float32")
    def test_my_backward(case):
        case.check(my_backward)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from backnorm.conformance.battery import Case, Recipe
from backnorm.conformance.ladder import RUNGS, Rung, is_at_least
from backnorm.conformance.verify.cases import (
    DTYPES,
    LAYOUTS,
    TIERS,
    Selection,
    check_names,
    recipes,
)
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.names import OperationName
from backnorm.conformance.verify.operations import OPERATIONS, operation_of
from backnorm.conformance.verify.subjects import described, is_unsupported, subject_from
from backnorm.conformance.verify.verdicts import Outcome, diagnosis_of, judged
from backnorm.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["CheckedCase", "cases"]


@dataclass(frozen=True, slots=True, eq=False)
class CheckedCase:
    """A case, and the rung of the ladder (`at_least`) that results must reach to pass.

    Attributes
    ----------
    recipe : Recipe
        The case before its data are drawn.
    at_least : Rung
    seed : int
    """

    recipe: Recipe
    at_least: Rung
    seed: int

    @property
    def name(self) -> str:
        """The name of the case."""
        return self.recipe.name

    @property
    def case(self) -> Case:
        """The case. Its data are drawn here, so collection draws none."""
        return self.recipe.case(self.seed)

    def check(
        self,
        function: Callable[..., Any],
        *,
        dialect: str | None = None,
        op: str | None = None,
    ) -> None:
        """Call a function on the case and judge its results, in this process.

        Parameters
        ----------
        function : callable
            A function as in :class:`backnorm.conformance.verify.conventions.Function`, with
            `dialect` an implementation of the dialect's operator, or for the operation "layer" a
            layer as in :class:`backnorm.conformance.verify.modules.OfModule`. The test is skipped
            if the function raises NotImplementedError or a framework's error of that meaning, or
            lacks a keyword that the case needs. Any other exception fails the test, even a
            TypeError: otherwise a wrong signature would skip all tests.

        Raises
        ------
        AssertionError
            If an output is worse than the rung, missing, or of another type or shape, or if an
            input is changed. The message names the mistake if it is known.
        ArgumentValueError
            If there is no such operator, or `op` is passed without `dialect`.
        """
        # This name makes pytest show the message of a failed test, but not the source of this
        # method.
        __tracebackhide__ = True
        case = self.case
        selection = Selection(operation=operation_of(case).name)
        job = Job("", selection, dialect=dialect, op=op)
        subject = subject_from(function, selection.operation, job.schema, job)
        # The subject gets writable copies of the inputs. If it wrote to the case's own arrays,
        # which are read-only, NumPy's ValueError would not name the input.
        inputs = {n: None if a is None else a.copy() for n, a in case.inputs.items()}
        before = {n: None if a is None else a.tobytes() for n, a in inputs.items()}
        try:
            found = subject(inputs, case)
            received_case = job.received(case, getattr(subject, "options", {}))
        except Exception as error:
            if is_unsupported(error):
                pytest.skip(described(error))
            raise
        lines = [
            f"the subject writes to {name}"
            for name, array in inputs.items()
            if array is not None and array.tobytes() != before[name]
        ]
        verdicts = judged(received_case, Outcome(case.name, outputs=found)).verdicts
        lines += [
            verdict.says
            for verdict in verdicts
            if verdict.status != "not_run" and not is_at_least(verdict.status, self.at_least)
        ]
        if lines:
            diagnosis = diagnosis_of(received_case, found, verdicts)
            if diagnosis is not None:
                lines.insert(0, diagnosis.says)
            raise AssertionError("\n".join([f"{case.name}:", *lines]))


def cases(
    *,
    tier: str = "smoke",
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"),
    layouts: Sequence[str] = ("NCX", "NXC"),
    at_least: Rung = "serial",
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    seed: int = 0,
    operation: OperationName = "backward",
) -> pytest.MarkDecorator:
    """Return a decorator that runs a test once for each case, with the argument `case`.

    Parameters
    ----------
    tier, dtypes, layouts, only, skip, seed, operation
        As in the options of ``backnorm verify``.
    at_least : Rung
        The worst rung that passes.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If a name is unknown, if a string is passed for a list, or if no case is selected.
    """
    for argument, names in {
        "dtypes": dtypes,
        "layouts": layouts,
        "only": only,
        "skip": skip,
    }.items():
        if isinstance(names, str):
            accepted = f'a list, such as ["{names}"]'
            raise ArgumentTypeError(argument, "must be a list", came=repr(names), accepted=accepted)
    check_names("tier", [tier], TIERS)
    check_names("operation", [operation], OPERATIONS)
    check_names("dtypes", dtypes, DTYPES)
    check_names("layouts", layouts, LAYOUTS)
    check_names("at_least", [at_least], RUNGS)
    selection = Selection(
        tier, tuple(dtypes), tuple(layouts), tuple(only), tuple(skip), seed, operation=operation
    )
    found = [
        pytest.param(CheckedCase(recipe, at_least, seed), id=recipe.name)
        for recipe in recipes(selection)
    ]
    if not found:
        raise ArgumentValueError("only", "no case is selected", came=tuple(only))
    return pytest.mark.parametrize("case", found)
