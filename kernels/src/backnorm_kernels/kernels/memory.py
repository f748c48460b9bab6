"""Memory in Numba code: addresses, loads and stores of vectors.

Kernels take addresses, not arrays; only tests pass arrays. Numba counts the references to every
array argument, even in an inlined function. Counting takes as long as computing a few elements.
Memory is contiguous. The module `storage` has the conversions of elements to float64 or float32,
and back. Loads are exact, and a store rounds once. Float32 vectors are not stored to float64
elements. Float32 vectors are stored to 16-bit elements only if all lanes are zero or normal (see
`vector.sound`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from backnorm_kernels.kernels.epilogue import (
    Addresses,
    after_store,
    is_forward,
    masked,
    part_of,
)
from backnorm_kernels.kernels.jit import by_type, emitted, inlined, nothing
from backnorm_kernels.kernels.storage import (
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
from backnorm_kernels.kernels.vector import (
    EvenOdd,
    Singles,
    Vec,
    load_lanes,
    splat,
    store_lanes,
)
from backnorm_kernels.scratch import LANES, SINGLES

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()

# The size of a cache line in bytes, on all x86-64 processors and most others.
_CACHE_LINE = 64


_Doubles, _Singles = types.CPointer(types.float64), types.CPointer(types.float32)


def _pointer(context: Any, builder: Any, kind: Any, value: Any, index: Any) -> Any:
    if isinstance(kind, Addresses):
        value = part_of(builder, kind, value)
    elif not isinstance(kind, types.CPointer):
        value = context.make_array(kind)(context, builder, value).data
    return builder.gep(value, [index])


@emitted(lambda place, _: place(place, types.intp) if isinstance(place, types.CPointer) else None)
def offset(builder, place, count):
    """Return the address `count` elements further on."""
    return builder.gep(place, [count])


@emitted(lambda place: _Singles(place) if place == _Doubles else None)
def singles_within(builder, place):
    """Return the address of float64 memory as an address of twice as many float32 elements."""
    return builder.bitcast(place, ir.FloatType().as_pointer())


def _loading(array: Any, count: Any, kind: Any, *like: Any) -> Any:
    """Return the signature and the code for loading a whole vector, or `count` elements."""
    if not accepts(array):
        return None
    lanes, whole = kind.lanes, count in (None, types.none)

    def codegen(context, builder, signature, arguments):
        values, index, *more = arguments
        pointer = _pointer(context, builder, array, values, index)
        stored = ir.VectorType(stored_type(array.dtype), lanes)
        size = array.dtype.bitwidth // 8
        first = None if whole else more[0]
        if first is None:
            raw = builder.load(pointer, typ=stored, align=size)
        else:
            raw = load_lanes(builder, pointer, stored, first, size)
        raw = masked(builder, array, values, index, raw, first)
        if kind == EvenOdd:
            return split_widen(builder, raw)
        convert = widen if kind == Vec else widen_to_single
        return convert(builder, raw, array.dtype, lanes)

    counts = () if count is None else (types.none if whole else types.intp,)
    return kind(array, types.intp, *counts, *like), codegen


@intrinsic
def load(typingctx, array, index):
    """Return elements index .. index+7 as a Vec."""
    return _loading(array, None, Vec)


@intrinsic
def load_like(typingctx, array, index, count, like):
    """Load a vector of the type of `like`: `count` elements, or all lanes if `count` is None."""
    return _loading(array, count, like, like)


@by_type
def prefetch(array, index, count):
    """Prefetch the cache lines of `count` elements; do nothing for the epilogue of a forward pass.

    The elements may lie after the end of the array.

    Processors prefetch contiguous memory by themselves. But they do not prefetch a row that begins
    far away from the previous row, nor beyond the end of a page of memory.
    """
    if is_forward(array):
        return nothing
    in_line = 8 * _CACHE_LINE // array.dtype.bitwidth

    def prefetch_lines(array, index, count):
        for k in range(0, count, in_line):
            _prefetch(array, index + k)

    return prefetch_lines


@intrinsic
def _prefetch(typingctx, array, index):
    if not accepts(array):
        return None

    def codegen(context, builder, signature, arguments):
        pointer = builder.bitcast(_pointer(context, builder, array, *arguments), _BYTES)
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # The three numbers say that the memory will be read and not written (0), that it is fetched
        # into all levels of cache (3), and that it has data, not instructions (1).
        builder.call(call, [pointer, *(ir.Constant(_I32, number) for number in (0, 3, 1))])
        return context.get_dummy_value()

    return types.none(array, types.intp), codegen


@intrinsic
def load_first(typingctx, array, index, count):
    """Return `count` elements from `index` on, and zero in the lanes after them.

    Memory after the elements is not accessed. If `count` exceeds the number of lanes, all lanes
    have elements.
    """
    return _loading(array, count, Vec)


@intrinsic
def load_singles(typingctx, array, index):
    """Return elements index .. index+15 as Singles. The array must not be float64."""
    return _loading(array, None, Singles)


@intrinsic
def load_singles_first(typingctx, array, index, count):
    """Return `count` elements as Singles, zero in later lanes. The array must not be float64."""
    return _loading(array, count, Singles)


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
    """Return a Vec of the elements with the indices index, index + step, index + 2 * step, ...

    An index above `last` is replaced by `last`.
    """
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
    """Return a Vec with `count` elements from `index` on, and zero in the lanes after them.

    If `count` is 8 or more, all eight lanes of the Vec have elements.
    """
    if count >= LANES:
        return load(values, index)
    return load_first(values, index, count)


@inlined
def store_some(values, index, count, value):
    """Write the first `count` lanes of a Vec (all if `count` is above 8), each rounded once."""
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
        after_store(builder, array, target, index, raw, write)
        return context.get_dummy_value()

    return types.none(array, types.intp, kind), codegen


@intrinsic
def store(typingctx, array, index, value):
    """Write a vector to the elements from `index` on, each rounded once."""
    return _storing(array, value)


@intrinsic
def stream(typingctx, array, index, value):
    """Write a vector to memory by a streaming store, which bypasses the caches.

    The address must be a multiple of the vector's size. An ordinary store reads its cache line
    first. A streaming store does not read the line, and evicts no other lines from the caches.
    """
    return _storing(array, value, streaming=True)


@intrinsic
def stored_sound(typingctx, array, left, right):
    """Return True if two float32 vectors are certainly `sound` (see `storage.surely_sound`).

    If so, the caller stores the vectors with `store`, which converts them to the same 16-bit
    elements again. The compiler merges the two conversions.
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
    """Write the first `count` lanes of a vector, each rounded once. If the vector has fewer lanes
    than `count`, write all its lanes.
    """
    if not accepts(array):
        return None

    size = array.dtype.bitwidth // 8

    def codegen(context, builder, signature, arguments):
        target, index, count, lanes = arguments
        raw = _narrow(builder, lanes, value, array.dtype)

        def write(pointer, vector):
            store_lanes(builder, vector, pointer, count, size)

        write(_pointer(context, builder, array, target, index), raw)
        after_store(builder, array, target, index, raw, write, count)
        return context.get_dummy_value()

    return types.none(array, types.intp, types.intp, value), codegen


@intrinsic
def aligned_head(typingctx, array, index, step):
    """Return how many elements from `index` on precede the first aligned element.

    An aligned address is a multiple of the size of `step` elements; `step` is a power of two.
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


@by_type
def line_head(array, index):
    """Return how many elements, from `index` on, lie before the next start of a cache line.

    The result is 0 if a cache line begins at element `index`.
    """
    elements = _CACHE_LINE // (array.dtype.bitwidth // 8)
    return lambda array, index: aligned_head(array, index, elements)


@inlined
def clear(values, size):
    """Set the first `size` elements to zero; `size` is a multiple of eight."""
    zero = splat(0.0)
    for i in range(0, size, LANES):
        store(values, i, zero)
