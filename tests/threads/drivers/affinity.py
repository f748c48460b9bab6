"""Processors that are taken away and given back while the process runs."""

import os
import threading
import time

from layer import Layer, at_rest, statuses, thread_ids, verdict

import backnorm


def of(thread: int) -> set[int]:
    return os.sched_getaffinity(thread)


every = os.sched_getaffinity(0)
one = {min(every)}
os.sched_setaffinity(0, one)
layer = Layer()
alone = statuses() == []
os.sched_setaffinity(0, every)
time.sleep(1.1)
number = backnorm.get_num_threads()
right = layer.is_right()
helpers = len(statuses())
# A thread of the pool, which exists with two processors or more, follows its caller. Threads of
# other libraries keep their processors.
two = set(sorted(every)[:2])
os.sched_setaffinity(0, two)
for _ in range(100):
    layer()
ours = thread_ids() - {threading.get_native_id()}
found = [of(thread) for thread in ours]
followed = (two in found or len(two) == 1) and all(each in (two, every) for each in found)
os.sched_setaffinity(0, one)
pinned = all(layer.is_right() for _ in range(100))
verdict(
    alone=alone,
    number=number - len(every),
    right=right,
    helped=helpers == len(every) - 1,
    followed=followed,
    pinned=pinned,
    at_rest=at_rest(),
)
