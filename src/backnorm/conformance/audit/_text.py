"""The text of `backnorm tolerance`: an audit as lines, and the bounds of right kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
from rich.console import Group
from rich.table import Table

from backnorm.conformance.audit._audit import Audit
from backnorm.conformance.formula import IMPRECISE, Mistake
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import KINDS, bound, rungs
from backnorm.dtypes import FLOAT64, statistics_types
from backnorm.errors import counted


def lines(found: Audit) -> Iterator[str]:
    """Yield the lines that say which kernels a test accepts and rejects."""
    # Imprecise kernels have a list of their own, because a right kernel in float32 may be no more
    # accurate than they are.
    for is_imprecise, noun in ((False, "wrong formula"), (True, "imprecise kernel")):
        caught, missed, invisible = (
            [each for each in mistakes if (each in IMPRECISE) == is_imprecise]
            for mistakes in (found.caught, found.missed, found.invisible)
        )
        if not (caught or missed or invisible):
            continue
        judged = counted(len(caught) + len(missed), noun)
        yield f"{len(caught)} of {judged} caught." + " These pass:" * bool(missed)
        yield from _named(missed)
        yield f"{counted(len(invisible), noun)} with the right results on such data:"
        yield from _named(invisible)
    for name, number in found.false_alarms.items():
        yield f"a right kernel, {name}: rejected in {number} of {found.runs}"


def _named(mistakes: Iterable[Mistake]) -> Iterator[str]:
    return (f"  {mistake.says} ({mistake.name})" for mistake in mistakes)


def bounds(dtype: np.dtype, elements: int) -> Group:
    """Return the error bounds of right kernels as a table.

    Parameters
    ----------
    dtype : numpy.dtype
        The element type of x.
    elements : int
        M, the number of elements per channel.
    """
    statistics = statistics_types(dtype)[-1]
    unit = 2.0**-53 if dtype == FLOAT64 else 2.0**-24
    title = f"{dtype}, {elements} elements a channel"
    table = Table(title=title, box=None, title_justify="left", pad_edge=False)
    for head in ("rung", "output", "expected", "guaranteed"):
        table.add_column(head, no_wrap=head != "expected")
    for rung in rungs(dtype):
        for name in GRADIENTS:
            output = dtype if name == "dx" else statistics
            each = (bound(rung, name, output, dtype, elements, kind=kind) for kind in KINDS)
            table.add_row(rung, name, *(found.in_units(unit) for found in each))
    return Group(
        table,
        f"u = 2**{math.log2(unit):.0f}; ulp: of the output's type at the exact value; T: the sum "
        "of the magnitudes of the terms; V, S, R: see docs/tolerance.md, which derives the bounds.",
    )
