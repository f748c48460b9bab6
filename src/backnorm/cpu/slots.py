"""The data of the library of threads: what it knows of the process, and a slot for each thread.

A slot is all that passes between a thread of ours and those who call it. Its state is eight times
the number of times that it was called, plus one of the values below; so who has called it knows
whether it is still at work for the same call.
"""

from __future__ import annotations

__all__ = [
    "CALLED",
    "CELLS",
    "CREATE",
    "IDLE",
    "INDEX",
    "MASK",
    "NEW",
    "OWN_MASK",
    "PARALLEL",
    "RECORD",
    "RETRY",
    "RUNNING",
    "SLEEPING",
    "SLOTS",
    "SLOT_CELLS",
    "STATE",
    "STATES",
    "TABLE",
    "TAKEN",
    "THREAD_NUMBER",
    "WAITED",
]

#: Cells of what the process knows: the functions by which an OpenMP team is entered, and by which
#: one of it tells its number; the addresses of pthread_create, pthread_detach and pthread_sigmask
#: (three cells); when to try again after the system refused a thread.
PARALLEL, THREAD_NUMBER, CREATE, RETRY = 0, 1, 2, 5

#: Where the slots begin, how many there are, and the cells of each, whole cache lines.
TABLE, SLOTS, SLOT_CELLS = 8, 256, 40

CELLS = TABLE + SLOTS * SLOT_CELLS

#: Cells of a slot: its state; the record to take part in, and as which participant; which
#: processors the caller may use, and which its own thread may (16 cells each).
STATE, RECORD, INDEX, MASK, OWN_MASK = 0, 1, 2, 8, 24

#: States. There is no thread; it has nothing to do, and watches the slot, or sleeps; a caller is
#: filling in the slot; the thread is called, and may be called off; it takes part; and somebody
#: sleeps until it is out.
NEW, IDLE, SLEEPING, TAKEN, CALLED, RUNNING, WAITED = range(7)
STATES = 8
