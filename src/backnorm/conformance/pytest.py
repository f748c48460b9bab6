"""Run the cases as pytest tests.

::

    import backnorm.conformance.pytest as bn

    @bn.cases(dtypes=["float32", "bfloat16"], at_least="float32")
    def test_my_backward(case):
        case.check(my_backward)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from backnorm.conformance.battery import Case
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import RUNGS, Rung, is_at_least
from backnorm.conformance.verify.cases import (
    DTYPES,
    LAYOUTS,
    TIERS,
    Selection,
    check_names,
    selected,
)
from backnorm.conformance.verify.operations import operation_of
from backnorm.conformance.verify.run import absent, graded
from backnorm.conformance.verify.subjects import (
    Function,
    OfDialect,
    Subject,
    described,
    is_unsupported,
    received,
    schema_of,
)
from backnorm.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["CheckedCase", "cases"]


class _Drawn:
    """Draws the cases of a selection one after the other, and keeps only the last one."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._rest: Iterator[Case] = iter(())
        self._last: Case | None = None

    def __call__(self, name: str) -> Case:
        """Return the case with this name."""
        if self._last is None or self._last.name != name:
            self._last = next((case for case in self._rest if case.name == name), None)
        if self._last is None:
            # Tests do not run in the order of the cases.
            self._rest = selected(self._selection)
            self._last = next(case for case in self._rest if case.name == name)
        return self._last


@dataclass(frozen=True, slots=True, eq=False)
class CheckedCase:
    """A case, and the rung of the ladder (`at_least`) that results must reach to pass."""

    name: str
    at_least: Rung
    _drawn: Callable[[str], Case]

    @property
    def case(self) -> Case:
        """The case; its data are drawn when the test runs."""
        return self._drawn(self.name)

    def check(
        self,
        function: Callable[..., Any],
        *,
        dialect: str | None = None,
        op: str | None = None,
    ) -> None:
        """Call a function on the case and judge its gradients, in this process.

        Parameters
        ----------
        function : callable
            A function as in :class:`backnorm.conformance.verify.subjects.Function`, or with
            `dialect` an implementation of the dialect's operator. The test is skipped if the
            function raises NotImplementedError or a framework's error of that meaning, or lacks a
            keyword that the case needs. Any other exception fails the test, even a TypeError:
            otherwise a wrong signature would skip all tests.

        Raises
        ------
        AssertionError
            If an output is worse than the rung, missing, or of another type or shape, or if an
            input is changed. The message names the mistake if it is known.
        """
        # This name makes pytest show the message of a failed test, but not the source of this
        # method.
        __tracebackhide__ = True
        case = judged = self.case
        subject: Subject = Function(function)
        if dialect is not None:
            schema = schema_of(dialect, op, "backward")
            subject, judged = OfDialect(function, schema), received(case, schema)
        # The subject gets writable copies of the inputs. If it wrote to the case's own arrays,
        # which are read-only, NumPy's ValueError would not name the input.
        inputs = {n: None if a is None else a.copy() for n, a in case.inputs.items()}
        before = {n: None if a is None else a.tobytes() for n, a in inputs.items()}
        try:
            found = subject(inputs, case)
        except Exception as error:
            if is_unsupported(error):
                pytest.skip(described(error))
            raise
        outputs = {n: a for n, a in found.items() if a is not None}
        missing = [absent(judged, n, found) for n in GRADIENTS if n not in outputs]
        lines = [text for status, text in missing if status == "not_written"]
        lines += [
            f"the subject writes to {name}"
            for name, array in inputs.items()
            if array is not None and array.tobytes() != before[name]
        ]
        grades = graded(judged, outputs)
        for output, (status, text, grade) in grades.items():
            if is_at_least(status, self.at_least):
                continue
            if grade is None:
                lines.append(text)
                continue
            line = f"{output} is {status}, not {self.at_least} or better"
            line += (
                f": {output}{list(grade.where)} = {grade.got!r}, exact {grade.exact!r}, "
                f"error {grade.ulp:.4g} ulp, condition {grade.condition:.3g}"
            )
            lines.append(f"{line} {text}".strip())
        if lines:
            arrays = {n: outputs[n] for n, (_, _, grade) in grades.items() if grade is not None}
            if arrays:
                diagnosis = operation_of(judged).diagnosis(judged, arrays)
                if diagnosis.kind not in ("right", "unknown"):
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
) -> pytest.MarkDecorator:
    """Return a decorator that runs a test once for each case, with the argument `case`.

    Parameters
    ----------
    tier, dtypes, layouts, only, skip, seed
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
    check_names("dtypes", dtypes, DTYPES)
    check_names("layouts", layouts, LAYOUTS)
    check_names("at_least", [at_least], RUNGS)
    selection = Selection(tier, tuple(dtypes), tuple(layouts), tuple(only), tuple(skip), seed)
    drawn = _Drawn(selection)
    found = [
        pytest.param(CheckedCase(case.name, at_least, drawn), id=case.name)
        for case in selected(selection)
    ]
    if not found:
        raise ArgumentValueError("only", "no case is selected", came=tuple(only))
    return pytest.mark.parametrize("case", found)
