"""Judge the outputs of a case: a verdict on each, and the diagnosis of a mistake."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from backnorm.conformance._naming import sentence
from backnorm.conformance.battery import Case
from backnorm.conformance.diagnosis import Diagnosis
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import RUNGS, Grade, Rung
from backnorm.conformance.verify._events import Fault, Outcome
from backnorm.conformance.verify.operations import VARIED, operation_of, proves, varied
from backnorm.dtypes import element_type

__all__ = [
    "STATUSES",
    "UNJUDGED",
    "Judgement",
    "Outcome",
    "Status",
    "Verdict",
    "diagnosis_of",
    "graded",
    "judged",
    "with_stale_outputs",
]

Status = (
    Rung
    | Fault
    | Literal[
        "wrong",
        "nonfinite",
        "not_written",
        "changed_input",
        "not_repeatable",
        "stale",
        "overwritten",
        "proves_nothing",
        "expected_to_fail",
    ]
)
#: The statuses of an output, best first.
STATUSES: tuple[Status, ...] = (
    *RUNGS, "proves_nothing", "refused", "not_run", "expected_to_fail", "wrong", "nonfinite",
    "not_written", "changed_input", "not_repeatable", "stale", "overwritten", "wrote_outside",
    "error", "out_of_memory", "hang", "crash",
)  # fmt: skip

#: The statuses of outputs that are not judged. "refused": the subject refused the case. "not_run":
#: the case was not run, or does not have this output. "proves_nothing": all outputs of the case are
#: right, but every known wrong formula passes the case, too. "expected_to_fail": the failure is
#: expected.
UNJUDGED: tuple[Status, ...] = "refused", "not_run", "proves_nothing", "expected_to_fail"

_BOTH_RIGHT = (
    ": both are right, as sums in another order are (--any-order accepts them), but a race can "
    "do this, too"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one output of one case.

    Attributes
    ----------
    case, output : str
    dtype, layout : str
        The element type and layout of the case.
    status : str
        One of :data:`STATUSES`.
    text : str
        A description; empty if the status is that of the grade.
    grade : Grade or None
    """

    case: str
    output: str
    dtype: str
    layout: str
    status: Status
    text: str = ""
    grade: Grade | None = None

    @property
    def is_judged(self) -> bool:
        """Whether the output was judged: its status is not in :data:`UNJUDGED`."""
        return self.status not in UNJUDGED

    @property
    def passed(self) -> bool:
        """Whether the output is right, or was not judged."""
        return self.status in RUNGS or not self.is_judged

    @property
    def is_inexact(self) -> bool:
        """Whether the output has the right type and shape, but wrong numbers."""
        return self.status in ("wrong", "nonfinite") and self.grade is not None

    @property
    def says(self) -> str:
        """The element whose error rules out the next better rung, if there is one, and the text."""
        grade = self.grade
        if grade is None or not grade.where:
            return self.text
        element = (
            f"{self.output}[{', '.join(map(str, grade.where))}]: {self.status}; got {grade.got!r} "
            f"({float(grade.got).hex()}), exact {grade.exact!r} ({float(grade.exact).hex()}), "
            f"error {grade.ulp:.4g} ulp, condition {grade.condition:.3g}"
        )
        return f"{element} {self.text}".strip()


class Judgement(NamedTuple):
    """The verdicts on a case, the diagnosis of wrong outputs if it was asked for, and the
    outputs whose bits were wrongly equal for another input.
    """

    verdicts: list[Verdict]
    diagnosis: Diagnosis | None
    unchanged: Collection[str]


def graded(case: Case, outputs: Mapping[str, np.ndarray | None]) -> dict[str, Verdict]:
    """Return a verdict on each output of a case, by its grade alone; None is no output.

    If all outputs are right, but every known wrong formula also passes the case, the status of the
    outputs is "proves_nothing".
    """
    operation = operation_of(case)
    ladder = operation.ladder(case)
    found: dict[str, Verdict] = {}
    for name in operation.outputs:
        actual = outputs.get(name)
        if actual is None:
            continue
        dtypes, shape = operation.types(case, name), ladder.value(name).shape
        if element_type(actual.dtype) not in dtypes or actual.shape != shape:
            accepted = " or ".join(map(str, dtypes))
            accepted = f"{accepted} of shape {shape}"
            came = f"{actual.dtype} of shape {actual.shape}"
            if actual.dtype == np.uint8 and actual.ndim == 1:
                # If results come from files, a file of the wrong size is read as an array of bytes.
                needed = ladder.value(name).hi.size * dtypes[0].itemsize
                came, accepted = f"{actual.size} bytes", f"{needed}: {accepted}"
            text = f"{name} has a wrong type or shape; got {came}, expected {accepted}"
            found[name] = _verdict(case, name, "wrong", text)
        else:
            grade = ladder.grade(name, actual)
            found[name] = _verdict(case, name, grade.status, grade=grade)
    is_right = all(each.status in RUNGS for each in found.values())
    # Without elements, no formula is tested, but that the results of parameters are 0.
    if is_right and case.data.x.size and not proves(case, ladder):
        text = "the case proves nothing: every wrong formula passes"
        found = {n: replace(v, status="proves_nothing", text=text) for n, v in found.items()}
    return found


def _verdict(case: Case, output: str, status: Status, text: str = "", **grade: Any) -> Verdict:
    types = str(case.data.x.dtype), case.data.data_format
    return Verdict(case.name, output, *types, status, text, **grade)


def diagnosis_of(
    case: Case, outputs: Mapping[str, np.ndarray | None], verdicts: Iterable[Verdict]
) -> Diagnosis | None:
    """Return the mistake that outputs show; None if none is known.

    Outputs of a wrong type or shape have no grade, and are not diagnosed.
    """
    arrays = {each.output: outputs[each.output] for each in verdicts if each.grade is not None}
    if not arrays:
        return None
    diagnosis = operation_of(case).diagnosis(case, arrays)
    return None if diagnosis.kind in ("right", "unknown") else diagnosis


def judged(
    case: Case,
    outcome: Outcome,
    *,
    any_order: bool = False,
    is_diagnosed: bool = False,
    varied: Callable[[Case, str], Case] = varied,
) -> Judgement:
    """Judge the outputs of the calls on a case, and what was observed in the calls.

    Parameters
    ----------
    case : Case
    outcome : Outcome
    any_order : bool
        Whether another call may give other bits if the outputs of both calls are right. The worse
        output is graded.
    is_diagnosed : bool
        Whether the mistake of wrong outputs is looked for.
    varied : callable
        Takes the case and the name of an input; returns the case with another value of the input.
    """
    outputs = {name: array for name, array in outcome.outputs.items() if array is not None}
    grades = graded(case, outputs)
    unchanged = set(outcome.unchanged)
    if unchanged:
        unchanged -= _right(varied(case, operation_of(case).varied), outputs)
    # If an input is varied and an output does not change, the output may be stale (left over from
    # an earlier call). But a wrong formula may also give an output that does not depend on this
    # input. So a wrong output counts as stale only if none of the outputs changed.
    is_stale = unchanged == outputs.keys()
    faults = {name: "stale" for name in unchanged if is_stale or grades[name].status in RUNGS}
    if outcome.again is not None:
        # The outputs differ in their bits, either by chance or because the arrays had another
        # alignment (then the call is repeatable).
        again = graded(case, outcome.again)
        if again.keys() != grades.keys():
            faults = dict.fromkeys(outputs, "not_repeatable: another call returns other outputs")
        else:
            grades = {
                name: max(each, again[name], key=lambda found: STATUSES.index(found.status))
                for name, each in grades.items()
            }
            is_right = all(each.status in RUNGS for each in grades.values())
            if not (outcome.is_repeatable or (is_right and any_order)):
                text = "not_repeatable" + outcome.text + _BOTH_RIGHT * is_right
                faults = {n: text for n in outputs if _differ(outputs[n], outcome.again[n])}
    for name, others in outcome.varied.items():
        right = _right(varied(case, name), others)
        text = f"stale: as if {name} had not changed"
        faults |= {n: text for n in grades if grades[n].status in RUNGS and n not in right}
    if outcome.overwritten:
        faults |= dict.fromkeys(outcome.overwritten, "overwritten")
    if outcome.changed:
        faults = dict.fromkeys(outputs, f"changed_input: {outcome.changed[0]}")
    diagnosis = None
    if is_diagnosed and any(verdict.is_inexact for verdict in grades.values()):
        diagnosis = diagnosis_of(case, outputs, grades.values())
        wrong = {n: v for n, v in outcome.nonlinear.items() if n in grades and grades[n].is_inexact}
        if wrong and outcome.again is None and (diagnosis is None or _may_be_nonlinear(diagnosis)):
            diagnosis = _of_nonlinear(wrong, diagnosis)
    operation = operation_of(case)
    verdicts = [
        _with_fault(grades.get(name) or _absent(case, name, outcome.outputs), faults.get(name))
        for name in operation.outputs
        if name in operation.results or name in outcome.outputs
    ]
    return Judgement(verdicts, diagnosis, unchanged)


def _may_be_nonlinear(diagnosis: Diagnosis) -> bool:
    return not diagnosis.is_firm and diagnosis.kind in ("formula", "described", "precision")


def _of_nonlinear(wrong: Mapping[str, tuple[float, float]], found: Diagnosis | None) -> Diagnosis:
    """Return the diagnosis of gradients that are not linear in dy, described by `found`."""
    says = sentence([name for name in GRADIENTS if name in wrong], "is not linear in dy")
    if found is not None and found.kind == "described":
        says += f": {found.says}"
    evidence = {
        text: value
        for name, (one, other) in wrong.items()
        for text, value in ((name, one), (f"{name} of {VARIED:g} dy", other))
    }
    return Diagnosis("formula", ("not-linear",), says, evidence)


def _differ(one: np.ndarray, other: np.ndarray | None) -> bool:
    return other is None or one.tobytes() != other.tobytes()


def _with_fault(verdict: Verdict, fault: str | None) -> Verdict:
    if fault is None:
        return verdict
    return replace(verdict, status=cast("Status", fault.partition(":")[0]), text=fault)


def _right(case: Case, outputs: Mapping[str, np.ndarray | None]) -> set[str]:
    """Return the names of the outputs that are right for a case."""
    passing = (*RUNGS, "proves_nothing")
    return {name for name, found in graded(case, outputs).items() if found.status in passing}


def _absent(case: Case, output: str, names: Collection[str]) -> Verdict:
    """Return the verdict on an output that is missing or None.

    `names` are the outputs that the subject can have. A function may return None for the gradients
    of parameters in a case without gamma.
    """
    if output not in names:
        return _verdict(case, output, "not_run", "the operator has no such output")
    # A backward pass takes no beta.
    parameter = "beta" if output == "dbeta" and "beta" in case.inputs else "gamma"
    if case.inputs[parameter] is None and output in ("dgamma", "dbeta"):
        return _verdict(case, output, "not_run", f"the case has no {parameter}")
    shape = case.data.like(output).shape
    accepted = " or ".join(map(str, operation_of(case).types(case, output)))
    text = f"no {output} (missing or None); expected an array of shape {shape}, {accepted}"
    return _verdict(case, output, "not_written", text)


def with_stale_outputs(
    verdicts: Iterable[Verdict], unchanged: Collection[tuple[str, str]]
) -> list[Verdict]:
    """Return the verdicts of a run, some of them with their status changed to "stale".

    Each case is called again with another dy (in a forward pass: another x). `unchanged` has the
    case and the name of outputs that had the same bits in both calls, although they should differ.
    The status of such an output becomes "stale" if the output of the same name has this status in
    another case.
    """
    verdicts = list(verdicts)
    stale = {verdict.output for verdict in verdicts if verdict.status == "stale"}
    return [
        replace(verdict, status="stale", text="stale")
        if verdict.output in stale and (verdict.case, verdict.output) in unchanged
        else verdict
        for verdict in verdicts
    ]
