"""Contestants that misbehave, for worker processes: "fakes:NAME", with this folder on the path."""

from __future__ import annotations

import os
import signal
import sys
import time

import backnorm
from benchmarks.host import Host
from benchmarks.peers.base import Contestant, Missing, Prepared, Unsupported


class Right(Contestant):
    name = "torch"
    temporaries = 0.0
    forms = ("allocate",)
    seconds = 0.0

    def start(self, threads):
        return {"right": f"1.{threads}"}

    def call(self, cell, data):
        time.sleep(self.seconds)
        return backnorm.batch_norm_backward(*data.backward_inputs, **data.options)._asdict()

    def prepare(self, cell, data):
        call = Prepared(lambda: self.call(cell, data), lambda returned: returned)
        return dict.fromkeys(self.forms, call)


class Ours(Right):
    name = "backnorm"


class OursInBothForms(Ours):
    forms = ("out", "allocate")


class WrongOurs(Ours):
    """Off by one unit in the last place of one parameter."""

    def call(self, cell, data):
        right = super().call(cell, data)
        right["dgamma"][-1] *= 1 + 2**-22
        return right


class RaisingOurs(Ours):
    def call(self, cell, data):
        raise ValueError("no\nsuch; thing")


class Slow(Right):
    seconds = 0.02


class Wrong(Right):
    name = "jax"

    def call(self, cell, data):
        return super().call(cell, data) | {"dx": data.dy}


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
    """Survives being judged, and not being timed, in one layout."""

    name = "tensorflow"
    calls = 0

    def call(self, cell, data):
        self.calls += 1
        if self.calls > 1 and cell.layout == "NXC":
            print("goodbye", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().call(cell, data)


class ExitingAtStart(Right):
    name = "tensorflow"

    def start(self, threads):
        os._exit(7)


class Hanging(Right):
    name = "tensorflow"

    def call(self, cell, data):
        time.sleep(1000)


class AbsentHost(Host):
    def start(self, threads):
        raise Missing("no such device")
