"""Types of operands whose loads and stores also compute an epilogue.

A kernel loads and stores elements at addresses. If a ReLU or another activation follows the
normalisation, the kernel gets a value of one of the types below instead of an address. Every load
or store with this value (see `memory`) then also computes the epilogue:

============  ===================================================================================
Identity      in place of dy, in a forward pass without an activation
ReLU          in place of dy, in a forward pass: the residual, if any, that is added before the
              ReLU, and the ceiling
Activation    in place of dy, in a forward pass: the number of the activation (see `activation`);
              if its derivative is computed, also the gradients with respect to its value
Masked        dy of a backward pass: an element is zero where its bit of the mask is not set
Unread        x of a backward pass whose output does not depend on x
Marking       y: a store also writes one bit per element: whether 0 < y < ceiling
WithResidual  dx: a store also writes the masked dy to the gradient of the residual, if any
============  ===================================================================================

The first three are `Epilogue` types. If the argument dy of a kernel has one of these three types,
the kernel computes a forward pass. If a ReLU has no ceiling, its ceiling is infinity here. An
element y that is infinite then counts as below the ceiling.

The mask has a bit for each element, in memory order. Threads write whole bytes of the mask, so
vectors that are written to a Marking begin at multiples of eight elements.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from backnorm_kernels.kernels.jit import by_type, emitted
from backnorm_kernels.kernels.storage import has_feature
from backnorm_kernels.kernels.vector import EvenOdd, Singles, Vec, first_lanes, load_lanes, spread

_I8, _I64 = ir.IntType(8), ir.IntType(64)
# The parts of an `Addresses` structure that are not addresses of elements, with their Numba types.
_PARTS = {
    "bits": types.CPointer(types.uint8),
    "ceiling": types.float64,
    "beyond": types.int64,
    "number": types.int64,
}


class Epilogue(types.Type):
    """Base class of types that describe the epilogue of a forward pass.

    A forward pass has no dy. Instead of dy, its kernel gets an operand of such a type.
    """


def is_forward(dy: types.Type) -> bool:
    """Return whether a kernel with an operand dy of this Numba type computes a forward pass."""
    return isinstance(dy, Epilogue)


class Identity(Epilogue, types.Opaque):
    """The epilogue of a normalisation without an activation."""

    def __init__(self) -> None:
        super().__init__(name="Identity")


class Unread(types.Opaque):
    """An operand that a kernel does not read, because the output does not depend on it."""

    def __init__(self) -> None:
        super().__init__(name="Unread")


class Addresses(types.Type):
    """The Numba type of a structure that consists of addresses and numbers.

    `parts` maps the name of each address or number to its type. `dtype` is the element type of the
    arrays at the addresses, except that a mask has bytes.
    """

    is_address = True

    def __init__(self, dtype: Any, *parts: str) -> None:
        self.dtype = dtype
        self.parts = {name: _PARTS.get(name, types.CPointer(dtype)) for name in ("values", *parts)}
        super().__init__(name=f"{type(self).__name__}({dtype})")


class Masked(Addresses):
    """Elements that are read as zero where their bit in a mask is not set."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(dtype, "bits")


class ReLU(Epilogue, Addresses):
    """The operand of a ReLU: the address of the residual (0 if there is none) and the ceiling."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(dtype, "ceiling")


class Activation(Epilogue, Addresses):
    """The operand of an activation: the address of the gradients with respect to the activation's
    value (0 if there are none), and the number that identifies the activation.
    """

    def __init__(self, dtype: Any) -> None:
        super().__init__(dtype, "number")


class Marking(Addresses):
    """The addresses of y and of a mask (0 if no mask is written), and the integer `beyond`.

    An element's bit is set in the mask if the element's own bits, read as an integer, are more than
    0 and less than `beyond` (see `record`).
    """

    def __init__(self, dtype: Any) -> None:
        super().__init__(dtype, "bits", "beyond")


class WithResidual(Addresses):
    """The output of a backward pass with a residual: the addresses of dx, of the residual's
    gradient (0 if it is not wanted), of dy and of a mask. A store of elements of dx also writes the
    same elements of the residual's gradient, which is the masked dy.
    """

    def __init__(self, dtype: Any) -> None:
        super().__init__(dtype, "residual", "dy", "bits")


class _AddressesModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, list(fe_type.parts.items()))


for _kind in (Masked, ReLU, Activation, Marking, WithResidual):
    register_model(_kind)(_AddressesModel)
for _opaque in (Identity, Unread):
    register_model(_opaque)(models.OpaqueModel)

#: `identity()` and `unread()` return values of `Identity` and `Unread`, the types without parts.
identity = emitted(Identity()())(lambda builder: None)
unread = emitted(Unread()())(lambda builder: None)


def part_of(builder: Any, kind: Any, value: Any, name: str = "values") -> Any:
    """Emit the part `name` of `value`, a structure of the type `kind` (`Addresses`)."""
    return builder.extract_value(value, [*kind.parts].index(name))


def masked(builder: Any, kind: Any, value: Any, index: Any, raw: Any, count: Any = None) -> Any:
    """Emit the masked elements from `index` on, given the vector `raw` of these elements: where the
    bit of an element in the mask is not set, the element is replaced by zero.

    If `count` is given, only the first `count` lanes of `raw` hold elements of the array.
    """
    if not isinstance(kind, Masked):
        return raw
    return _where_set(builder, part_of(builder, kind, value, "bits"), index, raw, count)


def _where_set(builder: Any, bits: Any, index: Any, raw: Any, count: Any = None) -> Any:
    lanes = raw.type.count
    if count is not None:
        # If count is 0, the index may be beyond the mask, so the first word is read instead. If
        # count is positive, the word that is read may extend beyond the mask's bits, but not beyond
        # its padding (see `layout.mask_size`).
        zero = ir.Constant(_I64, 0)
        index = builder.select(builder.icmp_signed(">", count, zero), index, zero)
    # The code reads 2 * lanes bits, because bit number `index` may lie in the middle of a byte.
    twice, once = ir.IntType(2 * lanes), ir.IntType(lanes)
    place = builder.gep(bits, [builder.lshr(index, ir.Constant(_I64, 3))])
    word = builder.load(builder.bitcast(place, twice.as_pointer()), align=1)
    shift = builder.trunc(builder.and_(index, ir.Constant(_I64, 7)), twice)
    word = builder.trunc(builder.lshr(word, shift), once)
    chosen = builder.bitcast(word, ir.VectorType(ir.IntType(1), lanes))
    return builder.select(chosen, _in_register(builder, raw), ir.Constant(raw.type, None))


def _in_register(builder: Any, raw: Any) -> Any:
    """Emit an instruction without effect that separates a load from the instructions after it.

    With AVX-512, LLVM would combine a load and a selection to a masked load, and the processor does
    not prefetch for masked loads. With masked loads, the backward pass of (16, 56, 56, 64) in
    float32 took 3.6 ns per element; with loads separated by this instruction, it took 0.6 ns per
    element (AMD Zen 5).
    """
    if not has_feature("avx512vl"):
        return raw
    return builder.asm(ir.FunctionType(raw.type, [raw.type]), "", "=v,0", [raw], False)


def after_store(
    builder: Any, kind: Any, target: Any, index: Any, raw: Any, write: Any, count: Any = None
) -> None:
    """Emit the stores that follow the store of the vector `raw`, whose elements begin at `index`.

    If `kind` is a `Marking`, bits of the mask are stored. If it is a `WithResidual`, elements of
    the residual's gradient are stored. If `count` is given, only the first `count` lanes of `raw`
    hold elements of the array.

    `write(pointer, vector)` emits a store of the same kind, ordinary or streaming, as the store of
    `raw`.
    """
    if isinstance(kind, Marking):
        _mark(builder, kind, target, index, raw, count)
    elif isinstance(kind, WithResidual):
        _, residual, dy, bits = (part_of(builder, kind, target, name) for name in kind.parts)
        with builder.if_then(_is_there(builder, residual)):
            place, size = builder.gep(dy, [index]), kind.dtype.bitwidth // 8
            if count is None:
                pointer = builder.bitcast(place, raw.type.as_pointer())
                loaded = builder.load(pointer, typ=raw.type, align=size)
            else:
                loaded = load_lanes(builder, place, raw.type, count, size)
            loaded = _where_set(builder, bits, index, loaded, count)
            write(builder.gep(residual, [index]), loaded)


def _is_there(builder: Any, place: Any) -> Any:
    """Emit a test whether an address is not 0. The result is the same throughout a call, so the
    processor predicts a branch on it well.
    """
    return builder.icmp_unsigned("!=", builder.ptrtoint(place, _I64), ir.Constant(_I64, 0))


def _mark(builder: Any, kind: Any, target: Any, index: Any, raw: Any, count: Any) -> None:
    _, bits, beyond = (part_of(builder, kind, target, name) for name in kind.parts)
    lanes = raw.type.count
    element = ir.IntType(kind.dtype.bitwidth)
    # If the bits of positive elements are read as integers, these integers have the same order as
    # the elements' values. The bits of a NaN are a larger integer than those of infinity.
    pattern = builder.bitcast(raw, ir.VectorType(element, lanes))
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
            # Bytes of the mask that lie after the byte of the last lane are not written here,
            # because another thread may write them.
            for byte in range(lanes // 8):
                more = builder.icmp_signed(">", count, ir.Constant(_I64, 8 * byte))
                with builder.if_then(more):
                    part = builder.lshr(word, ir.Constant(word.type, 8 * byte))
                    part = builder.trunc(part, _I8) if lanes > 8 else part
                    builder.store(part, builder.gep(place, [ir.Constant(_I64, byte)]))


@intrinsic
def values_of(typingctx, addresses):
    """Return the address of the elements, which is one part of the structure `addresses`."""

    def codegen(context, builder, signature, arguments):
        return part_of(builder, addresses, arguments[0])

    return types.CPointer(addresses.dtype)(addresses), codegen


@intrinsic
def has_values(typingctx, addresses):
    """Return whether the array at `addresses` is present: an absent array has the address 0."""

    def codegen(context, builder, signature, arguments):
        return _is_there(builder, part_of(builder, addresses, arguments[0]))

    return types.boolean(addresses), codegen


@intrinsic
def relu(typingctx, epilogue, value):
    """Return a vector limited to the range from 0 to the ceiling.

    NaN stays NaN. In a vector of float32, an infinity also stays infinite, because it may come from
    an overflow that does not occur in float64. The elements in infinite lanes are then computed
    again in float64.
    """
    if not isinstance(epilogue, ReLU) or value not in (Vec, Singles, EvenOdd):
        return None

    def codegen(context, builder, signature, arguments):
        vector, kind = arguments[1], arguments[1].type
        zero = ir.Constant(kind, None)
        ceiling = part_of(builder, epilogue, arguments[0], "ceiling")
        if value != Vec:
            ceiling = builder.fptrunc(ceiling, kind.element)
        ceiling = spread(builder, ceiling, kind.count)
        # On x86-64, LLVM compiles a comparison and a select of this form to one instruction.
        below = builder.select(builder.fcmp_ordered("<", ceiling, vector), ceiling, vector)
        if value == Vec:
            return builder.select(builder.fcmp_ordered("<=", below, zero), zero, below)
        within = builder.select(builder.fcmp_ordered(">", below, zero), below, zero)
        integer = ir.VectorType(ir.IntType(32), kind.count)
        signless = ir.Constant(integer, [0x7FFFFFFF] * kind.count)
        size = builder.and_(builder.bitcast(vector, integer), signless)
        infinity = ir.Constant(integer, [0x7F800000] * kind.count)
        return builder.select(builder.icmp_signed("<", size, infinity), within, vector)

    return value(epilogue, value), codegen


@intrinsic
def _in_line(typingctx, out):
    def codegen(context, builder, signature, arguments):
        place = builder.ptrtoint(part_of(builder, out, arguments[0]), _I64)
        if isinstance(out, WithResidual):
            residual = part_of(builder, out, arguments[0], "residual")
            apart = builder.xor(place, builder.ptrtoint(residual, _I64))
            there = _is_there(builder, residual)
            place = builder.select(there, apart, ir.Constant(_I64, 0))
        left = builder.and_(place, ir.Constant(_I64, 63))
        return builder.icmp_unsigned("==", left, ir.Constant(_I64, 0))

    return types.boolean(out), codegen


@by_type
def same_line(out):
    """Return whether streaming stores may write `out`. This depends on the addresses of `out` and
    of the second output that is written with it: the residual's gradient, or the mask.

    If the second output is the residual's gradient, the result is True if this gradient begins at
    the same offset in a cache line as dx. When a whole cache line of dx is written, a whole line of
    the gradient is then written with it. If the second output is a mask, the result is True if y
    begins at the start of a cache line. The bits for a cache line of y are then whole bytes of the
    mask. If `out` has no second output, the result is True.
    """
    if isinstance(out, Marking | WithResidual):
        return lambda out: _in_line(out)
    return lambda out: True
