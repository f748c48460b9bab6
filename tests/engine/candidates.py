"""The plans that a problem may have: what `plan` chooses, and all that gives the same bits.

Only the schedule differs: which channels are summed together, the size of items, tiles, stores,
threads. How the sums are cut, on which the bits depend, follows from the shape and is the same in
all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from backnorm.layout import Extents
from backnorm.machine import Machine
from backnorm.problem import Problem
from backnorm_kernels.geometry import Segments, round_up
from backnorm_kernels.plan import Plan, is_legal, plan

__all__ = ["candidates"]

# The fields of a plan that only its speed depends on, besides its geometry.
_SCHEDULE = ("grouped", "streaming", "threads")

# Elements of an item.
_SHARES = (8192, 65536)

_GROUPS = (1, 4, 16, 64)
_TILES = (128, 512, 1024, 4096)
_DEPTHS = (1, 2, 4, 8)
_ABREAST = (1, 4, 8)

# Elements above which one thread alone is no question where there are several.
_SHARED = 1 << 18


def candidates(problem: Problem, extents: Extents, machine: Machine) -> Iterator[Plan]:
    """Yield all plans worth trying, the one that `plan` chooses first."""
    chosen = plan(problem, extents, machine)
    yield chosen
    known = {_identity(chosen)}
    for values in _products(_choices(chosen, machine)):
        other = _changed(chosen, values)
        if is_legal(other) and _identity(other) not in known:
            known.add(_identity(other))
            yield other


def _choices(chosen: Plan, machine: Machine) -> dict[str, Sequence[Any]]:
    """Return, by the name of a field of the plan or its geometry, the values worth trying."""
    problem, extents, geometry = chosen.problem, chosen.extents, chosen.geometry
    sums = problem.operation != "inference"
    writes = not problem.operation.startswith("reduce")
    several = machine.threads > 1 and problem.size < _SHARED
    found: dict[str, Sequence[Any]] = {
        "threads": (1, machine.threads) if several else (chosen.threads,)
    }
    if writes:
        found["streaming"] = (False, True)
    if isinstance(geometry, Segments):
        found["share"] = (geometry.share, *_SHARES)
        if sums:
            found["grouped"] = (False, True) if writes else (False,)
            groups = {min(group, extents.channels) for group in _GROUPS}
            found["group"] = sorted({geometry.group, *groups} - {0})
        return found
    width = max(1, geometry.width)
    if sums:
        tiles = {min(tile, round_up(width, 16)) for tile in _TILES}
        found["tile"] = sorted({geometry.tile, *tiles})
        found["depth"] = sorted({geometry.depth, *_DEPTHS})
    if writes:
        found["abreast"] = sorted({geometry.abreast, *_ABREAST})
        rows = {round_up(max(1, share // width), 8) for share in _SHARES}
        found["share"] = sorted({geometry.share, *rows})
        found["by_tile"] = sorted({geometry.by_tile, False})
    return found


def _products(choices: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def _changed(chosen: Plan, values: dict[str, Any]) -> Plan:
    """Return the plan with other values, and what follows from them."""
    of_plan = {name: value for name, value in values.items() if name in _SCHEDULE}
    of_geometry = {name: value for name, value in values.items() if name not in of_plan}
    geometry = dataclasses.replace(chosen.geometry, **of_geometry)
    if isinstance(geometry, Segments):
        group = chosen.extents.outer * geometry.group * chosen.extents.inner
        geometry = dataclasses.replace(geometry, batch=max(1, geometry.share // max(1, group)))
    return dataclasses.replace(chosen, geometry=geometry, **of_plan, reasons=("requested",))


def _identity(decided: Plan) -> tuple[Any, ...]:
    """Return what a plan is known by: all but the reasons."""
    geometry = decided.geometry
    if isinstance(geometry, Segments) and decided.grouped:
        # Nothing is written in a second phase.
        geometry = dataclasses.replace(geometry, share=0)
    return geometry, decided.grouped, decided.streaming, decided.threads
