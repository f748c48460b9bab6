"""Vectors of eight float64 or sixteen float32 as values in Numba code, and their arithmetic.

A kernel is a readable Python loop over values of type ``Vec`` (float64), ``Singles`` (float32) or
``EvenOdd`` (float32, with the even lanes before the odd lanes; see `storage.split_widen`). The
Python code determines the machine code: with AVX-512, a vector is one register (two registers with
AVX2, four with NEON), and fused multiply-adds are called by name. The kernels do not rely on LLVM's
vectoriser: the speed of its code differed by a factor of five between some shapes of arrays and
others.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, overload, register_model

from backnorm_kernels.kernels.jit import emitted, inlined
from backnorm_kernels.kernels.storage import has_feature
from backnorm_kernels.scratch import LANES, SINGLES

_DOUBLE, _SINGLE = ir.DoubleType(), ir.FloatType()
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()

# The flags of `llvm.is.fpclass` for six classes, in this order: signalling NaN, quiet NaN,
# -infinity, +infinity, negative subnormal, positive subnormal.
_UNSOUND = 0x1 | 0x2 | 0x4 | 0x200 | 0x10 | 0x80
# The flags of the x86 instruction vfpclassps for the same six classes.
_UNSOUND_X86 = 0x1 | 0x80 | 0x8 | 0x10 | 0x20


class _VecType(types.Type):
    def __init__(self, element: str, lanes: int, order: str = "") -> None:
        self.element, self.lanes = element, lanes
        super().__init__(name=f"Vec<{lanes} x {element}{order}>")


Vec = _VecType("float64", LANES)
Singles = _VecType("float32", SINGLES)
EvenOdd = _VecType("float32", SINGLES, ", even before odd")


@register_model(_VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        element = _DOUBLE if fe_type.element == "float64" else _SINGLE
        super().__init__(dmm, fe_type, ir.VectorType(element, fe_type.lanes))


def first_lanes(builder: Any, count: Any, lanes: int = LANES) -> Any:
    """Emit a mask of the first `count` lanes.

    The indices of lanes are 32-bit integers, which need half as many registers as 64-bit integers.
    """
    least, most = ir.Constant(count.type, 0), ir.Constant(count.type, lanes)
    count = builder.select(builder.icmp_signed("<", count, most), count, most)
    count = builder.select(builder.icmp_signed(">", count, least), count, least)
    counts = spread(builder, builder.trunc(count, _I32), lanes)
    return builder.icmp_signed("<", ir.Constant(counts.type, list(range(lanes))), counts)


def load_lanes(builder: Any, pointer: Any, vector: Any, count: Any, size: int) -> Any:
    """Emit a load of a vector's first `count` lanes, which have `size` bytes each.

    The other lanes of the vector are zero. Memory after the lanes that are loaded is not accessed.
    """
    if vector.element == _I16 and has_feature("avx2") and not has_feature("avx512bw"):
        return _load_pairs(builder, pointer, vector, count)
    access = _masked(builder, "load", vector, [_BYTES, _I32, _mask(vector), vector], vector)
    mask = first_lanes(builder, count, vector.count)
    place, align = builder.bitcast(pointer, _BYTES), ir.Constant(_I32, size)
    return builder.call(access, [place, align, mask, ir.Constant(vector, None)])


def _load_pairs(builder: Any, pointer: Any, vector: Any, count: Any) -> Any:
    """Emit `load_lanes` for 16-bit lanes on processors that cannot mask lanes of 16 bits.

    Here pairs of lanes are loaded, and then the last lane alone, because `count` may be odd. If
    16-bit lanes were loaded with a mask, LLVM would emit a branch for each lane. With such
    branches, the backward pass of (32, 512, 7, 7) in bfloat16 took twice as long as with pairs.
    """
    lanes = vector.count
    most = ir.Constant(count.type, lanes)
    count = builder.select(builder.icmp_signed("<", count, most), count, most)
    half = builder.ashr(count, ir.Constant(count.type, 1))
    pairs = builder.bitcast(pointer, _I32.as_pointer())
    loaded = load_lanes(builder, pairs, ir.VectorType(_I32, lanes // 2), half, 2)
    last = builder.sub(count, ir.Constant(count.type, 1))
    nothing = cgutils.alloca_once_value(builder, ir.Constant(_I16, 0))
    some = builder.icmp_signed(">=", last, ir.Constant(count.type, 0))
    one = builder.load(builder.select(some, builder.gep(pointer, [last]), nothing), typ=_I16)
    places = ir.Constant(vector, list(range(lanes)))
    here = builder.icmp_signed("==", places, spread(builder, builder.trunc(last, _I16), lanes))
    return builder.select(here, spread(builder, one, lanes), builder.bitcast(loaded, vector))


def store_lanes(builder: Any, raw: Any, pointer: Any, count: Any, size: int) -> None:
    """Emit a store of the first `count` lanes, of `size` bytes each."""
    vector = raw.type
    access = _masked(builder, "store", vector, [vector, _BYTES, _I32, _mask(vector)], ir.VoidType())
    mask = first_lanes(builder, count, vector.count)
    builder.call(access, [raw, builder.bitcast(pointer, _BYTES), ir.Constant(_I32, size), mask])


def _mask(vector: Any) -> Any:
    return ir.VectorType(ir.IntType(1), vector.count)


def _masked(builder: Any, verb: str, vector: Any, parameters: list[Any], result: Any) -> Any:
    """Declare llvm.masked.load or llvm.masked.store."""
    name = f"llvm.masked.{verb}.v{vector.count}{vector.element.intrinsic_name}.p0"
    kind = ir.FunctionType(result, parameters)
    return cgutils.get_or_insert_function(builder.module, kind, name)


def spread(builder: Any, value: Any, lanes: int) -> Any:
    """Emit a vector with `value` in every lane."""
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


@emitted(Vec(types.float64))
def splat(builder, value):
    """Return a Vec with `value` in every lane."""
    return spread(builder, value, LANES)


@emitted(Singles(types.float64))
def splat_single(builder, value):
    """Return Singles with `value`, rounded to float32, in every lane."""
    return spread(builder, builder.fptrunc(value, _SINGLE), SINGLES)


@emitted(types.float64(Vec, types.intp))
def lane(builder, vector, index):
    """Return lane `index` of a Vec."""
    return builder.extract_element(vector, index)


@emitted(lambda count, first, second: first(types.intp, first, first))
def blend(builder, count, first, second):
    """Return a vector with the first `count` lanes of `first` and the others of `second`."""
    return builder.select(first_lanes(builder, count, first.type.count), first, second)


def _operator(symbol: Any, name: str) -> None:
    """Define the operator `symbol` for two vectors of one type by the LLVM instruction `name`."""

    @emitted(lambda left, right: left(left, right) if left == right else None)
    def operation(builder, left, right):
        return getattr(builder, name)(left, right)

    @overload(symbol)
    def implementation(left, right):
        if isinstance(left, _VecType) and left == right:
            return lambda left, right: operation(left, right)
        return None


for _symbol, _name in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    _operator(getattr(operator, _symbol), _name)


def _all(value: float) -> ir.Constant:
    return ir.Constant(ir.VectorType(_DOUBLE, LANES), [value] * LANES)


def _each(name: str) -> Any:
    """Return a function that applies a function of LLVM to every lane of a Vec."""

    @emitted(Vec(Vec))
    def each(builder, value):
        shape = ir.FunctionType(value.type, [value.type])
        function = cgutils.get_or_insert_function(builder.module, shape, f"llvm.{name}.v{LANES}f64")
        return builder.call(function, [value])

    return each


#: square_root(value) returns the square root, rounded once. magnitude(value) returns the absolute
#: value.
square_root, magnitude = _each("sqrt"), _each("fabs")


@emitted(Vec(Vec))
def at_least_zero(builder, value):
    """Return a Vec with negative lanes replaced by zero; NaN stays."""
    negative = builder.fcmp_ordered("<", value, _all(0.0))
    return builder.select(negative, _all(0.0), value)


@emitted(Vec(Vec, Vec, Vec))
def where_finite(builder, tested, then, otherwise):
    """Return the lanes of `then` where `tested` is finite, and of `otherwise` elsewhere."""
    # x - x is NaN if x is infinite or NaN, and 0 if x is finite.
    finite = builder.fcmp_ordered("ord", builder.fsub(tested, tested), _all(0.0))
    return builder.select(finite, then, otherwise)


def _where(symbol: str) -> Any:
    """Return a function that selects lanes by comparing the lanes of two vectors."""

    @emitted(lambda left, right, then, otherwise: then(left, right, then, otherwise))
    def where(builder, left, right, then, otherwise):
        return builder.select(builder.fcmp_ordered(symbol, left, right), then, otherwise)

    return where


#: Both functions have the arguments (left, right, then, otherwise). In each lane, `where_less`
#: returns `then` if left < right, and `where_equal` returns `then` if left = right. In all other
#: lanes, and if one of the two is NaN, they return `otherwise`.
where_less, where_equal = _where("<"), _where("==")


@emitted(Vec(Vec))
def rounded(builder, value):
    """Round each lane of a Vec to float32; return the result as a Vec, that is, as float64."""
    single = builder.fptrunc(value, ir.VectorType(_SINGLE, LANES))
    return builder.fpext(single, value.type)


@emitted(types.boolean(Vec, types.intp))
def all_finite(builder, value, count):
    """Return whether the first `count` lanes of a Vec are finite."""
    lost = builder.fcmp_unordered("uno", builder.fsub(value, value), _all(0.0))
    bits = builder.bitcast(builder.and_(lost, first_lanes(builder, count)), ir.IntType(LANES))
    return builder.icmp_unsigned("==", bits, ir.Constant(ir.IntType(LANES), 0))


@emitted(types.boolean(Vec))
def any_not_positive(builder, value):
    """Return whether a lane is zero or negative (NaN is neither)."""
    lanes = builder.fcmp_ordered("<=", value, _all(0.0))
    bits = builder.bitcast(lanes, ir.IntType(LANES))
    return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))


def _folding(left: list[int], right: list[int]) -> Any:
    """Return a function that takes two Vec and returns a Vec. Lane k of the result is the sum of
    two of the sixteen lanes: lane left[k] and lane right[k]. The lanes of the first Vec have the
    numbers 0 to 7, those of the second 8 to 15.
    """

    @emitted(Vec(Vec, Vec))
    def fold(builder, first, second):
        chosen = [
            builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_I32, LANES), mask))
            for mask in (left, right)
        ]
        return builder.fadd(*chosen)

    return fold


_fold_ones = _folding([0, 8, 2, 10, 4, 12, 6, 14], [1, 9, 3, 11, 5, 13, 7, 15])
_fold_twos = _folding([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
_fold_fours = _folding([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])


@inlined
def sums_of_lanes(v):
    """Return a Vec whose lane k is the sum of all lanes of v[k], for eight Vec v[0] to v[7].

    The lanes of a Vec are added in the order ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). Adding one
    lane after the other would take five times as long.
    """
    left = _fold_twos(_fold_ones(v[0], v[1]), _fold_ones(v[2], v[3]))
    right = _fold_twos(_fold_ones(v[4], v[5]), _fold_ones(v[6], v[7]))
    return _fold_fours(left, right)


@emitted(lambda left, right, term: term(left, right, term))
def multiply_add(builder, left, right, term):
    """Return left * right + term rounded once, for vectors or float64.

    Kernels fuse a multiplication and an addition only by this function or by `fused`, which it
    calls. If the compiler decided what to fuse, the vector loop and the scalar end of a row could
    round differently, and so could two machines.
    """
    return fused(builder, left, right, term)


def fused(builder: Any, left: Any, right: Any, term: Any) -> Any:
    """Emit left * right + term, rounded once, for `multiply_add`."""
    kind = left.type
    fma = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(kind, [kind] * 3),
        "llvm.fma." + ("" if kind == _DOUBLE else f"v{kind.count}") + _suffix(kind),
    )
    return builder.call(fma, [left, right, term])


def _suffix(kind: Any) -> str:
    return getattr(kind, "element", kind).intrinsic_name


@emitted(lambda value: value(value))
def negated(builder, value):
    """Return -value, for vectors or float64."""
    return builder.fneg(value)


def _half(first: int) -> Any:
    """Return a function that converts eight lanes of Singles, from `first` on, to a Vec."""

    @emitted(Vec(Singles))
    def half(builder, value):
        lanes = ir.Constant(ir.VectorType(_I32, LANES), list(range(first, first + LANES)))
        chosen = builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), lanes)
        return builder.fpext(chosen, ir.VectorType(_DOUBLE, LANES))

    return half


#: `value` is a Singles, a vector of sixteen float32. low_half(value) returns its first eight lanes,
#: high_half(value) returns its last eight. Both return float64 lanes (a Vec), so the conversion is
#: exact.
low_half, high_half = _half(0), _half(LANES)


def _reordering(source: Any, target: Any, lanes: list[int]) -> Any:
    """Return a function that puts lanes in another order."""

    @emitted(target(source))
    def reorder(builder, value):
        chosen = ir.Constant(ir.VectorType(_I32, SINGLES), lanes)
        return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), chosen)

    return reorder


#: Convert Singles to EvenOdd: first the lanes with even numbers, then the lanes with odd numbers.
#: If all lanes of the argument have the same value, all lanes of the result have this value, too.
even_odd = _reordering(Singles, EvenOdd, [*range(0, SINGLES, 2), *range(1, SINGLES, 2)])
#: Convert EvenOdd to Singles.
in_order = _reordering(EvenOdd, Singles, [half + k for k in range(LANES) for half in (0, LANES)])


def _unsound(builder: Any, value: Any) -> Any:
    """Emit a mask of the lanes that are NaN, infinite or subnormal."""
    mask = ir.VectorType(ir.IntType(1), SINGLES)
    if has_feature("avx512dq"):
        # LLVM compiles this intrinsic to one instruction, and `llvm.is.fpclass` to seven.
        one = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(mask, [value.type, _I32]),
            "llvm.x86.avx512.fpclass.ps.512",
        )
        return builder.call(one, [value, ir.Constant(_I32, _UNSOUND_X86)])
    tests = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(mask, [value.type, _I32]),
        f"llvm.is.fpclass.v{SINGLES}f32",
    )
    return builder.call(tests, [value, ir.Constant(_I32, _UNSOUND)])


def _doubtful(builder: Any, values: Any) -> Any:
    """Emit a mask of the lanes in which one of several Singles may be NaN, infinite or subnormal.

    This test is used on processors without the instruction vfpclassps. Doubling the bit pattern as
    an integer removes the sign. Subnormal numbers are then below 2^24, and infinities and NaN are
    the last 2^24 integers before 2^32. As signed integers, the doubled patterns of all these
    numbers have a magnitude up to 2^24. The doubled patterns of 2^-126 and zero have such a
    magnitude, too, although these two numbers are neither infinite nor subnormal. Subtracting 1
    turns the pattern of zero into the largest unsigned integer, so lanes with zero are not in the
    mask. Lanes with 2^-126 stay in the mask.
    """
    integer = ir.VectorType(_I32, SINGLES)
    absolute = _declared(builder, "abs", integer, integer, ir.IntType(1))
    least = _declared(builder, "umin", integer, integer, integer)
    found = ir.Constant(integer, [1 << 24] * SINGLES)
    for value in values:
        bits = builder.bitcast(value, integer)
        size = builder.call(absolute, [builder.add(bits, bits), ir.Constant(ir.IntType(1), 0)])
        size = builder.sub(size, ir.Constant(integer, [1] * SINGLES))
        found = builder.call(least, [found, size])
    return builder.icmp_unsigned("!=", found, ir.Constant(integer, [1 << 24] * SINGLES))


def _declared(builder: Any, name: str, result: Any, *parameters: Any) -> Any:
    return cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, parameters), f"llvm.{name}.v{SINGLES}i32"
    )


def _all_sound(builder: Any, *values: Any) -> Any:
    if has_feature("avx512dq"):
        lanes = functools.reduce(builder.or_, (_unsound(builder, value) for value in values))
    else:
        lanes = _doubtful(builder, values)
    bits = builder.bitcast(lanes, ir.IntType(SINGLES))
    return builder.icmp_unsigned("==", bits, ir.Constant(ir.IntType(SINGLES), 0))


@emitted(lambda value: types.boolean(value))
def sound(builder, value):
    """Return whether no lane of `value`, a vector of float32, is NaN, infinite or subnormal.

    The result may also be False if a lane has the magnitude 2^-126, which is normal. The function
    `marked` has no such exception: it treats the magnitude 2^-126 as normal.
    """
    return _all_sound(builder, value)


@emitted(lambda left, right: types.boolean(left, right))
def both_sound(builder, left, right):
    """Return whether all lanes of two float32 vectors are sound: see `sound`."""
    return _all_sound(builder, left, right)


@emitted(Singles(Singles))
def marked(builder, value):
    """Return `value`, with NaN in place of every lane that is infinite or subnormal."""
    nan = ir.Constant(value.type, [float("nan")] * SINGLES)
    return builder.select(_unsound(builder, value), nan, value)


@inlined
def two_sum(left, right):
    """TwoSum: return (s, e) with s = fl(left + right) and s + e = left + right exactly (Knuth)."""
    total = left + right
    moved = total - left
    return total, (left - (total - moved)) + (right - moved)


@inlined
def two_product(left, right):
    """TwoProduct: return (p, e) with p = fl(left * right), p + e = left * right exactly (FMA)."""
    product = left * right
    return product, multiply_add(left, right, negated(product))
