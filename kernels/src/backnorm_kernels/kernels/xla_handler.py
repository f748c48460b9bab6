"""The handler of XLA's custom calls on CPUs: no Python, no GIL, no copies of arrays.

`bn_xla_handler` is one C function for all kernels. It copies the record of the call, fills in the
addresses of the buffers, and runs the kernel. Helpers, which are tasks on XLA's thread pool, also
run the kernel. When no item is left to claim, the caller waits until the items that tasks have
begun are done. It never waits for a task to start. A task may start after the call has returned,
and then finds no item. Therefore the record has a reference count, and the last participant frees
it.

The functions here do not raise: an invalid call returns an XLA error, which JAX raises. The
variable `bn_environment` of this library holds data that differ from process to process: the
version of XLA's API and the addresses of kernels. `xla` fills in this variable when it
loads the library.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from backnorm_kernels.kernels.atomics import (
    add_fetch,
    address_of,
    call_c,
    load_acquire,
    load_word,
    stack_8_words,
    store_word,
)
from backnorm_kernels.kernels.jit import inlined, outlined
from backnorm_kernels.kernels.system import (
    advise_outputs,
    call_kernel,
    free,
    malloc,
    monotonic_ns,
    spin_wait,
    thread_id,
)
from backnorm_kernels.kernels.xla_frame import (
    HELPERS,
    INSTANCES,
    KERNEL,
    MEMORY,
    REFUSED,
    UNKNOWN,
    api_of,
    buffers_of,
    call_attribute,
    context_of,
    data_of,
    error,
    invalid,
    metadata_extension,
    record_of,
    slot_of,
    succeeded,
    write_api_version,
)
from backnorm_kernels.record import JOINED, SLOTS
from backnorm_kernels.xla_structures import ENVIRONMENT, ENVIRONMENT_CELLS, offsets

_API = offsets("Api")
_SCHEDULES = offsets("ThreadPool_Schedule_Args")
_COUNTS = offsets("ThreadPool_NumThreads_Args")

_MAJOR, _MINOR, _TASK, _KNOWN, _KERNELS = (8 * cell for cell in ENVIRONMENT)
_BYTES, _FUNCTION = 8 * SLOTS["bytes"], 8 * SLOTS["function"]
_DONE, _ITEMS = 8 * SLOTS["done"], 8 * SLOTS["items"]

# The block of a call begins with four cells: the address that malloc returned, the reference count,
# the thread of the caller, the address of the record. From _TASKS on, the block has two cells for
# each helper: the address of the block, and the helper's index. The address of these two cells is
# the argument of the helper's task. The record follows the cells of the last helper.
_RAW, _REFERENCES, _CALLER, _RECORD, _TASKS = range(5)

#: `environment()` returns the address of the variable `bn_environment`.
#: `xla_structures.ENVIRONMENT` describes the contents of this variable.
environment = address_of("bn_environment", ir.ArrayType(ir.IntType(64), ENVIRONMENT_CELLS))


@outlined
def _block_of(frame, helpers):
    """Return a new block with the record of a call, or 0 if no memory is free."""
    template, cells = record_of(frame)
    # In the block, the record begins at the first cache line after the cells of the helpers.
    start = (_TASKS + 2 * helpers + 7) // 8 * 64
    raw = malloc(start + load_word(template + _BYTES) + 64)
    if raw == 0:
        return 0
    block = (raw + 63) // 64 * 64
    store_word(block + 8 * _RAW, raw)
    store_word(block + 8 * _REFERENCES, 1 + helpers)
    store_word(block + 8 * _CALLER, thread_id())
    store_word(block + 8 * _RECORD, block + start)
    for k in range(helpers):
        store_word(block + 8 * (_TASKS + 2 * k), block)
        store_word(block + 8 * (_TASKS + 2 * k + 1), k + 1)
    for k in range(cells):
        store_word(block + start + 8 * k, load_word(template + 8 * k))
    return block


@outlined
def _release(block, participants):
    """Release `participants` references to a block; free the block if no reference is left."""
    if add_fetch(block + 8 * _REFERENCES, -participants) == 0:
        free(load_word(block + 8 * _RAW))


@outlined
def _task(argument):
    """Run the kernel as a helper: the body of a task on XLA's thread pool."""
    block = load_word(argument)
    # XLA may run a task immediately in the calling thread. In that thread the task does nothing: a
    # helper waits until the caller has filled the table, so the caller would wait for itself.
    if thread_id() != load_word(block + 8 * _CALLER):
        record = load_word(block + 8 * _RECORD)
        call_kernel(load_word(record + _FUNCTION), record, load_word(argument + 8))
    _release(block, 1)
    return 0


@outlined
def _wait_until_done(done, items):
    """Wait until all items are done."""
    begin = monotonic_ns()
    while load_acquire(done) != items:
        spin_wait(begin)


@outlined
def _run(block):
    """Run the kernel of a call, in the thread that made the call, and wait for the helpers.

    Return 0, or the number of the error message for an invalid channel (`REFUSED`).
    """
    record = load_word(block + 8 * _RECORD)
    function = load_word(record + _FUNCTION)
    advise_outputs(record)
    call_kernel(function, record, 0)
    _wait_until_done(record + _DONE, load_word(record + _ITEMS))
    ended = call_kernel(function, record, JOINED)
    # An invalid channel is an error of the call only if it was found before the first phase. In
    # this case `record.cancel` has set the number of items to 0.
    return REFUSED if ended < 0 and load_word(record + _ITEMS) == 0 else 0


@outlined
def _helpers(frame):
    """Return how many tasks to schedule: the requested number, but at most one per XLA thread."""
    requested = call_attribute(frame, HELPERS)
    if requested == 0:
        return 0
    api, made, threads = api_of(frame), stack_8_words(), stack_8_words()
    store_word(threads, 0)
    store_word(made + _COUNTS.struct_size, _COUNTS.size_)
    store_word(made + _COUNTS.extension_start, 0)
    store_word(made + _COUNTS.ctx, context_of(frame))
    store_word(made + _COUNTS.num_threads, threads)
    if not succeeded(api, call_c(load_word(api + _API.ThreadPool_NumThreads), made)):
        return 0
    return min(requested, load_word(threads)) if load_word(threads) > 1 else 0


@outlined
def _schedule(frame, task, block, helpers):
    """Schedule a task for every helper."""
    api, made = api_of(frame), stack_8_words()
    store_word(made + _SCHEDULES.struct_size, _SCHEDULES.size_)
    store_word(made + _SCHEDULES.extension_start, 0)
    store_word(made + _SCHEDULES.ctx, context_of(frame))
    store_word(made + _SCHEDULES.task, task)
    for k in range(helpers):
        store_word(made + _SCHEDULES.data, block + 8 * (_TASKS + 2 * k))
        if not succeeded(api, call_c(load_word(api + _API.ThreadPool_Schedule), made)):
            # This task and the following ones are not scheduled. The calling thread computes the
            # items that these tasks would have computed.
            _release(block, helpers - k)
            return


@inlined
def _kernel_of(frame):
    """Return the address of the kernel that the call names, or 0 if it is not registered."""
    name = call_attribute(frame, KERNEL)
    for k in range(load_acquire(environment() + _KNOWN)):
        if load_word(environment() + _KERNELS + 16 * k) == name:
            return load_word(environment() + _KERNELS + 16 * k + 8)
    return 0


@outlined
def _handler(frame):
    """Execute the call that a frame describes. Return 0, or the address of an XLA error."""
    extension = metadata_extension(frame)
    if extension != 0:
        major, minor = load_word(environment() + _MAJOR), load_word(environment() + _MINOR)
        write_api_version(extension, major, minor)
        return 0
    api, message = api_of(frame), invalid(frame)
    if message != 0:
        return error(api, message)
    function = _kernel_of(frame)
    if function == 0:
        return error(api, UNKNOWN)
    helpers = _helpers(frame)
    for instance in range(call_attribute(frame, INSTANCES)):
        block = _block_of(frame, helpers)
        if block == 0:
            return error(api, MEMORY)
        record = load_word(block + 8 * _RECORD)
        store_word(record + _FUNCTION, function)
        for k in range(buffers_of(frame)):
            store_word(record + 8 * slot_of(frame, k), data_of(frame, k, instance))
        _schedule(frame, load_word(environment() + _TASK), block, helpers)
        message = _run(block)
        _release(block, 1)
        if message != 0:
            return error(api, message)
    return 0


def entries() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the functions to export: see `build.frontend.linked`."""
    return {
        "bn_xla_handler": (_handler, (types.int64,)),
        "bn_xla_task": (_task, (types.int64,)),
    }


def data() -> str:
    """Return LLVM code that defines the exported data."""
    return f"@bn_environment = global [{ENVIRONMENT_CELLS} x i64] zeroinitializer\n"
