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
    Activation,
    Identity,
    Marking,
    Masked,
    ReLU,
    Unread,
    WithResidual,
)
from backnorm_kernels.kernels.jit import emitted, inlined
from backnorm_kernels.kernels.work_queue import set_flag
from backnorm_kernels.record import GEOMETRIES, SLOTS, dtype_of

_I64 = ir.IntType(64)
_READY = SLOTS["ready"]


class Kind(types.Type):
    """The compile-time parameters of a kernel.

    Parameters
    ----------
    element : numba type
        The storage form of elements: see `storage`.
    arithmetic : numba type
        The type in which elements are computed, float64 or float32: see `singles`.
    operation : {"forward", "backward", "frozen"}
        forward: y from x, with or without sums of x. backward: dx from x and dy. frozen: dx from dy
        alone.
    follows : {"", "relu", "activation"}
        The epilogue. relu: y is limited to the range from 0 to the ceiling, and dy counts as 0
        unless 0 < y < ceiling. activation: any other activation, only in a forward pass (see
        `activation`).
    """

    def __init__(self, element: Any, arithmetic: Any, operation: str, follows: str) -> None:
        self.element, self.arithmetic = element, arithmetic
        self.operation, self.follows = operation, follows
        super().__init__(name=f"Kind({element}, {arithmetic}, {operation}, {follows})")


register_model(Kind)(models.OpaqueModel)


def _reduced(reduce: Any) -> Any:
    """Return a function for kernels that maps a kind to the more general kind `reduce(kind)`."""

    @intrinsic
    def reduced(typingctx, kind):
        return reduce(kind)(kind), lambda context, *_: context.get_dummy_value()

    return reduced


def _of_pass(kind: Kind) -> Kind:
    direction = "forward" if kind.operation == "forward" else "backward"
    return Kind(kind.element, kind.arithmetic, direction, "")


#: `of_operation` returns a kind without its epilogue. `of_pass` also returns a kind without its
#: epilogue, but replaces the operation of a frozen backward pass by "backward". A function that is
#: compiled for such a reduced kind serves the kernels of several kinds.
of_operation = _reduced(lambda kind: Kind(kind.element, kind.arithmetic, kind.operation, ""))
of_pass = _reduced(_of_pass)


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
#: converts an address to a head in which only the fields that all geometries have may be used.
segments_head, columns_head, floor_head = map(_head_as, GEOMETRIES)
common_head = floor_head


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


def _operand(choose: Any) -> Any:
    """Return a function (kind, cells) that reads an operand from fields of the record.

    `choose` takes `kind`. It returns the operand's type, followed by the names of the fields of the
    record to read, one for each part of the operand.
    """

    @intrinsic
    def operand(typingctx, kind, cells):
        model, *fields = choose(kind)

        def codegen(context, builder, signature, arguments):
            def read(part, field):
                number = builder.load(builder.gep(arguments[1], [ir.Constant(_I64, SLOTS[field])]))
                if isinstance(part, types.CPointer):
                    return builder.inttoptr(number, context.get_value_type(part))
                return builder.bitcast(number, context.get_value_type(part))

            if isinstance(model, types.Opaque):
                return context.get_dummy_value()
            if isinstance(model, types.CPointer):
                return read(model, *fields)
            structure = cgutils.create_struct_proxy(model)(context, builder)
            for (name, part), field in zip(model.parts.items(), fields, strict=True):
                setattr(structure, name, read(part, field))
            return structure._getvalue()

        return model(kind, cells), codegen

    return operand


def _summed(kind: Kind) -> tuple[Any, ...]:
    if kind.operation == "forward":
        return (Identity(),)
    if kind.follows == "relu":
        return Masked(kind.element), "dy", "mask"
    return types.CPointer(kind.element), "dy"


def _followed(kind: Kind) -> tuple[Any, ...]:
    if kind.follows == "relu" and kind.operation == "forward":
        return ReLU(kind.element), "residual", "ceiling"
    if kind.follows == "activation":
        return Activation(kind.element), "dy", "activation"
    return _summed(kind)


def _written(kind: Kind) -> tuple[Any, ...]:
    if kind.follows != "relu":
        return types.CPointer(kind.element), "out"
    if kind.operation == "forward":
        return Marking(kind.element), "out", "mask", "beyond"
    return WithResidual(kind.element), "out", "residual", "dy", "mask"


#: Functions of (kind, cells) that return an operand. `summed_dy` returns the dy that is summed,
#: `output_dy` the dy from which the output is computed, and `output_of` the output.
summed_dy, output_dy, output_of = map(_operand, (_summed, _followed, _written))
output_x = _operand(
    lambda kind: (Unread(),) if kind.operation == "frozen" else (types.CPointer(kind.element), "x")
)
