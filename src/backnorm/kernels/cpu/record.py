"""The one argument of every kernel: a record, an array of integers with all that a call needs.

A kernel is thereby a plain native function of an address and a number, which Python calls, a
thread of ours, or XLA without Python. What cannot be a number in it is decided when the kernel is
compiled, and is its `Kind`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from backnorm.kernels.cpu.jit import inlined
from backnorm.kernels.cpu.rectified import Marking, Masked, Rectifier, Sided
from backnorm.kernels.cpu.threads import DONE_CELL, raise_flag

__all__ = [
    "ADDRESSES",
    "BETA",
    "COUNT",
    "CURSOR",
    "DONE",
    "DY",
    "EPSILON",
    "FAILED",
    "FINISHES",
    "FROM_DATA",
    "FROM_STATISTICS",
    "FUSED",
    "GAMMA",
    "GEOMETRY",
    "ITEMS",
    "JOINED",
    "MASK",
    "MEAN",
    "MEANS_ALONE",
    "MOMENTUM",
    "OUT",
    "PREPARES",
    "READY",
    "RESULT",
    "RESULT_2",
    "RUNNING_MEAN",
    "RUNNING_VARIANCE",
    "SCRATCH",
    "SETTLES",
    "SIDE",
    "SPACE",
    "STATISTICS",
    "STREAMING",
    "SUMMED",
    "VARIANCE",
    "Kind",
    "X",
    "call",
    "call_off",
    "cells_of",
    "doubles_at",
    "ended",
    "gradient_of",
    "number",
    "number_of",
    "output_of",
    "rest_of",
    "seen_of",
    "singles_at",
    "values_at",
]

#: Addresses of arrays, 0 where there is none: x; dy; the output; the residual of a forward pass, or
#: its gradient in a backward pass; the mask of a rectifier; statistics and parameters; the two
#: results of a channel (dgamma and dbeta, or mean and variance); the running statistics.
(
    X,
    DY,
    OUT,
    SIDE,
    MASK,
    MEAN,
    VARIANCE,
    GAMMA,
    BETA,
    RESULT,
    RESULT_2,
    RUNNING_MEAN,
    RUNNING_VARIANCE,
) = range(13)
ADDRESSES = 13

#: Float64 memory for the table of channels (see `channels`) and then the partial sums, its size,
#: and its address; 0 if the kernel is to take it itself, which it may where it runs alone.
SPACE, SCRATCH = 13, 14

#: Bits of a float64: added to the variance; weight of the batch in the running statistics.
EPSILON, MOMENTUM = 15, 16

#: Elements of a channel, all those that its sums are over.
COUNT = 17

#: Items of the first phase, and of both; see `threads`.
SUMMED, ITEMS = 18, 19

#: 0 or 1. Of the output: it is written past the caches; a group of channels is written while it is
#: in the cache. Of the call: how it fills the table first (see below); whether sums are in
#: the table already; whether it writes the results of channels at the end.
STREAMING, FUSED, PREPARES, SETTLES, FINISHES = range(20, 25)

#: Bits of a statistic, if it is float32 or float64 beside elements of fewer; otherwise 0.
STATISTICS = 25

#: Values of PREPARES: from statistics, from the means alone (for sums), from the data.
FROM_STATISTICS, MEANS_ALONE, FROM_DATA = 1, 2, 3

#: Whether the table is filled: the others wait for that.
READY = 26

#: Up to twelve numbers, see the kernels; then the cells of a cursor, to the end.
GEOMETRY, CURSOR = 27, 39

#: The cell that counts items that are done.
DONE = CURSOR + DONE_CELL

#: What `call` returns for a kernel that raised an error.
FAILED = -(1 << 62)

#: In the place of a participant's number: the caller, back after others did the last items.
JOINED = -1

_I64 = ir.IntType(64)


class Kind(types.Type):
    """What a kernel is compiled for.

    Parameters
    ----------
    element : numba type
        How elements are stored: see `storage`.
    operation : {"forward", "backward", "frozen"}
        Forward: y from x, by sums of x or not. Backward: dx from x and dy; frozen: from dy alone.
    rectified : bool
        Whether a rectifier follows: y is not less than zero, dy counts where y was more.
    sided : bool
        Whether a residual is added before the rectifier.
    """

    def __init__(self, element: Any, operation: str, rectified: bool, sided: bool) -> None:
        self.element, self.operation = element, operation
        self.rectified, self.sided = rectified, sided
        super().__init__(name=f"Kind({element}, {operation}, {rectified}, {sided})")


register_model(Kind)(models.OpaqueModel)


@intrinsic
def cells_of(typingctx, record):
    """Return the cells of the record at an address."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], _I64.as_pointer())

    return types.CPointer(types.int64)(types.int64), codegen


@inlined
def ended(refused):
    """Return what a kernel returns when all items are done.

    That is 1, or -1 - c if channel c was refused: its variance + epsilon is not positive. A caller
    that gets 0 must wait for those who are at work on the last items, and call again as `JOINED`;
    for another participant 0 says that it need not wake the caller.
    """
    return 1 if refused < 0 else -1 - refused


@inlined
def call_off(cells):
    """Let nobody wait for the table, or do anything."""
    cells[SUMMED] = 0
    cells[ITEMS] = 0
    raise_flag(cells, READY)


@intrinsic
def number_of(typingctx, place):
    """Return an address as a number."""

    def codegen(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], _I64)

    return types.int64(place), codegen


@intrinsic
def number(typingctx, cells, slot):
    """Return the float64 whose bits are in a slot."""

    def codegen(context, builder, signature, arguments):
        place = builder.gep(arguments[0], [arguments[1]])
        return builder.load(builder.bitcast(place, ir.DoubleType().as_pointer()))

    return types.float64(cells, types.intp), codegen


def _taken(context: Any, builder: Any, cells: Any, slot: Any, place: Any) -> Any:
    value = builder.load(builder.gep(cells, [slot]))
    return builder.inttoptr(value, context.get_value_type(place))


def _taking(element_of: Any) -> Any:
    """Return an intrinsic (kind, cells, slot) that takes the address of elements from a slot."""

    @intrinsic
    def take(typingctx, kind, cells, slot):
        place = types.CPointer(element_of(kind))

        def codegen(context, builder, signature, arguments):
            return _taken(context, builder, arguments[1], arguments[2], place)

        return place(kind, cells, types.intp), codegen

    return take


#: (kind, cells, slot): the address in a slot, of elements, of float32, of float64.
values_at = _taking(lambda kind: kind.element)
singles_at = _taking(lambda kind: types.float32)
doubles_at = _taking(lambda kind: types.float64)


def _gathering(model_of: Any, **slots: int) -> Any:
    """Return an intrinsic (kind, cells) that gathers the addresses of a structure from slots."""

    @intrinsic
    def gather(typingctx, kind, cells):
        model = model_of(kind)

        def codegen(context, builder, signature, arguments):
            made = cgutils.create_struct_proxy(model)(context, builder)
            for name, slot in slots.items():
                at = ir.Constant(_I64, slot)
                setattr(made, name, _taken(context, builder, arguments[1], at, model.parts[name]))
            return made._getvalue()

        return model(kind, cells), codegen

    return gather


_masked = _gathering(lambda kind: Masked(kind.element), values=DY, bits=MASK)
_rectifier = _gathering(lambda kind: Rectifier(kind.element, kind.sided), values=SIDE)
_marking = _gathering(lambda kind: Marking(kind.element), values=OUT, bits=MASK)
_sided = _gathering(lambda kind: Sided(kind.element), values=OUT, side=SIDE, dy=DY, bits=MASK)


def gradient_of(kind, cells):
    """Return dy as the sums read it: an address, or None in a forward pass."""


@overload(gradient_of)
def _gradient_of(kind, cells):
    if kind.operation == "forward":
        return lambda kind, cells: None
    if kind.rectified:
        return lambda kind, cells: _masked(kind, cells)
    return lambda kind, cells: values_at(kind, cells, DY)


def rest_of(kind, cells):
    """Return what the output is made of beside x: dy, a Rectifier, or None."""


@overload(rest_of)
def _rest_of(kind, cells):
    if kind.operation == "forward" and kind.rectified:
        return lambda kind, cells: _rectifier(kind, cells)
    return lambda kind, cells: gradient_of(kind, cells)


def seen_of(kind, cells):
    """Return x, or None where the output does not depend on it."""


@overload(seen_of)
def _seen_of(kind, cells):
    if kind.operation == "frozen":
        return lambda kind, cells: None
    return lambda kind, cells: values_at(kind, cells, X)


def output_of(kind, cells):
    """Return where the output is written."""


@overload(output_of)
def _output_of(kind, cells):
    if kind.rectified and kind.operation == "forward":
        return lambda kind, cells: _marking(kind, cells)
    if kind.rectified and kind.sided:
        return lambda kind, cells: _sided(kind, cells)
    return lambda kind, cells: values_at(kind, cells, OUT)


@intrinsic
def call(typingctx, function, record, index):
    """Call the machine code of a kernel; return its result, or `FAILED` if it raised an error."""

    def codegen(context, builder, signature, arguments):
        byte = ir.IntType(8).as_pointer()
        result = cgutils.alloca_once_value(builder, ir.Constant(_I64, 0))
        error = cgutils.alloca_once_value(builder, ir.Constant(byte, None))
        shape = ir.FunctionType(ir.IntType(32), [result.type, error.type, byte, _I64, _I64])
        target = builder.inttoptr(arguments[0], shape.as_pointer())
        nothing = ir.Constant(byte, None)
        status = builder.call(target, [result, error, nothing, arguments[1], arguments[2]])
        failed = builder.icmp_signed("!=", status, ir.Constant(ir.IntType(32), 0))
        return builder.select(failed, ir.Constant(_I64, FAILED), builder.load(result))

    return types.int64(types.int64, types.int64, types.int64), codegen
