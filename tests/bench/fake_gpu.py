"""A GPU that is not one: the device and contestants of ``--device cuda`` on CPU tensors.

For worker processes: "fake_gpu:NAME", with this folder on the path.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

from backnorm.errors import ArgumentValueError
from benchmarks.cuda.device import TorchDevice
from benchmarks.model import GpuFacts
from benchmarks.peers.base import Prepared
from benchmarks.peers.cuda.compiled import Compiled
from benchmarks.peers.cuda.cudnn import CuDnn
from benchmarks.peers.cuda.native import Native
from benchmarks.peers.cuda.ours import Backnorm
from benchmarks.peers.jax import JaxOnGpu


class WallEvent:
    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class FakeGpu(TorchDevice):
    """16 MB of memory are free; the L2 has 4 KiB."""

    place = "cpu"
    broken = False

    def library(self):
        import torch

        torch.set_num_threads(1)
        return torch

    def facts(self):
        return GpuFacts("Fake", "9.9", 3, 24 << 20, 4 << 10, "1.2", "13.0", 0, 2600, 0.0)

    def event(self):
        return WallEvent()

    def synchronise(self):
        if self.broken:
            print("an illegal memory access", file=sys.stderr, flush=True)
            raise RuntimeError("an illegal memory access")

    def free_memory(self):
        return 16 << 20

    def release(self):
        pass


class AbsentGpu(FakeGpu):
    def library(self):
        raise ArgumentValueError(
            "--device cuda", "no CUDA device", came="a toaster", accepted="cpu", hint="buy one"
        )


class EagerCompiled(Compiled):
    """Traced as ever, and run without a C++ compiler."""

    options = Compiled.options | {"backend": "eager"}


class JaxOnCpu(JaxOnGpu):
    platform = "cpu"


class DecomposedCuDnn(CuDnn):
    """PyTorch's description of what cuDNN's operators compute, in the place of cuDNN."""

    def start(self, threads):
        return {"cudnn": "decomposed"}

    def operators(self):
        from torch._decomp import decomposition_table

        aten = self._device.torch.ops.aten
        return SimpleNamespace(
            **{
                name: SimpleNamespace(default=decomposition_table[getattr(aten, name).default])
                for name in ("cudnn_batch_norm", "cudnn_batch_norm_backward")
            }
        )


class WrongOurs(Backnorm):
    """Off by one unit in the last place of one element."""

    def _call(self, cell, tensors, epsilon):
        call = super()._call(cell, tensors, epsilon)

        def wrong():
            first, *rest = call()
            first[-1, -1, -1] *= 1 + 2**-22
            return first, *rest

        return wrong


class WrongNative(Native):
    def prepare(self, cell, data):
        (right,) = super().prepare(cell, data).values()
        return {"allocate": Prepared(lambda: (self._device.tensors.dy,), right.results)}


class BreakingNative(Native):
    """Leaves a device behind on which nothing works any more."""

    def prepare(self, cell, data):
        if cell.layout == "NXC":
            self._device.broken = True
            raise RuntimeError("launch failed")
        return super().prepare(cell, data)


class Greedy(Native):
    temporaries = 1e9
