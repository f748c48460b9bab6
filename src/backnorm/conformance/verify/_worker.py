"""A process that runs a subject on cases: ``python -m backnorm.conformance.verify._worker``.

The process reads a job, one line of JSON, from its standard input, and then the names of cases, one
a line. It writes its events
(:mod:`._events`) to the file descriptor that the job names. The subject may print to standard
output, because events are not written there. If the subject ends the process (for example by a
crash), the last event names the case that was running.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.data import read_only
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
from backnorm.conformance.verify._segfault import SegfaultRecord
from backnorm.conformance.verify._solution import OfSolution
from backnorm.conformance.verify.cases import Selection, of_operation, recipes
from backnorm.conformance.verify.conventions import Inputs
from backnorm.conformance.verify.draws import drawn, storage_of
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.operations import nonlinear, operation_of, varied
from backnorm.conformance.verify.subjects import described, is_unsupported, subject_of
from backnorm.conformance.verify.tensors import DeviceError
from backnorm.errors import ArgumentError

# If x has more elements than this, the subject is called only once, because more calls would take
# minutes.
_REPEATED = 1 << 22
# If the job sets no memory limit, a huge case may use all available memory except this many bytes.
_RESERVED = 1 << 30

_Outputs = dict[str, np.ndarray | None]

# The cases in which each input is varied in turn, and those that also run in two threads.
_ALL_VARIED = "realistic-", "no-gamma-", "frozen-"
_IN_THREADS = "realistic-", "sums-of-"
_ROUNDS = 2


class WroteOutsideError(Exception):
    """A subject wrote outside of the memory of an output."""


class Worker:
    """Runs a subject on cases and writes events and outputs."""

    def __init__(self, job: Job, folder: Path, events: int) -> None:
        self.events = os.fdopen(events, "w", buffering=1)
        self.folder = folder
        self.memory = job.memory << 20
        self.record = SegfaultRecord(self.folder)
        try:
            operation = job.selection.operation
            # A layer has one state, and Triton's interpreter one grid at a time.
            self.is_threaded = not (
                job.command or operation == "layer" or os.environ.get("TRITON_INTERPRET") == "1"
            )
            self.subject: Any
            if job.command:
                self.subject = OfCommand(job.subject, operation)
            elif job.solution:
                self.subject = OfSolution(Path(job.subject), operation, job.device)
            else:
                self.subject = subject_of(job.subject, operation, job)
        except ArgumentError as error:
            self.say(Unusable(error.parts()))
            sys.exit(1)
        except Exception as error:
            sys.exit(described(error))

    def say(self, event: Event) -> None:
        """Write an event."""
        write(event, self.events, self.folder)

    def outcome(self, case: Case) -> Outcome:
        """Call the subject on a case. If the case is small, call the subject more often: with one
        input changed, with the original inputs in arrays that end at an unreadable page, in some
        cases also with each input changed in turn, and twice at once.
        """
        try:
            found = self._of_huge(case) if case.repeats > 1 else self._of_calls(case)
            return replace(found, options=getattr(self.subject, "options", {}))
        except DeviceError as error:
            # Later calls of this process could fail, too. Another worker runs the remaining cases.
            self.say(Outcome(case.name, "crash", str(error)))
            sys.exit(1)
        except Exception as error:
            is_own = isinstance(error, CommandError | WroteOutsideError)
            text = str(error) if is_own else described(error)
            fault = _fault_of(error, text)
            if fault == "error" and not case.data.x.size:
                # Many implementations refuse an empty batch by any exception.
                fault = "refused"
            return Outcome(case.name, fault, text)

    def _of_calls(self, case: Case) -> Outcome:
        memory = Memory(case)
        self.say(Calls(case.name))
        returned = self._returned(memory, case)
        first = _copies(returned)
        size = case.data.x.size
        if memory.changed or not size or size > _REPEATED:
            return Outcome(case.name, outputs=first, changed=memory.changed)
        # Call again with the same buffers, which now contain another dy (in a forward pass: another
        # x). The results must differ from those of the first call.
        second = self._varied(memory, case, operation_of(case).varied)
        tight = Memory(case, is_tight=True)
        third = self._called(tight, case)
        again, text, is_repeatable = None, "", True
        if not _are_equal(first, third):
            # The order in which a subject adds up may depend on the alignment of arrays. So only
            # calls with the same arrays must agree.
            for arrays, outputs in ((tight, third), (memory, first)):
                again = self._called(arrays, case)
                if not _are_equal(outputs, again):
                    return Outcome(case.name, outputs=outputs, again=again)
            again = third
        elif case.name.startswith(_IN_THREADS) and self.is_threaded:
            other = varied(case, operation_of(case).varied)
            again = self._in_threads(((case, first), (other, second)))
            if again is not None:
                text, is_repeatable = ": two calls run at once, in two threads", False
        # Before the inputs and the first results are compared: these calls may change them, too.
        others = self._of_varied(memory, case) if case.name.startswith(_ALL_VARIED) else {}
        unchanged = tuple(
            name
            for name, array in first.items()
            if array is not None
            and np.any(np.nan_to_num(array.astype(float)))
            and _equal(array, second[name])
        )
        overwritten = tuple(n for n, a in _copies(returned).items() if not _equal(a, first[n]))
        return Outcome(
            case.name,
            text=text,
            outputs=first,
            again=again,
            is_repeatable=is_repeatable,
            changed=memory.changed or tight.changed,
            unchanged=unchanged,
            nonlinear=nonlinear(first, second) if operation_of(case).varied == "dy" else {},
            varied=others,
            overwritten=overwritten,
        )

    def _varied(self, memory: Memory, case: Case, name: str) -> _Outputs:
        """Return the outputs of a call in which one input has other values in the same memory."""
        other = varied(case, name)
        memory.fill(other)
        try:
            return self._called(memory, other)
        finally:
            memory.fill(case)

    def _of_varied(self, memory: Memory, case: Case) -> dict[str, _Outputs]:
        """Vary each input and epsilon in turn; return the outputs that new memory would change."""
        others, kept = dict[str, _Outputs](), []
        names = [name for name, guarded in memory.guards.items() if guarded is not None]
        for name in (*names, "epsilon"):
            other = varied(case, name)
            try:
                found = self._varied(memory, case, name)
                # A call with the same values in new memory has nothing of earlier calls. Memory is
                # new only if that of earlier calls is kept.
                kept.append(Memory(other))
                expected = self._called(kept[-1], other)
            except Exception as error:
                # A function may take only one epsilon.
                if is_unsupported(error):
                    continue
                raise
            if not _are_equal(found, expected):
                others[name] = found
        return others

    def _in_threads(self, calls: Sequence[tuple[Case, _Outputs]]) -> _Outputs | None:
        """Run two calls at once, in threads; return outputs of the first that differ from those of
        a single call.
        """
        wrong: list[_Outputs] = []
        together = threading.Barrier(len(calls))

        def call(case: Case, expected: _Outputs) -> None:
            memory = Memory(case)
            try:
                for _ in range(_ROUNDS):
                    together.wait()
                    outputs = self._called(memory, case)
                    if case is calls[0][0] and not _are_equal(outputs, expected):
                        wrong.append(outputs)
            except threading.BrokenBarrierError:
                # A call in the other thread has raised an error.
                return
            except BaseException:
                together.abort()
                raise

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            # The thread that arrives last at the barrier goes on first. If two calls write to the
            # same memory, the outputs of the call that writes first are wrong.
            for order in (calls, calls[::-1]):
                with ThreadPoolExecutor(len(calls)) as pool:
                    for future in [pool.submit(call, *each) for each in order]:
                        future.result()
        finally:
            sys.setswitchinterval(interval)
        return wrong[0] if wrong else None

    def _of_huge(self, case: Case) -> Outcome:
        """Call the subject once, on a case with repeated channels.

        Every copy of a channel should have the same results. For each output, the copy of the
        channels is returned that differs most from the first copy.
        """
        self.record.expect(())
        with limited_memory(case, self.memory or available_bytes() - _RESERVED):
            large = repeated(case)
            arrays = large.inputs
            if getattr(self.subject, "writes", False):
                names = operation_of(case).results
                memory = {n: np.full_like(large.data.like(n), np.nan) for n in names}
                self.say(Calls(case.name))
                outputs = self.subject(arrays, large, memory)
            else:
                self.say(Calls(case.name))
                outputs = self.subject(arrays, large)
            self.say(Prepares(case.name))
            return Outcome(case.name, outputs=worst_parts(outputs, case))

    def _called(self, memory: Memory, case: Case) -> _Outputs:
        """Call the subject; return copies of its outputs."""
        return _copies(self._returned(memory, case))

    def _returned(self, memory: Memory, case: Case) -> _Outputs:
        """Call the subject; return its outputs, which a later call may overwrite."""
        if not getattr(self.subject, "writes", False):
            self.record.expect(memory.guards.items())
            found: _Outputs = self.subject(memory.arrays, case)
            memory.check()
            return found
        own = {
            name: Guarded(case.data.like(name), fill=True, is_tight=memory.is_tight)
            for name in operation_of(case).results
        }
        self.record.expect([*memory.guards.items(), *own.items()])
        found = self.subject(memory.arrays, case, {name: g.array for name, g in own.items()})
        memory.check()
        outside = [name for name, g in own.items() if not g.holds_canaries()]
        if outside:
            raise WroteOutsideError(f"wrote outside of {outside[0]}")
        return found


class Memory:
    """The inputs of calls, between unreadable pages.

    Attributes
    ----------
    guards : mapping
        By name; None for an absent input.
    changed : tuple of str
        The inputs to which a call has written.
    """

    def __init__(self, case: Case, *, is_tight: bool = False) -> None:
        self._storage = storage_of(case.name)
        self.guards = {
            name: None
            if array is None
            else Guarded(array, is_tight=is_tight, storage=self._storage.get(name, ""))
            for name, array in case.inputs.items()
        }
        self.is_tight, self.changed = is_tight, tuple[str, ...]()
        self._bits = self._of_now()

    @property
    def arrays(self) -> Inputs:
        """The arrays by name."""
        arrays = {name: None if g is None else g.array for name, g in self.guards.items()}
        for name, storage in self._storage.items():
            array = arrays.get(name)
            if array is not None and storage == "readonly":
                arrays[name] = read_only(array)
        return arrays

    def fill(self, case: Case) -> None:
        """Give the arrays the values of another case."""
        for name, array in case.inputs.items():
            guarded = self.guards[name]
            if guarded is not None:
                guarded.array[...] = array
        self._bits = self._of_now()

    def check(self) -> None:
        """Note the inputs that a call has changed."""
        now = self._of_now()
        written = (name for name, bits in self._bits.items() if bits != now[name])
        self.changed = self.changed or tuple(written)

    def _of_now(self) -> dict[str, bytes | None]:
        return {n: None if g is None else g.array.tobytes() for n, g in self.guards.items()}


def _copies(outputs: _Outputs) -> _Outputs:
    return {name: None if a is None else np.array(a) for name, a in outputs.items()}


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


def _job_of(fields: dict[str, Any]) -> Job:
    selection = {name: _tuples(value) for name, value in fields["selection"].items()}
    return Job(**fields | {"selection": Selection(**selection)})


def _tuples(value: Any) -> Any:
    """Return a value from JSON with tuples in the place of all lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def main() -> None:
    """Run the job that the standard input describes."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    orders = os.fdopen(os.dup(0))
    # The subject cannot read the orders.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    order = json.loads(orders.readline())
    job = _job_of(order["job"])
    selection = job.selection
    if job.memory:
        import resource

        limit = job.memory << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    worker = Worker(job, Path(order["folder"]), order["events"])
    known = {recipe.name: recipe for recipe in recipes(selection)}
    for line in orders:
        name = line.rstrip()
        worker.say(Prepares(name))
        recipe = known.get(name) or of_operation(drawn(name), selection.operation)
        worker.say(worker.outcome(recipe.case(selection.seed)))


if __name__ == "__main__":
    main()
