"""Machine words, functions of C and of XLA: what the handler of custom calls is made of.

Addresses are int64, here and in all that uses this.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from backnorm.cpu.kernels.cursor import pause
from backnorm.cpu.kernels.jit import inlined
from backnorm.cpu.xla_structures import ENVIRONMENT_CELLS

__all__ = [
    "add",
    "allocated",
    "ask",
    "byte",
    "environment",
    "expect_much",
    "give_way",
    "integer",
    "pause",
    "put",
    "put_integer",
    "release",
    "room",
    "run_kernel",
    "seen",
    "this_thread",
    "word",
]

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VOID = ir.VoidType()

_HUGE, _MADV_HUGEPAGE = 2 << 20, 14


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


def _writing(width: int) -> Any:
    """Return an intrinsic that writes an integer of so many bits at an address."""
    kind = ir.IntType(width)

    @intrinsic
    def write(typingctx, address, value):
        def codegen(context, builder, signature, arguments):
            place = builder.inttoptr(arguments[0], kind.as_pointer())
            value = arguments[1] if width == 64 else builder.trunc(arguments[1], kind)
            builder.store(value, place)
            return context.get_dummy_value()

        return types.none(types.int64, types.int64), codegen

    return write


byte, integer, word = _reading(8), _reading(32), _reading(64)
put_integer, put = _writing(32), _writing(64)
#: seen(address): a word; who sees its value sees what was written before it.
seen = _reading(64, "acquire")


@intrinsic
def add(typingctx, address, value):
    """Add to a word; return what it is then."""

    def codegen(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        before = builder.atomic_rmw("add", place, arguments[1], "acq_rel")
        return builder.add(before, arguments[1])

    return types.int64(types.int64, types.int64), codegen


def _of_c(name: str, result: Any, parameters: int) -> Any:
    """Return the code of an intrinsic that calls a function of the C library."""

    def codegen(context, builder, signature, arguments):
        shape = ir.FunctionType(result, [_I64] * parameters)
        function = cgutils.get_or_insert_function(builder.module, shape, name)
        value = builder.call(function, arguments)
        return value if result == _I64 else context.get_dummy_value()

    return codegen


@intrinsic
def allocated(typingctx, size):
    """Return the address of so many bytes of new memory, or 0."""
    return types.int64(types.int64), _of_c("malloc", _I64, 1)


@intrinsic
def release(typingctx, address):
    """Give memory back."""
    return types.none(types.int64), _of_c("free", _VOID, 1)


@intrinsic
def this_thread(typingctx):
    """Return a number of the thread that runs this."""
    return types.int64(), _of_c("pthread_self", _I64, 0)


@intrinsic
def give_way(typingctx):
    """Let another thread have the processor."""
    return types.none(), _of_c("sched_yield", _I32, 0)


@intrinsic
def _advise(typingctx, first, size):
    """Ask the system for huge pages where these bytes, whole pages, have none yet."""

    def codegen(context, builder, signature, arguments):
        if "linux" in context.codegen().magic_tuple()[0]:
            shape = ir.FunctionType(_I32, [_I64, _I64, _I32])
            function = cgutils.get_or_insert_function(builder.module, shape, "madvise")
            builder.call(function, [*arguments, ir.Constant(_I32, _MADV_HUGEPAGE)])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


@inlined
def expect_much(address, size):
    """Say that all of these bytes will be written, which may be in memory that is new.

    XLA takes its results from the C library, which takes large ones from the system, page by page:
    51 MB cost 39 ms, and 18 in huge pages.
    """
    first = (address + _HUGE - 1) // _HUGE * _HUGE
    last = (address + size) // _HUGE * _HUGE
    if first < last:
        _advise(first, last - first)


@intrinsic
def ask(typingctx, function, argument):
    """Call a C function of one address; return the address that it returns (of a void one, any)."""

    def codegen(context, builder, signature, arguments):
        shape = ir.FunctionType(_I64, [_I64])
        return builder.call(builder.inttoptr(arguments[0], shape.as_pointer()), arguments[1:])

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def room(typingctx):
    """Return the address of 64 bytes of the stack, until the function returns."""

    def codegen(context, builder, signature, arguments):
        return builder.ptrtoint(cgutils.alloca_once(builder, _I64, 8), _I64)

    return types.int64(), codegen


@intrinsic
def run_kernel(typingctx, function, record, index):
    """Call the function of a kernel by its address; return what it returns."""

    def codegen(context, builder, signature, arguments):
        shape = ir.FunctionType(_I64, [_I64, _I64])
        target = builder.inttoptr(arguments[0], shape.as_pointer())
        return builder.call(target, arguments[1:])

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def environment(typingctx):
    """Return the address of the library's data: see `xla_structures.ENVIRONMENT`."""

    def codegen(context, builder, signature, arguments):
        kind = ir.ArrayType(_I64, ENVIRONMENT_CELLS)
        known = builder.module.globals.get("bn_environment")
        place = known or ir.GlobalVariable(builder.module, kind, "bn_environment")
        return builder.ptrtoint(place, _I64)

    return types.int64(), codegen
