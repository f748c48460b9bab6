"""Describe a case: its inputs, the bounds of its outputs, and the wrong kernels it rejects."""

from __future__ import annotations

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from backnorm.conformance._ulps import ulp_at
from backnorm.conformance.battery import Case
from backnorm.conformance.formula import WRONG
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import GradientLadder
from backnorm.conformance.verify.operations import catches

__all__ = ["about"]


def about(case: Case) -> Group:
    """Return the inputs of a case, the bounds of its outputs, and the kernels that fail it."""
    ladder = GradientLadder.of(*case.operands, **case.options)
    caught = catches(case, ladder)
    passed = [mistake.name for mistake in WRONG if mistake.name not in caught]
    statistics = "training" if case.training else "frozen statistics"
    return Group(
        _line(
            f"{case.name}: {statistics}, {case.data.data_format}, epsilon {case.data.epsilon:g}, "
            f"{ladder.count} elements a channel"
        ),
        "",
        _inputs(case),
        "",
        _outputs(ladder),
        _line("condition: median of T over the exact value; rungs: median bounds in ulps"),
        "",
        *(
            _line(f"{verb} {len(names)} of {len(WRONG)} wrong kernels: {', '.join(names)}")
            for verb, names in (("rejects", caught), ("lets pass", passed))
        ),
    )


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ignore")


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
