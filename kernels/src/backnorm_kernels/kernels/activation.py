"""The activations SiLU and Hardswish after the normalisation.

The gradient of such an activation depends on the activation's argument z, which is not stored. A
forward pass writes the value of the activation. Before a backward pass, a kernel normalises x again
and writes the gradient with respect to z.

=========  ==============================  =====================================================
           value                           derivative
SiLU       z * s, s = 1/(1 + e^-z)         s * (1 + z * (1 - s))
Hardswish  z * min(max(z + 3, 0), 6) / 6   0 up to -3; (z + 3/2) / 3; 1 from 3 on
=========  ==============================  =====================================================

The formulas are those of PyTorch's operators. The kernels compute SiLU from e^-|z| instead of e^-z,
so that nothing overflows.

Activations of float64 elements are computed in float64. For float32 elements, z is rounded to
float32, and the activation is computed in float32, as in PyTorch; float64 would take nearly three
times as long. Activations of 16-bit elements are computed in the arithmetic of the normalisation,
before the result is rounded to 16 bits. If this arithmetic is float32, lanes where e^z might be
subnormal become NaN, and are then computed again in float64 (see `singles`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from backnorm_kernels.kernels.epilogue import part_of
from backnorm_kernels.kernels.jit import by_type, emitted, inlined
from backnorm_kernels.kernels.vector import (
    Vec,
    fused,
    joined,
    low_half,
    multiply_add,
    spread,
    where_less,
)
from backnorm_kernels.record import SILU

_SINGLE = ir.FloatType()

_LN2 = math.log(2.0)
# The exact value of ln 2, minus `_LN2`. (`_LN2` is ln 2 rounded to float64.)
_LN2_REST = 2.3190468138462996e-17

# If z is below `_LEAST_DOUBLE` in float64, or below `_LEAST_SINGLE` in float32, e^z and SiLU become
# 0. If z is above `_LEAST_SINGLE`, the float32 e^z is a normal number, not a subnormal one.
_LEAST_DOUBLE, _LEAST_SINGLE = -746.0, -87.0


def in_singles(dtype):
    """Whether activations are computed in float32 if `dtype` is the element type.

    If they are, z (the argument of the activation) is first rounded to float32.
    """
    return dtype == types.float32


@intrinsic
def _number_of(typingctx, activation):
    """Return the number, such as `SILU`, by which a record identifies the activation."""

    def codegen(context, builder, signature, arguments):
        return part_of(builder, activation, arguments[0], "number")

    return types.int64(activation), codegen


@by_type
def value(activation, z):
    """Return the activation of each lane of z."""
    if z == Vec and in_singles(activation.dtype):
        return lambda activation, z: low_half(_value(activation, joined(z, z)))
    return lambda activation, z: _value(activation, z)


@by_type
def gradient(activation, dy, z):
    """Return the gradient of z, given the gradient of the activation's value."""
    if z == Vec and in_singles(activation.dtype):
        return lambda activation, dy, z: low_half(
            _gradient(activation, joined(dy, dy), joined(z, z))
        )
    return lambda activation, dy, z: _gradient(activation, dy, z)


@inlined
def _value(activation, z):
    zero, one = _filled(z, 0.0), _filled(z, 1.0)
    if _number_of(activation) == SILU:
        e = _exponential(z)
        return _within(activation, z, (z * where_less(z, zero, e, one)) / (one + e))
    ramp, six = z + _filled(z, 3.0), _filled(z, 6.0)
    ramp = where_less(six, ramp, six, where_less(ramp, zero, zero, ramp))
    return z * (ramp * _filled(z, 1.0 / 6.0))


@inlined
def _gradient(activation, dy, z):
    zero, one = _filled(z, 0.0), _filled(z, 1.0)
    if _number_of(activation) == SILU:
        # The derivative is s * (1 + z * (1 - s)), where s is the sigmoid of z. Let d be 1 + e^-|z|.
        # If z >= 0, s is 1/d and 1 - s is e^-|z|/d. If z < 0, s is e^-|z|/d and 1 - s is 1/d.
        e = _exponential(z)
        d, rising, falling = one + e, where_less(z, zero, e, one), where_less(z, zero, one, e)
        slope = (rising * multiply_add(z, falling, d)) / (d * d)
        return _within(activation, z, dy * slope)
    three = _filled(z, 3.0)
    # The slope z/3 + 1/2 is computed as (z + 3/2)/3. Where the slope is nearly 0, the sum z + 3/2
    # is exact, but z/3 + 1/2 would lose digits by cancellation.
    slope = (z + _filled(z, 1.5)) * _filled(z, 1.0 / 3.0)
    rising = where_less(z, three, dy * slope, dy)
    # NaN stays NaN.
    return where_less(_filled(z, -3.0), z, rising, where_less(z, three, zero, z))


@emitted(lambda like, number: like(like, types.float64))
def _filled(builder, like, number):
    """Return a vector of the type of `like` with `number` in every lane."""
    if like.type.element == _SINGLE:
        number = builder.fptrunc(number, _SINGLE)
    return spread(builder, number, like.type.count)


@by_type
def _within(activation, z, result):
    """Return `result`, which was computed from z. If 16-bit elements are computed in float32, lanes
    with z < `_LEAST_SINGLE` become NaN. In these lanes, e^z may be a subnormal number, which has
    too few bits.
    """
    if z == Vec or in_singles(activation.dtype):
        return lambda activation, z, result: result
    least, nan = _LEAST_SINGLE, math.nan
    return lambda activation, z, result: where_less(z, _filled(z, least), _filled(z, nan), result)


@emitted(lambda z: z(z))
def _exponential(builder, z):
    """Return e^-|z| of a vector, with 0 for large |z|.

    Let n be the integer nearest to -|z|/ln 2, and r = -|z| - n ln 2. The result is 2^n times the
    Taylor series of e^r. The omitted terms of the series add up to less than half a unit in the
    last place of the result.
    """
    kind = z.type
    single = kind.element == _SINGLE
    terms, least = (7, _LEAST_SINGLE) if single else (13, _LEAST_DOUBLE)
    bits, digits, bias = (32, 23, 127) if single else (64, 52, 1023)
    integer = ir.VectorType(ir.IntType(bits), kind.count)

    def all_of(number: float) -> Any:
        return ir.Constant(kind, [number] * kind.count)

    def whole(number: int) -> Any:
        return ir.Constant(integer, [number] * kind.count)

    t = builder.or_(builder.bitcast(z, integer), whole(-(1 << (bits - 1))))
    t = builder.bitcast(t, kind)
    # Adding this number to v leaves the integer nearest to v in the last bits of the sum.
    magic = all_of(1.5 * 2.0**digits)
    shifted = fused(builder, t, all_of(1.0 / _LN2), magic)
    n = builder.fsub(shifted, magic)
    high = float(np.float32(_LN2)) if single else _LN2
    low = _LN2 - high if single else _LN2_REST
    r = fused(builder, n, all_of(-low), fused(builder, n, all_of(-high), t))
    factors = [all_of(1.0 / math.factorial(k)) for k in range(1, terms + 1)]
    found = fused(builder, _polynomial(builder, factors, r), r, all_of(1.0))

    def times_power(value: Any, power: Any) -> Any:
        exponent = builder.shl(builder.bitcast(power, integer), whole(digits))
        factor = builder.add(exponent, whole(bias << digits))
        return builder.fmul(value, builder.bitcast(factor, kind))

    if single:
        found = times_power(found, shifted)
    else:
        # `found` must be multiplied by 2^n. The number 2^n may be subnormal, but `times_power` can
        # multiply only by normal powers of two. So n is split into two halves, and `found` is
        # multiplied first by 2^half and then by 2^rest.
        half = builder.fadd(builder.fmul(n, all_of(0.5)), magic)
        rest = builder.fadd(builder.fsub(n, builder.fsub(half, magic)), magic)
        found = times_power(times_power(found, half), rest)
    return builder.select(builder.fcmp_ordered("<", t, all_of(least)), all_of(0.0), found)


def _polynomial(builder: Any, factors: list[Any], r: Any) -> Any:
    """Emit a polynomial by Estrin's scheme, which is many times as fast as Horner's.

    In Horner's scheme, each operation waits for the previous one, and a processor can overlap the
    operations of only a few vectors.
    """
    while len(factors) > 1:
        pairs = zip(factors[::2], factors[1::2], strict=False)
        last = factors[-1:] if len(factors) % 2 else []
        factors = [fused(builder, more, r, one) for one, more in pairs] + last
        if len(factors) > 1:
            r = builder.fmul(r, r)
    return factors[0]
