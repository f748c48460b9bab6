"""Signals at random moments of calls: ``signals.py COUNT [torch] [pinned] [allocating]``.

An exception comes of each.
"""

import os
import random
import signal
import sys
import time

import numpy as np

if "torch" in sys.argv:
    import torch  # noqa: F401 (its team takes part)

from layer import Layer, at_rest, statuses, thread_ids, verdict


class AlarmError(Exception):
    """The exception that the handler raises."""


def ring(number, frame):
    global rings
    rings += 1
    raise AlarmError


allocating = "allocating" in sys.argv
layer = Layer((16, 32, 40, 40)) if allocating else Layer()
out = np.empty_like(layer.x)
random.seed(1)
begin = time.perf_counter()
for _ in range(20):
    layer(out)
usual = (time.perf_counter() - begin) / 20
helpers = len(statuses())
if "pinned" in sys.argv:
    for thread in thread_ids():
        os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})
signal.signal(signal.SIGALRM, ring)
count, rung, written = int(sys.argv[1]), 0, 0
for _ in range(count):
    rings = 0
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3 * usual))
        while not rings:
            layer(None if allocating else out)
    except AlarmError:
        rung += 1
    # Whoever were still at work would write this over.
    out.fill(7)
    before = time.perf_counter()
    while time.perf_counter() - before < usual:
        pass
    written += not (out == 7).all()
verdict(
    missed=count - rung,
    written=written,
    lost=len(statuses()) - helpers,
    at_rest=at_rest(),
    right=all(layer.is_right() for _ in range(20)),
)
