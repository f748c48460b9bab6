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
    "blend",
    "exact_product",
    "exact_sum",
    "first_lanes",
    "lane",
    "multiply_add",
    "negated",
    "splat",
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
