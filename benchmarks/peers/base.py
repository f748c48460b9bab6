"""What a contestant is: the protocol, and the two ways to decline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from backnorm.conformance.data import LayerData
from benchmarks.model import Cell, Form, Timing

__all__ = ["Contestant", "Data", "Missing", "Prepared", "Unsupported"]


class Missing(Exception):  # noqa: N818 (an answer rather than an error)
    """The contestant is not installed; the message says what would have to be."""


class Unsupported(Exception):  # noqa: N818 (likewise)
    """The contestant cannot do this cell; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Data(LayerData):
    """The arrays of a cell, the same for every contestant.

    Attributes
    ----------
    x, dy : numpy.ndarray
        Contiguous, in the order of `data_format`. Nobody writes to them.
    mean, variance, gamma, beta : numpy.ndarray
        Shape (C,); float64 beside a float64 x, else float32. mean and variance (biased) are x's.
    out : numpy.ndarray
        Like x. Where every contestant whose form is "out" writes its result: the same memory, so
        that nobody has better pages than another.
    """

    out: np.ndarray = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that is ready to be timed.

    Attributes
    ----------
    call : callable
        Without arguments; on the CPU done when it returns. Nothing in it converts or copies an
        array that the framework would have had in its own form.
    results : callable
        Turns what `call` returned into NumPy arrays, by name: "dx", "dgamma", "dbeta" of a
        backward pass, "y", "mean", "variance" of a forward pass, "y" of an inference. The variance
        is the biased one. dx and y have x's shape and type. Only what the contestant computes has
        to be there, dx or y at the least. Not timed.
    finish : callable or None
        On a GPU, for work that is not in PyTorch's stream, which its events therefore do not see:
        waits for what `call` returned, and for all calls before it.
    """

    call: Callable[[], Any]
    results: Callable[[Any], Mapping[str, np.ndarray]]
    finish: Callable[[Any], Any] | None = None


class Contestant(Protocol):
    """An implementation that takes part; made once in the worker process.

    Those that run on a GPU are made with the device (`benchmarks.cuda.device.TorchDevice`), on
    which they find PyTorch and the cell's tensors.

    Attributes
    ----------
    name : str
        As in `Outcome.contestant`.
    temporaries : float
        Arrays of x's size (in its element type) that a call holds at its peak beside x, dy and
        `out`; cells for which the machine has too little memory are left out.
    """

    name: str
    temporaries: float

    def start(self, threads: int) -> dict[str, str]:
        """Import what is needed, limit it to `threads` threads, and return its versions.

        Called once, before anything else, and the only place that may import a framework first.

        Returns
        -------
        dict of str to str
            Package name to version.

        Raises
        ------
        Missing
            If it is not installed.
        """

    def prepare(self, cell: Cell, data: Data) -> Mapping[Form, Prepared | Timing]:
        """Return the calls for a cell, one for each form that the contestant has.

        A `Timing` in the place of a call is known from what has been measured before.

        Raises
        ------
        Unsupported
            If it cannot do this cell.
        """
