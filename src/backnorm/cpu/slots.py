"""The data of the thread library: addresses of C functions, and a slot for each worker thread.

Callers and a worker communicate only through the worker's slot (see `docs/threads.md`). The state
cell of a slot has eight times the number of requests that the slot has received, plus one of the
states below, such as `IDLE`. So a compare-exchange that expects an old state fails if the slot has
since received another request.
"""

from __future__ import annotations

#: Cells of the process: the addresses of GOMP_parallel and omp_get_thread_num; those of
#: pthread_create, pthread_detach and pthread_sigmask (three cells); the earliest time to create a
#: thread again after a failure.
PARALLEL, THREAD_NUMBER, CREATE, RETRY = 0, 1, 2, 5

#: The slots begin at the cell `TABLE`. There are `SLOTS` slots. Each has `SLOT_CELLS` cells, which
#: fill whole cache lines.
TABLE, SLOTS, SLOT_CELLS = 8, 256, 40

CELLS = TABLE + SLOTS * SLOT_CELLS

#: Cells of a slot: its state; the record of the request, and the index of the participant; the
#: affinity mask of the caller, and that of the worker (16 cells each).
STATE, RECORD, INDEX, MASK, OWN_MASK = 0, 1, 2, 8, 24

#: States. NEW: no thread exists. IDLE: the worker spins on the slot. SLEEPING: the worker sleeps on
#: the slot's futex. TAKEN: a caller fills in the slot. CALLED: there is a request, which may be
#: cancelled. RUNNING: the worker runs the kernel. WAITED: the worker runs the kernel, and the
#: caller sleeps until the worker is done.
NEW, IDLE, SLEEPING, TAKEN, CALLED, RUNNING, WAITED = range(7)
STATES = 8
