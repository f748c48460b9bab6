"""Vectors of eight float64 as values in Numba code.

A kernel stays a readable Python loop over ``Vec`` values while the machine code is explicit:
what is one register (or two with AVX2, four with NEON), what is loaded, what is streamed. The
auto-vectoriser is not relied on: its speed changed fivefold with the shape of the arrays.

Arrays in memory are one-dimensional and contiguous; their NumPy type says how an element is
stored: ``float64``, ``float32``, ``uint16`` for float16 and ``int16`` for bfloat16 (Numba has
arithmetic for neither; only loads and stores see the 16-bit form). Everything between a load
and a store is float64, so a store is the only rounding that shows.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

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
    "splat",
    "store",
    "store_one",
    "stream",
]

LANES = 8

_DOUBLE = ir.DoubleType()
_FLOAT = ir.FloatType()
_HALF = ir.HalfType()
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


class _VecType(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"Vec<{LANES} x float64>")


Vec = _VecType()


@register_model(_VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(_DOUBLE, LANES))


def _wide(element: ir.Type, lanes: int | None) -> ir.Type:
    return element if lanes is None else ir.VectorType(element, lanes)


def _constant(element: ir.Type, value: Any, lanes: int | None) -> ir.Constant:
    if lanes is None:
        return ir.Constant(element, value)
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _widen(builder: Any, raw: Any, dtype: Any, lanes: int | None) -> Any:
    """Emit the exact conversion of stored elements to float64."""
    double = _wide(_DOUBLE, lanes)
    if dtype == types.float64:
        return raw
    if dtype == types.float32:
        return builder.fpext(raw, double)
    if dtype == types.uint16:
        half = builder.bitcast(raw, _wide(_HALF, lanes))
        # By way of float32: the processors that convert halves convert them to float32.
        return builder.fpext(builder.fpext(half, _wide(_FLOAT, lanes)), double)
    bits = builder.shl(builder.zext(raw, _wide(_I32, lanes)), _constant(_I32, 16, lanes))
    return builder.fpext(builder.bitcast(bits, _wide(_FLOAT, lanes)), double)


def _narrow(builder: Any, value: Any, dtype: Any, lanes: int | None) -> Any:
    """Emit the conversion of float64 to stored elements: one rounding, ties to even."""
    if dtype == types.float64:
        return value
    if dtype == types.float32:
        return builder.fptrunc(value, _wide(_FLOAT, lanes))
    single = builder.fptrunc(_to_odd(builder, value, lanes), _wide(_FLOAT, lanes))
    if dtype == types.uint16:
        return builder.bitcast(builder.fptrunc(single, _wide(_HALF, lanes)), _wide(_I16, lanes))
    return _to_bfloat16(builder, single, lanes)


def _to_odd(builder: Any, value: Any, lanes: int | None) -> Any:
    """Round float64 to 24 significant bits "to odd".

    The float32 that follows is then exact, and rounding it to 16 bits gives what rounding the
    float64 at once would: the odd last bit remembers that something was cut off, so no tie
    appears where there was none (Boldo and Melquiond, "Emulation of FMA and correctly rounded
    sums", 2008). Infinity is kept, and so is NaN: its quiet bit is above the cut.
    """
    cut = (1 << 29) - 1
    bits = builder.bitcast(value, _wide(_I64, lanes))
    low = builder.and_(bits, _constant(_I64, cut, lanes))
    sticky = builder.and_(
        builder.add(low, _constant(_I64, cut, lanes)), _constant(_I64, cut + 1, lanes)
    )
    kept = builder.and_(bits, _constant(_I64, ~cut, lanes))
    return builder.bitcast(builder.or_(kept, sticky), _wide(_DOUBLE, lanes))


def _to_bfloat16(builder: Any, single: Any, lanes: int | None) -> Any:
    bits = builder.bitcast(single, _wide(_I32, lanes))
    odd = builder.and_(builder.lshr(bits, _constant(_I32, 16, lanes)), _constant(_I32, 1, lanes))
    rounded = builder.add(builder.add(bits, _constant(_I32, 0x7FFF, lanes)), odd)
    # Rounding could carry a NaN's payload into the sign or to infinity: keep it, made quiet.
    quiet = builder.or_(bits, _constant(_I32, 0x400000, lanes))
    chosen = builder.select(builder.fcmp_unordered("uno", single, single), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, _constant(_I32, 16, lanes)), _wide(_I16, lanes))


def _stored(dtype: Any) -> ir.Type:
    return {types.float64: _DOUBLE, types.float32: _FLOAT}.get(dtype, _I16)


def _accepts(array: Any) -> bool:
    return isinstance(array, types.Array) and array.dtype in (
        types.float64,
        types.float32,
        types.uint16,
        types.int16,
    )


@intrinsic
def load(typingctx, array, index):
    """Return elements index .. index+7 as a Vec."""
    if not _accepts(array):
        return None

    def codegen(context, builder, signature, arguments):
        pointer = _pointer(context, builder, array, *arguments)
        stored = _stored(array.dtype)
        raw = builder.load(
            pointer, typ=ir.VectorType(stored, LANES), align=array.dtype.bitwidth // 8
        )
        return _widen(builder, raw, array.dtype, LANES)

    return Vec(array, types.intp), codegen


@intrinsic
def load_one(typingctx, array, index):
    """Return element `index` as a float64."""
    if not _accepts(array):
        return None

    def codegen(context, builder, signature, arguments):
        pointer = _pointer(context, builder, array, *arguments)
        raw = builder.load(pointer, typ=_stored(array.dtype), align=array.dtype.bitwidth // 8)
        return _widen(builder, raw, array.dtype, None)

    return types.float64(array, types.intp), codegen


def _storing(lanes: int | None, streaming: bool) -> Any:
    def typed(array: Any, index: Any, value: Any) -> Any:
        if not _accepts(array):
            return None

        def codegen(context, builder, signature, arguments):
            target, position, wide = arguments
            raw = _narrow(builder, wide, array.dtype, lanes)
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
    if not _accepts(array):
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


def _binary(name: str, flags: tuple[str, ...]) -> Any:
    @intrinsic
    def operation(typingctx, left, right):
        def codegen(context, builder, signature, arguments):
            return getattr(builder, name)(*arguments, flags=flags)

        if left == Vec and right == Vec:
            return Vec(Vec, Vec), codegen
        return None

    return operation


# "contract" lets a product and a sum become one fused multiply-add, which rounds once less.
_add = _binary("fadd", ("contract",))
_sub = _binary("fsub", ("contract",))
_mul = _binary("fmul", ("contract",))
# For error-free transformations every operation must round by itself.
_plain_add = _binary("fadd", ())
_plain_sub = _binary("fsub", ())
_plain_mul = _binary("fmul", ())


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
def _product_error(typingctx, left, right, product):
    def codegen(context, builder, signature, arguments):
        left, right, product = arguments
        fma = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(product.type, [product.type] * 3),
            "llvm.fma." + ("f64" if product.type == _DOUBLE else f"v{LANES}f64"),
        )
        return builder.call(fma, [left, right, builder.fneg(product)])

    return product(left, right, product), codegen


def exact_sum(left, right):
    """Return (s, e) with s = fl(left + right) and s + e = left + right exactly (Knuth)."""


def exact_product(left, right):
    """Return (p, e) with p = fl(left * right) and p + e = left * right exactly (by FMA)."""


@overload(exact_sum)
def _exact_sum(left, right):
    if left == Vec:

        def vector(left, right):
            total = _plain_add(left, right)
            moved = _plain_sub(total, left)
            lost = _plain_sub(left, _plain_sub(total, moved))
            return total, _plain_add(lost, _plain_sub(right, moved))

        return vector

    def scalar(left, right):
        # Numba does not contract or reassociate scalar arithmetic unless asked to.
        total = left + right
        moved = total - left
        return total, (left - (total - moved)) + (right - moved)

    return scalar


@overload(exact_product)
def _exact_product(left, right):
    if left == Vec:

        def vector(left, right):
            product = _plain_mul(left, right)
            return product, _product_error(left, right, product)

        return vector

    def scalar(left, right):
        product = left * right
        return product, _product_error(left, right, product)

    return scalar
