"""The thread pool: worker threads that help callers, and their slots.

The threads run no Python code: they need no GIL, use no objects and raise no exceptions. They block
all signals except those that an error in their own code raises (such as SIGSEGV). An idle worker
first spins on its slot for a moment, because waking a sleeping thread takes longer than a small
problem. If no request comes during this moment, the worker sleeps on a futex. A caller that may use
P processors requests help from at most P - 1 idle workers. The caller never waits for a worker to
start: when all items are done, it cancels the requests that no worker has accepted. So a worker
that is late, busy or missing does not delay a call. `docs/threads.md` describes how a call begins,
ends and is interrupted; `slots` describes a slot and its states.
"""

from __future__ import annotations

from llvmlite import ir

from backnorm_kernels.kernels.atomics import (
    address_of,
    compare_exchange,
    exchange,
    load_acquire,
    load_word,
    stack_32_words,
    store_release,
    store_word,
)
from backnorm_kernels.kernels.jit import inlined, outlined
from backnorm_kernels.kernels.system import (
    MASK_CELLS,
    SLEEP_AFTER,
    YIELD_AFTER,
    call_kernel,
    futex_wait,
    futex_wake,
    get_affinity,
    monotonic_ns,
    pause,
    set_affinity,
    set_thread_name,
    spin_wait,
    start_thread,
)
from backnorm_kernels.record import CLAIMED, LINE
from backnorm_kernels.record import SLOTS as FIELDS
from backnorm_kernels.slots import (
    CALLED,
    CELLS,
    CREATE,
    FIRST_SLOT,
    IDLE,
    INDEX,
    MASK,
    NEW,
    OWN_MASK,
    RECORD,
    RETRY,
    RUNNING,
    SLEEPING,
    SLOT_CELLS,
    SLOTS,
    STATES,
    TAKEN,
    WAITED,
)

#: threads_data(): the address of the memory in which the library keeps the thread pool's slots (see
#: `slots`).
threads_data = address_of("bn_threads", ir.ArrayType(ir.IntType(64), CELLS))

_work = address_of("bn_work")

_FUNCTION = 8 * FIELDS["function"]

# If pthread_create fails, it is not called again for this many nanoseconds.
_RETRY_NS = 1_000_000_000


@outlined
def start_helpers(record, helpers):
    """Ask up to `helpers` idle workers to run a record's kernel, as participants 1, 2, ..."""
    mask = stack_32_words()
    most = min(SLOTS, get_affinity(mask) - 1)
    index = 1
    for k in range(most):
        if index > helpers:
            break
        slot = threads_data() + 8 * (FIRST_SLOT + SLOT_CELLS * k)
        state = load_acquire(slot)
        status = state % STATES
        if status > SLEEPING or (status == NEW and not _may_create()):
            continue
        taken = state - status + STATES + TAKEN
        if not compare_exchange(slot, state, taken):
            continue
        store_word(slot + 8 * RECORD, record)
        store_word(slot + 8 * INDEX, index)
        for cell in range(MASK_CELLS):
            store_word(slot + 8 * (MASK + cell), load_word(mask + 8 * cell))
        called = taken - TAKEN + CALLED
        place = _slot_cell(record, index)
        store_word(place, slot)
        store_word(place + 8, called)
        store_release(slot, called)
        if status == SLEEPING:
            futex_wake(slot)
        elif status == NEW and not start_thread(threads_data() + 8 * CREATE, _work(), slot):
            store_word(threads_data() + 8 * RETRY, monotonic_ns() + _RETRY_NS)
            store_word(place, 0)
            store_release(slot, NEW)
            continue
        index += 1


@outlined
def join_helpers(record, helpers):
    """Cancel each request that no worker has accepted; wait for the workers that accepted one."""
    for index in range(1, helpers + 1):
        place = _slot_cell(record, index)
        slot, called = load_word(place), load_word(place + 8)
        if slot == 0:
            return
        store_word(place, 0)
        if not compare_exchange(slot, called, called - CALLED + IDLE):
            _wait_until_left(slot, called - CALLED + RUNNING)


@outlined
def worker(slot):
    """Serve requests until the process ends: the start routine of a worker thread."""
    set_thread_name()
    while True:
        called = _wait_for_call(slot)
        # If the caller has cancelled the request, or another request has replaced it, the exchange
        # fails, and the worker waits for a request again.
        if not compare_exchange(slot, called, called - CALLED + RUNNING):
            continue
        _set_affinity_of_caller(slot)
        record = load_word(slot + 8 * RECORD)
        call_kernel(load_word(record + _FUNCTION), record, load_word(slot + 8 * INDEX))
        # After this exchange the caller may free the record.
        if exchange(slot, called - CALLED + IDLE) % STATES == WAITED:
            futex_wake(slot)
    return 0


@inlined
def _slot_cell(record, index):
    """Return the address at which a record stores a participant's slot and the slot's state."""
    return record + 8 * (CLAIMED + LINE * index + 1)


@inlined
def _may_create():
    """Return whether a thread may be created: no attempt failed in the last second."""
    later = load_word(threads_data() + 8 * RETRY)
    return later == 0 or monotonic_ns() > later


@outlined
def _wait_for_call(slot):
    """Wait until a slot has a request; return the state of the slot."""
    while True:
        begin = monotonic_ns()
        while monotonic_ns() - begin < YIELD_AFTER:
            state = load_acquire(slot)
            if state % STATES == CALLED:
                return state
            pause()
        state = load_acquire(slot)
        asleep = state - IDLE + SLEEPING
        if state % STATES == IDLE and compare_exchange(slot, state, asleep):
            while load_acquire(slot) == asleep:
                futex_wait(slot, asleep)


@outlined
def _wait_until_left(slot, running):
    """Wait until a worker has left the kernel."""
    begin = monotonic_ns()
    while monotonic_ns() - begin < SLEEP_AFTER:
        if load_acquire(slot) != running:
            return
        spin_wait(begin)
    waited = running - RUNNING + WAITED
    if compare_exchange(slot, running, waited):
        while load_acquire(slot) == waited:
            futex_wait(slot, waited)


@inlined
def _set_affinity_of_caller(slot):
    """Set the worker's affinity mask to that of its caller, if the two differ."""
    same = True
    for cell in range(MASK_CELLS):
        wanted = load_word(slot + 8 * (MASK + cell))
        if wanted != load_word(slot + 8 * (OWN_MASK + cell)):
            store_word(slot + 8 * (OWN_MASK + cell), wanted)
            same = False
    if not same:
        set_affinity(slot + 8 * MASK)
