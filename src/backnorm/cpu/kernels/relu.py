"""Addresses with a ReLU: what is read or written at them depends on 0 < y < ceiling.

Kernels are written for addresses of elements. Where a ReLU follows the normalisation, or another
activation, they are given one of these in its place, and loads and stores (see `memory`) do what it
asks for:

============  ===================================================================================
Masked        dy: an element is zero where its bit is not set
ReLU          in the place of dy in a forward pass: the residual, if any, to be added before the
              ReLU, and its ceiling
Activation    in the place of dy in a forward pass: which activation it is, and dy, if its gradient
              is wanted (see `activation`)
Marking       y: a store also writes a bit an element, whether what was stored is more than zero
              and below the ceiling
WithResidual  dx, and the gradient of the residual, if that is wanted: a store also writes the
              masked dy there
============  ===================================================================================

A ReLU without a ceiling is one whose ceiling is infinity, which is not taken for reached.

The mask has a bit for each element, in the order of memory. Threads write whole bytes of it, so
vectors begin at multiples of eight elements wherever a Marking is written.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from backnorm.cpu.kernels.storage import has_feature
from backnorm.cpu.kernels.vector import EvenOdd, Singles, Vec, first_lanes, load_lanes, spread

__all__ = [
    "Activation",
    "Addresses",
    "Marking",
    "Masked",
    "ReLU",
    "WithResidual",
    "after_store",
    "base_of",
    "has_values",
    "masked",
    "relu",
    "same_line",
    "values_of",
]

_I8, _I64 = ir.IntType(8), ir.IntType(64)
# What is no address of elements.
_PARTS = {
    "bits": types.CPointer(types.uint8),
    "ceiling": types.float64,
    "beyond": types.int64,
    "number": types.int64,
}


class Addresses(types.Type):
    """Several addresses, and numbers that go with them.

    `parts` are their names and types, and `dtype` is the elements' type.
    """

    is_address = True

    def __init__(self, dtype: Any, *parts: str) -> None:
        self.dtype = dtype
        self.parts = {name: _PARTS.get(name, types.CPointer(dtype)) for name in ("values", *parts)}
        super().__init__(name=f"{type(self).__name__}({dtype})")


class Masked(Addresses):
    """Elements that count where their bit is set."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(dtype, "bits")


class ReLU(Addresses):
    """The residual, if there is one (its address may be 0), and the ceiling."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(dtype, "ceiling")


class Activation(Addresses):
    """The gradient of its value, if that is given (its address may be 0), and its number."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(dtype, "number")


class Marking(Addresses):
    """Elements to write, and a mask, if it is wanted (its address may be 0)."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(dtype, "bits", "beyond")


class WithResidual(Addresses):
    """Elements to write, and masked elements for a second place, if there is one."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(dtype, "residual", "dy", "bits")


class _AddressesModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, list(fe_type.parts.items()))


for _kind in (Masked, ReLU, Activation, Marking, WithResidual):
    register_model(_kind)(_AddressesModel)


def _parts(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return cgutils.create_struct_proxy(kind)(context, builder, value=value)


def base_of(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Emit the address of the elements themselves."""
    return _parts(context, builder, kind, value).values


def masked(
    context: Any, builder: Any, kind: Any, value: Any, index: Any, raw: Any, count: Any = None
) -> Any:
    """Emit a vector `raw`, loaded from `index` on, with zero where the mask says so.

    Of `raw` the first `count` lanes count, or all.
    """
    if not isinstance(kind, Masked):
        return raw
    parts = _parts(context, builder, kind, value)
    return _where_set(builder, parts.bits, index, raw, count)


def _where_set(builder: Any, bits: Any, index: Any, raw: Any, count: Any = None) -> Any:
    lanes = raw.type.count
    if count is not None:
        # Without lanes the index may be rows beyond the last element, where there is no mask. With
        # one, its padding holds the words: see `layout.mask_size`.
        zero = ir.Constant(_I64, 0)
        index = builder.select(builder.icmp_signed(">", count, zero), index, zero)
    # Twice as many bits as lanes, because those of an index need not begin a byte.
    twice, once = ir.IntType(2 * lanes), ir.IntType(lanes)
    place = builder.gep(bits, [builder.lshr(index, ir.Constant(_I64, 3))])
    word = builder.load(builder.bitcast(place, twice.as_pointer()), align=1)
    shift = builder.trunc(builder.and_(index, ir.Constant(_I64, 7)), twice)
    word = builder.trunc(builder.lshr(word, shift), once)
    chosen = builder.bitcast(word, ir.VectorType(ir.IntType(1), lanes))
    return builder.select(chosen, _in_register(builder, raw), ir.Constant(raw.type, None))


def _in_register(builder: Any, raw: Any) -> Any:
    """Emit an instruction that does nothing, but keeps a load apart from what follows.

    With AVX-512 LLVM would make one masked load of a load and a selection, and those are not
    prefetched: the backward pass of (16, 56, 56, 64) float32 took 3.6 ns an element, and takes
    0.6 (AMD Zen 5).
    """
    if not has_feature("avx512vl"):
        return raw
    return builder.asm(ir.FunctionType(raw.type, [raw.type]), "", "=v,0", [raw], False)


def after_store(
    context: Any,
    builder: Any,
    kind: Any,
    target: Any,
    index: Any,
    raw: Any,
    write: Any,
    count: Any = None,
) -> None:
    """Emit what follows the store of `raw` at `index`, of its first `count` lanes or of all.

    `write` emits a store of the same kind: of a vector to an address.
    """
    if isinstance(kind, Marking):
        _mark(context, builder, kind, target, index, raw, count)
    elif isinstance(kind, WithResidual):
        parts = _parts(context, builder, kind, target)
        with builder.if_then(_is_there(builder, parts.residual)):
            place, size = builder.gep(parts.dy, [index]), kind.dtype.bitwidth // 8
            if count is None:
                pointer = builder.bitcast(place, raw.type.as_pointer())
                dy = builder.load(pointer, typ=raw.type, align=size)
            else:
                dy = load_lanes(builder, place, raw.type, count, size)
            dy = _where_set(builder, parts.bits, index, dy, count)
            write(builder.gep(parts.residual, [index]), dy)


def _is_there(builder: Any, place: Any) -> Any:
    """Emit whether an address is one. The answer is the same for a whole call: it costs nothing."""
    return builder.icmp_unsigned("!=", builder.ptrtoint(place, _I64), ir.Constant(_I64, 0))


def _mark(
    context: Any, builder: Any, kind: Any, target: Any, index: Any, raw: Any, count: Any
) -> None:
    parts = _parts(context, builder, kind, target)
    bits, lanes = parts.bits, raw.type.count
    element = ir.IntType(kind.dtype.bitwidth)
    # As integers elements are in the order of their values, NaN beyond infinity.
    pattern = builder.bitcast(raw, ir.VectorType(element, lanes))
    beyond = parts.beyond
    if element != beyond.type:
        beyond = builder.trunc(beyond, element)
    passes = builder.and_(
        builder.icmp_signed(">", pattern, ir.Constant(pattern.type, None)),
        builder.icmp_signed("<", pattern, spread(builder, beyond, lanes)),
    )
    if count is not None:
        passes = builder.and_(passes, first_lanes(builder, count, lanes))
    word = builder.bitcast(passes, ir.IntType(lanes))
    place = builder.gep(bits, [builder.lshr(index, ir.Constant(_I64, 3))])
    with builder.if_then(_is_there(builder, bits)):
        if count is None:
            builder.store(word, builder.bitcast(place, word.type.as_pointer()), align=1)
        else:
            # Bytes after the last lane belong to others.
            for byte in range(lanes // 8):
                more = builder.icmp_signed(">", count, ir.Constant(_I64, 8 * byte))
                with builder.if_then(more):
                    part = builder.lshr(word, ir.Constant(word.type, 8 * byte))
                    part = builder.trunc(part, _I8) if lanes > 8 else part
                    builder.store(part, builder.gep(place, [ir.Constant(_I64, byte)]))


@intrinsic
def values_of(typingctx, addresses):
    """Return the address of the elements themselves."""

    def codegen(context, builder, signature, arguments):
        return base_of(context, builder, addresses, arguments[0])

    return types.CPointer(addresses.dtype)(addresses), codegen


@intrinsic
def has_values(typingctx, addresses):
    """Return whether there are elements at all."""

    def codegen(context, builder, signature, arguments):
        return _is_there(builder, base_of(context, builder, addresses, arguments[0]))

    return types.boolean(addresses), codegen


@intrinsic
def relu(typingctx, how, value):
    """Return a vector with 0 in the place of what is less, and its ceiling of what is more.

    NaN is kept. Of float32, infinities are kept too: they may come of an overflow that float64 has
    not, and show that their lanes are not sound.
    """
    if not isinstance(how, ReLU) or value not in (Vec, Singles, EvenOdd):
        return None

    def codegen(context, builder, signature, arguments):
        vector, kind = arguments[1], arguments[1].type
        zero = ir.Constant(kind, None)
        ceiling = _parts(context, builder, how, arguments[0]).ceiling
        if value != Vec:
            ceiling = builder.fptrunc(ceiling, kind.element)
        ceiling = spread(builder, ceiling, kind.count)
        # In these forms a minimum and a maximum are one instruction each, on x86-64.
        below = builder.select(builder.fcmp_ordered("<", ceiling, vector), ceiling, vector)
        if value == Vec:
            return builder.select(builder.fcmp_ordered("<=", below, zero), zero, below)
        within = builder.select(builder.fcmp_ordered(">", below, zero), below, zero)
        integer = ir.VectorType(ir.IntType(32), kind.count)
        signless = ir.Constant(integer, [0x7FFFFFFF] * kind.count)
        size = builder.and_(builder.bitcast(vector, integer), signless)
        infinity = ir.Constant(integer, [0x7F800000] * kind.count)
        return builder.select(builder.icmp_signed("<", size, infinity), within, vector)

    return value(how, value), codegen


def same_line(out):
    """Return whether a streaming store of an output writes all that goes with it, too.

    A second output must begin where the first does within a line of the cache, and vectors that
    write bits must begin at whole bytes of them.
    """


@intrinsic
def _in_line(typingctx, out):
    def codegen(context, builder, signature, arguments):
        parts = _parts(context, builder, out, arguments[0])
        place = builder.ptrtoint(parts.values, _I64)
        if isinstance(out, WithResidual):
            apart = builder.xor(place, builder.ptrtoint(parts.residual, _I64))
            there = _is_there(builder, parts.residual)
            place = builder.select(there, apart, ir.Constant(_I64, 0))
        left = builder.and_(place, ir.Constant(_I64, 63))
        return builder.icmp_unsigned("==", left, ir.Constant(_I64, 0))

    return types.boolean(out), codegen


@overload(same_line)
def _same_line(out):
    if isinstance(out, Marking | WithResidual):
        return lambda out: _in_line(out)
    return lambda out: True
