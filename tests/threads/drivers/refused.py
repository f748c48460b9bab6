"""A system that refuses threads: the caller works alone, and asks again later."""

import resource
import time
from pathlib import Path

from layer import Layer, at_rest, statuses, thread_ids, verdict

import backnorm


def size() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


with backnorm.num_threads(1):
    layer = Layer()
before = statuses()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
# Not even the stack of a thread.
resource.setrlimit(resource.RLIMIT_AS, (size() + (3 << 20), hard))
alone = layer.is_right() and layer.is_right()
refused = statuses()
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
at_once = layer.is_right() and statuses()
time.sleep(1.1)
later = layer.is_right()
verdict(
    none_before=before == [],
    alone=alone,
    refused=refused == [],
    not_asked_at_once=at_once == [],
    later=later,
    helped=len(statuses()) == 1,
    two_threads=len(thread_ids()) >= 2,
    at_rest=at_rest(),
)
