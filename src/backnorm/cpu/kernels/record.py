"""The record as the kernels see it: its head by name, its cells, addresses of elements.

`backnorm.cpu.record` describes it. What cannot be a number in it is decided when a kernel is
compiled, and is its `Kind`.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from backnorm.cpu.kernels.cursor import raise_flag
from backnorm.cpu.kernels.jit import inlined
from backnorm.cpu.kernels.relu import Activation, Marking, Masked, ReLU, WithResidual
from backnorm.cpu.record import GEOMETRIES, SLOTS, dtype_of

__all__ = [
    "Kind",
    "call_off",
    "cells_of",
    "columns_head",
    "doubles_at",
    "ended",
    "floor_head",
    "gradient_of",
    "other_of",
    "output_of",
    "own_of",
    "scratch_of",
    "seen_of",
    "segments_head",
    "singles_at",
    "values_at",
]

_I64 = ir.IntType(64)
_READY = SLOTS["ready"]


class Kind(types.Type):
    """What a kernel is compiled for.

    Parameters
    ----------
    element : numba type
        How elements are stored: see `storage`.
    arithmetic : numba type
        What they are computed in, float64 or float32: see `singles`.
    operation : {"forward", "backward", "frozen"}
        Forward: y from x, by sums of x or not. Backward: dx from x and dy; frozen: from dy alone.
    follows : {"", "relu", "activation"}
        What follows: of a ReLU y is from zero to the ceiling, and dy counts where y was between; of
        another activation, in a forward pass alone, it is what `activation` has.
    """

    def __init__(self, element: Any, arithmetic: Any, operation: str, follows: str) -> None:
        self.element, self.arithmetic = element, arithmetic
        self.operation, self.follows = operation, follows
        super().__init__(name=f"Kind({element}, {arithmetic}, {operation}, {follows})")

    @property
    def relu(self) -> bool:
        """Whether a ReLU follows."""
        return self.follows == "relu"


register_model(Kind)(models.OpaqueModel)


def _head_as(geometry: str) -> Any:
    """Return an intrinsic that takes an address for that of a record of a geometry."""
    head = numba.from_dtype(dtype_of(geometry))

    @intrinsic
    def head_at(typingctx, record):
        def codegen(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(head))

        return head(types.int64), codegen

    return head_at


segments_head, columns_head, floor_head = map(_head_as, GEOMETRIES)


def _addressed(element_of: Any) -> Any:
    """Return an intrinsic (kind, number) that takes a number for the address of elements."""

    @intrinsic
    def at(typingctx, kind, number):
        place = types.CPointer(element_of(kind))

        def codegen(context, builder, signature, arguments):
            return builder.inttoptr(arguments[1], context.get_value_type(place))

        return place(kind, types.int64), codegen

    return at


#: (kind, number): the address of elements, of float32, of float64.
values_at = _addressed(lambda kind: kind.element)
singles_at = _addressed(lambda kind: types.float32)
doubles_at = _addressed(lambda kind: types.float64)


@intrinsic
def cells_of(typingctx, record):
    """Return the cells of the record at an address."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], _I64.as_pointer())

    return types.CPointer(types.int64)(types.int64), codegen


@inlined
def scratch_of(kind, head, record):
    """Return where the table of channels begins."""
    return doubles_at(kind, record + head.scratch)


@inlined
def own_of(kind, head, record, index):
    """Return where the memory of a participant begins."""
    return doubles_at(kind, record + head.own + index * head.own_bytes)


@inlined
def ended(refused):
    """Return what a kernel that has joined returns.

    That is 1, or -1 - c if channel c was refused: its variance + epsilon is not positive.
    """
    return 1 if refused < 0 else -1 - refused


@inlined
def call_off(head, cells, refused):
    """Refuse a channel: let nobody wait for the table, or do anything."""
    head.refused = 1 + refused
    head.summed = 0
    head.items = 0
    raise_flag(cells, _READY)


def _taken_as(kind: Any, context: Any, builder: Any, number: Any) -> Any:
    """Emit a cell as what it holds: an address, a float64, or an integer."""
    if isinstance(kind, types.CPointer):
        return builder.inttoptr(number, context.get_value_type(kind))
    return builder.bitcast(number, context.get_value_type(kind))


def _gathering(model_of: Any, **slots: str) -> Any:
    """Return an intrinsic (kind, cells) that gathers the parts of a structure from fields."""

    @intrinsic
    def gather(typingctx, kind, cells):
        model = model_of(kind)

        def codegen(context, builder, signature, arguments):
            made = cgutils.create_struct_proxy(model)(context, builder)
            for name, field in slots.items():
                at = ir.Constant(_I64, SLOTS[field])
                number = builder.load(builder.gep(arguments[1], [at]))
                setattr(made, name, _taken_as(model.parts[name], context, builder, number))
            return made._getvalue()

        return model(kind, cells), codegen

    return gather


_masked = _gathering(lambda kind: Masked(kind.element), values="dy", bits="mask")
_relu = _gathering(lambda kind: ReLU(kind.element), values="residual", ceiling="ceiling")
_activation = _gathering(lambda kind: Activation(kind.element), values="dy", number="activation")
_marking = _gathering(
    lambda kind: Marking(kind.element), values="out", bits="mask", beyond="beyond"
)
_with_residual = _gathering(
    lambda kind: WithResidual(kind.element), values="out", residual="residual", dy="dy", bits="mask"
)


def gradient_of(kind, head, cells):
    """Return dy as the sums read it: an address, or None in a forward pass."""


@overload(gradient_of)
def _gradient_of(kind, head, cells):
    if kind.operation == "forward":
        return lambda kind, head, cells: None
    if kind.relu:
        return lambda kind, head, cells: _masked(kind, cells)
    return lambda kind, head, cells: values_at(kind, head.dy)


def other_of(kind, head, cells):
    """Return what the output is made of beside x: dy, a ReLU, another activation, or None."""


@overload(other_of)
def _other_of(kind, head, cells):
    if kind.operation == "forward" and kind.relu:
        return lambda kind, head, cells: _relu(kind, cells)
    if kind.follows == "activation":
        return lambda kind, head, cells: _activation(kind, cells)
    return lambda kind, head, cells: gradient_of(kind, head, cells)


def seen_of(kind, head):
    """Return x, or None where the output does not depend on it."""


@overload(seen_of)
def _seen_of(kind, head):
    if kind.operation == "frozen":
        return lambda kind, head: None
    return lambda kind, head: values_at(kind, head.x)


def output_of(kind, head, cells):
    """Return where the output is written."""


@overload(output_of)
def _output_of(kind, head, cells):
    if kind.relu and kind.operation == "forward":
        return lambda kind, head, cells: _marking(kind, cells)
    if kind.relu:
        return lambda kind, head, cells: _with_residual(kind, cells)
    return lambda kind, head, cells: values_at(kind, head.out)
