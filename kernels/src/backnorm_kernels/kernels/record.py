"""How kernels read a record: the fields of its head by name, its 64-bit words (*cells*), and the
arrays whose addresses are in the record.

`record` describes the record. `Kind` has the compile-time parameters of a kernel.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from backnorm_kernels.kernels.epilogue import (
    BackwardOutput,
    Epilogue,
    ForwardOutput,
    Gradient,
)
from backnorm_kernels.kernels.jit import emitted, inlined
from backnorm_kernels.kernels.work_queue import set_flag
from backnorm_kernels.record import GEOMETRIES, SLOTS, dtype_of

_I64 = ir.IntType(64)
_READY = SLOTS["ready"]


class Kind(types.Type):
    """The compile-time parameters of a kernel besides its geometry.

    Parameters
    ----------
    element : numba type
        The storage form of elements: see `storage`.
    arithmetic : numba type
        The type in which elements are computed, float64 or float32: see `float32`.
    direction : {"forward", "backward"}
        forward: y from x, with or without sums of x. backward: dx from x and dy, or, if the record
        is `frozen`, from dy alone.
    """

    def __init__(self, element: Any, arithmetic: Any, direction: str) -> None:
        self.element, self.arithmetic, self.direction = element, arithmetic, direction
        super().__init__(name=f"Kind({element}, {arithmetic}, {direction})")


register_model(Kind)(models.OpaqueModel)


def _head_as(geometry: str) -> Any:
    """Return a function that makes a record's address a pointer to its head in this geometry."""
    head = numba.from_dtype(dtype_of(geometry))

    @intrinsic
    def head_at(typingctx, record):
        def codegen(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(head))

        return head(types.int64), codegen

    return head_at


#: Functions that convert an address to the head of a record, one for each geometry. `common_head`
#: converts an address to a head that has only the fields that all geometries have.
segments_head, columns_head = map(_head_as, GEOMETRIES)
common_head = _head_as("")


def _addressed(element_of: Any) -> Any:
    """Return a function (kind, number) that makes a number a pointer to type `element_of(kind)`."""

    @intrinsic
    def at(typingctx, kind, number):
        place = types.CPointer(element_of(kind))

        def codegen(context, builder, signature, arguments):
            return builder.inttoptr(arguments[1], context.get_value_type(place))

        return place(kind, types.int64), codegen

    return at


#: Three functions of (kind, number). Each converts the number, which is an address, to a pointer:
#: to elements of the kind's type, to float32 elements, or to float64 elements.
values_at = _addressed(lambda kind: kind.element)
singles_at = _addressed(lambda kind: types.float32)
doubles_at = _addressed(lambda kind: types.float64)


@emitted(types.CPointer(types.int64)(types.int64))
def cells_of(builder, record):
    """Return a pointer to the cells (64-bit words) of the record at an address."""
    return builder.inttoptr(record, _I64.as_pointer())


@inlined
def scratch_of(kind, head, record):
    """Return the address of the table of channels."""
    return doubles_at(kind, record + head.scratch)


@inlined
def own_of(kind, head, record, index):
    """Return the address of the memory of a participant."""
    return doubles_at(kind, record + head.own + index * head.own_bytes)


@inlined
def ended(refused):
    """Return the result of a call: 1, or -1 - c if channel c is invalid.

    A channel is invalid if its variance + epsilon is zero or negative: see `channels.prepare`.
    """
    return 1 if refused < 0 else -1 - refused


@inlined
def cancel(head, cells, refused):
    """Cancel a call with an invalid channel, so that no participant waits or takes another item."""
    head.refused = 1 + refused
    head.summed = 0
    head.items = 0
    set_flag(cells, _READY)


def _operand(forward: tuple[Any, ...], backward: tuple[Any, ...]) -> Any:
    """Return a function (kind, cells) that reads an operand from fields of the record.

    For each of the two directions: the operand's type (`epilogue.Addresses`), followed by the names
    of the fields of the record to read, one for each part of the operand.
    """

    @intrinsic
    def operand(typingctx, kind, cells):
        model, *fields = forward if kind.direction == "forward" else backward
        model = model(kind.element)

        def codegen(context, builder, signature, arguments):
            def read(part, field):
                number = builder.load(builder.gep(arguments[1], [ir.Constant(_I64, SLOTS[field])]))
                if part == types.boolean:
                    return builder.icmp_signed("!=", number, ir.Constant(_I64, 0))
                if isinstance(part, types.CPointer):
                    return builder.inttoptr(number, context.get_value_type(part))
                return builder.bitcast(number, context.get_value_type(part))

            structure = cgutils.create_struct_proxy(model)(context, builder)
            for (name, part), field in zip(model.parts.items(), fields, strict=True):
                setattr(structure, name, read(part, field))
            return structure._getvalue()

        return model(kind, cells), codegen

    return operand


#: Functions of (kind, cells) that return an operand: dy, or the epilogue of a forward pass; the
#: output.
dy_of = _operand((Epilogue, "residual", "ceiling", "relu"), (Gradient, "dy", "mask", "relu"))
output_of = _operand(
    (ForwardOutput, "out", "mask", "beyond", "relu"),
    (BackwardOutput, "out", "residual", "dy", "mask", "relu"),
)
