"""Run a subject in child processes, handle their crashes, and grade the outputs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.ladder import RUNGS, Grade, Rung
from backnorm.conformance.verify.cases import Selection, selected
from backnorm.conformance.verify.operations import (
    OPERATIONS,
    Operation,
    operation_of,
    varied_input,
)
from backnorm.conformance.verify.proof import proves
from backnorm.conformance.verify.subjects import received, schema_of_subject
from backnorm.dtypes import element_type
from backnorm.errors import ArgumentValueError

__all__ = [
    "STATUSES",
    "UNJUDGED",
    "Job",
    "Results",
    "Status",
    "Verdict",
    "graded",
    "judged_cases",
    "verify",
]

Status = (
    Rung
    | Literal[
        "wrong",
        "nonfinite",
        "not_written",
        "changed_input",
        "not_repeatable",
        "stale",
        "wrote_outside",
        "error",
        "crash",
        "hang",
        "out_of_memory",
        "refused",
        "not_run",
        "proves_nothing",
        "expected_to_fail",
    ]
)
#: The statuses of an output, best first.
STATUSES: tuple[Status, ...] = (
    *RUNGS, "proves_nothing", "refused", "not_run", "expected_to_fail", "wrong", "nonfinite",
    "not_written", "changed_input", "not_repeatable", "stale", "wrote_outside", "error",
    "out_of_memory", "hang", "crash",
)  # fmt: skip

#: The statuses of outputs that are not judged. "refused": the subject refused the case. "not_run":
#: the case was not run, or does not have this output. "proves_nothing": all outputs of the case are
#: right, but every known wrong formula passes the case, too. "expected_to_fail": the failure is
#: expected.
UNJUDGED: tuple[Status, ...] = "refused", "not_run", "proves_nothing", "expected_to_fail"

# A child process that has not ended this many seconds after its last case is killed.
_GRACE = 0.3
# The time limit of a subject's import, and of making the data of a case, is at least this many
# seconds.
_PREPARATION = 120.0
# After this many seconds without an event, the parent looks whether the child process has ended.
_PAUSE = 0.1
# If the subject crashes or hangs on this many cases in a row, the remaining cases are not run.
_MOST_ENDS = 8

_BOTH_RIGHT = (
    ": both are right, as sums in another order are (--any-order accepts them), but a race can "
    "do this, too"
)


@dataclass(frozen=True, slots=True)
class Job:
    """A subject, and the cases on which it is run.

    Attributes
    ----------
    subject : str
        As on the command line, see :func:`backnorm.conformance.verify.subjects.subject_of`.
    selection : Selection
    dialect, op : str or None
        The dialect and operator whose signature the subject has; None: the canonical signature.
    timeout : float
        The time limit of a case's calls in seconds.
    memory : int
        The limit of the child's data memory in MiB; 0: no limit.
    command : bool
        Whether the subject is a command line, see :class:`._command.OfCommand`.
    any_order : bool
        Whether another call may give other bits, as atomic additions do, if the outputs of both
        calls are right. The worse output is graded.
    files : bool
        Whether the subject is files of results, which cannot be run again.
    echo : bool
        Whether what the subject prints appears on standard error.
    """

    subject: str
    selection: Selection = field(default_factory=Selection)
    dialect: str | None = None
    op: str | None = None
    timeout: float = 30.0
    memory: int = 0
    command: bool = False
    any_order: bool = False
    files: bool = False
    echo: bool = False


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


@dataclass(slots=True)
class Results:
    """The results of a run.

    Attributes
    ----------
    job : Job
    verdicts : list of Verdict
    outputs : dict
        The outputs of the diagnostic cases by name.
    unchanged : set
        The cases and outputs whose bits were wrongly equal for another input.
    seconds : float
    interrupted : bool
    """

    job: Job
    verdicts: list[Verdict] = field(default_factory=list)
    outputs: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    unchanged: set[tuple[str, str]] = field(default_factory=set)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def operation(self) -> Operation:
        """The operation that the run judges."""
        return OPERATIONS[self.job.selection.operation]


def verify(job: Job, progress: Callable[[int, int], None] | None = None) -> Results:
    """Run a job and return its results.

    Parameters
    ----------
    job : Job
    progress : callable, optional
        Called with the number of finished cases and the number of all cases.

    Raises
    ------
    ArgumentError
        If the subject cannot be imported, there is no such dialect or operator, or no case is
        selected.
    """
    cases = {case.name: case for case in judged_cases(job)}
    if not cases:
        raise ArgumentValueError(
            "--only", "no case is selected", came=job.selection.only,
            accepted="globs such as 'realistic*'", hint="backnorm cases list prints the names",
        )  # fmt: skip
    results, started = Results(job), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="backnorm-verify-") as folder:
        done: list[str] = []
        ends = 0
        try:
            while len(done) < len(cases) and ends < _MOST_ENDS:
                before = len(done)
                for event in _child(job, done, Path(folder)):
                    case = cases[event["case"]]
                    done.append(case.name)
                    results.verdicts += _verdicts(case, event, results)
                    ends = ends + 1 if event["event"] in ("crash", "hang") else 0
                    # If the subject is a command, each call of it is a separate process, and a
                    # crash of that process does not end `_child`. So several calls can crash or
                    # hang in one run of `_child`.
                    if ends == _MOST_ENDS:
                        break
                    if progress is not None:
                        progress(len(done), len(cases))
                if len(done) == before:
                    break
            if not done and job.memory:
                raise ArgumentValueError(
                    "--memory", "must suffice for Python and a case", came=f"{job.memory} MiB"
                )
            text = "the process ended before this case"
            if ends == _MOST_ENDS:
                text = f"the subject ended {ends} processes in a row"
            for case in cases.values():
                if case.name not in done:
                    event = {"event": "not_run", "text": text}
                    results.verdicts += _verdicts(case, event, results)
        except KeyboardInterrupt:
            results.interrupted = True
    results.verdicts = _with_stale_outputs(results)
    results.seconds = time.perf_counter() - started
    return results


def judged_cases(job: Job) -> Iterator[Case]:
    """Yield the cases of a job, with the numbers by which its subject is judged."""
    schema = schema_of_subject(job.subject, job.dialect, job.op, job.selection.operation)
    for case in selected(job.selection):
        yield case if schema is None else received(case, schema)


def _child(job: Job, done: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Run a child process; yield an event with the outcome for each case that the child began."""
    reader, writer = os.pipe()
    order = {
        "subject": job.subject, "dialect": job.dialect, "op": job.op, "memory": job.memory,
        "command": job.command,
        "selection": asdict(job.selection), "done": done, "folder": str(folder), "events": writer,
    }  # fmt: skip
    with (folder / "stderr").open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "backnorm.conformance.verify._child"],
            stdin=subprocess.PIPE,
            stdout=sys.__stderr__ if job.echo else errors,
            stderr=None if job.echo else errors,
            pass_fds=[writer],
            start_new_session=True,
        )
    os.close(writer)
    assert child.stdin is not None
    child.stdin.write(json.dumps(order).encode() + b"\n")
    child.stdin.close()
    at: str | None = None
    is_ready = False
    try:
        for event in _events(reader, child, job.timeout):
            match event["event"]:
                case "ready":
                    is_ready = True
                case "unusable":
                    raise ArgumentValueError(**event["error"])
                case "begin":
                    at = event["case"]
                case "end" | "refused" | "wrote_outside" | "error" | "crash":
                    at = None
                    yield event
                case "finished":
                    return
                case "hang":
                    os.killpg(child.pid, signal.SIGKILL)
                    if at is not None:
                        yield {
                            "event": "hang",
                            "case": at,
                            "text": f"no result in {job.timeout:g} s",
                        }
                        return
        status = child.wait()
        if at is not None:
            yield {"event": "crash", "case": at, "text": ended(status)}
            return
        if not is_ready:
            text = (folder / "stderr").read_text(errors="replace").strip().splitlines()
            raise ArgumentValueError(
                "SUBJECT", "cannot be imported", came=job.subject, hint=text[-1] if text else None
            )
    finally:
        os.close(reader)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE)
        # Processes that the subject has started may still run, even if the child has ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _events(
    reader: int, child: subprocess.Popen[bytes], timeout: float
) -> Iterator[dict[str, Any]]:
    """Yield the events that a child process writes to the file descriptor `reader`. If the calls of
    a case exceed the time limit, or their preparation exceeds its own, yield "hang" and stop.
    """
    preparation = max(timeout, _PREPARATION)
    read, limit, started = b"", preparation, time.monotonic()
    while True:
        # The end of the child may not end the pipe, because a process that the subject has forked
        # holds the pipe open, too.
        has_ended = child.poll() is not None
        ready, _, _ = select.select([reader], [], [], 0 if has_ended else _PAUSE)
        data = os.read(reader, 1 << 16) if ready else b""
        if not data:
            if ready or has_ended:
                return
            if time.monotonic() - started > limit:
                yield {"event": "hang"}
                return
            continue
        *lines, read = (read + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            limit = timeout if event["event"] == "call" else preparation
            yield event
        started = time.monotonic()


def ended(status: int) -> str:
    """Describe how a process with this status ended."""
    if status < 0:
        name = signal.Signals(-status).name
        meaning = {
            "SIGSEGV": ": it read or wrote outside of an array, or at a null pointer",
            "SIGKILL": ": it was killed, perhaps for its memory",
        }
        return f"the process ended by {name}{meaning.get(name, '')}"
    return f"the process ended with status {status}"


def _verdicts(case: Case, event: Mapping[str, Any], results: Results) -> list[Verdict]:
    """Return a verdict on each output of a case."""
    known = case.name, str(case.data.x.dtype), case.data.data_format
    kind = event["event"]
    if kind != "end":
        memory = "MemoryError" in event.get("text", "")
        status: Status = "out_of_memory" if memory else kind
        return [
            Verdict(known[0], output, *known[1:], status, event.get("text", ""))
            for output in operation_of(case).results
        ]
    outputs = _loaded(event["outputs"])
    if case.name.startswith("diagnostic"):
        results.outputs[case.name] = outputs
    graded_outputs = graded(case, outputs)
    faults = list(event["faults"])
    unchanged = set(event["unchanged"])
    if unchanged:
        unchanged -= _right_if_varied(case, outputs)
    results.unchanged |= {(case.name, name) for name in unchanged}
    # If an input is varied and an output does not change, the output may be stale (left over from
    # an earlier call). But a wrong formula may also give an output that does not depend on this
    # input. So a wrong output counts as stale only if none of the outputs changed.
    is_stale = unchanged == outputs.keys()
    varying: dict[str, str] = {
        name: "stale" for name in unchanged if is_stale or graded_outputs[name][0] in RUNGS
    }
    if event["again"] is not None:
        # The outputs differ in their bits, either by chance or because the arrays had another
        # alignment (then the call is repeatable).
        others = _loaded(event["again"])
        again = graded(case, others)
        if again.keys() != graded_outputs.keys():
            faults.append("not_repeatable: another call returns other outputs")
        else:
            graded_outputs = {
                name: max(each, again[name], key=lambda found: STATUSES.index(found[0]))
                for name, each in graded_outputs.items()
            }
            is_right = all(status in RUNGS for status, *_ in graded_outputs.values())
            if not (event["is_repeatable"] or (is_right and results.job.any_order)):
                text = "not_repeatable" + _BOTH_RIGHT * is_right
                varying = {
                    n: text for n, a in outputs.items() if a.tobytes() != others[n].tobytes()
                }
    verdicts = []
    for output in operation_of(case).results:
        if output not in outputs:
            missing = absent(case, output, event["names"])
            verdicts.append(Verdict(known[0], output, *known[1:], *missing))
            continue
        status, text, found = graded_outputs[output]
        fault = next(iter(faults), varying.get(output))
        if fault is not None:
            status, text = cast("Status", fault.partition(":")[0]), fault
        verdicts.append(Verdict(known[0], output, *known[1:], status, text, found))
    return verdicts


def _with_stale_outputs(results: Results) -> list[Verdict]:
    """Return the verdicts, some of them with their status changed to "stale".

    Each case is called again with another dy (in a forward pass: another x). `results.unchanged`
    lists outputs that had the same bits in both calls, although they should differ. The status of a
    listed output becomes "stale" if the output of the same name has this status in another case.
    """
    stale = {verdict.output for verdict in results.verdicts if verdict.status == "stale"}
    return [
        replace(verdict, status="stale", text="stale")
        if verdict.output in stale and (verdict.case, verdict.output) in results.unchanged
        else verdict
        for verdict in results.verdicts
    ]


def _right_if_varied(case: Case, outputs: Mapping[str, np.ndarray]) -> set[str]:
    """Return the names of the outputs that would also be right for the changed input of the second
    call.
    """
    name = operation_of(case).varied
    changed: dict[str, Any] = {name: varied_input(getattr(case.data, name))}
    varied = replace(case, data=replace(case.data, **changed))
    grades = graded(varied, outputs)
    return {name for name, (status, *_) in grades.items() if status in (*RUNGS, "proves_nothing")}


def absent(case: Case, output: str, names: Collection[str]) -> tuple[Status, str]:
    """Return the status and text of an output that is missing or None.

    `names` are the outputs that the subject can have. A function may return None for the gradients
    of parameters in a case without gamma.
    """
    if output not in names:
        lacks = "the operator has no such output"
        return "not_run", lacks + "; its inverse deviation is not judged" * (output == "variance")
    if case.inputs["gamma"] is None and output in ("dgamma", "dbeta"):
        return "not_run", "the case has no gamma"
    shape = (case.data.x if output in ("dx", "y") else case.data.mean).shape
    accepted = " or ".join(map(str, operation_of(case).types(case, output)))
    text = f"no {output} (missing or None); expected an array of shape {shape}, {accepted}"
    return "not_written", text


def _loaded(saved: Mapping[str, Any]) -> dict[str, np.ndarray]:
    with np.load(saved["file"]) as file:
        return {
            name: file[name].view(np.dtype(kind)).reshape(saved["shapes"][name])
            for name, kind in saved["types"].items()
        }


def graded(
    case: Case, outputs: Mapping[str, np.ndarray]
) -> dict[str, tuple[Status, str, Grade | None]]:
    """Return the status, text and grade of each output of a case.

    If all outputs are right, but every known wrong formula also passes the case, the status of the
    outputs is "proves_nothing".
    """
    operation = operation_of(case)
    ladder = operation.ladder(case)
    found: dict[str, tuple[Status, str, Grade | None]] = {}
    for name in operation.results:
        if name not in outputs:
            continue
        actual, dtypes, shape = outputs[name], operation.types(case, name), ladder.value(name).shape
        if element_type(actual.dtype) not in dtypes or actual.shape != shape:
            accepted = " or ".join(map(str, dtypes))
            accepted = f"{accepted} of shape {shape}"
            came = f"{actual.dtype} of shape {actual.shape}"
            if actual.dtype == np.uint8 and actual.ndim == 1:
                # If results come from files, a file of the wrong size is read as an array of bytes.
                needed = ladder.value(name).hi.size * dtypes[0].itemsize
                came, accepted = f"{actual.size} bytes", f"{needed}: {accepted}"
            text = f"{name} has a wrong type or shape; got {came}, expected {accepted}"
            found[name] = "wrong", text, None
        else:
            grade = ladder.grade(name, actual)
            found[name] = grade.status, "", grade
    if all(status in RUNGS for status, *_ in found.values()) and not proves(case, ladder):
        text = "the case proves nothing: every wrong formula passes"
        return {name: ("proves_nothing", text, grade) for name, (*_, grade) in found.items()}
    return found
