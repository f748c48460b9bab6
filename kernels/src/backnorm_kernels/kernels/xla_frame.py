"""The call frame of XLA's foreign function interface (FFI): its fields, validation and errors.

Attributes of a call, all arrays of int64:

``buffers``
    Six numbers for each argument, and then for each result: the index of the record's field in
    which the address of the array is stored; the code of the array's element type; the rank; the
    number of elements; the size in bytes; the distance in bytes from the array of one instance of
    the problem to that of the next instance.
``call``
    The index of the kernel; the number of instances of the problem, which are computed one after
    the other; the largest number of helpers (participants other than the caller) of an instance.
``record``
    The 64-bit words of the record (see `record`), with addresses still 0 and without
    scratch memory.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from backnorm_kernels.kernels.atomics import (
    call_c,
    load_byte,
    load_int32,
    load_word,
    stack_8_words,
    store_int32,
    store_word,
)
from backnorm_kernels.kernels.jit import inlined, outlined
from backnorm_kernels.record import ADDRESSES, CLAIMED, LAYOUT, LINE, SLOTS
from backnorm_kernels.xla_structures import offsets

_EXTENSION, _VERSION = offsets("Extension_Base"), offsets("Api_Version")
_METADATA, _DESCRIBES = offsets("Metadata"), offsets("Metadata_Extension")
_FAILS, _DESTROYS = offsets("Error_Create_Args"), offsets("Error_Destroy_Args")
_TENSOR, _SPAN, _ARRAY = offsets("Buffer"), offsets("ByteSpan"), offsets("Array")
_ARGS, _RETS, _ATTRS = offsets("Args"), offsets("Rets"), offsets("Attrs")
_FRAME, _API = offsets("CallFrame"), offsets("Api")

# Values of enumerations in XLA's header.
_METADATA_EXTENSION, _EXECUTE, _IS_BUFFER, _IS_ARRAY, _S64 = 1, 3, 1, 1, 5

# XLA passes three attributes to the handler. Each of the following lines has positions, and ends
# with their count. First line: the positions of the numbers that describe one array (an argument or
# a result) in the attribute "buffers". Second line: the positions of the numbers in the attribute
# "call". Third line: the positions of the three attributes in the call frame.
_SLOT, _TYPE, _RANK, _ELEMENTS, _STRIDE, _PER_BUFFER = range(6)
KERNEL, INSTANCES, HELPERS, _PER_CALL = range(4)
_BUFFERS, _CALL, _RECORD, _PER_FRAME = range(4)
# The names of the attributes, in the order of the call frame; each name is a number made of its
# bytes.
_NAMES = tuple(int.from_bytes(name, "little") for name in (b"buffers", b"call", b"record"))

# Error messages, each with XLA's code of the error: 3 invalid argument, 5 not found, 8 resource
# exhausted, 9 failed precondition, 13 internal.
_MESSAGES = (
    (13, "the call frame is not the one that XLA's header describes"),
    (13, "the handler was called at a stage other than execution"),
    (3, "the attributes are not buffers, call and record, arrays of int64 that fit each other"),
    (3, "an argument is not a buffer of the type, rank and size in the attribute buffers"),
    (3, "a result is not a buffer of the type, rank and size in the attribute buffers"),
    (9, "the record of the call is of another version of backnorm: trace the function anew"),
    (5, "the kernel is not loaded in this process: trace a call of this kernel in it first"),
    (8, "no memory for the working space of a kernel"),
    (3, "variance + epsilon is not positive in a channel"),
)
_FOREIGN, _STAGE, _ATTRIBUTES, _ARGUMENT, _RESULT, _OTHER, UNKNOWN, MEMORY, REFUSED = range(1, 10)

# Byte offsets of fields in a record.
_LAYOUT_AT, _SIZE_AT, _PARTICIPANTS_AT = (
    8 * SLOTS[name] for name in ("layout", "bytes", "participants")
)
_OWN_AT, _OWN_BYTES_AT, _SCRATCH_AT = (8 * SLOTS[name] for name in ("own", "own_bytes", "scratch"))
_ADDRESSES = len(ADDRESSES)

_I64 = ir.IntType(64)


@intrinsic
def _message(typingctx, number):
    """Return the address of the message with this number, and XLA's error code for it."""

    def codegen(context, builder, signature, arguments):
        place, code = ir.Constant(_I64, 0), ir.Constant(_I64, 0)
        for k, (error_code, text) in enumerate(_MESSAGES):
            this = builder.icmp_signed("==", arguments[0], ir.Constant(_I64, k + 1))
            string = context.insert_const_string(builder.module, f"backnorm: {text}")
            place = builder.select(this, builder.ptrtoint(string, _I64), place)
            code = builder.select(this, ir.Constant(_I64, error_code), code)
        return cgutils.pack_array(builder, [place, code])

    return types.UniTuple(types.int64, 2)(types.int64), codegen


@outlined
def error(api, number):
    """Return an XLA error with a message; messages are numbered from 1."""
    made = stack_8_words()
    message, code = _message(number)
    store_word(made + _FAILS.struct_size, _FAILS.size_)
    store_word(made + _FAILS.extension_start, 0)
    store_word(made + _FAILS.message, message)
    store_int32(made + _FAILS.errc, code)
    return call_c(load_word(api + _API.Error_Create), made)


@outlined
def succeeded(api, code):
    """Return whether a function of XLA succeeded; destroy its error if it did not."""
    if code == 0:
        return True
    made = stack_8_words()
    store_word(made + _DESTROYS.struct_size, _DESTROYS.size_)
    store_word(made + _DESTROYS.extension_start, 0)
    store_word(made + _DESTROYS.error, code)
    call_c(load_word(api + _API.Error_Destroy), made)
    return False


@inlined
def metadata_extension(frame):
    """Return the extension by which XLA queries the API version, or 0 if the frame has none."""
    extension = load_word(frame + _FRAME.extension_start)
    if extension != 0 and load_int32(extension + _EXTENSION.type) == _METADATA_EXTENSION:
        return extension
    return 0


@outlined
def write_api_version(extension, major, minor):
    """Write the API version that the handler supports to the metadata extension of a call frame."""
    if load_word(extension + _EXTENSION.struct_size) < _DESCRIBES.size_:
        return
    metadata = load_word(extension + _DESCRIBES.metadata)
    if load_word(metadata + _METADATA.struct_size) < _METADATA.size_:
        return
    version = metadata + _METADATA.api_version
    store_word(version + _VERSION.struct_size, _VERSION.size_)
    store_word(version + _VERSION.extension_start, 0)
    store_int32(version + _VERSION.major_version, major)
    store_int32(version + _VERSION.minor_version, minor)
    store_int32(metadata + _METADATA.traits, 0)


@inlined
def api_of(frame):
    """Return the address of the structure of XLA's API functions."""
    return load_word(frame + _FRAME.api)


@inlined
def context_of(frame):
    """Return the execution context, an argument of XLA's API functions."""
    return load_word(frame + _FRAME.ctx)


@inlined
def _attribute(frame, k):
    """Return the address of attribute number `k`: a structure with an array's address and size."""
    return load_word(load_word(frame + _FRAME.attrs + _ATTRS.attrs) + 8 * k)


@inlined
def call_attribute(frame, k):
    """Return element `k` of the attribute "call", an array of 64-bit integers."""
    return load_word(load_word(_attribute(frame, _CALL) + _ARRAY.data) + 8 * k)


@inlined
def record_of(frame):
    """Return the address of the record and its size in 64-bit words."""
    array = _attribute(frame, _RECORD)
    return load_word(array + _ARRAY.data), load_word(array + _ARRAY.size)


@inlined
def _arguments(frame):
    return load_word(frame + _FRAME.args + _ARGS.size)


@inlined
def buffers_of(frame):
    """Return the number of arguments and results."""
    return _arguments(frame) + load_word(frame + _FRAME.rets + _RETS.size)


@inlined
def _buffer(frame, k):
    count = _arguments(frame)
    if k < count:
        return load_word(load_word(frame + _FRAME.args + _ARGS.args) + 8 * k)
    return load_word(load_word(frame + _FRAME.rets + _RETS.rets) + 8 * (k - count))


@inlined
def _entry(frame, k):
    """Return the address of the entry for argument or result `k` in the attribute "buffers"."""
    return load_word(_attribute(frame, _BUFFERS) + _ARRAY.data) + 8 * _PER_BUFFER * k


@inlined
def slot_of(frame, k):
    """Return the index of the record's field that takes the address of an argument or a result."""
    return load_word(_entry(frame, k) + 8 * _SLOT)


@inlined
def data_of(frame, k, instance):
    """Return the address of an argument or a result for one instance of the problem.

    Under `jax.vmap`, one call computes several problems, the instances.
    """
    stride = load_word(_entry(frame, k) + 8 * _STRIDE)
    return load_word(_buffer(frame, k) + _TENSOR.data) + instance * stride


@outlined
def invalid(frame):
    """Validate a call frame; return the number of an error message, or 0."""
    args, rets, attrs = frame + _FRAME.args, frame + _FRAME.rets, frame + _FRAME.attrs
    # Some XLA versions report an API structure that is smaller than the header says. The handler
    # needs only the structure's functions for errors, which all versions have.
    if load_word(frame) < _FRAME.size_ or load_word(api_of(frame)) < _API.Error_Destroy + 8:
        return _FOREIGN
    if (
        load_word(args) < _ARGS.size_
        or load_word(rets) < _RETS.size_
        or load_word(attrs) < _ATTRS.size_
    ):
        return _FOREIGN
    if load_int32(frame + _FRAME.stage) != _EXECUTE:
        return _STAGE
    if not _attributes_fit(frame):
        return _ATTRIBUTES
    record, cells = record_of(frame)
    if cells < CLAIMED or load_word(record + _LAYOUT_AT) != LAYOUT:
        return _OTHER
    if not _record_fits(frame):
        return _ATTRIBUTES
    for k in range(buffers_of(frame)):
        is_argument = k < _arguments(frame)
        kind = args + _ARGS.types if is_argument else rets + _RETS.types
        kind = load_int32(load_word(kind) + 4 * (k if is_argument else k - _arguments(frame)))
        if kind != _IS_BUFFER or not _matches(_buffer(frame, k), _entry(frame, k)):
            return _ARGUMENT if is_argument else _RESULT
    return 0


@outlined
def _attributes_fit(frame):
    attrs = frame + _FRAME.attrs
    if load_word(attrs + _ATTRS.size) != _PER_FRAME:
        return False
    for k in range(_PER_FRAME):
        if load_int32(load_word(attrs + _ATTRS.types) + 4 * k) != _IS_ARRAY:
            return False
        if _spelled(load_word(load_word(attrs + _ATTRS.names) + 8 * k)) != _NAMES[k]:
            return False
        if load_int32(_attribute(frame, k) + _ARRAY.dtype) != _S64:
            return False
    if load_word(_attribute(frame, _BUFFERS) + _ARRAY.size) != _PER_BUFFER * buffers_of(frame):
        return False
    if load_word(_attribute(frame, _CALL) + _ARRAY.size) != _PER_CALL:
        return False
    for k in range(buffers_of(frame)):
        if not 0 <= slot_of(frame, k) < _ADDRESSES:
            return False
    return 0 <= call_attribute(frame, HELPERS) < 1 << 16 and call_attribute(frame, INSTANCES) >= 0


@outlined
def _record_fits(frame):
    """Whether the sizes in the record are those for its participants (a caller and its helpers)."""
    participants = call_attribute(frame, HELPERS) + 1
    record, cells = record_of(frame)
    if cells != CLAIMED + 2 * LINE * participants:
        return False
    if load_word(record + _PARTICIPANTS_AT) != participants:
        return False
    # The sizes are limited to 2^40, so that sums and products of sizes do not overflow.
    own, own_bytes, size = (
        load_word(record + _OWN_AT),
        load_word(record + _OWN_BYTES_AT),
        load_word(record + _SIZE_AT),
    )
    if not (8 * cells == load_word(record + _SCRATCH_AT) <= own < 1 << 40):
        return False
    return 0 <= own_bytes < 1 << 40 and size == own + participants * own_bytes


@inlined
def _spelled(span):
    """Return a name of up to 7 bytes as a number made of its bytes; -1 for a longer name."""
    first, length, number = load_word(span + _SPAN.ptr), load_word(span + _SPAN.len), 0
    if length > 7:
        return -1
    for k in range(length):
        number |= (load_byte(first + k) & 255) << (8 * k)
    return number


@outlined
def _matches(buffer, expected):
    if load_word(buffer + _TENSOR.struct_size) < _TENSOR.size_:
        return False
    if load_int32(buffer + _TENSOR.dtype) != load_word(expected + 8 * _TYPE):
        return False
    rank, dims, elements = load_word(buffer + _TENSOR.rank), load_word(buffer + _TENSOR.dims), 1
    if rank != load_word(expected + 8 * _RANK):
        return False
    for axis in range(rank):
        elements *= load_word(dims + 8 * axis)
    if elements != load_word(expected + 8 * _ELEMENTS):
        return False
    return elements == 0 or load_word(buffer + _TENSOR.data) != 0
