"""Describe a case: its inputs, the bounds of its outputs, and the wrong kernels it rejects."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table

from backnorm.conformance._ulps import ulp_at
from backnorm.conformance.battery import Case
from backnorm.conformance.formula import WRONG
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import GradientLadder
from backnorm.conformance.verify.proof import catches


def show_about(case: Case, console: Console) -> None:
    """Print the inputs of a case, the bounds of its outputs, and the wrong kernels that fail it."""
    ladder = GradientLadder.of(*case.operands, **case.options)
    caught = catches(case, ladder)
    passed = [mistake.name for mistake in WRONG if mistake.name not in caught]
    statistics = "training" if case.training else "frozen statistics"
    console.print(
        f"{case.name}: {statistics}, {case.data.data_format}, epsilon {case.data.epsilon:g}, "
        f"{ladder.count} elements a channel",
        soft_wrap=True,
    )
    for table in (_inputs(case), _outputs(ladder)):
        console.print()
        console.print(table)
    console.print("condition: median of T over the exact value; rungs: median bounds in ulps")
    console.print()
    for verb, names in (("rejects", caught), ("lets pass", passed)):
        text = f"{verb} {len(names)} of {len(WRONG)} wrong kernels: {', '.join(names)}"
        console.print(text)


def _inputs(case: Case) -> Table:
    table = _table("", "type", "shape", "least", "greatest", "mean", "deviation")
    for name, array in case.inputs.items():
        if array is None:
            table.add_row(name, "not passed")
            continue
        wide = array.astype(np.float64)
        with np.errstate(all="ignore"):
            facts = wide.min(), wide.max(), wide.mean(), wide.std()
        shape = "x".join(map(str, array.shape))
        table.add_row(name, str(array.dtype), shape, *(f"{fact:.4g}" for fact in facts))
    return table


def _outputs(ladder: GradientLadder) -> Table:
    """Return a table with a column for each gradient. The rows are the gradient's type, the median
    and the largest condition number of its elements, and the median of each rung's bound, in ulps.
    """
    columns: list[list[str]] = []
    for name in GRADIENTS:
        size, terms = np.abs(ladder.value(name).hi), ladder.terms(name)
        dtype = ladder.element_type(name)
        ulp = ulp_at(ladder.value(name), dtype)
        with np.errstate(all="ignore"):
            # For each element, `terms` has T, the sum of the magnitudes of the terms of the
            # element's formula. If T is 0, every term is 0, so the element has no rounding error,
            # and its condition number is set to 1.
            condition = np.divide(terms, size, out=np.ones_like(terms), where=terms != 0)
            bounds = [np.median(each / ulp) for each in ladder.allowances(name, dtype).values()]
        numbers = np.median(condition), condition.max(), *bounds
        columns.append([str(dtype), *(f"{each:.4g}" for each in numbers)])
    heads = "type", "condition", "worst condition", *ladder.allowances("dx", ladder.data)
    table = _table("", *GRADIENTS)
    for head, *cells in zip(heads, *columns, strict=True):
        table.add_row(head, *cells)
    return table


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, no_wrap=True)
    return table
