"""The data of the thread library: addresses of C functions, and a slot for each worker thread.

Callers and a worker communicate only through the worker's slot (see `docs/threads.md`). The state
cell of a slot combines two numbers: eight times the number of requests that the slot has received,
plus one of the states below, such as `IDLE`. Suppose that a thread has read the state, and that the
slot then receives another request. The state has then changed, so if the thread now calls
compare-exchange with the state that it has read, the exchange fails.
"""

from __future__ import annotations

#: Cells of the process. PARALLEL and THREAD_NUMBER have the addresses of GOMP_parallel and
#: omp_get_thread_num. CREATE and the two cells after it have the addresses of pthread_create,
#: pthread_detach and pthread_sigmask. RETRY has the earliest time at which a thread may be created
#: again, after creating a thread has failed.
PARALLEL, THREAD_NUMBER, CREATE, RETRY = 0, 1, 2, 5

#: The slots begin at the cell `FIRST_SLOT`. There are `SLOTS` slots. Each has `SLOT_CELLS` cells,
#: which fill whole cache lines.
FIRST_SLOT, SLOTS, SLOT_CELLS = 8, 256, 40

CELLS = FIRST_SLOT + SLOTS * SLOT_CELLS

#: Cells of a slot. STATE: the slot's state. RECORD: the record that the caller wants the worker to
#: run. INDEX: the worker's index among the participants that run this record. MASK and OWN_MASK:
#: the affinity masks of the caller and of the worker, 16 cells each.
STATE, RECORD, INDEX, MASK, OWN_MASK = 0, 1, 2, 8, 24

#: States. NEW: no thread exists. IDLE: the worker spins on the slot. SLEEPING: the worker sleeps on
#: the slot's futex. TAKEN: a caller fills in the slot. CALLED: there is a request, which may be
#: cancelled. RUNNING: the worker runs the kernel. WAITED: the worker runs the kernel, and the
#: caller sleeps until the worker is done.
NEW, IDLE, SLEEPING, TAKEN, CALLED, RUNNING, WAITED = range(7)
STATES = 8
