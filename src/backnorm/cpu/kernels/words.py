"""Machine words at addresses, plain and atomic, and calls of C functions by address.

Addresses are int64, here and in all that uses this.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "add",
    "address_of",
    "ask",
    "byte",
    "exchange",
    "integer",
    "publish",
    "put",
    "put_integer",
    "room",
    "seen",
    "swap",
    "wide_room",
    "word",
]

_I64 = ir.IntType(64)


def _reading(width: int, ordering: str | None = None) -> Any:
    """Return an intrinsic that reads a signed integer of so many bits at an address."""
    kind = ir.IntType(width)

    @intrinsic
    def read(typingctx, address):
        def codegen(context, builder, signature, arguments):
            place = builder.inttoptr(arguments[0], kind.as_pointer())
            if ordering:
                return builder.load_atomic(place, ordering, 8)
            value = builder.load(place)
            return value if width == 64 else builder.sext(value, _I64)

        return types.int64(types.int64), codegen

    return read


def _writing(width: int, ordering: str | None = None) -> Any:
    """Return an intrinsic that writes an integer of so many bits at an address."""
    kind = ir.IntType(width)

    @intrinsic
    def write(typingctx, address, value):
        def codegen(context, builder, signature, arguments):
            place = builder.inttoptr(arguments[0], kind.as_pointer())
            value = arguments[1] if width == 64 else builder.trunc(arguments[1], kind)
            if ordering:
                builder.store_atomic(value, place, ordering, 8)
            else:
                builder.store(value, place)
            return context.get_dummy_value()

        return types.none(types.int64, types.int64), codegen

    return write


byte, integer, word = _reading(8), _reading(32), _reading(64)
put_integer, put = _writing(32), _writing(64)
#: seen(address): a word; who sees its value sees what was written before it.
seen = _reading(64, "acquire")
#: publish(address, value): write a word after everything that was written before.
publish = _writing(64, "release")


@intrinsic
def add(typingctx, address, value):
    """Add to a word; return what it is then."""

    def codegen(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        before = builder.atomic_rmw("add", place, arguments[1], "acq_rel")
        return builder.add(before, arguments[1])

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def exchange(typingctx, address, value):
    """Write a word; return what it was."""

    def codegen(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("xchg", place, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def swap(typingctx, address, expected, value):
    """Write a word if it is what was expected; return whether it was."""

    def codegen(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        found = builder.cmpxchg(place, arguments[1], arguments[2], "acq_rel", "acquire")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def ask(typingctx, function, argument):
    """Call a C function of one address; return the address that it returns (of a void one, any)."""

    def codegen(context, builder, signature, arguments):
        shape = ir.FunctionType(_I64, [_I64])
        return builder.call(builder.inttoptr(arguments[0], shape.as_pointer()), arguments[1:])

    return types.int64(types.int64, types.int64), codegen


def _on_the_stack(cells: int) -> Any:
    """Return an intrinsic that gives the address of so many words until the function returns."""

    @intrinsic
    def place(typingctx):
        def codegen(context, builder, signature, arguments):
            return builder.ptrtoint(cgutils.alloca_once(builder, _I64, cells), _I64)

        return types.int64(), codegen

    return place


#: The addresses of 64 and of 256 bytes of the stack, until the function returns.
room, wide_room = _on_the_stack(8), _on_the_stack(32)


def address_of(name: str, kind: Any = _I64) -> Any:
    """Return an intrinsic that gives the address of what the library exports by a name.

    A function of one int64, if `kind` says nothing else.
    """

    @intrinsic
    def found(typingctx):
        def codegen(context, builder, signature, arguments):
            known = builder.module.globals.get(name)
            if known is None and kind == _I64:
                known = ir.Function(builder.module, ir.FunctionType(_I64, [_I64]), name)
            elif known is None:
                known = ir.GlobalVariable(builder.module, kind, name)
            return builder.ptrtoint(known, _I64)

        return types.int64(), codegen

    return found
