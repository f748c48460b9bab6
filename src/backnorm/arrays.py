"""What an executable needs to know of NumPy's arrays; adapters have such a class for tensors."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from backnorm.aliasing import check_out, own
from backnorm.allocation import allocate
from backnorm.binding import Code
from backnorm.cpu import addresses, engine
from backnorm.cpu.scratch import bin_rows
from backnorm.dtypes import FLOAT64
from backnorm.layout import (
    MARK_BYTES,
    Order,
    dense,
    in_order,
    mask_size,
    memory_order,
    order_mark,
    reordered_mask,
    restore,
)
from backnorm.problem import Problem, as_array
from backnorm.signature import Signature

__all__ = ["NUMPY", "NumPy"]

_BYTE = np.dtype(np.uint8)
_put = struct.Struct(f"{MARK_BYTES}s").pack_into


def _marked(mask: np.ndarray, mark: bytes) -> np.ndarray:
    """Return memory for a mask, with the order of its bits at the end."""
    # Half as long as an assignment to a slice.
    _put(mask, -len(mark), mark)  # type: ignore[arg-type]
    return mask


class NumPy:
    """What an executable needs to know of arrays.

    Attributes
    ----------
    code : Code
    names : dict
        The global names of the code.
    """

    code = Code(
        arrays="numpy",
        facts="(type({}), {}.shape, {}.dtype, {}.flags.num)",
        # Kernels read those of one axis: 0.05 us an operand less than its shape.
        channel_facts="(type({}), {}.size, {}.ndim, {}.dtype, {}.flags.num)",
        # With the order of its bits, which are read in place only if x lies so.
        mask_facts="(type({}), {}.shape, {}.dtype, {}.flags.num, {}[at_end].tobytes())",
        address="id({})" if addresses.HEADER else "address_of({})",
        header=addresses.HEADER,
        stage="stage.__call__",
        constants=(
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
            "data": "empty(shape, dtype)",
            "large data": "allocate(shape, dtype)",
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

    def read(self, operands: Sequence[object], signature: Signature) -> list[Any]:
        """Return the operands as arrays, or raise if one cannot be or is missing."""
        return [
            None if value is None and not operand.required else as_array(operand.name, value)
            for operand, value in zip(signature.operands, operands, strict=True)
        ]

    def described(self, read: Sequence[Any], signature: Signature) -> Sequence[Any]:
        """Return the shapes and types that are checked."""
        return read

    def shown(self, channels: Any) -> Any:
        """Return a per-channel array as NumPy's, for an error message."""
        return channels.reshape(-1)

    def order_of(self, x: Any) -> Order:
        """Return the order of axes in which x is dense, or its own order if it is not."""
        return memory_order(x)

    def place(self, x: Any) -> Any:
        """Return the machine to plan for."""
        return engine.machine()

    def planned(self, *how: Any) -> tuple[Any, Any]:
        """Return a plan and its launch: see `cpu.engine.planned`."""
        return engine.planned(*how)

    def values(self, problem: Problem, order: Order) -> tuple[Any, ...]:
        """Return the values of `code.constants`."""
        shape = tuple(problem.shape[axis] for axis in order)
        size, statistics = mask_size(problem.size), problem.statistics_dtype
        mark = order_mark(problem.shape, order) if problem.writes_mask else None
        rows = bin_rows(problem.dtype.itemsize)
        return (
            shape,
            problem.dtype,
            problem.channels,
            statistics,
            size,
            mark,
            problem.count,
            rows,
        )

    def ready(
        self, read: Sequence[Any], signature: Signature, problem: Problem, order: Order
    ) -> list[Any]:
        """Return the operands as kernels read them: themselves, or copies."""
        found: list[Any] = []
        for array, operand in zip(read, signature.operands, strict=True):
            if array is None:
                found.append(None)
            elif operand.kind == "data":
                found.append(in_order(array, order, problem.dtype))
            elif operand.kind == "mask":
                found.append(reordered_mask(dense(array, _BYTE), problem.shape, order))
            else:
                found.append(dense(array, problem.statistics_dtype))
        return found

    def are_plain(self, operands: Sequence[Any], order: Order, ready: Sequence[Any] = ()) -> bool:
        """Whether kernels read the operands in place, here and in every call of the same facts."""
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

    def layouts(self, operands: Sequence[Any]) -> Any:
        """Return what a key lacks of how the operands lie, or None if they are not all arrays."""
        found = []
        for array in operands:
            if array is not None and type(array) is not np.ndarray:
                return None
            found.append(None if array is None else array.strides)
        return tuple(found)

    def finished(
        self,
        results: tuple[Any, ...],
        operands: Sequence[Any],
        ready: Sequence[Any],
        signature: Signature,
        order: Order,
    ) -> tuple[Any, ...]:
        """Return the results with their axes in the caller's order."""
        if order == _natural(len(order)):
            return results
        return tuple(
            found if found is None or result.kind != "data" else restore(found, order)
            for found, result in zip(results, signature.results, strict=True)
        )

    def new(self, problem: Problem, order: Order) -> Any:
        """Return a new array like x, dense in this order."""
        shape = tuple(problem.shape[axis] for axis in order)
        return self.names["allocate"](shape, problem.dtype)

    def target(
        self,
        out: Any,
        operands: Sequence[Any],
        signature: Signature,
        problem: Problem,
        order: Order,
        *,
        in_place: bool = False,
    ) -> Any:
        """Return `out` as a kernel can write to it, or None if the result must be copied there.

        `in_place` says that kernels read all operands in place, in row-major order.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            If `out` is not what the first result may be written to.
        """
        out = own(out)
        is_plain = check_out(problem, signature, operands, out, contiguous=in_place)
        if problem.residual and signature.overwrites is not None:
            # The gradient of the residual is read from dy once more after dx is written.
            dy: Any = operands[signature.names.index(signature.overwrites)]
            if np.may_share_memory(out, dy):
                return None
        if is_plain and (in_place or order == _natural(len(order))):
            return out
        if out.dtype == problem.dtype and out.flags.aligned:
            moved = out.transpose(order)
            if moved.flags.c_contiguous:
                return moved
        return None

    def put(self, result: Any, out: Any) -> Any:
        """Return `out`, with the result copied there unless it was written there."""
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
