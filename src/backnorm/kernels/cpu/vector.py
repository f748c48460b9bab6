"""Vectors of eight float64 as values in Numba code, and their arithmetic.

A kernel stays a readable Python loop over ``Vec`` values while the machine code is explicit:
what is one register (or two with AVX2, four with NEON), and what is fused. The auto-vectoriser
is not relied on: its speed changed fivefold with the shape of the arrays.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from backnorm.kernels.cpu.jit import inlined

__all__ = [
    "LANES",
    "Vec",
    "any_not_positive",
    "at_least_zero",
    "blend",
    "exact_product",
    "exact_sum",
    "first_lanes",
    "lane",
    "multiply_add",
    "negated",
    "splat",
    "square_root",
    "sums_of_lanes",
    "where_finite",
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


def first_lanes(builder: Any, count: Any) -> Any:
    """Emit a mask of the first `count` lanes."""
    wide = ir.VectorType(_I64, LANES)
    one = builder.insert_element(ir.Constant(wide, ir.Undefined), count, ir.Constant(_I32, 0))
    counts = builder.shuffle_vector(
        one,
        ir.Constant(wide, ir.Undefined),
        ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES),
    )
    return builder.icmp_signed("<", ir.Constant(wide, list(range(LANES))), counts)


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
def blend(typingctx, count, first, second):
    """Return a Vec with the first `count` lanes of `first` and the others of `second`."""

    def codegen(context, builder, signature, arguments):
        count, first, second = arguments
        return builder.select(first_lanes(builder, count), first, second)

    return Vec(types.intp, Vec, Vec), codegen


def _binary(name: str) -> Any:
    @intrinsic
    def operation(typingctx, left, right):
        def codegen(context, builder, signature, arguments):
            return getattr(builder, name)(*arguments)

        if left == Vec and right == Vec:
            return Vec(Vec, Vec), codegen
        return None

    return operation


_add, _sub, _mul, _div = _binary("fadd"), _binary("fsub"), _binary("fmul"), _binary("fdiv")


def _operator(symbol: Any, operation: Any) -> None:
    @overload(symbol)
    def implementation(left, right):
        if left == Vec and right == Vec:
            return lambda left, right: operation(left, right)
        return None


_operator(operator.add, _add)
_operator(operator.sub, _sub)
_operator(operator.mul, _mul)
_operator(operator.truediv, _div)


def _all(value: float) -> ir.Constant:
    return ir.Constant(ir.VectorType(_DOUBLE, LANES), [value] * LANES)


@intrinsic
def square_root(typingctx, value):
    """Return the square root of every lane, each rounded once."""

    def codegen(context, builder, signature, arguments):
        kind = arguments[0].type
        root = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(kind, [kind]), f"llvm.sqrt.v{LANES}f64"
        )
        return builder.call(root, arguments)

    return Vec(Vec), codegen


@intrinsic
def at_least_zero(typingctx, value):
    """Return a Vec with negative lanes replaced by zero; NaN stays."""

    def codegen(context, builder, signature, arguments):
        negative = builder.fcmp_ordered("<", arguments[0], _all(0.0))
        return builder.select(negative, _all(0.0), arguments[0])

    return Vec(Vec), codegen


@intrinsic
def where_finite(typingctx, tested, then, otherwise):
    """Return the lanes of `then` where `tested` is finite, and of `otherwise` elsewhere."""

    def codegen(context, builder, signature, arguments):
        tested, then, otherwise = arguments
        # Infinity and NaN less themselves are NaN.
        finite = builder.fcmp_ordered("ord", builder.fsub(tested, tested), _all(0.0))
        return builder.select(finite, then, otherwise)

    return Vec(Vec, Vec, Vec), codegen


@intrinsic
def any_not_positive(typingctx, value):
    """Return whether a lane is zero or negative (NaN is neither)."""

    def codegen(context, builder, signature, arguments):
        lanes = builder.fcmp_ordered("<=", arguments[0], _all(0.0))
        bits = builder.bitcast(lanes, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))

    return types.boolean(Vec), codegen


def _folding(left: list[int], right: list[int]) -> Any:
    """Return an intrinsic that adds two selections of the lanes of two Vec."""

    @intrinsic
    def fold(typingctx, first, second):
        def codegen(context, builder, signature, arguments):
            chosen = [
                builder.shuffle_vector(*arguments, ir.Constant(ir.VectorType(_I32, LANES), mask))
                for mask in (left, right)
            ]
            return builder.fadd(*chosen)

        return Vec(Vec, Vec), codegen

    return fold


_fold_ones = _folding([0, 8, 2, 10, 4, 12, 6, 14], [1, 9, 3, 11, 5, 13, 7, 15])
_fold_twos = _folding([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
_fold_fours = _folding([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])


@inlined
def sums_of_lanes(v):
    """Return the sums of the lanes of eight Vec, as the lanes of one.

    Each is ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)); one by one takes five times as long.
    """
    left = _fold_twos(_fold_ones(v[0], v[1]), _fold_ones(v[2], v[3]))
    right = _fold_twos(_fold_ones(v[4], v[5]), _fold_ones(v[6], v[7]))
    return _fold_fours(left, right)


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
