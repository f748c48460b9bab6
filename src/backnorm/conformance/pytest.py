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

from backnorm.conformance.battery import Case
from backnorm.conformance.diagnosis import diagnose
from backnorm.conformance.ladder import Rung, is_at_least
from backnorm.conformance.verify.cases import Selection, selected
from backnorm.conformance.verify.run import graded
from backnorm.conformance.verify.subjects import Function, OfDialect, RefusedError, Subject

__all__ = ["CheckedCase", "cases"]


@dataclass(frozen=True, slots=True, eq=False)
class CheckedCase:
    """A case, and the worst rung that passes."""

    case: Case
    at_least: Rung

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
            `dialect` an implementation of the dialect's operator. Its inputs are read-only. A case
            that it does not support is skipped.

        Raises
        ------
        AssertionError
            If an output is worse than the rung. The message names the mistake if it is known.
        """
        subject: Subject = Function(function)
        if dialect is not None:
            subject = OfDialect.of(function, dialect, op)
        try:
            found = subject(self.case.inputs, self.case)
        except RefusedError as refused:
            pytest.skip(str(refused))
        outputs = {n: a for n, a in found.items() if a is not None}
        lines = []
        for output, (status, text, grade) in graded(self.case, outputs).items():
            if is_at_least(status, self.at_least):
                continue
            line = f"{output} is {status}, not {self.at_least} or better"
            if grade is not None:
                line += (
                    f": {output}{list(grade.where)} = {grade.got!r}, exact {grade.exact!r}, "
                    f"{grade.worst_ulp:.4g} ulp at worst, condition {grade.condition:.3g}"
                )
            lines.append(f"{line} {text}".strip())
        if lines:
            arrays = outputs.get("dx"), outputs.get("dgamma"), outputs.get("dbeta")
            diagnosis = diagnose(
                self.case.data, arrays, training=self.case.training, scaled=self.case.scaled
            )
            if diagnosis.kind != "right":
                lines.insert(0, diagnosis.says)
            raise AssertionError("\n".join([f"{self.case.name}:", *lines]))


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
    """Return a decorator that runs a test for each case, passed as the argument `case`.

    Parameters
    ----------
    tier, dtypes, layouts, only, skip, seed
        As in the options of ``backnorm verify``.
    at_least : Rung
        The worst rung that passes.
    """
    selection = Selection(tier, tuple(dtypes), tuple(layouts), tuple(only), tuple(skip), seed)
    found = [
        pytest.param(CheckedCase(case, at_least), id=case.name) for case in selected(selection)
    ]
    return pytest.mark.parametrize("case", found)
