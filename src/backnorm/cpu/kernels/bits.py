"""Patterns of bits: vectors of float64 as integers, eight at a time, and single numbers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from backnorm.cpu.kernels.storage import has_feature
from backnorm.cpu.kernels.vector import Vec
from backnorm.cpu.scratch import LANES

__all__ = [
    "all_below",
    "integers_at",
    "larger",
    "number_of",
    "pattern_of",
    "patterns_added",
    "patterns_less",
    "without",
]

_I64 = ir.IntType(64)
_INTEGERS = ir.VectorType(_I64, LANES)


def _combining(emit: Any) -> Any:
    """Return an intrinsic that makes one Vec of two, whose lanes it takes for integers."""

    @intrinsic
    def combine(typingctx, left, right):
        def codegen(context, builder, signature, arguments):
            found = emit(builder, *(builder.bitcast(each, _INTEGERS) for each in arguments))
            return builder.bitcast(found, arguments[0].type)

        return Vec(Vec, Vec), codegen

    return combine


def _larger(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.icmp_signed(">", left, right), left, right)


#: The sums of lanes, modulo 2^64; and the larger of each two: of magnitudes, infinity is larger
#: than all numbers, and NaN than infinity.
patterns_added = _combining(lambda builder, left, right: builder.add(left, right))
larger = _combining(_larger)


@intrinsic
def patterns_less(typingctx, value, other, times):
    """Return the lanes of `value` less `times` those of `other`, modulo 2^64."""

    def codegen(context, builder, signature, arguments):
        value, other = (builder.bitcast(each, _INTEGERS) for each in arguments[:2])
        nothing = ir.Constant(_INTEGERS, ir.Undefined)
        first = builder.insert_element(nothing, arguments[2], ir.Constant(ir.IntType(32), 0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        every = builder.shuffle_vector(first, nothing, lanes)
        return builder.bitcast(builder.sub(value, builder.mul(other, every)), arguments[0].type)

    return Vec(Vec, Vec, types.intp), codegen


@intrinsic
def without(typingctx, total, term, one):
    """Return total - term, rounded once.

    With AVX-512 as one * total - term, where `one` is 1: on some processors (AMD Zen) other parts
    do that than add, which have much to do beside it. Of a constant LLVM would make a subtraction.
    """

    def codegen(context, builder, signature, arguments):
        total, term, one = arguments
        if not has_feature("avx512f"):
            return builder.fsub(total, term)
        kind = total.type
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fma.v{LANES}f64"
        )
        return builder.call(fma, [total, one, builder.fneg(term)])

    return Vec(Vec, Vec, Vec), codegen


@intrinsic
def all_below(typingctx, left, right):
    """Return whether every lane of `left` is less than that of `right`, as integers."""

    def codegen(context, builder, signature, arguments):
        left, right = (builder.bitcast(each, _INTEGERS) for each in arguments)
        mask = builder.bitcast(builder.icmp_signed("<", left, right), ir.IntType(LANES))
        return builder.icmp_unsigned("==", mask, ir.Constant(ir.IntType(LANES), -1))

    return types.boolean(Vec, Vec), codegen


@intrinsic
def pattern_of(typingctx, number):
    """Return the pattern of a float64 as an integer."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _I64)

    return types.int64(types.float64), codegen


@intrinsic
def number_of(typingctx, pattern):
    """Return the float64 of a pattern."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), codegen


@intrinsic
def integers_at(typingctx, place):
    """Return the address of float64 memory as one of integers."""
    if place != types.CPointer(types.float64):
        return None

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _I64.as_pointer())

    return types.CPointer(types.int64)(place), codegen
