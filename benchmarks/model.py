"""What a benchmark measures and what it found: plain values, and the figures derived from them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Len, Lt

from backnorm.machine import counted

__all__ = [
    "CONDITIONS",
    "DEVICES",
    "FLOOR",
    "LEAST_PASSES",
    "OF_OURS",
    "OURS",
    "OURS_IN_FLOAT32",
    "PASSES",
    "Cell",
    "Condition",
    "DeviceName",
    "ElementType",
    "Environment",
    "Form",
    "GpuFacts",
    "Operation",
    "Outcome",
    "Result",
    "Row",
    "Timing",
    "geometric_mean",
]

# What a file of a result is checked for, by `report.result_file`.
_Count = Annotated[int, Ge(1)]
_Size = Annotated[int, Ge(0)]
_Seconds = Annotated[float, Gt(0), Lt(1e9)]

Operation = Literal["backward", "forward", "inference"]

#: Where a run takes place; all contestants of a run are on one device.
DeviceName = Literal["cpu", "cuda"]
DEVICES: tuple[DeviceName, ...] = get_args(DeviceName)

#: What comes before a call that is timed: calls of the same contestant alone, or right before each
#: a convolution of PyTorch's.
Condition = Literal["quiet", "after-convolution"]
CONDITIONS: tuple[Condition, ...] = get_args(Condition)

#: How a contestant gives its result: into memory that the caller owns, or newly allocated.
Form = Literal["out", "allocate"]

#: Passes over an array of x's size that two plain loops make; GB/s count these.
PASSES: dict[Operation, int] = {"backward": 5, "forward": 3, "inference": 2}

#: Passes that no order of work can save: inputs are read once, and the output is written once.
LEAST_PASSES: dict[Operation, int] = {"backward": 3, "forward": 2, "inference": 2}

#: Names of our own contestants, in either form, and of the floor. The first computes as it does
#: without a choice of arithmetic.
OURS, OURS_IN_FLOAT32 = OF_OURS = "backnorm", "backnorm-float32"
FLOOR = "floor"

ElementType = Literal["float64", "float32", "float16", "bfloat16"]

#: Bytes of an element.
ITEMSIZE: dict[ElementType, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


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
    shape: Annotated[tuple[_Count, ...], Len(2, 16)]
    layout: Literal["NCX", "NXC"]
    dtype: ElementType

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

    @property
    def least_traffic(self) -> int:
        """Bytes that have to be moved whatever the order of work."""
        return LEAST_PASSES[self.op] * self.nbytes

    def __str__(self) -> str:
        """Return the cell in a line."""
        shape = ",".join(map(str, self.shape))
        return f"{self.op} ({shape}) {self.layout} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median, 20th and 80th percentile of `samples` samples."""

    median: _Seconds
    p20: _Seconds
    p80: _Seconds
    samples: _Count

    def __post_init__(self) -> None:
        if not self.p20 <= self.median <= self.p80:
            raise ValueError("must have p20 <= median <= p80")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one contestant in one cell.

    Attributes
    ----------
    contestant : str
        "backnorm", "backnorm-float32", "floor", or the name of a peer: :mod:`benchmarks.peers`
        lists them.
    form : {"out", "allocate"}
    status : {"ok", "inaccurate", "missing", "unsupported", "crashed"}
        "inaccurate": computed and timed, but outside what a float32 implementation may be wrong by.
        "missing": not installed. "unsupported": cannot do this cell. "crashed": ended the process.
    timing : Timing or None
        Where the status is "ok" or "inaccurate". On a GPU the device's time.
    detail : str
        Why not, or how wrong.
    whole : Timing or None
        On a GPU, for small problems: seconds of a whole call as the host sees it, dispatch
        included, many in a row.
    """

    contestant: str
    form: Form
    status: Literal["ok", "inaccurate", "missing", "unsupported", "crashed"]
    timing: Timing | None = None
    detail: str = ""
    whole: Timing | None = None

    def __post_init__(self) -> None:
        timed = self.status in ("ok", "inaccurate")
        if timed != (self.timing is not None) or (self.whole is not None and not timed):
            raise ValueError("must have a timing where it was timed, and only there")


@dataclass(frozen=True, slots=True)
class Row:
    """A cell and the outcomes of all contestants in it."""

    cell: Cell
    outcomes: tuple[Outcome, ...]

    def seconds(self, contestant: str, form: Form) -> float | None:
        """Return the median of a contestant in one form, or None."""
        outcome = self.find(contestant, form)
        return outcome.timing.median if outcome and outcome.timing else None

    def find(self, contestant: str, form: Form) -> Outcome | None:
        """Return the outcome of a contestant in one form, timed or not."""
        for outcome in self.outcomes:
            if (outcome.contestant, outcome.form) == (contestant, form):
                return outcome
        return None

    def peers(self) -> list[Outcome]:
        """Return the outcomes of the peers that computed the cell rightly, and so are compared."""
        ours = (*OF_OURS, FLOOR)
        return [o for o in self.outcomes if o.status == "ok" and o.contestant not in ours]

    def ratio_to(self, peer: Outcome, ours: str = OURS) -> float | None:
        """Return the time of one of ours over the peer's, both in the peer's form."""
        seconds = self.seconds(ours, peer.form)
        return seconds / peer.timing.median if seconds is not None and peer.timing else None

    def ratio(self, ours: str = OURS, peer: str | None = None) -> float | None:
        """Return the time of one of ours over the best peer's: the largest ratio to any of them.

        Or to any form of one peer.
        """
        best = self.best_peer(ours, peer)
        return self.ratio_to(best, ours) if best else None

    def best_peer(self, ours: str = OURS, peer: str | None = None) -> Outcome | None:
        """Return the peer that the cell's ratio is to, or None; of one peer, its form."""
        compared = [found for found in self.peers() if peer in (None, found.contestant)]
        ratios = [(ratio, found) for found in compared if (ratio := self.ratio_to(found, ours))]
        return max(ratios, key=lambda pair: pair[0], default=(0.0, None))[1]

    def ours(self, name: str = OURS) -> Outcome | None:
        """Return the outcome of ours that is shown: output given, unless there is no such form."""
        found = [outcome for outcome in self.outcomes if outcome.contestant == name]
        return max(found, key=lambda outcome: outcome.form == "out", default=None)

    def ratio_to_floor(self, name: str = OURS) -> float | None:
        """Return the time of `ours` over that of moving the memory alone."""
        ours, floor = self.ours(name), self.seconds(FLOOR, "out")
        return ours.timing.median / floor if ours and ours.timing and floor else None

    def whole_ratio_to(self, peer: Outcome) -> float | None:
        """Return our time of a whole call over the peer's, both in the peer's form."""
        ours = self.find(OURS, peer.form)
        if ours is None or ours.whole is None or peer.whole is None:
            return None
        return ours.whole.median / peer.whole.median

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
    microarchitecture : str
        LLVM's name of the processor's kind ("" if it is not known): those of a cloud may have one
        name and be of several kinds.
    """

    cpu: str
    system: str
    python: str
    processors: _Count
    threads: _Count
    cache_per_core: _Size
    cache_shared: _Size
    versions: dict[str, str]
    date: str
    microarchitecture: str = ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The GPU of a run, and what was measured of it.

    Attributes
    ----------
    name : str
    capability : str
        CUDA compute capability, as "9.0".
    multiprocessors : int
    memory, cache : int
        Bytes; the cache is the L2.
    driver, cuda : str
        Version of the driver ("" if it is not known), and of the CUDA that PyTorch is built for.
    clock, memory_clock : int
        The highest clocks of multiprocessors and memory, MHz; 0 if they are not known.
    bandwidth : float
        Measured: bytes read and written a second when device memory is copied.
    """

    name: str
    capability: str
    multiprocessors: _Count
    memory: _Count
    cache: _Size
    driver: str
    cuda: str
    clock: _Size
    memory_clock: _Size
    bandwidth: Annotated[float, Gt(0), Lt(1e18)]


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run.

    Attributes
    ----------
    environment : Environment
    settings : dict of str to number or str
        How it was measured (rounds, warm-up seconds, ...).
    rows : tuple of Row
    gpu : GpuFacts or None
        Where it was measured on one.
    condition : {"quiet", "after-convolution"}
        What came before the calls that were timed.
    """

    environment: Environment
    settings: dict[str, float | int | str]
    rows: tuple[Row, ...]
    gpu: GpuFacts | None = None
    condition: Condition = "quiet"

    @property
    def device(self) -> DeviceName:
        """Where it was measured."""
        return "cuda" if self.gpu else "cpu"

    @property
    def caches(self) -> tuple[int, ...]:
        """Bytes of the device's caches that may be counted on, the largest last."""
        if self.gpu:
            return (self.gpu.cache,)
        return self.environment.cache_per_core, counted(self.environment.cache_shared)


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive values; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
