"""Run a stage: in the calling thread alone, in PyTorch's OpenMP team, or with workers of the pool.

A stage (`stage`) calls `bn_run`, which returns early when a time limit has passed. The stage
then calls `bn_run` again. Whenever `bn_run` has returned, early or not, no other thread accesses
the record.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from backnorm_kernels.kernels.atomics import address_of, load_acquire, load_word, store_word
from backnorm_kernels.kernels.jit import emitted, outlined
from backnorm_kernels.kernels.pool import join_helpers, start_helpers, threads_data, worker
from backnorm_kernels.kernels.system import advise_outputs, call_kernel, monotonic_ns
from backnorm_kernels.record import ADDRESSES, CLAIMED, JOINED, LINE, SLOTS
from backnorm_kernels.slots import CELLS, PARALLEL, THREAD_NUMBER

_I32, _I64 = ir.IntType(32), ir.IntType(64)

_FUNCTION, _PARTICIPANTS = 8 * SLOTS["function"], 8 * SLOTS["participants"]
_READY, _REGION = 8 * SLOTS["ready"], 8 * SLOTS["region"]
_DONE, _ITEMS = 8 * SLOTS["done"], 8 * SLOTS["items"]
_ARRIVED, _OPENED = 8 * SLOTS["arrived"], 8 * SLOTS["opened"]
_REFUSED = 8 * SLOTS["refused"]
_LIMIT, _DEADLINE = 8 * SLOTS["limit"], 8 * SLOTS["deadline"]

# Calls with at most this number of items have no deadline.
_FEW = 2

_member = address_of("bn_member")


@emitted(types.none(*[types.int64] * 4))
def _open_region(builder, parallel, member, record, threads):
    """Call GOMP_parallel(member, record, threads, 0)."""
    shape = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I32, _I32])
    target = builder.inttoptr(parallel, shape.as_pointer())
    count = builder.trunc(threads, _I32)
    builder.call(target, [member, record, count, ir.Constant(_I32, 0)])


@emitted(types.int64(types.int64))
def _thread_number(builder, function):
    """Call omp_get_thread_num()."""
    target = builder.inttoptr(function, ir.FunctionType(_I32, []).as_pointer())
    return builder.sext(builder.call(target, []), _I64)


@outlined
def _team_member(record):
    """Body of each thread of the OpenMP team. If the team has more threads than the call has
    participants, the surplus threads return at once.
    """
    index = _thread_number(load_word(threads_data() + 8 * THREAD_NUMBER))
    if index < load_word(record + _PARTICIPANTS):
        call_kernel(load_word(record + _FUNCTION), record, index)
    return 0


@outlined
def _reset(record, participants):
    """Reset the counters of the work queue and of the barrier."""
    store_word(record + _DONE, 0)
    store_word(record + _ARRIVED, 0)
    store_word(record + _OPENED, 0)
    store_word(record + _REFUSED, 0)
    for line in range(2 * participants):
        store_word(record + 8 * (CLAIMED + LINE * line), 0)


@outlined
def _resolve_addresses(record, header):
    """Replace the address of each array object by the address of its elements."""
    for slot in range(len(ADDRESSES)):
        array = load_word(record + 8 * slot)
        if array != 0:
            store_word(record + 8 * slot, load_word(array + header))


@outlined
def _run(record, header):
    """Run the kernel of a record until all items are done or the deadline has passed.

    Parameters
    ----------
    record : address
    header : int
        0; or, in the first call of a record that has addresses of array objects, the size of the
        object header, after which the object stores the address of its elements.

    Returns
    -------
    int
        1 if the call is complete, -1 - c if channel c is invalid, or 0 if the deadline has passed
        and the function must be called again.
    """
    function, participants = load_word(record + _FUNCTION), load_word(record + _PARTICIPANTS)
    if load_word(record + _READY) == 0:
        _reset(record, participants)
        if header != 0:
            _resolve_addresses(record, header)
        advise_outputs(record)
    limit = load_word(record + _LIMIT) if load_word(record + _ITEMS) > _FEW else 0
    store_word(record + _DEADLINE, monotonic_ns() + limit if limit != 0 else 0)
    region = load_word(record + _REGION)
    if participants == 1:
        call_kernel(function, record, 0)
    elif region > 0:
        _open_region(load_word(threads_data() + 8 * PARALLEL), _member(), record, region)
    else:
        start_helpers(record, participants - 1)
        call_kernel(function, record, 0)
        join_helpers(record, participants - 1)
    # If some items are not done, the time limit has passed. An invalid channel does not lead to
    # this return: `cancel` in `kernels.record` has then set the number of items to 0, and no item
    # has been done, so the two numbers are equal.
    if load_acquire(record + _DONE) != load_word(record + _ITEMS):
        return 0
    return call_kernel(function, record, JOINED)


def entries() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the functions to export: see `build.frontend.linked`."""
    return {
        "bn_run": (_run, (types.int64, types.int64)),
        "bn_member": (_team_member, (types.int64,)),
        "bn_work": (worker, (types.int64,)),
    }


def data() -> str:
    """Return LLVM code that defines the exported data."""
    return f"@bn_threads = global [{CELLS} x i64] zeroinitializer, align 64\n"
