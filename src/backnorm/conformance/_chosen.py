"""Cases of a battery that are judged as computed in one arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from backnorm.arithmetics import check_arithmetic
from backnorm.dtypes import FLOAT64

__all__ = ["computed_in"]

_Case = TypeVar("_Case", bound=Any)


def computed_in(cases: Iterable[_Case], arithmetic: object) -> Iterator[_Case]:
    """Yield the cases whose elements may be computed so, each with that to be judged by.

    None: all cases as they are.
    """
    name = None if arithmetic is None else check_arithmetic(arithmetic)
    for case in cases:
        if name is None:
            yield case
        elif name == "float64" or case.data.x.dtype != FLOAT64:
            yield replace(case, arithmetic=name)
