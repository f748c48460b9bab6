"""An NVIDIA GPU as the device of a run: PyTorch, a cell's tensors, events, the speed of copying.

Each call of CUDA has its own method. Tests replace these methods, and all other code runs on
PyTorch's CPU tensors.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from typing import Any

from benchmarks.cells import Cell
from benchmarks.cuda.watches import SMALL, DeviceWatch, Queued, WholeWatch
from benchmarks.peers.base import Data, Missing, Prepared
from benchmarks.peers.tensors import LayerTensors, layer_tensors
from benchmarks.turns import Timing, timing

__all__ = ["Cuda"]

# The memory that is read to empty the L2, in multiples of the L2's size. One is not enough, because
# the L2's halves fill unevenly, and its replacement policy is not documented.
_FLUSH = 4
_LEAST_FLUSH = 1 << 20

# Blocks of x's size to fill with NaN before a call: it may allocate a result and a temporary.
_SPOILED = 2

# Bytes of the buffer whose copying is timed: far more than any cache has, and slow compared to a
# launch; at most a third of the free memory. Then the numbers of untimed and of timed copies.
_COPIED, _COPIED_SHARE = 1 << 30, 3
_WARM, _SAMPLES = 3, 20


class Cuda:
    """PyTorch's current CUDA device (the first that ``CUDA_VISIBLE_DEVICES`` names).

    Attributes
    ----------
    place : str
        PyTorch's name of the device.
    torch : module
        PyTorch, imported by `start`.
    copies : Timing
        Seconds for each byte read or written when memory is copied.
    watch : DeviceWatch
    """

    place = "cuda"

    def __init__(self) -> None:
        self.torch: Any = None
        self.copies: Timing
        self.watch: Any = DeviceWatch(self)
        self._held: LayerTensors | None = None
        self._ballast: Any = None
        self._sum: Any = None
        self._flush_seconds = 0.0

    def library(self) -> Any:
        """Import PyTorch, and check that there are a GPU for it and Triton for our kernels."""
        if importlib.util.find_spec("torch") is None:
            raise Missing("PyTorch is not installed: pip install torch")
        import torch

        if torch.version.cuda is None:
            built = "ROCm" if torch.version.hip else "the CPU alone"
            raise Missing(f"PyTorch {torch.__version__} is built for {built}")
        if not torch.cuda.is_available():
            raise Missing(f"PyTorch {torch.__version__} sees no GPU or no driver")
        if importlib.util.find_spec("triton") is None:
            raise Missing("the kernels of backnorm need Triton: pip install triton")
        return torch

    def facts(self) -> dict[str, Any]:
        """Return the properties of the device that PyTorch reports."""
        properties = self.torch.cuda.get_device_properties(self.torch.cuda.current_device())
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "cache": properties.L2_cache_size,
            "cuda": self.torch.version.cuda,
        }

    def event(self) -> Any:
        """Return a CUDA event that records the time."""
        return self.torch.cuda.Event(enable_timing=True)

    def synchronise(self) -> None:
        """Wait for all streams."""
        self.torch.cuda.synchronize()

    def free_memory(self) -> float:
        """Return the free bytes of the device, and those that PyTorch reserves without use."""
        free, _ = self.torch.cuda.mem_get_info()
        unused = self.torch.cuda.memory_reserved() - self.torch.cuda.memory_allocated()
        return float(free + unused)

    def release(self) -> None:
        """Free the memory that PyTorch caches, because other processes allocate, too."""
        self.torch.cuda.empty_cache()

    def start(self, threads: int) -> dict[str, Any]:
        """Import PyTorch, and measure how fast memory is copied; return facts of the device."""
        self.torch = self.library()
        self.torch.set_grad_enabled(False)
        facts = self.facts()
        self.copies = self._measured_copies()
        self.release()
        size = max(_FLUSH * facts["cache"], _LEAST_FLUSH)
        self._ballast = self.torch.zeros(size // 4, dtype=self.torch.float32, device=self.place)
        self._sum = self.torch.zeros((), dtype=self.torch.float32, device=self.place)
        self._flush_seconds = self._timed_flush()
        return facts | {"bandwidth": 1.0 / self.copies.median}

    @property
    def tensors(self) -> LayerTensors:
        """The tensors of the cell that is measured."""
        assert self._held is not None, "a cell is held before a contestant prepares"
        return self._held

    def hold(self, data: Data | None) -> None:
        """Copy a cell's arrays to the device; with None, free those held."""
        self._held = None if data is None else layer_tensors(data, self.place)
        if data is None:
            gc.collect()
            self.release()

    def spoil(self, data: Data) -> None:
        """Fill with NaN the memory that PyTorch will give to the next call that allocates.

        PyTorch reuses blocks of the same size, which may still have right results of another call.
        """
        blocks = [
            self.torch.full((data.x.nbytes,), 0xFF, dtype=self.torch.uint8, device=self.place)
            for _ in range(_SPOILED)
        ]
        del blocks

    def timed(self, cell: Cell, prepared: Prepared) -> Queued:
        """Return a call in the form that `watch` takes."""
        return Queued(prepared.call, prepared.finish, cold=cell.nbytes > SMALL)

    def once(self, call: Queued) -> tuple[Any, float]:
        """Make a call and wait for it; return its result and the seconds."""
        begin = time.perf_counter()
        returned = call.call()
        self.wait(call, returned)
        return returned, time.perf_counter() - begin

    def wait(self, call: Queued, returned: Any) -> None:
        """Wait for a call, which returned `returned`, and for all calls before it."""
        if call.finish is not None:
            call.finish(returned)
        else:
            self.synchronise()

    def whole_watch(self, cell: Cell) -> WholeWatch | None:
        """Return the watch for whole calls, for small cells."""
        return WholeWatch(self) if cell.nbytes <= SMALL else None

    def survived(self) -> None:
        """Raise an error if an earlier error has made the device unusable for this process."""
        self.synchronise()

    def flush(self, seconds: float) -> None:
        """Read more than the L2 holds, for `seconds` or longer, before the next call.

        The memory is not written, because write-backs of the L2 would slow the next call.
        """
        times = max(1, -int(-seconds // self._flush_seconds)) if self._flush_seconds else 1
        for _ in range(times):
            self.torch.sum(self._ballast, dim=0, out=self._sum)

    def _measured_copies(self) -> Timing:
        """Return the seconds for each byte read or written when memory is copied.

        Every byte counts twice, since it is read and written.
        """
        size = int(min(_COPIED, self.free_memory() // _COPIED_SHARE))
        source = self.torch.zeros(size, dtype=self.torch.uint8, device=self.place)
        target = self.torch.zeros_like(source)
        pairs = []
        for _ in range(_WARM + _SAMPLES):
            start, end = self.event(), self.event()
            start.record()
            target.copy_(source)
            end.record()
            pairs.append((start, end))
        self.synchronise()
        return timing([s.elapsed_time(e) / 1e3 / (2 * size) for s, e in pairs[_WARM:]])

    def _timed_flush(self) -> float:
        self.flush(0.0)
        start, end = self.event(), self.event()
        start.record()
        self.flush(0.0)
        end.record()
        self.synchronise()
        return float(start.elapsed_time(end)) / 1e3
