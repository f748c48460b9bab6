"""Many callers at once: ``crowd.py THREADS CALLS``."""

import sys
import threading
import time

from layer import Layer, at_rest, statuses, thread_ids, verdict

from backnorm import machine

callers, calls = int(sys.argv[1]), int(sys.argv[2])
layers = [Layer((16, 8, 2000 + 16 * (k % 4))) for k in range(callers)]
wrong = 0
lock = threading.Lock()


def compute(layer: Layer) -> None:
    global wrong
    for _ in range(calls):
        if not layer.is_right():
            with lock:
                wrong += 1


before, helpers = thread_ids(), len(statuses())
threads = [threading.Thread(target=compute, args=(layer,)) for layer in layers]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
# The system takes a moment longer to be rid of them.
time.sleep(0.2)
verdict(
    wrong=wrong,
    # No more threads than there are processors, however many call.
    too_many=max(0, len(statuses()) - (machine.processors() - 1)),
    stray=len(thread_ids() - before) - (len(statuses()) - helpers),
    at_rest=at_rest(),
)
