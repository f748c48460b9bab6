"""How a kernel is run: by its caller alone, in the team of PyTorch's threads, or with our own.

`bn_run` is the one call of a stage. When it returns, no thread but the caller's touches the record.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from backnorm.cpu.kernels.jit import outlined
from backnorm.cpu.kernels.pool import dismiss, summon, threads_data, work
from backnorm.cpu.kernels.system import now, participate
from backnorm.cpu.kernels.words import address_of, put, seen, word
from backnorm.cpu.record import ADDRESSES, CLAIMED, JOINED, LINE, SLOTS
from backnorm.cpu.slots import CELLS, PARALLEL, THREAD_NUMBER

__all__ = ["data", "entries"]

_I32, _I64 = ir.IntType(32), ir.IntType(64)

_FUNCTION, _PARTICIPANTS = 8 * SLOTS["function"], 8 * SLOTS["participants"]
_READY, _REGION = 8 * SLOTS["ready"], 8 * SLOTS["region"]
_DONE, _ITEMS = 8 * SLOTS["done"], 8 * SLOTS["items"]
_ARRIVED, _OPENED = 8 * SLOTS["arrived"], 8 * SLOTS["opened"]
_REFUSED = 8 * SLOTS["refused"]
_LIMIT, _DEADLINE = 8 * SLOTS["limit"], 8 * SLOTS["deadline"]

# Calls of no more items are over before anybody would look at the clock.
_FEW = 2

_member = address_of("bn_member")


@intrinsic
def _open_region(typingctx, parallel, member, record, threads):
    """Call GOMP_parallel(member, record, threads, 0)."""

    def codegen(context, builder, signature, arguments):
        shape = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I32, _I32])
        target = builder.inttoptr(arguments[0], shape.as_pointer())
        threads = builder.trunc(arguments[3], _I32)
        builder.call(target, [arguments[1], arguments[2], threads, ir.Constant(_I32, 0)])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def _thread_number(typingctx, function):
    """Call omp_get_thread_num()."""

    def codegen(context, builder, signature, arguments):
        shape = ir.FunctionType(_I32, [])
        target = builder.inttoptr(arguments[0], shape.as_pointer())
        return builder.sext(builder.call(target, []), _I64)

    return types.int64(types.int64), codegen


@outlined
def _take_part(record):
    """What each thread of a team does; those that are too many do nothing."""
    index = _thread_number(word(threads_data() + 8 * THREAD_NUMBER))
    if index < word(record + _PARTICIPANTS):
        participate(word(record + _FUNCTION), record, index)
    return 0


@outlined
def _clear(record, participants):
    """Begin a call: nothing is claimed, nothing is done."""
    put(record + _DONE, 0)
    put(record + _ARRIVED, 0)
    put(record + _OPENED, 0)
    put(record + _REFUSED, 0)
    for line in range(2 * participants):
        put(record + 8 * (CLAIMED + LINE * line), 0)


@outlined
def _find(record, header):
    """Replace each array object by the address of its elements, which follows its header."""
    for slot in range(len(ADDRESSES)):
        array = word(record + 8 * slot)
        if array != 0:
            put(record + 8 * slot, word(array + header))


@outlined
def _run(record, header):
    """Run the kernel of a record until everything is done or its time is up.

    Parameters
    ----------
    record : address
    header : int
        0; or in the first call of a record whose addresses are those of array objects, the size of
        the header after which such an object has the address of its elements.

    Returns
    -------
    int
        1, or -1 - c where channel c was refused; 0 if the time is up: call again.
    """
    function, participants = word(record + _FUNCTION), word(record + _PARTICIPANTS)
    if word(record + _READY) == 0:
        _clear(record, participants)
        if header != 0:
            _find(record, header)
    limit = word(record + _LIMIT) if word(record + _ITEMS) > _FEW else 0
    put(record + _DEADLINE, now() + limit if limit != 0 else 0)
    region = word(record + _REGION)
    if participants == 1:
        participate(function, record, 0)
    elif region > 0:
        _open_region(word(threads_data() + 8 * PARALLEL), _member(), record, region)
    else:
        summon(record, participants - 1)
        participate(function, record, 0)
        dismiss(record, participants - 1)
    # A caller that was refused has taken the items out of the record.
    if seen(record + _DONE) != word(record + _ITEMS):
        return 0
    return participate(function, record, JOINED)


def entries() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the functions to export: see `build.frontend.linked`."""
    return {
        "bn_run": (_run, (types.int64, types.int64)),
        "bn_member": (_take_part, (types.int64,)),
        "bn_work": (work, (types.int64,)),
    }


def data() -> str:
    """Return LLVM code of the data to export."""
    return f"@bn_threads = global [{CELLS} x i64] zeroinitializer, align 64\n"
