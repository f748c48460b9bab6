"""The implementation of `interfaces.Arrays` for NumPy arrays."""

from __future__ import annotations

import functools
import struct
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from backnorm import addresses, engines
from backnorm.aliasing import check_out, own
from backnorm.allocation import LARGE, allocate
from backnorm.dtypes import FLOAT64
from backnorm.engines import Place
from backnorm.interfaces import Arrays, Code, Launch, Operands, Results
from backnorm.layout import (
    MARK_BYTES,
    Extents,
    Order,
    dense,
    in_order,
    mask_size,
    memory_order,
    order_mark,
    reordered_mask,
    restore,
)
from backnorm.problem import Problem
from backnorm.reproducible_sums import bin_rows
from backnorm.scalars import as_array
from backnorm.signature import Signature

_Operands = Operands[np.ndarray]

_BYTE = np.dtype(np.uint8)
_put = struct.Struct(f"{MARK_BYTES}s").pack_into


def _marked(mask: np.ndarray, mark: bytes) -> np.ndarray:
    """Store `mark`, the order of a mask's bits, at the end of the mask, and return the mask."""
    # `pack_into` takes half the time of an assignment to a slice.
    _put(mask, -len(mark), mark)  # type: ignore[arg-type]
    return mask


class NumPy(Arrays[np.ndarray, Place]):
    """NumPy's arrays."""

    code = Code(
        arrays="numpy",
        facts="(type({}), {}.shape, {}.dtype, {}.flags.num)",
        # A per-channel array must have one axis. So the facts `size` and `ndim` together say as
        # much as `shape`. Reading `size` takes 0.05 us less than reading `shape`.
        channel_facts="(type({}), {}.size, {}.ndim, {}.dtype, {}.flags.num)",
        # The facts of a mask include the memory order of the elements that its bits stand for,
        # because the mask is read in place only if x has the same order.
        mask_facts="(type({}), {}.shape, {}.dtype, {}.flags.num, {}[at_end].tobytes())",
        address="id({})" if addresses.HEADER else "address_of({})",
        header=addresses.HEADER,
        stage="stage.__call__",
        constants=(
            "is_large",
            "shape",
            "dtype",
            "channels",
            "statistics",
            "mask_bytes",
            "mark",
            "count",
            "rows",
        ),
        new={
            # `allocate` is a Python function, which takes 0.25 us longer than `empty`. So
            # `allocate` is called only for large data arrays and for masks.
            "data": "(allocate if is_large else empty)(shape, dtype)",
            "channel": "empty(channels, statistics)",
            "mask": "marked(allocate((mask_bytes,), byte), mark)",
            "sums": "empty((2, channels), double)",
            "coefficients": "empty((4, channels), double)",
            "bins": "empty((rows, channels), integer)",
            "count": "count",
        },
    )
    names: ClassVar[dict[str, Any]] = {
        "address_of": addresses.address_of,
        "allocate": allocate,
        "at_end": slice(-MARK_BYTES, None),
        "byte": _BYTE,
        "double": FLOAT64,
        "empty": np.empty,
        "integer": np.dtype(np.int64),
        "marked": _marked,
    }

    def values(self, problem: Problem, order: Order) -> tuple[object, ...]:
        return (
            problem.data_bytes >= LARGE,
            tuple(problem.shape[axis] for axis in order),
            problem.dtype,
            problem.channels,
            problem.statistics_dtype,
            mask_size(problem.size),
            order_mark(problem.shape, order) if problem.writes_mask else None,
            problem.count,
            bin_rows(problem.dtype.itemsize),
        )

    def place(self, x: np.ndarray | None) -> Place:
        return engines.place()

    def planned(
        self, problem: Problem, extents: Extents, place: Place, exchanged: bool
    ) -> tuple[Any, Launch]:
        return engines.planned(problem, extents, place, exchanged)

    def order_of(self, x: np.ndarray) -> Order:
        return memory_order(x)

    def read(self, operands: Sequence[object], signature: Signature) -> _Operands:
        return [
            None if value is None and not operand.required else as_array(operand.name, value)
            for operand, value in zip(signature.operands, operands, strict=True)
        ]

    def ready(self, read: _Operands, problem: Problem, order: Order) -> _Operands:
        ready: list[np.ndarray | None] = []
        for array, operand in zip(read, problem.signature.operands, strict=True):
            if array is None:
                ready.append(None)
            elif operand.kind == "data":
                ready.append(in_order(array, order, problem.dtype))
            elif operand.kind == "mask":
                ready.append(reordered_mask(dense(array, _BYTE), problem.shape, order))
            else:
                ready.append(dense(array, problem.statistics_dtype))
        return ready

    def are_plain(self, operands: Sequence[Any], order: Order, ready: _Operands = ()) -> bool:
        return order == _natural(len(order)) and all(
            array is None
            or (
                type(array) is np.ndarray
                and array.flags.c_contiguous
                and array.flags.aligned
                and array.dtype.isnative
                and addresses.address_of(array) == addresses.address_of(read)
            )
            for array, read in zip(operands, ready or operands, strict=True)
        )

    def layouts(self, operands: Sequence[object]) -> Hashable:
        layouts = []
        for array in operands:
            if array is not None and type(array) is not np.ndarray:
                return None
            layouts.append(None if array is None else array.strides)
        return tuple(layouts)

    def finished(
        self,
        results: Results,
        operands: _Operands,
        ready: _Operands,
        problem: Problem,
        order: Order,
    ) -> Results:
        if order == _natural(len(order)):
            return results
        return tuple(
            array if array is None or result.kind != "data" else restore(array, order)
            for array, result in zip(results, problem.signature.results, strict=True)
        )

    def new(self, problem: Problem, order: Order) -> np.ndarray:
        """Return a new row-major array of x's type, whose axes are those of x in this order."""
        shape = tuple(problem.shape[axis] for axis in order)
        array: np.ndarray = self.names["allocate"](shape, problem.dtype)
        return array

    def target(
        self,
        out: np.ndarray,
        operands: _Operands,
        problem: Problem,
        order: Order,
        in_place: bool = False,
    ) -> np.ndarray | None:
        out = own(out)
        is_plain = check_out(problem, operands, out, contiguous=in_place)
        if problem.residual and problem.signature.overwrites == "dy":
            # After dx is written, dy is read again for the gradient of the residual, so a kernel
            # must not write dx to memory of dy.
            dy = operands[problem.signature.names.index(problem.signature.overwrites)]
            if dy is not None and np.may_share_memory(out, dy):
                return None
        if is_plain and (in_place or order == _natural(len(order))):
            return out
        if out.dtype == problem.dtype and out.flags.aligned:
            moved = out.transpose(order)
            if moved.flags.c_contiguous:
                return moved
        return None

    def put(self, result: np.ndarray, out: np.ndarray) -> np.ndarray:
        if result is not out:
            memory = own(out)
            if not np.may_share_memory(result, memory):
                memory[...] = result
        return out


@functools.cache
def _natural(rank: int) -> Order:
    """Return the axes in row-major order."""
    return tuple(range(rank))


NUMPY = NumPy()
