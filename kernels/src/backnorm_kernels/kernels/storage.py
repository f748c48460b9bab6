"""The storage of elements: LLVM code that converts the four element types to float64 or float32 and
back.

In kernels, the NumPy type of an array identifies the storage form of its elements: ``float64``,
``float32``, ``uint16`` for float16 and ``int16`` for bfloat16. (Numba has no arithmetic for the
16-bit types, so only loads and stores use the 16-bit form.) Widening is exact. Narrowing rounds
once, to the nearest number (ties to even). The argument `lanes` of a function is the length of the
vector that it converts, or None for a scalar.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

_DOUBLE, _FLOAT, _HALF = ir.DoubleType(), ir.FloatType(), ir.HalfType()


class _BrainFloat(ir.Type):
    """LLVM's type bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"


_BFLOAT = _BrainFloat()
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def stored_type(dtype: Any) -> ir.Type:
    """Return the LLVM type of an element in memory."""
    return {types.float64: _DOUBLE, types.float32: _FLOAT}.get(dtype, _I16)


def accepts(array: Any) -> bool:
    """Whether `array` is the Numba type of an array of elements, or of an element's address."""
    is_address = isinstance(array, types.CPointer) or getattr(array, "is_address", False)
    return (is_address or isinstance(array, types.Array)) and array.dtype in (
        types.float64,
        types.float32,
        types.uint16,
        types.int16,
    )


def widen(builder: Any, raw: Any, dtype: Any, lanes: int | None) -> Any:
    """Emit the exact conversion of stored elements to float64."""
    if dtype == types.float64:
        return raw
    # 16-bit elements are converted to float32 first, because the processor's instructions for
    # float16 (F16C) convert it only to float32.
    return builder.fpext(widen_to_single(builder, raw, dtype, lanes), _wide(_DOUBLE, lanes))


def widen_to_single(builder: Any, raw: Any, dtype: Any, lanes: int | None) -> Any:
    """Emit the exact conversion of stored elements of float32, float16 or bfloat16 to float32."""
    if dtype == types.float32:
        return raw
    if dtype == types.uint16:
        if _converts_halves():
            half = builder.bitcast(raw, _wide(_HALF, lanes))
            return builder.fpext(half, _wide(_FLOAT, lanes))
        return _half_to_single(builder, raw, lanes)
    bits = builder.shl(builder.zext(raw, _wide(_I32, lanes)), _constant(_I32, 16, lanes))
    return builder.bitcast(bits, _wide(_FLOAT, lanes))


def narrow(builder: Any, value: Any, dtype: Any, lanes: int | None) -> Any:
    """Emit the conversion of float64 to stored elements: one rounding, ties to even."""
    if dtype == types.float64:
        return value
    if dtype == types.float32:
        return builder.fptrunc(value, _wide(_FLOAT, lanes))
    single = _to_odd(builder, value, lanes)
    if dtype == types.uint16:
        return _to_half(builder, single, lanes)
    return _to_bfloat16(builder, single, lanes)


def narrow_sound(builder: Any, single: Any, dtype: Any, lanes: int) -> Any:
    """Emit the conversion of float32 lanes, which must be zero or normal, to stored elements."""
    if dtype == types.float32:
        return single
    if dtype == types.uint16:
        return _to_half(builder, single, lanes)
    if has_feature("avx512bf16"):
        # This conversion is one instruction. It treats subnormal numbers as zero, but there are
        # none here.
        return builder.bitcast(builder.fptrunc(single, _wide(_BFLOAT, lanes)), _wide(_I16, lanes))
    rounded = _round_to_bfloat16(builder, builder.bitcast(single, _wide(_I32, lanes)), lanes)
    return builder.trunc(builder.lshr(rounded, _constant(_I32, 16, lanes)), _wide(_I16, lanes))


def splits(dtype: Any) -> bool:
    """Whether even and odd elements are converted to float32 separately.

    The result is True for bfloat16 on processors with AVX2 but without AVX-512. A 32-bit word has
    two elements: a shift converts the even element to float32, and a mask converts the odd element.
    So each element stays in its 32-bit word. When the results are converted back, one instruction
    joins the even and the odd elements. If the elements were converted in their original order,
    converting the results back would take three instructions.
    """
    return dtype == types.int16 and tells_sound(dtype)


def split_widen(builder: Any, raw: Any) -> Any:
    """Emit `widen_to_single` for bfloat16, with the even lanes before the odd lanes."""
    half = raw.type.count // 2
    pairs = builder.bitcast(raw, _wide(_I32, half))
    even = builder.shl(pairs, _constant(_I32, 16, half))
    odd = builder.and_(pairs, _constant(_I32, 0xFFFF0000, half))
    joined = builder.shuffle_vector(even, odd, _lanes(range(2 * half)))
    return builder.bitcast(joined, _wide(_FLOAT, 2 * half))


def split_narrow(builder: Any, single: Any) -> Any:
    """Emit `narrow_sound` for bfloat16; `single` has the even elements first, then the odd ones."""
    lanes = single.type.count
    rounded = _round_to_bfloat16(builder, builder.bitcast(single, _wide(_I32, lanes)), lanes)
    nothing = ir.Constant(rounded.type, ir.Undefined)
    half, quarters = lanes // 2, _wide(_I16, lanes)
    even = builder.shuffle_vector(rounded, nothing, _lanes(range(half)))
    odd = builder.shuffle_vector(rounded, nothing, _lanes(range(half, lanes)))
    even = builder.bitcast(builder.lshr(even, _constant(_I32, 16, half)), quarters)
    # An odd element is in the upper 16 bits of its 32-bit word. In memory, the upper 16 bits come
    # after the lower 16 bits, so the odd element is already in its place.
    chosen = _lanes(k if k % 2 == 0 else lanes + k for k in range(lanes))
    return builder.shuffle_vector(even, builder.bitcast(odd, quarters), chosen)


def tells_sound(dtype: Any) -> bool:
    """Whether `surely_sound` is faster than `vector.sound`.

    `surely_sound` tests 16-bit elements; with one instruction it tests twice as many of them as
    `vector.sound` tests float32 elements. With AVX-512, `vector.sound` is a single instruction, so
    `surely_sound` is not used.
    """
    return (
        dtype in (types.uint16, types.int16) and has_feature("avx2") and not has_feature("avx512dq")
    )


def surely_sound(builder: Any, raws: Any, dtype: Any) -> Any:
    """Emit a sufficient test that float32 values are zero or normal (see `vector.sound`).

    The test reads only the 16-bit elements to which the values were rounded. It is true if every
    element is finite and not zero, and if the magnitude of every bfloat16 is more than 2^-126, the
    smallest normal number. Such elements were certainly rounded from normal float32 numbers. The
    test is false for an element that is zero: the float32 value may have been subnormal or, with
    bfloat16, a NaN, which the integer arithmetic of the rounding can turn into zero. The test
    doubles the bit pattern of each element, which removes the sign bit.
    """
    kind = raws[0].type
    lanes = kind.count
    if dtype == types.int16:
        # If a bfloat16's exponent is all zeros or all ones, its doubled pattern is, as a signed
        # integer, at most 0x100 in magnitude. So it suffices to test the least magnitude of all
        # lanes.
        name, end, least = "umin", "abs", 0x101
    else:
        # If 1 is subtracted from the doubled pattern of a float16, zero becomes 0xFFFF, infinity
        # and NaN are at least 0xF7FF, and other numbers are at most 0xF7FD. So it suffices to test
        # the greatest number of all lanes.
        name, end, least = "umax", "", 0xF7FD
    extreme = _of_each(builder, name, kind, kind)
    found = _constant(_I16, least, lanes)
    for raw in raws:
        size = builder.add(raw, raw)
        if end:
            absolute = _of_each(builder, end, kind, ir.IntType(1))
            size = builder.call(absolute, [size, ir.Constant(ir.IntType(1), 0)])
        else:
            size = builder.sub(size, _constant(_I16, 1, lanes))
        found = builder.call(extreme, [found, size])
    doubt = builder.icmp_unsigned("!=", found, _constant(_I16, least, lanes))
    return builder.icmp_unsigned(
        "==", builder.bitcast(doubt, ir.IntType(lanes)), ir.Constant(ir.IntType(lanes), 0)
    )


def _of_each(builder: Any, name: str, kind: Any, *more: Any) -> Any:
    """Declare an LLVM intrinsic for vectors of 16-bit integers."""
    return cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind, *more]), f"llvm.{name}.v{kind.count}i16"
    )


def _lanes(indices: Any) -> ir.Constant:
    indices = list(indices)
    return ir.Constant(ir.VectorType(_I32, len(indices)), indices)


def _to_half(builder: Any, single: Any, lanes: int | None) -> Any:
    if _converts_halves():
        return builder.bitcast(builder.fptrunc(single, _wide(_HALF, lanes)), _wide(_I16, lanes))
    return _single_to_half(builder, single, lanes)


def _to_odd(builder: Any, value: Any, lanes: int | None) -> Any:
    """Round float64 to float32 "to odd": truncate, and set the last bit if the value was inexact.

    If the result is then rounded to 16 bits, the outcome is the same as if the float64 had been
    rounded directly to 16 bits. The reason is that the odd last bit records that bits were
    truncated, so an inexact value does not look like a tie (Boldo and Melquiond, "Emulation of FMA
    and correctly rounded sums", 2008). Infinity and NaN do not change.
    """
    single, integer = _wide(_FLOAT, lanes), _wide(_I32, lanes)
    nearest = builder.fptrunc(value, single)
    back = builder.fpext(nearest, value.type)
    cut = builder.fcmp_ordered("one", back, value)
    away = builder.fcmp_ordered(
        ">", _magnitude(builder, back, lanes), _magnitude(builder, value, lanes)
    )
    # The bit patterns of neighbouring floats of the same sign are consecutive integers. So
    # subtracting 1 from the bit pattern gives the next float32 of smaller magnitude.
    bits = builder.sub(builder.bitcast(nearest, integer), builder.zext(away, integer))
    return builder.bitcast(builder.or_(bits, builder.zext(cut, integer)), single)


def _magnitude(builder: Any, value: Any, lanes: int | None) -> Any:
    bits = builder.bitcast(value, _wide(_I64, lanes))
    kept = builder.and_(bits, _constant(_I64, (1 << 63) - 1, lanes))
    return builder.bitcast(kept, value.type)


def _to_bfloat16(builder: Any, single: Any, lanes: int | None) -> Any:
    bits = builder.bitcast(single, _wide(_I32, lanes))
    rounded = _round_to_bfloat16(builder, bits, lanes)
    # `_round_to_bfloat16` reads the bits of a number as an integer, and adds to this integer. For a
    # NaN, this addition could carry into the sign bit. And a NaN whose payload is 0 in all the bits
    # that bfloat16 keeps could become infinity. So a NaN is not rounded; its bit for a quiet NaN is
    # set instead.
    quiet = builder.or_(bits, _constant(_I32, 0x400000, lanes))
    chosen = builder.select(builder.fcmp_unordered("uno", single, single), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, _constant(_I32, 16, lanes)), _wide(_I16, lanes))


def _round_to_bfloat16(builder: Any, bits: Any, lanes: int | None) -> Any:
    """Round a float32, given as its bits, to the nearest bfloat16 (ties to even) by integer
    arithmetic. The upper 16 bits of the result are the bfloat16.
    """
    odd = builder.and_(builder.lshr(bits, _constant(_I32, 16, lanes)), _constant(_I32, 1, lanes))
    return builder.add(builder.add(bits, _constant(_I32, 0x7FFF, lanes)), odd)


def has_feature(name: str) -> bool:
    """Whether the target is an x86 processor with this feature."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return triple.startswith(("x86_64", "i")) and f"+{name}" in features.split(",")


def _converts_halves() -> bool:
    """Whether the target has instructions that convert float16.

    Without such instructions, LLVM would compile the conversion to a call of a function that is not
    linked.
    """
    triple = cpu_target.target_context.codegen().magic_tuple()[0]
    return not triple.startswith(("x86_64", "i")) or has_feature("f16c")


def _half_to_single(builder: Any, raw: Any, lanes: int | None) -> Any:
    """Emit the exact conversion of float16 to float32 without instructions for float16."""
    integer, single = _wide(_I32, lanes), _wide(_FLOAT, lanes)
    half = builder.zext(raw, integer)
    sign = builder.shl(
        builder.and_(half, _constant(_I32, 0x8000, lanes)), _constant(_I32, 16, lanes)
    )
    moved = builder.shl(
        builder.and_(half, _constant(_I32, 0x7FFF, lanes)), _constant(_I32, 13, lanes)
    )
    # Float16's exponent bias is 112 less than float32's, so the moved bits are multiplied by 2^112.
    # The product is exact, also for subnormal float16.
    scaled = builder.fmul(builder.bitcast(moved, single), _constant(_FLOAT, 2.0**112, lanes))
    special = builder.icmp_unsigned(">=", moved, _constant(_I32, 0x7C00 << 13, lanes))
    kept = builder.or_(moved, _constant(_I32, 0x7F800000, lanes))
    bits = builder.select(special, kept, builder.bitcast(scaled, integer))
    return builder.bitcast(builder.or_(bits, sign), single)


def _single_to_half(builder: Any, value: Any, lanes: int | None) -> Any:
    """Emit the conversion of float32 to float16, rounded to nearest even, by integer arithmetic."""
    integer, single = _wide(_I32, lanes), _wide(_FLOAT, lanes)
    bits = builder.bitcast(value, integer)
    magnitude = builder.and_(bits, _constant(_I32, 0x7FFFFFFF, lanes))
    # Adding 0.5 to a number below 2^-14 rounds the number to a multiple of 2^-24, the smallest
    # positive float16.
    anchor = _constant(_I32, 0x3F000000, lanes)
    shifted = builder.fadd(builder.bitcast(magnitude, single), builder.bitcast(anchor, single))
    tiny = builder.sub(builder.bitcast(shifted, integer), anchor)
    odd = builder.and_(
        builder.lshr(magnitude, _constant(_I32, 13, lanes)), _constant(_I32, 1, lanes)
    )
    # Change the exponent's bias from 127 to 15, and round. If rounding carries out of the fraction,
    # the exponent grows by 1. The largest possible result is the pattern of infinity.
    biased = builder.add(magnitude, _constant(_I32, 0xFFF - (112 << 23), lanes))
    normal = builder.lshr(builder.add(biased, odd), _constant(_I32, 13, lanes))
    special = builder.select(
        builder.fcmp_unordered("uno", value, value),
        _constant(_I32, 0x7E00, lanes),
        _constant(_I32, 0x7C00, lanes),
    )
    least = _constant(_I32, 0x38800000, lanes)
    most = _constant(_I32, 0x47800000, lanes)
    finite = builder.select(builder.icmp_unsigned("<", magnitude, least), tiny, normal)
    chosen = builder.select(builder.icmp_unsigned(">=", magnitude, most), special, finite)
    sign = builder.and_(
        builder.lshr(bits, _constant(_I32, 16, lanes)), _constant(_I32, 0x8000, lanes)
    )
    return builder.trunc(builder.or_(chosen, sign), _wide(_I16, lanes))


def _wide(element: ir.Type, lanes: int | None) -> ir.Type:
    return element if lanes is None else ir.VectorType(element, lanes)


def _constant(element: ir.Type, value: Any, lanes: int | None) -> ir.Constant:
    if lanes is None:
        return ir.Constant(element, value)
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)
