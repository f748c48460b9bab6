"""Kernels that go beyond their arrays, to show that the fuzz finds that.

After the right kernel, each of these loads or stores what is not the array's: an element after its
end or before its beginning, or in what it may only read.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from guarded import Guarded

from backnorm_kernels import stage
from backnorm_kernels.record import ADDRESSES, SLOTS

__all__ = ["MUTANTS"]

Access = Callable[[int], None]


def _load(address: int) -> None:
    ctypes.c_int8.from_address(address).value  # noqa: B018 (it is read)


def _store(address: int) -> None:
    ctypes.c_int16.from_address(address).value = 5


def _mutant(field: str, access: Access, where: str) -> Callable[[Guarded], None]:
    """Return what makes kernels access memory beside what a field of the record says."""

    def install(guarded: Guarded) -> None:
        runner = stage.runner

        @functools.cache
        def broken_runner() -> Any:
            run = runner()

            def broken(record: int, header: int) -> int:
                ended: int = run(record, header)
                _go_beyond(guarded, record, field, access, where)
                return ended

            return broken

        stage.runner = broken_runner

    return install


def _go_beyond(guarded: Guarded, record: int, field: str, access: Access, where: str) -> None:
    cells = (ctypes.c_int64 * (max(SLOTS.values()) + 1)).from_address(record)
    address = {"own": record + cells[SLOTS["own"]], "record": record}.get(field)
    if address is None:
        address = cells[SLOTS[field]]
    span = guarded.arena.span_of(address) if address else None
    if span is not None and span[0] < span[1]:
        access({"after": span[1], "before": span[0] - 2, "within": span[0]}[where])


#: By name, what makes kernels wrong.
MUTANTS = {
    f"{access.__name__[1:]} {where} {field}": _mutant(field, access, where)
    for fields, access, where in (
        (ADDRESSES, _load, "after"),
        (("x", "dy", "mask", "mean"), _load, "before"),
        (("out", "residual", "mask", "result", "result_2", "running_mean"), _store, "after"),
        (("out", "mask", "result"), _store, "before"),
        (("x", "dy", "mean", "gamma"), _store, "within"),
        (("record", "own"), _load, "after"),
        (("record", "own"), _store, "after"),
    )
    for field in fields
}
