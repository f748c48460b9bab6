"""The implementation of `interfaces.Arrays` for NumPy arrays."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from operator import call
from typing import Any

import numpy as np

from backnorm import addresses, engines
from backnorm.aliasing import check_out, own
from backnorm.allocation import LARGE, allocate
from backnorm.dtypes import FLOAT64
from backnorm.engines import Place
from backnorm.interfaces import Arrays, Launch, Operands, Results
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
from backnorm.signature import Kind, Signature

_Operands = Operands[np.ndarray]

_BYTE, _INTEGER = np.dtype(np.uint8), np.dtype(np.int64)

# For a small array, `allocate` takes 0.25 us longer than `empty`, because it is a Python function.
empty = np.empty

# The last bytes of a mask, which say in which order of axes its bits are.
_MARK = slice(-MARK_BYTES, None)
_put = struct.Struct(f"{MARK_BYTES}s").pack_into


def is_plain(array: Any) -> bool:
    """Whether kernels can read an array in place if x is row-major."""
    flags = array.flags
    dense = flags.c_contiguous and flags.aligned and array.dtype.isnative
    return type(array) is np.ndarray and dense


def _new_mask(size: int, mark: bytes) -> np.ndarray:
    """Return a new mask that ends with `mark`, the order of its bits."""
    mask = allocate((size,), _BYTE)
    # `pack_into` takes half the time of an assignment to a slice.
    _put(mask, -len(mark), mark)  # type: ignore[arg-type]
    return mask


# A function that allocates an array.
_Form = Callable[[], np.ndarray]


class NumPy(Arrays[np.ndarray, Place]):
    """NumPy's arrays."""

    classes = (np.ndarray, type(None))

    def facts(self, operands: Sequence[Any], mask: int | None = None) -> list[Hashable]:
        facts: list[Hashable] = [
            None if array is None else (type(array), array.shape, array.dtype, array.flags.num)
            for array in operands
        ]
        # A mask is read in place only if x has the order of axes in which the mask's bits are.
        if mask is not None and operands[mask] is not None:
            facts.append(operands[mask][_MARK].tobytes())
        return facts

    def forms(self, problem: Problem, order: Order) -> dict[Kind, _Form]:
        shape = tuple(problem.shape[axis] for axis in order)
        channels, itemsize = problem.channels, problem.dtype.itemsize
        rows, of_sums = (bin_rows(itemsize), _INTEGER) if problem.reproducible else (2, FLOAT64)
        mark = order_mark(problem.shape, order) if problem.writes_mask else b""
        make = allocate if problem.data_bytes >= LARGE else empty
        return {
            "data": partial(make, shape, problem.dtype),
            "channel": partial(empty, channels, problem.statistics_dtype),
            "mask": partial(_new_mask, mask_size(problem.size), mark),
            "sums": partial(empty, (rows, channels), of_sums),
            "coefficients": partial(empty, (4, channels), np.dtype(problem.arithmetic)),
        }

    def new(self, forms: Sequence[_Form], operands: _Operands) -> list[np.ndarray]:
        return [*map(call, forms)]

    def addresses(self, arrays: _Operands) -> list[int]:
        if addresses.HEADER:
            # Machine code reads the addresses of elements from the array objects.
            return [*map(id, arrays)]
        return [0 if array is None else addresses.address_of(array) for array in arrays]

    def place(self, x: np.ndarray | None) -> Place:
        return engines.place()

    def planned(self, problem: Problem, extents: Extents, place: Place) -> tuple[Any, Launch]:
        return engines.planned(problem, extents, place, addresses.HEADER)

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

    def target(
        self, out: np.ndarray, operands: _Operands, problem: Problem, order: Order
    ) -> np.ndarray | None:
        out = own(out)
        is_plain = check_out(problem, operands, out)
        if problem.residual and problem.signature.overwrites == "dy":
            # After dx is written, dy is read again for the gradient of the residual, so a kernel
            # must not write dx to memory of dy.
            dy = operands[problem.signature.names.index(problem.signature.overwrites)]
            if dy is not None and np.may_share_memory(out, dy):
                return None
        if is_plain and order == _natural(len(order)):
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


@cache
def _natural(rank: int) -> Order:
    """Return the axes in row-major order."""
    return tuple(range(rank))


NUMPY = NumPy()
