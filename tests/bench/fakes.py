"""Contestants that misbehave, for worker processes: "fakes:NAME", with this folder on the path.

And devices, likewise.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import backnorm
from benchmarks import convolution
from benchmarks.convolution import AfterConvolution
from benchmarks.device import Host
from benchmarks.peers.base import Missing, Prepared, Unsupported


def gradients(data, **changes):
    exact = backnorm.batch_norm_backward(*data.backward_inputs, **data.options)
    return exact._asdict() | changes


class Right:
    name = "torch"
    temporaries = 0.0

    def start(self, threads):
        return {"right": f"1.{threads}"}

    def call(self, cell, data):
        return gradients(data)

    def prepare(self, cell, data):
        return {"allocate": Prepared(lambda: self.call(cell, data), lambda returned: returned)}


class Ours(Right):
    name = "backnorm"


class WrongOurs(Ours):
    """Off by one unit in the last place of one parameter."""

    def call(self, cell, data):
        right = gradients(data)
        right["dgamma"][-1] *= 1 + 2**-22
        return right


class RaisingOurs(Ours):
    def call(self, cell, data):
        raise ValueError("no\nsuch thing")


class Wrong(Right):
    name = "jax"

    def call(self, cell, data):
        return gradients(data, dx=data.dy)


class Absent(Right):
    name = "onednn"

    def start(self, threads):
        raise Missing("absent is not installed")


class Declining(Right):
    name = "numpy"

    def prepare(self, cell, data):
        raise Unsupported("not today")


class Raising(Right):
    name = "numpy"

    def call(self, cell, data):
        raise RuntimeError("out of\nluck")


class Greedy(Right):
    name = "numpy"
    temporaries = 1e15


class Segfaulting(Right):
    """Survives being checked, and not being timed."""

    name = "tensorflow"
    calls = 0

    def call(self, cell, data):
        self.calls += 1
        if self.calls > 1:
            print("goodbye", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        return gradients(data)


class SegfaultingAtNXC(Segfaulting):
    def call(self, cell, data):
        return super().call(cell, data) if cell.layout == "NXC" else gradients(data)


class ExitingAtStart(Right):
    name = "tensorflow"

    def start(self, threads):
        os._exit(7)


class Hanging(Right):
    name = "tensorflow"

    def call(self, cell, data):
        time.sleep(1000)


class Expensive(Host):
    """Where every call takes a second for each thread."""

    def start(self, threads):
        self.watch = self
        self.threads = threads

    def warm(self, call, seconds):
        return float(self.threads)

    def sample(self, call, loop):
        return float(self.threads)


class WithoutPyTorch(AfterConvolution):
    def start(self, threads):
        convolution.importlib.util.find_spec = lambda name: None
        super().start(threads)
