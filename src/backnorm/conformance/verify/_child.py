"""A process that runs a subject on cases: ``python -m backnorm.conformance.verify._child``.

The process reads a job, one line of JSON, from its standard input. It writes a line of JSON for
each event to the file descriptor that the job names, and the outputs of each case to a file. The
subject may print to standard output, because events are not written there. If the subject ends the
process (for example by a crash), the last event names the case that was running.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.verify._command import CommandError, OfCommand
from backnorm.conformance.verify._huge import (
    available_bytes,
    limited_memory,
    repeated,
    worst_parts,
)
from backnorm.conformance.verify._memory import Guarded
from backnorm.conformance.verify.cases import Selection, selected
from backnorm.conformance.verify.operations import operation_of, varied_input
from backnorm.conformance.verify.subjects import described, is_unsupported, subject_of
from backnorm.errors import ArgumentError

# If x has more elements than this, the subject is called only once, because more calls would take
# minutes.
_REPEATED = 1 << 22
# If the job sets no memory limit, a huge case may use all available memory except this many bytes.
_RESERVED = 1 << 30


_Outputs = dict[str, np.ndarray | None]
_Inputs = dict[str, Guarded | None]


@dataclass(frozen=True, slots=True)
class _Calls:
    """The outputs of a call, and what was observed in this call and in further calls.

    `again` has the outputs of another call with equal inputs, if these outputs differ from the
    first call's. If `is_repeatable`, they differ because of the alignment of the arrays.

    The subject is also called with another dy (in a forward pass: another x). `unchanged` names the
    outputs that had the same bits in the call with another dy (or x) as in the first call.
    """

    outputs: _Outputs
    again: _Outputs | None = None
    is_repeatable: bool = False
    faults: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)


class WroteOutsideError(Exception):
    """A subject wrote outside of the memory of an output."""


class Runner:
    """Runs a subject on cases and writes events and outputs."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.events = os.fdopen(job["events"], "w", buffering=1)
        self.folder = Path(job["folder"])
        self.memory = job["memory"] << 20
        self.say(event="import")
        try:
            self.subject: Any = (
                OfCommand(job["subject"])
                if job["command"]
                else subject_of(
                    job["subject"],
                    dialect=job["dialect"],
                    op=job["op"],
                    operation=job["selection"]["operation"],
                )
            )
        except ArgumentError as error:
            self.say(event="unusable", error=error.parts())
            sys.exit(1)
        except Exception as error:
            sys.exit(described(error))
        self.say(event="ready")

    def say(self, **event: Any) -> None:
        """Write an event."""
        self.events.write(json.dumps(event) + "\n")

    def run(self, case: Case) -> None:
        """Run a case, and write an event with the outcome."""
        self.say(event="begin", case=case.name)
        started = time.perf_counter()
        try:
            if case.repeats > 1:
                calls = _Calls(self._of_huge(case))
            else:
                self.say(event="call")
                calls = self._calls(case)
        except CommandError as error:
            self.say(event="crash", case=case.name, text=str(error))
            return
        except WroteOutsideError as error:
            self.say(event="wrote_outside", case=case.name, text=str(error))
            return
        except Exception as error:
            kind = "refused" if is_unsupported(error) else "error"
            self.say(event=kind, case=case.name, text=described(error))
            return
        self.say(
            event="end",
            case=case.name,
            outputs=self._saved(case.name, calls.outputs),
            names=list(calls.outputs),
            again=None if calls.again is None else self._saved(f"{case.name}-again", calls.again),
            is_repeatable=calls.is_repeatable,
            faults=calls.faults,
            unchanged=calls.unchanged,
            seconds=time.perf_counter() - started,
        )

    def _saved(self, name: str, outputs: dict[str, np.ndarray | None]) -> dict[str, Any]:
        """Write arrays to a file as bytes. Return the path of the file, and the types and shapes of
        the arrays, which the file does not contain.
        """
        path = self.folder / f"{name}.npz"
        arrays = {name: array for name, array in outputs.items() if array is not None}
        # Arrays are stored as bytes, because NumPy's file format does not support bfloat16.
        stored: dict[str, Any] = {
            name: np.frombuffer(array.tobytes(), np.uint8) for name, array in arrays.items()
        }
        np.savez(path, **stored)
        return {
            "file": str(path),
            "types": {name: str(array.dtype) for name, array in arrays.items()},
            "shapes": {name: array.shape for name, array in arrays.items()},
        }

    def _calls(self, case: Case) -> _Calls:
        """Call the subject on a case. If the case is small, call the subject twice more: with one
        input changed, and then with the original inputs in arrays that end at an unreadable page.
        """
        inputs = _guarded(case)
        before = {n: None if g is None else g.array.tobytes() for n, g in inputs.items()}
        first = self._called(inputs, case)
        faults = [
            f"changed_input: {n}"
            for n, g in inputs.items()
            if g is not None and before[n] != g.array.tobytes()
        ]
        size = case.data.x.size
        if faults or not size or size > _REPEATED:
            return _Calls(first, faults=faults)
        # Call again with the same buffers, which now contain another dy (in a forward pass: another
        # x). The results must differ from those of the first call.
        varied = inputs[operation_of(case).varied]
        assert varied is not None
        original = varied.array.copy()
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
                    return _Calls(outputs, again)
            again = third
        unchanged: list[str] = [
            name
            for name, array in first.items()
            if array is not None
            and np.any(np.nan_to_num(array.astype(float)))
            and _equal(array, second[name])
        ]
        return _Calls(first, again, is_repeatable=True, unchanged=unchanged)

    def _of_huge(self, case: Case) -> _Outputs:
        """Call the subject once, on a case with repeated channels.

        Every copy of a channel should have the same results. Return, for each output, the copy of
        the channels that differs most from the first copy.
        """
        with limited_memory(case, self.memory or available_bytes() - _RESERVED):
            large = repeated(case)
            arrays = large.inputs
            # The time limit applies from "call" to the next event: the time to fill and to compare
            # the arrays does not count.
            self.say(event="call")
            if getattr(self.subject, "writes", False):
                memory = {n: np.full_like(large.data.like(n), np.nan) for n in GRADIENTS}
                outputs = self.subject(arrays, large, memory)
            else:
                outputs = self.subject(arrays, large)
            self.say(event="called")
            return worst_parts(outputs, case)

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


def _remaining(job: dict[str, Any]) -> Iterator[Case]:
    """Yield the cases of a job that were not run yet."""
    fields: dict[str, Any] = {name: _tuples(value) for name, value in job["selection"].items()}
    selection = Selection(**fields)
    done = set(job["done"])
    for case in selected(selection):
        if case.name not in done:
            yield case


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
    runner = Runner(job)
    for case in _remaining(job):
        runner.run(case)
    runner.say(event="finished")


if __name__ == "__main__":
    main()
