"""Events: lines of JSON from the process that runs a subject to the process that judges it."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np

__all__ = [
    "Calls",
    "Event",
    "Fault",
    "Outcome",
    "Prepares",
    "Saved",
    "Unusable",
    "ended",
    "load",
    "read",
    "save",
    "write",
]

#: The statuses of a case without outputs that could be judged.
Fault = Literal["refused", "not_run", "wrote_outside", "error", "out_of_memory", "hang", "crash"]


@dataclass(frozen=True, slots=True)
class Unusable:
    """The subject cannot be called: the parts of an :class:`~backnorm.errors.ArgumentError`."""

    error: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prepares:
    """The data of a case are drawn, or its results are compared."""

    case: str


@dataclass(frozen=True, slots=True)
class Calls:
    """The subject is called on a case. Only from here to the next event, its time is limited."""

    case: str


class Saved(NamedTuple):
    """An array whose bytes are in a file."""

    file: str
    dtype: str
    shape: tuple[int, ...]


Arrays = Mapping[str, Saved | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of the calls of a subject on a case.

    Attributes
    ----------
    case : str
    fault : str or None
        None: the outputs are to be judged.
    text : str
        A description of the fault.
    outputs : mapping
        The outputs of the first call: all that the subject can have, None for those it lacks.
    again : mapping or None
        The outputs of another call with equal inputs, if they differ from the first call's.
    is_repeatable : bool
        Whether `again` differs because of the alignment of the arrays.
    changed : tuple of str
        The inputs to which the subject wrote.
    unchanged : tuple of str
        The outputs that had the same bits in a call with another dy (in a forward pass: another x).
    """

    case: str
    fault: Fault | None = None
    text: str = ""
    outputs: Arrays = field(default_factory=dict)
    again: Arrays | None = None
    is_repeatable: bool = False
    changed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()


Event = Unusable | Prepares | Calls | Outcome
_EVENTS: dict[str, type[Event]] = {
    each.__name__: each for each in (Unusable, Prepares, Calls, Outcome)
}


def write(event: Event, stream: TextIO) -> None:
    """Write an event as a line."""
    stream.write(json.dumps([type(event).__name__, asdict(event)]) + "\n")


def read(line: bytes) -> Event:
    """Return the event that a line has."""
    name, fields = json.loads(line)
    return _EVENTS[name](**fields)


def save(arrays: Mapping[str, np.ndarray | None], folder: Path, name: str) -> Arrays:
    """Write each array to a file of its own, whose name begins with `name`."""
    saved: dict[str, Saved | None] = dict.fromkeys(arrays)
    for output, array in arrays.items():
        if array is not None:
            file = folder / f"{name}-{output}"
            file.write_bytes(array.tobytes())
            saved[output] = Saved(str(file), str(array.dtype), array.shape)
    return saved


def load(arrays: Arrays) -> dict[str, np.ndarray]:
    """Return the arrays that are not None, and remove their files."""
    loaded = {}
    for output, saved in arrays.items():
        if saved is not None:
            file, dtype, shape = saved
            loaded[output] = np.fromfile(file, np.dtype(dtype)).reshape(shape)
            Path(file).unlink()
    return loaded


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
