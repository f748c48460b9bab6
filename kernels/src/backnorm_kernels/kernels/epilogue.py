"""Types of operands whose loads and stores also compute what surrounds the normalisation.

A kernel loads and stores elements at addresses. Instead of the address of dy and that of the
output, the kernel gets values of the types below. If a ReLU follows the normalisation, a load or
store with such a value (see `memory`) also applies masks and residuals:

==============  =================================================================================
Epilogue        in place of dy, in a forward pass: the residual, if any, that is added before the
                ReLU, and the ceiling
Gradient        dy: an element is zero where its bit of the mask is not set
ForwardOutput   y: a store also writes one bit per element, if a mask is wanted: whether 0 < y <
                ceiling
BackwardOutput  dx: a store also writes the masked dy to the gradient of the residual, if any
==============  =================================================================================

Each value has a flag `relu`. Without a ReLU, nothing but the elements is read or written. The loops
in which most of the time is spent get the flag as a constant (`with_relu`), so that LLVM compiles
them with and without a ReLU (docs/decisions/compiled-at-build-time.md). If a ReLU has no ceiling,
its ceiling is infinity here. An element y that is infinite then counts as below the ceiling.

The mask has a bit for each element, in memory order. Threads write whole bytes of the mask, so
vectors that are written together with bits begin at multiples of eight elements.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from backnorm_kernels.kernels.jit import emitted
from backnorm_kernels.kernels.storage import has_feature
from backnorm_kernels.kernels.vector import EvenOdd, Singles, Vec, first_lanes, load_lanes, spread

_I8, _I64 = ir.IntType(8), ir.IntType(64)
# The parts of an `Addresses` structure that are not addresses of elements, with their Numba types.
_PARTS = {
    "bits": types.CPointer(types.uint8),
    "ceiling": types.float64,
    "beyond": types.int64,
    "relu": types.boolean,
}


class Addresses(types.Type):
    """The Numba type of a structure that consists of addresses and numbers.

    `parts` maps the name of each address or number to its type. `dtype` is the element type of the
    arrays at the addresses, except that a mask has bytes.
    """

    is_address = True
    names: tuple[str, ...]

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.parts = {name: _PARTS.get(name, types.CPointer(dtype)) for name in self.names}
        super().__init__(name=f"{type(self).__name__}({dtype})")


class Epilogue(Addresses):
    """What a forward pass has in place of dy: the address of the residual (0 if there is none), and
    the ceiling.
    """

    names = ("values", "ceiling", "relu")


class Gradient(Addresses):
    """The addresses of dy and of a mask."""

    names = ("values", "bits", "relu")


class ForwardOutput(Addresses):
    """The addresses of y and of a mask (0 if no mask is written), and the integer `beyond`.

    An element's bit is set in the mask if the element's own bits, read as an integer, are more than
    0 and less than `beyond` (see `record`).
    """

    names = ("values", "bits", "beyond", "relu")


class BackwardOutput(Addresses):
    """The addresses of dx, of the residual's gradient (0 if it is not wanted), of dy and of a mask.
    A store of elements of dx also writes the same elements of the residual's gradient, which is the
    masked dy.
    """

    names = ("values", "residual", "dy", "bits", "relu")


def is_forward(dy: types.Type) -> bool:
    """Return whether a kernel with an operand dy of this Numba type computes a forward pass."""
    return isinstance(dy, Epilogue)


class _AddressesModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, list(fe_type.parts.items()))


for _kind in (Epilogue, Gradient, ForwardOutput, BackwardOutput):
    register_model(_kind)(_AddressesModel)


def part_of(builder: Any, kind: Any, value: Any, name: str = "values") -> Any:
    """Emit the part `name` of `value`, a structure of the type `kind` (`Addresses`)."""
    return builder.extract_value(value, kind.names.index(name))


def masked(builder: Any, kind: Any, value: Any, index: Any, raw: Any, count: Any = None) -> Any:
    """Emit the masked elements from `index` on, given the vector `raw` of these elements: where the
    bit of an element in the mask is not set, the element is replaced by zero.

    If `count` is given, only the first `count` lanes of `raw` hold elements of the array.
    """
    if not isinstance(kind, Gradient):
        return raw
    before = builder.block
    with builder.if_then(part_of(builder, kind, value, "relu")):
        bits = part_of(builder, kind, value, "bits")
        chosen = _where_set(builder, bits, index, raw, count)
        after = builder.block
    result = builder.phi(raw.type)
    result.add_incoming(raw, before)
    result.add_incoming(chosen, after)
    return result


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

    If `kind` is `ForwardOutput`, bits of the mask are stored. If it is `BackwardOutput`, elements
    of the residual's gradient are stored. If `count` is given, only the first `count` lanes of
    `raw` hold elements of the array.

    `write(pointer, vector)` emits a store of the same kind, ordinary or streaming, as the store of
    `raw`.
    """
    if not isinstance(kind, ForwardOutput | BackwardOutput):
        return
    with builder.if_then(part_of(builder, kind, target, "relu")):
        if isinstance(kind, ForwardOutput):
            _mark(builder, kind, target, index, raw, count)
            return
        _, residual, dy, bits, _ = (part_of(builder, kind, target, name) for name in kind.names)
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
    _, bits, beyond, _ = (part_of(builder, kind, target, name) for name in kind.names)
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


def _part(name: str, result: Any) -> Any:
    """Return a function for kernels that returns a part of a structure of addresses."""

    @intrinsic
    def part(typingctx, addresses):
        def codegen(context, builder, signature, arguments):
            return part_of(builder, addresses, arguments[0], name)

        return result(addresses)(addresses), codegen

    return part


#: `values_of` returns the address of the elements; `has_relu` the flag.
values_of = _part("values", lambda addresses: types.CPointer(addresses.dtype))
has_relu = _part("relu", lambda addresses: types.boolean)


@emitted(lambda addresses, flag: addresses(addresses, types.boolean))
def with_relu(builder, addresses, flag):
    """Return a structure of addresses with another flag `relu`, which is its last part."""
    last = len(addresses.type.elements) - 1
    return builder.insert_value(addresses, flag, last)


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
    if not isinstance(epilogue, Epilogue) or value not in (Vec, Singles, EvenOdd):
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
def same_line(typingctx, out):
    """Return whether streaming stores may write `out`. This depends on the addresses of `out` and
    of the second output that is written with it: the residual's gradient, or the mask.

    If the second output is the residual's gradient, the result is True if this gradient begins at
    the same offset in a cache line as dx. When a whole cache line of dx is written, a whole line of
    the gradient is then written with it. If the second output is a mask, the result is True if y
    begins at the start of a cache line. The bits for a cache line of y are then whole bytes of the
    mask. If there is no second output, the result is True.
    """

    def codegen(context, builder, signature, arguments):
        place, second = (
            builder.ptrtoint(part_of(builder, out, arguments[0], name), _I64)
            for name in out.names[:2]
        )
        if isinstance(out, BackwardOutput):
            place = builder.xor(place, second)
        line, zero = ir.Constant(_I64, 63), ir.Constant(_I64, 0)
        return builder.or_(
            builder.icmp_unsigned("==", builder.and_(place, line), zero),
            builder.icmp_unsigned("==", second, zero),
        )

    return types.boolean(out), codegen
