"""Memory in Numba code: addresses, loads and stores of vectors, scratch.

Arrays in memory are one-dimensional and contiguous; `storage` has the forms their elements take.
Everything between a load and a store is float64, so a store is the only rounding that shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from backnorm.kernels.cpu.jit import inlined
from backnorm.kernels.cpu.storage import accepts, narrow, stored_type, widen
from backnorm.kernels.cpu.vector import LANES, Vec, first_lanes, splat

__all__ = [
    "address",
    "aligned_head",
    "clear",
    "keep",
    "load",
    "load_apart",
    "load_first",
    "load_one",
    "load_some",
    "offset",
    "scratch",
    "store",
    "store_first",
    "store_one",
    "store_some",
    "stream",
]

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()


def _pointer(context: Any, builder: Any, kind: Any, value: Any, index: Any) -> Any:
    if isinstance(kind, types.CPointer):
        return builder.gep(value, [index])
    data = context.make_array(kind)(context, builder, value).data
    return builder.gep(data, [index])


@intrinsic
def _address(typingctx, array):
    def codegen(context, builder, signature, arguments):
        return context.make_array(array)(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), codegen


def address(array):
    """Return where the elements of an array begin, or None for None.

    Functions within a kernel take addresses: for every array that a function takes, even one
    that is inlined, Numba counts references up and down, which costs as much as a short run of
    elements and spills all vectors. An address does not keep its array alive: see `keep`.
    """


@overload(address)
def _address_of(array):
    if isinstance(array, types.NoneType):
        return lambda array: None
    return lambda array: _address(array)


@intrinsic
def offset(typingctx, place, count):
    """Return the address `count` elements further on."""
    if not isinstance(place, types.CPointer):
        return None

    def codegen(context, builder, signature, arguments):
        return builder.gep(arguments[0], [arguments[1]])

    return place(place, types.intp), codegen


@intrinsic
def keep(typingctx, array):
    """Do nothing. An array that was allocated in a kernel lives until its last mention."""

    def codegen(context, builder, signature, arguments):
        return context.get_dummy_value()

    return types.none(array), codegen


@intrinsic
def load(typingctx, array, index):
    """Return elements index .. index+7 as a Vec."""
    if not accepts(array):
        return None

    def codegen(context, builder, signature, arguments):
        pointer = _pointer(context, builder, array, *arguments)
        stored = stored_type(array.dtype)
        raw = builder.load(
            pointer, typ=ir.VectorType(stored, LANES), align=array.dtype.bitwidth // 8
        )
        return widen(builder, raw, array.dtype, LANES)

    return Vec(array, types.intp), codegen


@intrinsic
def load_first(typingctx, array, index, count):
    """Return `count` elements from `index` on, and zero in the lanes after them.

    Memory after the elements is not touched. `count` may exceed the lanes.
    """
    if not accepts(array):
        return None

    def codegen(context, builder, signature, arguments):
        values, index, count = arguments
        stored = ir.VectorType(stored_type(array.dtype), LANES)
        pointer = _pointer(context, builder, array, values, index)
        size = ir.Constant(_I32, array.dtype.bitwidth // 8)
        zero = ir.Constant(stored, None)
        mask = first_lanes(builder, count)
        intrinsic = _masked(builder, "load", stored, [_BYTES, _I32, mask.type, stored], stored)
        pointer = builder.bitcast(pointer, _BYTES)
        raw = builder.call(intrinsic, [pointer, size, mask, zero])
        return widen(builder, raw, array.dtype, LANES)

    return Vec(array, types.intp, types.intp), codegen


@intrinsic
def load_one(typingctx, array, index):
    """Return element `index` as a float64."""
    if not accepts(array):
        return None

    def codegen(context, builder, signature, arguments):
        pointer = _pointer(context, builder, array, *arguments)
        raw = builder.load(pointer, typ=stored_type(array.dtype), align=array.dtype.bitwidth // 8)
        return widen(builder, raw, array.dtype, None)

    return types.float64(array, types.intp), codegen


@intrinsic
def load_apart(typingctx, array, index, step, last):
    """Return elements index, index + step, ... as a Vec; instead of any after `last`, that one."""
    if not accepts(array):
        return None

    def codegen(context, builder, signature, arguments):
        values, index, step, last = arguments
        stored = stored_type(array.dtype)
        raw = ir.Constant(ir.VectorType(stored, LANES), ir.Undefined)
        for lane in range(LANES):
            within = builder.icmp_signed("<", index, last)
            pointer = _pointer(context, builder, array, values, builder.select(within, index, last))
            one = builder.load(pointer, typ=stored, align=array.dtype.bitwidth // 8)
            raw = builder.insert_element(raw, one, ir.Constant(_I32, lane))
            index = builder.add(index, step)
        return widen(builder, raw, array.dtype, LANES)

    return Vec(array, types.intp, types.intp, types.intp), codegen


@inlined
def load_some(values, index, count):
    """Return `count` elements from `index` on, at most eight, and zero in the lanes after them."""
    if count >= LANES:
        return load(values, index)
    return load_first(values, index, count)


@inlined
def store_some(values, index, count, value):
    """Write the first `count` lanes of a Vec, at most all eight, each rounded once."""
    if count >= LANES:
        store(values, index, value)
    else:
        store_first(values, index, count, value)


def _storing(lanes: int | None, streaming: bool) -> Any:
    def typed(array: Any, index: Any, value: Any) -> Any:
        if not accepts(array):
            return None

        def codegen(context, builder, signature, arguments):
            target, position, wide = arguments
            raw = narrow(builder, wide, array.dtype, lanes)
            pointer = builder.bitcast(
                _pointer(context, builder, array, target, position), raw.type.as_pointer()
            )
            size = array.dtype.bitwidth // 8
            written = builder.store(raw, pointer, align=size * LANES if streaming else size)
            if streaming:
                mark = builder.module.add_metadata([ir.Constant(_I32, 1)])
                written.set_metadata("nontemporal", mark)
            return context.get_dummy_value()

        kind = types.float64 if lanes is None else Vec
        return types.none(array, types.intp, kind), codegen

    return typed


_store, _stream, _store_one = _storing(LANES, False), _storing(LANES, True), _storing(None, False)


@intrinsic
def store(typingctx, array, index, value):
    """Write a Vec to elements index .. index+7, each rounded once."""
    return _store(array, index, value)


@intrinsic
def stream(typingctx, array, index, value):
    """Write a Vec past the caches; the address must be a multiple of eight elements' size.

    An ordinary store reads its cache line first; this one does not, and evicts nothing.
    """
    return _stream(array, index, value)


@intrinsic
def store_one(typingctx, array, index, value):
    """Write one float64 to element `index`, rounded once."""
    return _store_one(array, index, value)


@intrinsic
def store_first(typingctx, array, index, count, value):
    """Write the first `count` lanes of a Vec, each rounded once; `count` may exceed the lanes."""
    if not accepts(array):
        return None

    def codegen(context, builder, signature, arguments):
        target, index, count, wide = arguments
        raw = narrow(builder, wide, array.dtype, LANES)
        pointer = _pointer(context, builder, array, target, index)
        size = ir.Constant(_I32, array.dtype.bitwidth // 8)
        mask = first_lanes(builder, count)
        intrinsic = _masked(
            builder, "store", raw.type, [raw.type, _BYTES, _I32, mask.type], ir.VoidType()
        )
        builder.call(intrinsic, [raw, builder.bitcast(pointer, _BYTES), size, mask])
        return context.get_dummy_value()

    return types.none(array, types.intp, types.intp, Vec), codegen


@intrinsic
def aligned_head(typingctx, array, index, step):
    """Return how many elements from `index` on precede the first whose address is a multiple.

    Namely of the size of `step` elements, a power of two.
    """
    if not accepts(array):
        return None

    def codegen(context, builder, signature, arguments):
        values, index, step = arguments
        address = builder.ptrtoint(_pointer(context, builder, array, values, index), _I64)
        size = ir.Constant(_I64, array.dtype.bitwidth // 8)
        mask = builder.sub(builder.mul(step, size), ir.Constant(_I64, 1))
        return builder.udiv(builder.and_(builder.neg(address), mask), size)

    return types.intp(array, types.intp, types.intp), codegen


@inlined
def scratch(size):
    """Return a flat float64 array, undefined, that starts at a cache line.

    Vectors put down and taken up again must not straddle lines: that costs more than their sums.
    """
    memory = np.empty(size + LANES)
    head = aligned_head(memory, 0, LANES)
    return memory[head : head + size]


@inlined
def clear(values, size):
    """Set the first `size` elements to zero; `size` is a multiple of eight."""
    zero = splat(0.0)
    for i in range(0, size, LANES):
        store(values, i, zero)


def _masked(builder: Any, verb: str, vector: Any, parameters: list[Any], result: Any) -> Any:
    """Declare llvm.masked.load or llvm.masked.store."""
    name = f"llvm.masked.{verb}.v{LANES}{vector.element.intrinsic_name}.p0"
    kind = ir.FunctionType(result, parameters)
    return cgutils.get_or_insert_function(builder.module, kind, name)
