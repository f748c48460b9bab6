"""Problems to time: the workload files, and the cells that options select from them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, TypeVar, get_args

import typer

__all__ = ["DEVICES", "FLOOR", "ITEMSIZE", "LAYOUTS", "LEAST_PASSES", "OF_OURS", "OPERATIONS",
           "OURS", "OURS_IN_FLOAT32", "OURS_REPRODUCIBLE", "PASSES", "SWEEP", "Cell", "Form",
           "Layout", "Operation", "chosen", "quick", "select", "workloads"]  # fmt: skip

_Name = TypeVar("_Name", bound=str)

Operation = Literal["backward", "forward", "inference"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
Layout = Literal["NCX", "NXC"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
DEVICES = ("cpu", "cuda")

#: Bytes of an element.
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}

#: How a contestant returns its result: in memory that the caller owns, or newly allocated.
Form = Literal["out", "allocate"]

#: Passes over an array of x's size that two plain loops make; GB/s count these.
PASSES: dict[Operation, int] = {"backward": 5, "forward": 3, "inference": 2}

#: The fewest possible passes: inputs are read once, and the output is written once.
LEAST_PASSES: dict[Operation, int] = {"backward": 3, "forward": 2, "inference": 2}

#: Names of our own contestants and of the floor. The first computes in its default arithmetic.
OURS, OURS_IN_FLOAT32 = "backnorm", "backnorm-float32"
OURS_REPRODUCIBLE = "backnorm-reproducible"
OF_OURS = OURS, OURS_IN_FLOAT32, OURS_REPRODUCIBLE
FLOOR = "floor"

#: The suite that varies only the size. The documentation's means of ratios to peers leave it out.
SWEEP = "sweep"

# The order of the suites in a run.
_ORDER = ("batch256", "resnet50", "inception", "densenet", "tensorflow", "3d", "other", "small",
          SWEEP)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One problem to time.

    Attributes
    ----------
    suite : str
    op : {"backward", "forward", "inference"}
    shape : tuple of int
        (N, C, spatial ...) in both layouts; memory is in the order of `layout`.
    layout : {"NCX", "NXC"}
    dtype : str
    """

    suite: str
    op: Operation
    shape: tuple[int, ...]
    layout: Layout
    dtype: str

    @property
    def size(self) -> int:
        """Elements of x."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of x."""
        return self.size * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        """Return the cell in a line."""
        return f"{self.op} ({','.join(map(str, self.shape))}) {self.layout} {self.dtype}"


@cache
def workloads(device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Return the suites of a device by name, in the order in which they run."""
    found = {name: _file(name) for name in _ORDER}
    return {name: each for name, each in found.items() if device in each.get("devices", DEVICES)}


def select(suites: str, ops: str, dtypes: str, layouts: str, device: str = "cpu") -> list[Cell]:
    """Return the cells that options select; cells on the same arrays are adjacent.

    Parameters
    ----------
    suites, ops, dtypes, layouts : str
        Names, separated by commas; ``all`` means every suite and layout, and the operations and
        types that the workload's file lists. Arrays of rank 2 have one layout, NCX.
    device : {"cpu", "cuda"}

    Raises
    ------
    typer.BadParameter
        For an unknown name, or if no cell is selected.
    """
    found = workloads(device)
    wanted_ops = chosen("--op", ops, OPERATIONS)
    wanted_dtypes = chosen("--dtype", dtypes, tuple(ITEMSIZE))
    wanted_layouts = chosen("--layout", layouts, LAYOUTS)
    cells = [
        Cell(suite, op, tuple(shape), layout, dtype)
        for suite in chosen("--suite", suites, tuple(found))
        for dtype in _meant(wanted_dtypes, dtypes, found[suite]["dtypes"])
        for shape in found[suite]["shapes"]
        for layout in wanted_layouts
        if len(shape) > 2 or layout == "NCX"
        for op in _meant(wanted_ops, ops, found[suite]["ops"])
    ]
    if not cells:
        raise typer.BadParameter("leaves nothing to time: arrays of rank 2 have the layout NCX",
                                 param_hint="--layout")  # fmt: skip
    return cells


def quick(device: str = "cpu") -> list[Cell]:
    """Return the cells of a quick run."""
    listed = _file("quick" if device == "cpu" else "quick-cuda")["cells"]
    return [
        Cell(each["suite"], each["op"], tuple(each["shape"]), layout, "float32")
        for each in listed
        for layout in LAYOUTS
    ]


def chosen(option: str, text: str, accepted: Sequence[_Name]) -> list[_Name]:
    """Return the names that an option lists, in the order of `accepted`.

    Raises
    ------
    typer.BadParameter
        If there is no name, or if a name is neither accepted nor ``all``.
    """
    names = _words(text)
    unknown = [name for name in names if name not in (*accepted, "all")]
    if unknown or not names:
        got = repr(unknown[0]) if unknown else "no name"
        expected = ", ".join((*accepted, "all"))
        raise typer.BadParameter(f"got {got}; expected {expected}", param_hint=option)
    return [name for name in accepted if name in names or "all" in names]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _meant(wanted: Sequence[_Name], text: str, listed: Sequence[str]) -> list[_Name]:
    """Return the names that were typed; for ``all``, those that the workload lists."""
    return [name for name in wanted if name in _words(text) or name in listed]


def _file(name: str) -> dict[str, Any]:
    file = resources.files(__package__) / "workloads" / f"{name}.toml"
    return tomllib.loads(file.read_text("utf-8"))
