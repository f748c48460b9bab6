"""The interface of a contestant, and the exceptions of a missing or unsupported one."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from backnorm.conformance.data import LayerData
from benchmarks.cells import Cell, Form
from benchmarks.turns import Timing

__all__ = ["ARRAYS", "SHARE", "Contestant", "Data", "Missing", "Prepared", "Unsupported", "Verdict"]

#: Arrays of x's size that a contestant holds: x, dy and the output.
ARRAYS = 3

#: The part of the free memory that a cell may take.
SHARE = 0.8


class Missing(Exception):  # noqa: N818 (an answer rather than an error)
    """The contestant or device is not available; the message says what is missing."""


class Unsupported(Exception):  # noqa: N818 (likewise)
    """The contestant cannot compute this cell; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Data(LayerData):
    """The arrays of a cell, with the same values for every contestant.

    Attributes
    ----------
    x, dy : numpy.ndarray
        Contiguous, in the order of `data_format`; read only.
    mean, variance, gamma, beta : numpy.ndarray
        Shape (C,); float64 with a float64 x, else float32. mean and variance (biased) are x's.
    out : numpy.ndarray
        Like x: memory for the result in the form "out".
    """

    out: np.ndarray = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that is ready to be timed.

    Attributes
    ----------
    call : callable
        Takes no arguments; on the CPU it is complete when it returns. It does not convert or copy
        arrays that a user of the framework would already have in the framework's form.
    results : callable
        Converts the result of `call` to NumPy arrays, by name: "dx", "dgamma", "dbeta" of a
        backward pass, "y", "mean", "variance" (biased) of a forward pass, "y" of an inference. dx
        and y have x's shape and type, and one of them is required. Not timed.
    finish : callable or None
        On a GPU, for work outside PyTorch's stream, which PyTorch's events cannot time: waits for
        the result of `call`, and for all calls before it.
    """

    call: Callable[[], Any]
    results: Callable[[Any], Mapping[str, np.ndarray]]
    finish: Callable[[Any], Any] | None = None


class Verdict(NamedTuple):
    """The state of a form of the contestant in a cell, before it is timed.

    Attributes
    ----------
    form : {"out", "allocate"}
    status : {"ok", "inaccurate", "unsupported", "crashed", "missing", "refused"}
    detail : str
        Why it is not "ok".
    timing : Timing or None
        The time, if it follows from earlier measurements.
    whole : bool
        Whether `Work.turn` can time whole calls, too.
    """

    form: Form
    status: str
    detail: str = ""
    timing: Timing | None = None
    whole: bool = False


class Contestant(abc.ABC):
    """An implementation that is timed in its own process.

    Attributes
    ----------
    name : str
    temporaries : float
        Arrays of x's size (in its element type) that a call holds at its peak besides x, dy and
        `out`. Cells for which the machine has too little memory are left out.
    device : Host or Cuda
        Set before `start`; on a GPU it holds PyTorch and the cell's tensors.
    """

    name: str
    temporaries = 1.0
    device: Any = None

    def start(self, threads: int) -> dict[str, str]:
        """Import the framework, limit it to `threads` threads, and return its versions.

        Raises
        ------
        Missing
            If the framework is not installed.
        """
        return {}

    @abc.abstractmethod
    def prepare(self, cell: Cell, data: Data) -> Mapping[Form, Prepared | Timing]:
        """Return the calls for a cell, one for each form that the contestant has.

        A `Timing` instead of a call follows from earlier measurements.

        Raises
        ------
        Unsupported
            If the contestant cannot compute this cell.
        """
