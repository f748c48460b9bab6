"""Threads of our own: called for a record, and called off or waited for before the call returns.

Python is not in them: no GIL, no objects, no exceptions, no signals. A thread that has nothing to
do watches its slot for a moment, because being woken takes longer than a small problem, and then
sleeps. Whoever calls takes any that are free, up to one less than the processors it may use, and
never waits for one to begin: those that have not begun when everything is done are called off. So a
late, busy or missing thread costs nothing but its help.
"""

from __future__ import annotations

from llvmlite import ir

from backnorm.cpu.kernels.jit import inlined, outlined
from backnorm.cpu.kernels.system import (
    LOOKS,
    MASK_CELLS,
    PATIENCE,
    introduce_itself,
    linger,
    now,
    participate,
    pause,
    processors,
    run_on,
    sleep,
    started,
    wake,
)
from backnorm.cpu.kernels.words import (
    address_of,
    exchange,
    publish,
    put,
    seen,
    swap,
    wide_room,
    word,
)
from backnorm.cpu.record import CLAIMED, LINE
from backnorm.cpu.record import SLOTS as FIELDS
from backnorm.cpu.slots import (
    CALLED,
    CELLS,
    CREATE,
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
    TABLE,
    TAKEN,
    WAITED,
)

__all__ = ["dismiss", "summon", "threads_data", "work"]

#: threads_data(): the address of the library's data, see `slots`.
threads_data = address_of("bn_threads", ir.ArrayType(ir.IntType(64), CELLS))

_work = address_of("bn_work")

_FUNCTION = 8 * FIELDS["function"]

# Nanoseconds until a system that refused a thread is asked again.
_LATER = 1_000_000_000


@outlined
def summon(record, helpers):
    """Call so many threads, or as many as there are, to take part in a record, as 1, 2, ..."""
    mask = wide_room()
    most = min(SLOTS, processors(mask) - 1)
    index = 1
    for k in range(most):
        if index > helpers:
            break
        slot = threads_data() + 8 * (TABLE + SLOT_CELLS * k)
        state = seen(slot)
        status = state % STATES
        if status > SLEEPING or (status == NEW and not _may_start()):
            continue
        taken = state - status + STATES + TAKEN
        if not swap(slot, state, taken):
            continue
        put(slot + 8 * RECORD, record)
        put(slot + 8 * INDEX, index)
        for cell in range(MASK_CELLS):
            put(slot + 8 * (MASK + cell), word(mask + 8 * cell))
        called = taken - TAKEN + CALLED
        place = _place(record, index)
        put(place, slot)
        put(place + 8, called)
        publish(slot, called)
        if status == SLEEPING:
            wake(slot)
        elif status == NEW and not started(threads_data() + 8 * CREATE, _work(), slot):
            put(threads_data() + 8 * RETRY, now() + _LATER)
            put(place, 0)
            publish(slot, NEW)
            continue
        index += 1


@outlined
def dismiss(record, helpers):
    """See to it that none of the threads that were called for a record touches it any more."""
    for index in range(1, helpers + 1):
        place = _place(record, index)
        slot, called = word(place), word(place + 8)
        if slot == 0:
            return
        put(place, 0)
        if not swap(slot, called, called - CALLED + IDLE):
            _await(slot, called - CALLED + RUNNING)


@outlined
def work(slot):
    """What a thread of ours does until the process ends."""
    introduce_itself()
    while True:
        called = _next_call(slot)
        # Unless it has been called off, or by now for something else.
        if not swap(slot, called, called - CALLED + RUNNING):
            continue
        _follow(slot)
        record = word(slot + 8 * RECORD)
        participate(word(record + _FUNCTION), record, word(slot + 8 * INDEX))
        # From here on the record may be gone.
        if exchange(slot, called - CALLED + IDLE) % STATES == WAITED:
            wake(slot)
    return 0


@inlined
def _place(record, index):
    """Return where a record says which thread is a participant."""
    return record + 8 * (CLAIMED + LINE * index + 1)


@inlined
def _may_start():
    """Return whether the system may be asked for a thread: not just after it has refused one."""
    later = word(threads_data() + 8 * RETRY)
    return later == 0 or now() > later


@outlined
def _next_call(slot):
    """Wait until a slot is called; return its state."""
    while True:
        for _ in range(PATIENCE):
            state = seen(slot)
            if state % STATES == CALLED:
                return state
            pause()
        state = seen(slot)
        asleep = state - IDLE + SLEEPING
        if state % STATES == IDLE and swap(slot, state, asleep):
            while seen(slot) == asleep:
                sleep(slot, asleep)


@outlined
def _await(slot, running):
    """Wait until a thread that was running is out."""
    for looks in range(LOOKS):
        if seen(slot) != running:
            return
        linger(looks)
    waited = running - RUNNING + WAITED
    if swap(slot, running, waited):
        while seen(slot) == waited:
            sleep(slot, waited)


@inlined
def _follow(slot):
    """Use the processors that the caller may use, which may have changed."""
    same = True
    for cell in range(MASK_CELLS):
        wanted = word(slot + 8 * (MASK + cell))
        if wanted != word(slot + 8 * (OWN_MASK + cell)):
            put(slot + 8 * (OWN_MASK + cell), wanted)
            same = False
    if not same:
        run_on(slot + 8 * MASK)
