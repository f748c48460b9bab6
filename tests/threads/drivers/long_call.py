"""A signal in the middle of a call that takes long: Python sees to it before the call is over."""

import signal

import numpy as np
from layer import Layer, at_rest, verdict

import backnorm
from backnorm_kernels import stage


class AlarmError(Exception):
    """The exception that the handler raises."""


def ring(number, frame):
    raise AlarmError


# A millisecond in the place of a tenth of a second, and a call of tens of milliseconds.
stage._LIMIT = 1_000_000
found = {}
signal.signal(signal.SIGALRM, ring)
for threads in (1, 2):
    backnorm.set_num_threads(threads)
    layer = Layer((64, 64, 80, 80))
    out = np.full_like(layer.x, np.nan)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        layer(out)
        found[f"late{threads}"] = True
    except AlarmError:
        pass
    found[f"finished{threads}"] = not np.isnan(out).any()
    found[f"wrong{threads}"] = not layer.is_right()
verdict(**{name: int(value) for name, value in found.items()}, at_rest=at_rest())
