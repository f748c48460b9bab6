"""A kernel as a custom call of XLA on the CPU: no Python, no GIL, no copy.

`handler` is one C function for all kernels. It takes the copy of a record that came with the call,
fills in the addresses of the buffers, and runs the kernel, as do helpers, which are tasks on the
threads of XLA. Nobody waits for one to start, only for items that one has begun; a task that
starts when its call is over finds no item. So the copy belongs to all participants, and the last
of them frees it.

Nothing here raises: what is wrong with a call is an error of XLA, which JAX raises.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from typing import Any

import numba
import numpy as np
from numba import types

from backnorm.kernels.cpu.jit import SOURCES, inlined, kernel, native, outlined
from backnorm.kernels.cpu.record import (
    DONE,
    FAILED,
    ITEMS,
    JOINED,
    SCRATCH,
    SPACE,
    call,
    call_off,
    cells_of,
)
from backnorm.kernels.cpu.xla_frame import (
    HELPERS,
    INSTANCES,
    KERNEL,
    MEMORY,
    REFUSED,
    UNKNOWN,
    api_of,
    buffers_of,
    called,
    context_of,
    describe,
    expect_results,
    place_of,
    question,
    record_of,
    refuse,
    slot_of,
    succeeded,
    wrong,
)
from backnorm.kernels.cpu.xla_memory import (
    add,
    allocated,
    ask,
    give_way,
    machine_code,
    pause,
    put,
    release,
    room,
    seen,
    this_thread,
    word,
)
from backnorm.kernels.cpu.xla_structures import offsets

__all__ = ["handler", "introduce"]

_API = offsets("Api")
_SCHEDULES = offsets("ThreadPool_Schedule_Args")
_COUNTS = offsets("ThreadPool_NumThreads_Args")

# Cells of the environment, one for the process: the version of the API, the C function of a task,
# how many kernels are known, and from _TABLE on their names and addresses.
_MAJOR, _MINOR, _TASK, _KNOWN, _TABLE = range(5)
_CAPACITY = 4096

# Cells of the block of a call: what malloc gave, participants that have not left, the thread that
# called, the kernel, where the record is; from _TICKETS on, for every helper, where the block is
# and the helper's index. Then the record, and its scratch memory.
_RAW, _HOLDERS, _CALLER, _FUNCTION, _RECORD, _TICKETS = range(6)

# How often to look for the last item before giving up the processor: about 50 µs.
_PATIENCE = 1000


@outlined
def _block_of(frame, helpers):
    """Return a new block with a copy of the record and room for its scratch memory, or 0."""
    template, cells = record_of(frame)
    # The record and its scratch memory begin at lines of the cache.
    start = (_TICKETS + 2 * helpers + 7) // 8 * 64
    end = start + (cells + 7) // 8 * 64
    raw = allocated(end + 8 * word(template + 8 * SPACE) + 64)
    if raw == 0:
        return 0
    block = (raw + 63) // 64 * 64
    put(block + 8 * _RAW, raw)
    put(block + 8 * _HOLDERS, 1 + helpers)
    put(block + 8 * _CALLER, this_thread())
    put(block + 8 * _RECORD, block + start)
    for k in range(helpers):
        put(block + 8 * (_TICKETS + 2 * k), block)
        put(block + 8 * (_TICKETS + 2 * k + 1), k + 1)
    for k in range(cells):
        put(block + start + 8 * k, word(template + 8 * k))
    put(block + start + 8 * SCRATCH, block + end)
    return block


@outlined
def _leave(block, participants):
    """Let go of a block for so many participants; the last of all frees it."""
    if add(block + 8 * _HOLDERS, -participants) == 0:
        release(word(block + 8 * _RAW))


@kernel
def _task(ticket, environment):
    """What a thread of XLA does for a call: its share, if it comes in time."""
    block = word(ticket)
    # XLA may run a task at once instead of scheduling it. A caller who is not at work yet must not
    # be its own helper, who waits for it.
    if this_thread() != word(block + 8 * _CALLER):
        # Whether it failed is all the same: then it has begun no item.
        call(word(block + 8 * _FUNCTION), word(block + 8 * _RECORD), word(ticket + 8))
    _leave(block, 1)
    return 0


@outlined
def _await(done, items):
    """Wait until as many items are done."""
    for _ in range(_PATIENCE):
        if seen(done) == items:
            return
        pause()
    while seen(done) != items:
        give_way()


@outlined
def _run(block):
    """Run the kernel of a block as the caller; return the number of what went wrong, or 0."""
    function, record = word(block + 8 * _FUNCTION), word(block + 8 * _RECORD)
    ended = call(function, record, 0)
    if ended == 0:
        _await(record + 8 * DONE, word(record + 8 * ITEMS))
        ended = call(function, record, JOINED)
    if ended == FAILED:
        call_off(cells_of(record))
        return MEMORY
    # A channel may be refused when all is done; if it was before, there are no items.
    return REFUSED if ended < 0 and word(record + 8 * ITEMS) == 0 else 0


@outlined
def _helpers(frame):
    """Return how many tasks to schedule: as many as asked for, where XLA has threads for them."""
    wanted = called(frame, HELPERS)
    if wanted == 0:
        return 0
    api, made, answer = api_of(frame), room(), room()
    put(answer, 0)
    put(made + _COUNTS.struct_size, _COUNTS.size_)
    put(made + _COUNTS.extension_start, 0)
    put(made + _COUNTS.ctx, context_of(frame))
    put(made + _COUNTS.num_threads, answer)
    if not succeeded(api, ask(word(api + _API.ThreadPool_NumThreads), made)):
        return 0
    return min(wanted, word(answer)) if word(answer) > 1 else 0


@outlined
def _summon(frame, task, block, helpers):
    """Schedule a task for every helper."""
    api, made = api_of(frame), room()
    put(made + _SCHEDULES.struct_size, _SCHEDULES.size_)
    put(made + _SCHEDULES.extension_start, 0)
    put(made + _SCHEDULES.ctx, context_of(frame))
    put(made + _SCHEDULES.task, task)
    for k in range(helpers):
        put(made + _SCHEDULES.data, block + 8 * (_TICKETS + 2 * k))
        if not succeeded(api, ask(word(api + _API.ThreadPool_Schedule), made)):
            # Nobody comes for this share or the next; the caller does them.
            _leave(block, helpers - k)
            return


@inlined
def _kernel_of(frame, environment):
    """Return the address of the kernel that is meant, or 0 if it is not known."""
    name = called(frame, KERNEL)
    for k in range(seen(environment + 8 * _KNOWN)):
        if word(environment + 8 * (_TABLE + 2 * k)) == name:
            return word(environment + 8 * (_TABLE + 2 * k + 1))
    return 0


@kernel
def _handle(frame, environment):
    """Answer a call frame: 0, or an error of XLA."""
    asked = question(frame)
    if asked != 0:
        describe(asked, word(environment + 8 * _MAJOR), word(environment + 8 * _MINOR))
        return 0
    api, refused = api_of(frame), wrong(frame)
    if refused != 0:
        return refuse(api, refused)
    function = _kernel_of(frame, environment)
    if function == 0:
        return refuse(api, UNKNOWN)
    expect_results(frame)
    helpers = _helpers(frame)
    for instance in range(called(frame, INSTANCES)):
        block = _block_of(frame, helpers)
        if block == 0:
            return refuse(api, MEMORY)
        put(block + 8 * _FUNCTION, function)
        record = word(block + 8 * _RECORD)
        for k in range(buffers_of(frame)):
            put(record + 8 * slot_of(frame, k), place_of(frame, k, instance))
        _summon(frame, word(environment + 8 * _TASK), block, helpers)
        refused = _run(block)
        _leave(block, 1)
        if refused != 0:
            return refuse(api, refused)
    return 0


# All of this lives as long as the process: XLA keeps the address of the handler for ever.
_environment = np.zeros(_TABLE + 2 * _CAPACITY, np.int64)
_kept: list[Any] = []
_lock = threading.Lock()


def introduce(key: str, address: int) -> int:
    """Let calls mean the kernel at `address`; return the number that they name it by.

    The number follows from `key` and the sources of the kernels, so it is the same in all
    processes that would do the same with a record.
    """
    digest = hashlib.sha256(f"{SOURCES} {key}".encode()).digest()
    name = int.from_bytes(digest[:8], "little", signed=True)
    with _lock:
        known = int(_environment[_KNOWN])
        end = _TABLE + 2 * known
        if name not in _environment[_TABLE:end:2]:
            if known == _CAPACITY:
                raise RuntimeError(f"more than {_CAPACITY} kernels")
            _environment[end : end + 2] = name, address
            _environment[_KNOWN] = known + 1
    return name


def handler(major: int, minor: int) -> Any:
    """Return the handler, a `numba.cfunc`, for the version of the interface in XLA's header."""
    with _lock:
        if not _kept:
            where = _environment.ctypes.data
            sharing = native(_task, types.int64, types.int64)
            handling = native(_handle, types.int64, types.int64)
            # Functions of C, and thin: what they call comes compiled from the disk.
            signature = types.int64(types.int64)
            task = numba.cfunc(signature)(lambda ticket: machine_code(sharing, ticket, where))
            answer = numba.cfunc(signature)(lambda frame: machine_code(handling, frame, where))
            _environment[[_MAJOR, _MINOR, _TASK]] = major, minor, task.address
            _kept.extend((answer, task, _environment, _task, _handle))
            # Not even the end of the interpreter ends it: threads of XLA may still be at work.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))
    return _kept[0]
