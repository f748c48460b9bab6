"""What a benchmark measures and what it found: plain values, and the figures derived from them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "FLOOR",
    "OURS",
    "PASSES",
    "Cell",
    "Environment",
    "Form",
    "Operation",
    "Outcome",
    "Result",
    "Row",
    "Timing",
    "geometric_mean",
]

Operation = Literal["backward", "forward", "inference"]

#: How a contestant gives its result: into memory that the caller owns, or newly allocated.
Form = Literal["out", "allocate"]

#: Passes over an array of x's size that two plain loops make; GB/s count these.
PASSES: dict[Operation, int] = {"backward": 5, "forward": 3, "inference": 2}

#: Name of our own contestant, in either form, and of the floor.
OURS = "backnorm"
FLOOR = "floor"

#: Bytes of an element.
ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Cell:
    """One problem to time.

    Attributes
    ----------
    suite : str
    op : {"backward", "forward", "inference"}
    shape : tuple of int
        (N, C, spatial ...), whatever the layout; memory is in the order of `layout`.
    layout : {"NCX", "NXC"}
    dtype : str
    """

    suite: str
    op: Operation
    shape: tuple[int, ...]
    layout: Literal["NCX", "NXC"]
    dtype: str

    @property
    def size(self) -> int:
        """Elements of x."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of x."""
        return self.size * ITEMSIZE[self.dtype]

    @property
    def traffic(self) -> int:
        """Bytes that GB/s are counted in."""
        return PASSES[self.op] * self.nbytes

    def __str__(self) -> str:
        """Return the cell in a line."""
        shape = ",".join(map(str, self.shape))
        return f"{self.op} ({shape}) {self.layout} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median, 20th and 80th percentile of `samples` samples."""

    median: float
    p20: float
    p80: float
    samples: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one contestant in one cell.

    Attributes
    ----------
    contestant : str
        "backnorm", "torch", "tensorflow", "jax", "onednn", "numpy" or "floor".
    form : {"out", "allocate"}
    status : {"ok", "inaccurate", "missing", "unsupported", "crashed"}
        "inaccurate": computed and timed, but outside what a float32 implementation may be wrong by.
        "missing": not installed. "unsupported": cannot do this cell. "crashed": ended the process.
    timing : Timing or None
        Where the status is "ok" or "inaccurate".
    detail : str
        Why not, or how wrong.
    """

    contestant: str
    form: Form
    status: Literal["ok", "inaccurate", "missing", "unsupported", "crashed"]
    timing: Timing | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A cell and the outcomes of all contestants in it."""

    cell: Cell
    outcomes: tuple[Outcome, ...]

    def seconds(self, contestant: str, form: Form) -> float | None:
        """Return the median of a contestant in one form, or None."""
        for outcome in self.outcomes:
            if (outcome.contestant, outcome.form) == (contestant, form) and outcome.timing:
                return outcome.timing.median
        return None

    def peers(self) -> list[Outcome]:
        """Return the outcomes of the peers that computed the cell rightly, and so are compared."""
        ours = (OURS, FLOOR)
        return [o for o in self.outcomes if o.status == "ok" and o.contestant not in ours]

    def ratio_to(self, peer: Outcome) -> float | None:
        """Return our time over the peer's, both in the peer's form."""
        ours = self.seconds(OURS, peer.form)
        return ours / peer.timing.median if ours is not None and peer.timing else None

    def ratio(self) -> float | None:
        """Return our time over the best peer's: the largest ratio to any of them."""
        ratios = [r for peer in self.peers() if (r := self.ratio_to(peer)) is not None]
        return max(ratios, default=None)

    def ratio_to_floor(self) -> float | None:
        """Return our time, output given, over that of moving the memory alone."""
        ours, floor = self.seconds(OURS, "out"), self.seconds(FLOOR, "out")
        return ours / floor if ours is not None and floor else None

    def gigabytes_per_second(self, outcome: Outcome) -> float | None:
        """Return the traffic by convention over the median time."""
        return self.cell.traffic / outcome.timing.median / 1e9 if outcome.timing else None


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and with what a benchmark ran.

    Attributes
    ----------
    cpu, system, python : str
    processors, threads : int
        Processors of the machine, and threads each contestant was given.
    cache_per_core, cache_shared : int
        Bytes.
    versions : dict of str to str
        Of backnorm and of every package that took part.
    date : str
        ISO 8601, UTC, when the run began.
    """

    cpu: str
    system: str
    python: str
    processors: int
    threads: int
    cache_per_core: int
    cache_shared: int
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run: `settings` says how it was measured (rounds, warm-up seconds, ...)."""

    environment: Environment
    settings: dict[str, float | int | str]
    rows: tuple[Row, ...]


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive values; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
