"""Memory in Numba code: addresses, loads and stores of vectors.

Kernels take addresses. Arrays would do as well (in tests they do), but for every array that a
function takes, even one that is inlined, Numba counts references, which costs as much as a short
run of elements. Memory is contiguous; `storage` has the forms that elements take.
Loading is exact, and storing is one rounding. Float32 is not stored to float64, and to 16 bits
only lanes that are zero or normal (see `vector.sound`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from backnorm.cpu.kernels.jit import inlined
from backnorm.cpu.kernels.relu import Addresses, after_store, base_of, masked
from backnorm.cpu.kernels.storage import (
    accepts,
    narrow,
    narrow_sound,
    split_narrow,
    split_widen,
    stored_type,
    surely_sound,
    widen,
    widen_to_single,
)
from backnorm.cpu.kernels.vector import (
    EvenOdd,
    Singles,
    Vec,
    load_lanes,
    splat,
    store_lanes,
)
from backnorm.cpu.scratch import LANES, SINGLES

__all__ = [
    "aligned_head",
    "clear",
    "line_head",
    "load",
    "load_apart",
    "load_even_odd",
    "load_first",
    "load_one",
    "load_singles",
    "load_singles_first",
    "load_singles_some",
    "load_some",
    "offset",
    "prefetch",
    "singles_within",
    "store",
    "store_first",
    "store_one",
    "store_some",
    "stored_sound",
    "stream",
]

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()

# Bytes; of all x86-64 processors, and of most others.
_CACHE_LINE = 64


def _pointer(context: Any, builder: Any, kind: Any, value: Any, index: Any) -> Any:
    if isinstance(kind, Addresses):
        return builder.gep(base_of(context, builder, kind, value), [index])
    if isinstance(kind, types.CPointer):
        return builder.gep(value, [index])
    data = context.make_array(kind)(context, builder, value).data
    return builder.gep(data, [index])


@intrinsic
def offset(typingctx, place, count):
    """Return the address `count` elements further on."""
    if not isinstance(place, types.CPointer):
        return None

    def codegen(context, builder, signature, arguments):
        return builder.gep(arguments[0], [arguments[1]])

    return place(place, types.intp), codegen


@intrinsic
def singles_within(typingctx, place):
    """Return the address of float64 memory as one of float32 elements, two for each."""
    if place != types.CPointer(types.float64):
        return None

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(place), codegen


def _loading(array: Any, index: Any, count: Any, kind: Any) -> Any:
    """Return how a vector is loaded, or its first `count` lanes."""
    if not accepts(array):
        return None
    lanes = kind.lanes

    def codegen(context, builder, signature, arguments):
        pointer = _pointer(context, builder, array, *arguments[:2])
        stored = ir.VectorType(stored_type(array.dtype), lanes)
        size = array.dtype.bitwidth // 8
        if count is None:
            raw = builder.load(pointer, typ=stored, align=size)
        else:
            raw = load_lanes(builder, pointer, stored, arguments[2], size)
        raw = masked(context, builder, array, arguments[0], arguments[1], raw, *arguments[2:])
        if kind == EvenOdd:
            return split_widen(builder, raw)
        convert = widen if kind == Vec else widen_to_single
        return convert(builder, raw, array.dtype, lanes)

    counted = () if count is None else (types.intp,)
    return kind(array, types.intp, *counted), codegen


@intrinsic
def load(typingctx, array, index):
    """Return elements index .. index+7 as a Vec."""
    return _loading(array, index, None, Vec)


def prefetch(array, index, count):
    """Let the cache lines of `count` elements, which need not exist, be read soon; of None nothing.

    For rows that are far apart, and beyond a page: there processors do not read ahead.
    """


@overload(prefetch)
def _prefetch_of(array, index, count):
    if isinstance(array, types.NoneType):
        return lambda array, index, count: None
    in_line = 8 * _CACHE_LINE // array.dtype.bitwidth

    def run(array, index, count):
        for k in range(0, count, in_line):
            _prefetch(array, index + k)

    return run


@intrinsic
def _prefetch(typingctx, array, index):
    if not accepts(array):
        return None

    def codegen(context, builder, signature, arguments):
        pointer = builder.bitcast(_pointer(context, builder, array, *arguments), _BYTES)
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # To read, into all caches, data.
        builder.call(call, [pointer, *(ir.Constant(_I32, number) for number in (0, 3, 1))])
        return context.get_dummy_value()

    return types.none(array, types.intp), codegen


@intrinsic
def load_first(typingctx, array, index, count):
    """Return `count` elements from `index` on, and zero in the lanes after them.

    Memory after the elements is not touched. `count` may exceed the lanes.
    """
    return _loading(array, index, count, Vec)


@intrinsic
def load_singles(typingctx, array, index):
    """Return elements index .. index+15, not of float64, as Singles."""
    return _loading(array, index, None, Singles)


@intrinsic
def load_singles_first(typingctx, array, index, count):
    """Return Singles of `count` elements, not of float64, and zero in the lanes after them."""
    return _loading(array, index, count, Singles)


@intrinsic
def load_even_odd(typingctx, array, index):
    """Return elements index .. index+15, of bfloat16, as EvenOdd."""
    return _loading(array, index, None, EvenOdd)


@inlined
def load_singles_some(values, index, count):
    """Return `count` elements from `index` on, and zero in the lanes after them, as Singles."""
    if count >= SINGLES:
        return load_singles(values, index)
    return load_singles_first(values, index, count)


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


def _narrow(builder: Any, value: Any, kind: Any, dtype: Any) -> Any:
    if kind == EvenOdd:
        return split_narrow(builder, value)
    if kind == Singles:
        return narrow_sound(builder, value, dtype, SINGLES)
    return narrow(builder, value, dtype, LANES if kind == Vec else None)


def _storing(array: Any, kind: Any, *, streaming: bool = False) -> Any:
    if not accepts(array):
        return None
    size = array.dtype.bitwidth // 8

    def codegen(context, builder, signature, arguments):
        target, index, value = arguments
        raw = _narrow(builder, value, kind, array.dtype)

        def write(pointer, vector):
            pointer = builder.bitcast(pointer, vector.type.as_pointer())
            written = builder.store(vector, pointer, align=size * kind.lanes if streaming else size)
            if streaming:
                mark = builder.module.add_metadata([ir.Constant(_I32, 1)])
                written.set_metadata("nontemporal", mark)

        write(_pointer(context, builder, array, target, index), raw)
        after_store(context, builder, array, target, index, raw, write)
        return context.get_dummy_value()

    return types.none(array, types.intp, kind), codegen


@intrinsic
def store(typingctx, array, index, value):
    """Write a vector to the elements from `index` on, each rounded once."""
    return _storing(array, value)


@intrinsic
def stream(typingctx, array, index, value):
    """Write a vector past the caches; the address must be a multiple of its lanes' size.

    An ordinary store reads its cache line first; this one does not, and evicts nothing.
    """
    return _storing(array, value, streaming=True)


@intrinsic
def stored_sound(typingctx, array, left, right):
    """Return whether two vectors of float32, as elements of 16 bits, show that they are `sound`.

    What is computed for that is what `store` will write, so it is computed once.
    """

    def codegen(context, builder, signature, arguments):
        raws = [_narrow(builder, value, left, array.dtype) for value in arguments[1:]]
        return surely_sound(builder, raws, array.dtype)

    return types.boolean(array, left, right), codegen


@intrinsic
def store_one(typingctx, array, index, value):
    """Write one float64 to element `index`, rounded once."""
    return _storing(array, types.float64)


@intrinsic
def store_first(typingctx, array, index, count, value):
    """Write the first `count` lanes of a vector, each rounded once; there may be fewer."""
    if not accepts(array):
        return None

    size = array.dtype.bitwidth // 8

    def codegen(context, builder, signature, arguments):
        target, index, count, lanes = arguments
        raw = _narrow(builder, lanes, value, array.dtype)

        def write(pointer, vector):
            store_lanes(builder, vector, pointer, count, size)

        write(_pointer(context, builder, array, target, index), raw)
        after_store(context, builder, array, target, index, raw, write, count)
        return context.get_dummy_value()

    return types.none(array, types.intp, types.intp, value), codegen


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


def line_head(array, index):
    """Return how many elements from `index` on precede the first that begins a cache line."""


@overload(line_head)
def _line_head(array, index):
    elements = _CACHE_LINE // (array.dtype.bitwidth // 8)
    return lambda array, index: aligned_head(array, index, elements)


@inlined
def clear(values, size):
    """Set the first `size` elements to zero; `size` is a multiple of eight."""
    zero = splat(0.0)
    for i in range(0, size, LANES):
        store(values, i, zero)
