"""Events: lines of JSON from the process that runs a subject to the process that judges it."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

__all__ = [
    "UNKNOWN_ACCESS",
    "Calls",
    "Event",
    "Fault",
    "Outcome",
    "Prepares",
    "Unusable",
    "ended",
    "read",
    "write",
]

Arrays = Mapping[str, np.ndarray | None]

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


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of the calls of a subject on a case.

    Attributes
    ----------
    case : str
    fault : str or None
        None: the outputs are to be judged.
    text : str
        A description of the fault, or of the call that returned `again`.
    outputs : mapping
        The outputs of the first call: all that the subject can have, None for those it lacks.
    again : mapping or None
        The outputs of another call with equal inputs, if they differ from the first call's.
    is_repeatable : bool
        Whether `again` differs because of the alignment of the arrays.
    changed : sequence of str
        The inputs to which the subject wrote.
    unchanged : sequence of str
        The outputs that had the same bits in a call with another dy (in a forward pass: another x).
    nonlinear : mapping
        By the name of a gradient that is not linear in dy: an element, and the same element of a
        call with :data:`~.operations.VARIED` times dy.
    varied : mapping
        By the name of an input: the outputs of a call after this input has changed in place.
    overwritten : sequence of str
        The outputs that a later call has changed.
    options : mapping
        The options by which a layer is judged, see :class:`.modules.OfModule`.
    """

    case: str
    fault: Fault | None = None
    text: str = ""
    outputs: Arrays = field(default_factory=dict)
    again: Arrays | None = None
    is_repeatable: bool = False
    changed: Sequence[str] = ()
    unchanged: Sequence[str] = ()
    nonlinear: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    varied: Mapping[str, Arrays] = field(default_factory=dict)
    overwritten: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


#: The access to memory by which a process ended, if nothing more is known.
UNKNOWN_ACCESS = "it read or wrote outside of an array, or at a null pointer"

Event = Unusable | Prepares | Calls | Outcome
# The description of an array: the file of its bytes, its type and its shape.
_SAVED = "array_file", "dtype", "shape"
_EVENTS: dict[str, type[Event]] = {
    each.__name__: each for each in (Unusable, Prepares, Calls, Outcome)
}


_numbers = itertools.count()


def write(event: Event, stream: TextIO, folder: Path) -> None:
    """Write an event as a line, and each array of it to a file in the folder."""

    def saved(array: np.ndarray) -> dict[str, Any]:
        file = folder / f"{os.getpid()}-{next(_numbers)}"
        file.write_bytes(array.tobytes())
        return dict(zip(_SAVED, (str(file), str(array.dtype), array.shape), strict=True))

    parts = {each.name: getattr(event, each.name) for each in fields(event)}
    stream.write(json.dumps([type(event).__name__, parts], default=saved) + "\n")


def read(line: bytes) -> Event:
    """Return the event of a line, and remove the files of its arrays."""
    name, parts = json.loads(line, object_hook=_loaded)
    return _EVENTS[name](**parts)


def _loaded(value: dict[str, Any]) -> Any:
    """Return the array that an object of JSON describes, or the object itself."""
    if value.keys() != {*_SAVED}:
        return value
    file, dtype, shape = value.values()
    array = np.fromfile(file, np.dtype(dtype)).reshape(shape)
    Path(file).unlink()
    return array


def ended(status: int, access: str = UNKNOWN_ACCESS) -> str:
    """Describe how a process with this status ended; `access` says by which access to memory."""
    if status < 0:
        name = signal.Signals(-status).name
        meaning = {"SIGSEGV": f": {access}", "SIGKILL": ": it was killed, perhaps for its memory"}
        return f"the process ended by {name}{meaning.get(name, '')}"
    return f"the process ended with status {status}"
