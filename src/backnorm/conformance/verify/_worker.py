"""A process that runs a subject on cases: ``python -m backnorm.conformance.verify._worker``.

The process reads a job, one line of JSON, from its standard input. It writes its events
(:mod:`._events`) to the file descriptor that the job names. The subject may print to standard
output, because events are not written there. If the subject ends the process (for example by a
crash), the last event names the case that was running.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.verify._command import CommandError, OfCommand
from backnorm.conformance.verify._events import (
    Calls,
    Event,
    Fault,
    Outcome,
    Prepares,
    Unusable,
    write,
)
from backnorm.conformance.verify._memory import (
    Guarded,
    available_bytes,
    limited_memory,
    repeated,
    worst_parts,
)
from backnorm.conformance.verify.cases import Selection, recipes
from backnorm.conformance.verify.operations import operation_of, varied_input
from backnorm.conformance.verify.subjects import described, is_unsupported, subject_of
from backnorm.conformance.verify.tensors import DeviceError
from backnorm.errors import ArgumentError

# If x has more elements than this, the subject is called only once, because more calls would take
# minutes.
_REPEATED = 1 << 22
# If the job sets no memory limit, a huge case may use all available memory except this many bytes.
_RESERVED = 1 << 30

_Outputs = dict[str, np.ndarray | None]
_Inputs = dict[str, Guarded | None]


class WroteOutsideError(Exception):
    """A subject wrote outside of the memory of an output."""


class Worker:
    """Runs a subject on cases and writes events and outputs."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.events = os.fdopen(job["events"], "w", buffering=1)
        self.folder = Path(job["folder"])
        self.memory = job["memory"] << 20
        try:
            self.subject: Any = (
                OfCommand(job["subject"])
                if job["command"]
                else subject_of(
                    job["subject"],
                    dialect=job["dialect"],
                    op=job["op"],
                    operation=job["selection"]["operation"],
                    tensors=job["tensors"],
                    device=job["device"],
                )
            )
        except ArgumentError as error:
            self.say(Unusable(error.parts()))
            sys.exit(1)
        except Exception as error:
            sys.exit(described(error))

    def say(self, event: Event) -> None:
        """Write an event."""
        write(event, self.events, self.folder)

    def outcome(self, case: Case) -> Outcome:
        """Call the subject on a case. If the case is small, call the subject twice more: with one
        input changed, and then with the original inputs in arrays that end at an unreadable page.
        """
        try:
            return self._of_huge(case) if case.repeats > 1 else self._of_calls(case)
        except DeviceError as error:
            # Later calls of this process could fail, too. Another worker runs the remaining cases.
            self.say(Outcome(case.name, "crash", str(error)))
            sys.exit(1)
        except Exception as error:
            is_own = isinstance(error, CommandError | WroteOutsideError)
            text = str(error) if is_own else described(error)
            return Outcome(case.name, _fault_of(error, text), text)

    def _of_calls(self, case: Case) -> Outcome:
        inputs = _guarded(case)
        before = {n: None if g is None else g.array.tobytes() for n, g in inputs.items()}
        varied = inputs[operation_of(case).varied]
        assert varied is not None
        original = varied.array.copy()
        self.say(Calls(case.name))
        first = self._called(inputs, case)
        changed = tuple(
            n for n, g in inputs.items() if g is not None and before[n] != g.array.tobytes()
        )
        size = case.data.x.size
        if changed or not size or size > _REPEATED:
            return Outcome(case.name, outputs=first, changed=changed)
        # Call again with the same buffers, which now contain another dy (in a forward pass: another
        # x). The results must differ from those of the first call.
        varied.array[...] = varied_input(original)
        second = self._called(inputs, case)
        varied.array[...] = original
        tight = _guarded(case, is_tight=True)
        third = self._called(tight, case)
        again = None
        if not _are_equal(first, third):
            # The order in which a subject adds up may depend on the alignment of arrays. So only
            # calls with the same arrays must agree.
            for arrays, outputs in ((tight, third), (inputs, first)):
                again = self._called(arrays, case)
                if not _are_equal(outputs, again):
                    return Outcome(case.name, outputs=outputs, again=again)
            again = third
        unchanged = tuple(
            name
            for name, array in first.items()
            if array is not None
            and np.any(np.nan_to_num(array.astype(float)))
            and _equal(array, second[name])
        )
        return Outcome(
            case.name, outputs=first, again=again, is_repeatable=True, unchanged=unchanged
        )

    def _of_huge(self, case: Case) -> Outcome:
        """Call the subject once, on a case with repeated channels.

        Every copy of a channel should have the same results. For each output, the copy of the
        channels is returned that differs most from the first copy.
        """
        with limited_memory(case, self.memory or available_bytes() - _RESERVED):
            large = repeated(case)
            arrays = large.inputs
            if getattr(self.subject, "writes", False):
                memory = {n: np.full_like(large.data.like(n), np.nan) for n in GRADIENTS}
                self.say(Calls(case.name))
                outputs = self.subject(arrays, large, memory)
            else:
                self.say(Calls(case.name))
                outputs = self.subject(arrays, large)
            self.say(Prepares(case.name))
            return Outcome(case.name, outputs=worst_parts(outputs, case))

    def _called(self, inputs: _Inputs, case: Case) -> _Outputs:
        arrays = {name: None if g is None else g.array for name, g in inputs.items()}
        is_tight = any(g is not None and g.is_tight for g in inputs.values())
        if not getattr(self.subject, "writes", False):
            found = self.subject(arrays, case)
            return {n: None if a is None else np.array(a) for n, a in found.items()}
        memory = {
            name: Guarded(case.data.like(name), fill=True, is_tight=is_tight) for name in GRADIENTS
        }
        found = self.subject(arrays, case, {name: g.array for name, g in memory.items()})
        outside = [name for name, g in memory.items() if not g.holds_canaries()]
        if outside:
            raise WroteOutsideError(f"wrote outside of {outside[0]}")
        return {name: array.copy() for name, array in found.items()}


def _guarded(case: Case, *, is_tight: bool = False) -> _Inputs:
    """Return copies of a case's inputs between unreadable pages."""
    return {
        name: None if array is None else Guarded(array, is_tight=is_tight)
        for name, array in case.inputs.items()
    }


def _are_equal(one: _Outputs, other: _Outputs) -> bool:
    return all(_equal(array, other[name]) for name, array in one.items())


def _equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.tobytes() == other.tobytes()


def _fault_of(error: Exception, text: str) -> Fault:
    """Return the status that an exception of a call means."""
    if isinstance(error, WroteOutsideError):
        return "wrote_outside"
    if "MemoryError" in text:
        return "out_of_memory"
    if isinstance(error, CommandError):
        return "crash"
    return "refused" if is_unsupported(error) else "error"


def _selection_of(fields: dict[str, Any]) -> Selection:
    return Selection(**{name: _tuples(value) for name, value in fields.items()})


def _tuples(value: Any) -> Any:
    """Return a value from JSON with tuples in the place of all lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def main() -> None:
    """Run the job that the standard input describes."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    job = json.loads(sys.stdin.readline())
    if job["memory"]:
        import resource

        limit = job["memory"] << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    worker, selection, waiting = Worker(job), _selection_of(job["selection"]), set(job["waiting"])
    for recipe in recipes(selection):
        if recipe.name in waiting:
            worker.say(Prepares(recipe.name))
            worker.say(worker.outcome(recipe.case(selection.seed)))


if __name__ == "__main__":
    main()
