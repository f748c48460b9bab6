"""What to time: the workload files, and the cells that a choice of options makes of them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, TypeVar, cast, get_args

from backnorm.errors import ArgumentValueError
from benchmarks.model import DEVICES, ITEMSIZE, Cell, DeviceName, ElementType, Operation

__all__ = [
    "ALL",
    "LAYOUTS",
    "OPERATIONS",
    "Workload",
    "chosen",
    "representative",
    "select",
    "words",
    "workloads",
]

_Name = TypeVar("_Name", bound=str)

#: The word for everything that an option accepts.
ALL = "all"

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
LAYOUTS: tuple[Literal["NCX", "NXC"], ...] = ("NCX", "NXC")

# The order of the suites in a run: from networks to edges, and the sweep at the end.
_ORDER = (
    "batch256",
    "resnet50",
    "inception",
    "densenet",
    "tensorflow",
    "3d",
    "other",
    "small",
    "sweep",
)

# The cells of a quick run.
_QUICK: dict[DeviceName, str] = {"cpu": "quick", "cuda": "quick-cuda"}


@dataclass(frozen=True, slots=True)
class Workload:
    """A suite: shapes, where they come from, and what `all` means for them.

    Attributes
    ----------
    name, title, reference : str
    shapes : tuple of tuple of int
        (N, C, spatial ...).
    ops, dtypes : tuple of str
        What ``all`` stands for; anything else has to be asked for by name.
    devices : tuple of str
        Where there is such a suite; on all of them unless the file says otherwise.
    """

    name: str
    title: str
    reference: str
    shapes: tuple[tuple[int, ...], ...]
    ops: tuple[Operation, ...]
    dtypes: tuple[str, ...]
    devices: tuple[DeviceName, ...]


@cache
def workloads(device: DeviceName = "cpu") -> dict[str, Workload]:
    """Return all suites of a device by name, in the order in which they run."""
    found = {name: _workload(name) for name in _ORDER}
    return {name: workload for name, workload in found.items() if device in workload.devices}


def _values(name: str) -> dict[str, Any]:
    file = resources.files(__package__) / "workloads" / f"{name}.toml"
    return tomllib.loads(file.read_text("utf-8"))


def _workload(name: str) -> Workload:
    values = _values(name)
    return Workload(
        name=values["name"],
        title=values["title"],
        reference=values["reference"],
        shapes=tuple(tuple(shape) for shape in values["shapes"]),
        ops=tuple(values["ops"]),
        dtypes=tuple(values["dtypes"]),
        devices=tuple(values.get("devices", DEVICES)),
    )


def select(
    suites: Sequence[str],
    ops: Sequence[str],
    dtypes: Sequence[str],
    layouts: Sequence[str],
    device: DeviceName = "cpu",
) -> list[Cell]:
    """Return the cells of a choice, those on the same arrays side by side.

    Parameters
    ----------
    suites, ops, dtypes, layouts : sequence of str
        Names; ``all`` for every suite and layout, and for the operations and types that the
        workload's file lists. Arrays of rank 2 have one layout, which counts as NCX.
    device : {"cpu", "cuda"}
        Some suites are of one device alone.

    Raises
    ------
    ArgumentValueError
        For a name that is not known, or a choice without any cell.
    """
    wanted_suites = chosen("--suite", suites, tuple(workloads(device)))
    wanted_ops = chosen("--op", ops, OPERATIONS)
    wanted_dtypes = chosen("--dtype", dtypes, tuple(ITEMSIZE))
    wanted_layouts = chosen("--layout", layouts, LAYOUTS)
    cells = []
    for suite in wanted_suites:
        workload = workloads(device)[suite]
        for dtype in _meant(wanted_dtypes, dtypes, workload.dtypes):
            for shape in workload.shapes:
                for layout in wanted_layouts:
                    if len(shape) == 2 and layout != "NCX":
                        continue
                    cells += [
                        _cell(suite, op, shape, layout, dtype)
                        for op in _meant(wanted_ops, ops, workload.ops)
                    ]
    if not cells:
        raise ArgumentValueError(
            "--layout",
            "leaves nothing to time: arrays of rank 2 have one layout",
            came=", ".join(layouts),
            accepted="NCX",
        )
    return cells


def representative(device: DeviceName = "cpu") -> list[Cell]:
    """Return the cells of a quick run."""
    return [
        _cell(cell["suite"], cell["op"], tuple(cell["shape"]), layout, "float32")
        for cell in _values(_QUICK[device])["cells"]
        for layout in LAYOUTS
    ]


def words(text: str) -> list[str]:
    """Return the names that are typed with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def chosen(option: str, given: Sequence[str], accepted: Sequence[_Name]) -> list[_Name]:
    """Return the names that an option stands for, in the order of `accepted`.

    Raises
    ------
    ArgumentValueError
        For a name that is neither accepted nor ``all``, or no name.
    """
    if not given:
        raise ArgumentValueError(option, "names nothing", accepted=", ".join((*accepted, ALL)))
    for name in given:
        if name != ALL and name not in accepted:
            raise ArgumentValueError(
                option, "unknown", came=repr(name), accepted=", ".join((*accepted, ALL))
            )
    return [name for name in accepted if name in given or ALL in given]


def _meant(wanted: Iterable[str], given: Sequence[str], listed: Sequence[str]) -> list[str]:
    """Return what was asked for by name, or by ``all`` if the workload lists it."""
    return [name for name in wanted if name in given or name in listed]


def _cell(suite: str, op: str, shape: tuple[int, ...], layout: str, dtype: str) -> Cell:
    return Cell(
        suite,
        cast(Operation, op),
        shape,
        cast(Literal["NCX", "NXC"], layout),
        cast(ElementType, dtype),
    )
