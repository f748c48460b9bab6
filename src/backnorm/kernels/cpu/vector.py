"""Vectors of eight float64 as values in Numba code.

A kernel stays a readable Python loop over ``Vec`` values while the machine code is explicit:
what is one register (or two with AVX2, four with NEON), what is loaded, what is streamed. The
auto-vectoriser is not relied on: its speed changed fivefold with the shape of the arrays.

Arrays in memory are one-dimensional and contiguous; `storage` has the forms their elements take.
Everything between a load and a store is float64, so a store is the only rounding that shows.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from backnorm.kernels.cpu.jit import inlined
from backnorm.kernels.cpu.storage import accepts, narrow, stored_type, widen

__all__ = [
    "LANES",
    "Vec",
    "aligned_head",
    "exact_product",
    "exact_sum",
    "lane",
    "last_lanes",
    "load",
    "load_one",
    "multiply_add",
    "negated",
    "splat",
    "store",
    "store_one",
    "stream",
]

LANES = 8

_DOUBLE = ir.DoubleType()
_I32, _I64 = ir.IntType(32), ir.IntType(64)


class _VecType(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"Vec<{LANES} x float64>")


Vec = _VecType()


@register_model(_VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(_DOUBLE, LANES))


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


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
def load_one(typingctx, array, index):
    """Return element `index` as a float64."""
    if not accepts(array):
        return None

    def codegen(context, builder, signature, arguments):
        pointer = _pointer(context, builder, array, *arguments)
        raw = builder.load(pointer, typ=stored_type(array.dtype), align=array.dtype.bitwidth // 8)
        return widen(builder, raw, array.dtype, None)

    return types.float64(array, types.intp), codegen


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
def aligned_head(typingctx, array, index):
    """Return how many elements from `index` on precede the first 64-byte boundary.

    Streamed lines should be whole cache lines, so the boundary is the line's, not the vector's.
    """
    if not accepts(array):
        return None

    def codegen(context, builder, signature, arguments):
        address = builder.ptrtoint(_pointer(context, builder, array, *arguments), _I64)
        missing = builder.and_(builder.neg(address), ir.Constant(_I64, 63))
        return builder.udiv(missing, ir.Constant(_I64, array.dtype.bitwidth // 8))

    return types.intp(array, types.intp), codegen


@intrinsic
def splat(typingctx, value):
    """Return a Vec with `value` in every lane."""

    def codegen(context, builder, signature, arguments):
        vector = ir.VectorType(_DOUBLE, LANES)
        one = builder.insert_element(
            ir.Constant(vector, ir.Undefined), arguments[0], ir.Constant(_I32, 0)
        )
        mask = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
        return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)

    return Vec(types.float64), codegen


@intrinsic
def lane(typingctx, vector, index):
    """Return lane `index` of a Vec."""

    def codegen(context, builder, signature, arguments):
        return builder.extract_element(*arguments)

    return types.float64(Vec, types.intp), codegen


@intrinsic
def last_lanes(typingctx, vector, count):
    """Return the Vec with all but its last `count` lanes set to zero."""

    def codegen(context, builder, signature, arguments):
        value, count = arguments
        wide = ir.VectorType(_I64, LANES)
        first = builder.sub(ir.Constant(_I64, LANES), count)
        one = builder.insert_element(ir.Constant(wide, ir.Undefined), first, ir.Constant(_I32, 0))
        firsts = builder.shuffle_vector(
            one,
            ir.Constant(wide, ir.Undefined),
            ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES),
        )
        lanes = ir.Constant(wide, list(range(LANES)))
        keep = builder.icmp_signed(">=", lanes, firsts)
        zero = ir.Constant(ir.VectorType(_DOUBLE, LANES), [0.0] * LANES)
        return builder.select(keep, value, zero)

    return Vec(Vec, types.intp), codegen


def _binary(name: str) -> Any:
    @intrinsic
    def operation(typingctx, left, right):
        def codegen(context, builder, signature, arguments):
            return getattr(builder, name)(*arguments)

        if left == Vec and right == Vec:
            return Vec(Vec, Vec), codegen
        return None

    return operation


_add, _sub, _mul = _binary("fadd"), _binary("fsub"), _binary("fmul")


def _operator(symbol: Any, operation: Any) -> None:
    @overload(symbol)
    def implementation(left, right):
        if left == Vec and right == Vec:
            return lambda left, right: operation(left, right)
        return None


_operator(operator.add, _add)
_operator(operator.sub, _sub)
_operator(operator.mul, _mul)


@intrinsic
def multiply_add(typingctx, left, right, term):
    """Return left * right + term rounded once, for Vec or float64.

    Fusion is asked for where it is wanted and nowhere else: were it left to the compiler, the
    vector loop and the scalar end of a row could round differently, and so could two machines.
    """

    def codegen(context, builder, signature, arguments):
        kind = arguments[0].type
        fma = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(kind, [kind] * 3),
            "llvm.fma." + ("f64" if kind == _DOUBLE else f"v{LANES}f64"),
        )
        return builder.call(fma, arguments)

    return term(left, right, term), codegen


@intrinsic
def negated(typingctx, value):
    """Return -value, for Vec or float64."""

    def codegen(context, builder, signature, arguments):
        return builder.fneg(arguments[0])

    return value(value), codegen


@inlined
def exact_sum(left, right):
    """Return (s, e) with s = fl(left + right) and s + e = left + right exactly (Knuth)."""
    total = left + right
    moved = total - left
    return total, (left - (total - moved)) + (right - moved)


@inlined
def exact_product(left, right):
    """Return (p, e) with p = fl(left * right) and p + e = left * right exactly (by FMA)."""
    product = left * right
    return product, multiply_add(left, right, negated(product))
