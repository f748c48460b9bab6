"""Machine words at addresses, plain and atomic, and calls of C functions by address.

Addresses are int64, here and in the modules that use this one.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from backnorm_kernels.kernels.jit import emitted

_I64 = ir.IntType(64)


def _reading(width: int, ordering: str | None = None) -> Any:
    """Return a function that loads a signed integer of `width` bits from an address."""
    kind = ir.IntType(width)

    @emitted(types.int64(types.int64))
    def read(builder, address):
        place = builder.inttoptr(address, kind.as_pointer())
        if ordering:
            return builder.load_atomic(place, ordering, 8)
        value = builder.load(place)
        return value if width == 64 else builder.sext(value, _I64)

    return read


def _writing(width: int, ordering: str | None = None) -> Any:
    """Return a function that stores an integer of `width` bits at an address."""
    kind = ir.IntType(width)

    @emitted(types.none(types.int64, types.int64))
    def write(builder, address, value):
        place = builder.inttoptr(address, kind.as_pointer())
        value = value if width == 64 else builder.trunc(value, kind)
        if ordering:
            builder.store_atomic(value, place, ordering, 8)
        else:
            builder.store(value, place)

    return write


load_byte, load_int32, load_word = _reading(8), _reading(32), _reading(64)
store_int32, store_word = _writing(32), _writing(64)
load_acquire, store_release = _reading(64, "acquire"), _writing(64, "release")


@emitted(types.int64(types.int64, types.int64))
def add_fetch(builder, address, value):
    """Add to a word, and return the sum."""
    place = builder.inttoptr(address, _I64.as_pointer())
    before = builder.atomic_rmw("add", place, value, "acq_rel")
    return builder.add(before, value)


@emitted(types.int64(types.int64, types.int64))
def exchange(builder, address, value):
    """Store a word, and return the previous value."""
    place = builder.inttoptr(address, _I64.as_pointer())
    return builder.atomic_rmw("xchg", place, value, "acq_rel")


@emitted(types.boolean(types.int64, types.int64, types.int64))
def compare_exchange(builder, address, expected, value):
    """Store a word if its previous value is the expected one; return whether it was stored."""
    place = builder.inttoptr(address, _I64.as_pointer())
    found = builder.cmpxchg(place, expected, value, "acq_rel", "acquire")
    return builder.extract_value(found, 1)


@emitted(types.int64(types.int64, types.int64))
def call_c(builder, function, argument):
    """Call a C function with one argument; return its result.

    If the function has no result (void), the returned number has no meaning.
    """
    shape = ir.FunctionType(_I64, [_I64])
    return builder.call(builder.inttoptr(function, shape.as_pointer()), [argument])


def _on_the_stack(cells: int) -> Any:
    """Return a function that allocates `cells` words in its caller's stack frame."""

    @emitted(types.int64())
    def place(builder):
        return builder.ptrtoint(cgutils.alloca_once(builder, _I64, cells), _I64)

    return place


stack_8_words, stack_32_words = _on_the_stack(8), _on_the_stack(32)


def address_of(name: str, kind: Any = _I64) -> Any:
    """Return a function that returns the address of an exported symbol of the library.

    If `kind` is not given, the symbol is a function that takes and returns an int64. If `kind` is
    given, the symbol is data of this type.
    """

    @emitted(types.int64())
    def address(builder):
        exported = builder.module.globals.get(name)
        if exported is None and kind == _I64:
            exported = ir.Function(builder.module, ir.FunctionType(_I64, [_I64]), name)
        elif exported is None:
            exported = ir.GlobalVariable(builder.module, kind, name)
        return builder.ptrtoint(exported, _I64)

    return address
