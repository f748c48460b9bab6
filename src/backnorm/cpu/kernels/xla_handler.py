"""A kernel as a custom call of XLA on the CPU: no Python, no GIL, no copy.

`bn_xla_handler` is one C function for all kernels. It makes a record of what came with the call,
fills in the addresses of the buffers, and runs the kernel, as do helpers, which are tasks on the
threads of XLA. Nobody waits for one to start, only for items that one has begun; a task that
starts when its call is over finds no item. So the record belongs to all participants, and the last
of them frees it.

Nothing here raises: what is wrong with a call is an error of XLA, which JAX raises. What the
process knows (the version of XLA's interface, where kernels are) is data of the library,
`bn_environment`, which `backnorm.cpu.xla` fills in when it loads it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from backnorm.cpu.kernels.jit import inlined, outlined
from backnorm.cpu.kernels.system import (
    allocated,
    linger,
    participate,
    release,
    this_thread,
)
from backnorm.cpu.kernels.words import add, address_of, ask, put, room, seen, word
from backnorm.cpu.kernels.xla_frame import (
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
from backnorm.cpu.record import JOINED, SLOTS
from backnorm.cpu.xla_structures import ENVIRONMENT, ENVIRONMENT_CELLS, offsets

__all__ = ["data", "entries"]

_API = offsets("Api")
_SCHEDULES = offsets("ThreadPool_Schedule_Args")
_COUNTS = offsets("ThreadPool_NumThreads_Args")

_MAJOR, _MINOR, _TASK, _KNOWN, _TABLE = (8 * cell for cell in ENVIRONMENT)
_BYTES, _FUNCTION = 8 * SLOTS["bytes"], 8 * SLOTS["function"]
_DONE, _ITEMS = 8 * SLOTS["done"], 8 * SLOTS["items"]

# Cells of the block of a call: what malloc gave, participants that have not left, the thread that
# called, where the record is; from _TICKETS on, for every helper, where the block is
# and the helper's index. Then the record.
_RAW, _HOLDERS, _CALLER, _RECORD, _TICKETS = range(5)

#: environment(): the address of the library's data, see `xla_structures.ENVIRONMENT`.
environment = address_of("bn_environment", ir.ArrayType(ir.IntType(64), ENVIRONMENT_CELLS))


@outlined
def _block_of(frame, helpers):
    """Return a new block with the record of a call, or 0."""
    template, cells = record_of(frame)
    # The record begins at a line of the cache.
    start = (_TICKETS + 2 * helpers + 7) // 8 * 64
    raw = allocated(start + word(template + _BYTES) + 64)
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
    return block


@outlined
def _leave(block, participants):
    """Let go of a block for so many participants; the last of all frees it."""
    if add(block + 8 * _HOLDERS, -participants) == 0:
        release(word(block + 8 * _RAW))


@outlined
def _task(ticket):
    """What a thread of XLA does for a call: its share, if it comes in time."""
    block = word(ticket)
    # XLA may run a task at once instead of scheduling it. A caller who is not at work yet must not
    # be its own helper, who waits for it.
    if this_thread() != word(block + 8 * _CALLER):
        record = word(block + 8 * _RECORD)
        participate(word(record + _FUNCTION), record, word(ticket + 8))
    _leave(block, 1)
    return 0


@outlined
def _await(done, items):
    """Wait until as many items are done."""
    looks = 0
    while seen(done) != items:
        linger(looks)
        looks += 1


@outlined
def _run(block):
    """Run the kernel of a block as the caller; return the number of what went wrong, or 0."""
    record = word(block + 8 * _RECORD)
    function = word(record + _FUNCTION)
    participate(function, record, 0)
    _await(record + _DONE, word(record + _ITEMS))
    ended = participate(function, record, JOINED)
    # A channel may be refused when all is done; if it was before, there are no items.
    return REFUSED if ended < 0 and word(record + _ITEMS) == 0 else 0


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
def _kernel_of(frame):
    """Return the address of the kernel that is meant, or 0 if it is not known."""
    name = called(frame, KERNEL)
    for k in range(seen(environment() + _KNOWN)):
        if word(environment() + _TABLE + 16 * k) == name:
            return word(environment() + _TABLE + 16 * k + 8)
    return 0


@outlined
def _handle(frame):
    """Answer a call frame: 0, or an error of XLA."""
    asked = question(frame)
    if asked != 0:
        describe(asked, word(environment() + _MAJOR), word(environment() + _MINOR))
        return 0
    api, refused = api_of(frame), wrong(frame)
    if refused != 0:
        return refuse(api, refused)
    function = _kernel_of(frame)
    if function == 0:
        return refuse(api, UNKNOWN)
    expect_results(frame)
    helpers = _helpers(frame)
    for instance in range(called(frame, INSTANCES)):
        block = _block_of(frame, helpers)
        if block == 0:
            return refuse(api, MEMORY)
        record = word(block + 8 * _RECORD)
        put(record + _FUNCTION, function)
        for k in range(buffers_of(frame)):
            put(record + 8 * slot_of(frame, k), place_of(frame, k, instance))
        _summon(frame, word(environment() + _TASK), block, helpers)
        refused = _run(block)
        _leave(block, 1)
        if refused != 0:
            return refuse(api, refused)
    return 0


def entries() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the functions to export: see `build.frontend.linked`."""
    return {
        "bn_xla_handler": (_handle, (types.int64,)),
        "bn_xla_task": (_task, (types.int64,)),
    }


def data() -> str:
    """Return LLVM code of the data to export."""
    return f"@bn_environment = global [{ENVIRONMENT_CELLS} x i64] zeroinitializer\n"
