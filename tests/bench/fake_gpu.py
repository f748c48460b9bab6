"""A made-up GPU: the device and contestants of ``--device cuda`` on CPU tensors.

For worker processes: "fake_gpu:NAME", with this folder on the path.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

from benchmarks.cuda.device import Cuda
from benchmarks.peers.cuda import Backnorm, Compiled, CuDnn, Native
from benchmarks.peers.jax import JaxOnGpu


class WallEvent:
    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class FakeGpu(Cuda):
    """16 MB of memory are free; the L2 has 4 KiB."""

    place = "cpu"
    broken = False

    def library(self):
        import torch

        torch.set_num_threads(1)
        return torch

    def facts(self):
        return {"name": "Fake", "cache": 4 << 10}

    def event(self):
        return WallEvent()

    def synchronise(self):
        if self.broken:
            raise RuntimeError("an illegal memory access")

    def free_memory(self):
        return 16 << 20

    def release(self):
        pass


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

        aten = self.device.torch.ops.aten
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


class BreakingNative(Native):
    """Leaves a device behind on which nothing works any more."""

    def prepare(self, cell, data):
        self.device.broken = True
        raise RuntimeError("launch failed")
