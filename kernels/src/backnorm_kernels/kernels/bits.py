"""Functions that treat the bits of a float64, or of a vector of eight float64, as integers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from backnorm_kernels.kernels.jit import emitted
from backnorm_kernels.kernels.storage import has_feature
from backnorm_kernels.kernels.vector import Vec, fused
from backnorm_kernels.scratch import LANES

_I64 = ir.IntType(64)
_INTEGERS = ir.VectorType(_I64, LANES)
_Integers = types.CPointer(types.int64)


def _combining(emit: Any) -> Any:
    """Return a function that combines two Vec lane by lane, as `emit` combines two integers."""

    @emitted(Vec(Vec, Vec))
    def combine(builder, left, right):
        combined = emit(builder, *(builder.bitcast(each, _INTEGERS) for each in (left, right)))
        return builder.bitcast(combined, left.type)

    return combine


def _larger(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.icmp_signed(">", left, right), left, right)


#: Both functions take two vectors, and read the bits of each lane as an integer. For each lane,
#: `patterns_added` returns the sum of the two integers modulo 2^64, and `larger` returns the larger
#: of the two. If `larger` compares the bit patterns of magnitudes, infinity is larger than all
#: numbers, and NaN is larger than infinity.
patterns_added = _combining(lambda builder, left, right: builder.add(left, right))
larger = _combining(_larger)


@emitted(Vec(Vec, Vec, types.intp))
def patterns_less(builder, value, other, times):
    """Return value - times * other in every lane.

    The bit patterns of `value` and `other` are treated as integers, modulo 2^64.
    """
    minuend, subtrahend = (builder.bitcast(each, _INTEGERS) for each in (value, other))
    nothing = ir.Constant(_INTEGERS, ir.Undefined)
    first = builder.insert_element(nothing, times, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    every = builder.shuffle_vector(first, nothing, lanes)
    return builder.bitcast(builder.sub(minuend, builder.mul(subtrahend, every)), value.type)


@emitted(Vec(Vec, Vec, Vec))
def without(builder, total, term, one):
    """Return total - term, rounded once.

    With AVX-512, the difference is computed as the fused operation one * total - term, where `one`
    is 1. On processors that have separate units for fused operations (AMD Zen), this is faster than
    a subtraction, because the calling loop already keeps the addition units busy. If `one` were a
    constant, LLVM would turn the operation into a subtraction.
    """
    if not has_feature("avx512f"):
        return builder.fsub(total, term)
    return fused(builder, total, one, builder.fneg(term))


@emitted(types.boolean(Vec, Vec))
def all_below(builder, left, right):
    """Return whether left < right in all lanes, if the bits of the lanes are read as integers."""
    left, right = (builder.bitcast(each, _INTEGERS) for each in (left, right))
    mask = builder.bitcast(builder.icmp_signed("<", left, right), ir.IntType(LANES))
    return builder.icmp_unsigned("==", mask, ir.Constant(ir.IntType(LANES), -1))


@emitted(types.int64(types.float64))
def pattern_of(builder, number):
    """Return the bit pattern of a float64 as an integer."""
    return builder.bitcast(number, _I64)


@emitted(types.float64(types.int64))
def number_of(builder, pattern):
    """Return the float64 that has a bit pattern."""
    return builder.bitcast(pattern, ir.DoubleType())


@emitted(lambda place: _Integers(place) if place == types.CPointer(types.float64) else None)
def integers_at(builder, place):
    """Return the address of float64 memory as an address of integers."""
    return builder.bitcast(place, _I64.as_pointer())
