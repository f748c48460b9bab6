"""The NVIDIA GPU that PyTorch has chosen, and what its driver says of it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from typing import Any

from backnorm.errors import ArgumentValueError
from benchmarks.cuda.device import Event, TorchDevice
from benchmarks.model import GpuFacts

__all__ = ["Cuda"]

# What errors speak of.
_OPTION = "--device cuda"

_ACCEPTED = "cpu; or cuda where PyTorch is built with CUDA and sees an NVIDIA GPU"

# Seconds that the driver's program may take.
_PATIENCE = 20


class Cuda(TorchDevice):
    """PyTorch's current CUDA device (the first that ``CUDA_VISIBLE_DEVICES`` names)."""

    place = "cuda"

    def library(self) -> Any:
        """Import PyTorch, and make sure that it has a GPU and that our kernels have Triton."""
        if importlib.util.find_spec("torch") is None:
            raise _refusal("PyTorch is not installed", "no torch", "pip install torch")
        import torch

        reason = _without_cuda(torch)
        if reason:
            raise _refusal("no CUDA device", reason, None)
        if importlib.util.find_spec("triton") is None:
            raise _refusal(
                "Triton is not installed, and our kernels are written in it",
                "no triton",
                "pip install 'backnorm[cuda]'",
            )
        return torch

    def facts(self) -> GpuFacts:
        """Return what PyTorch and ``nvidia-smi`` know."""
        cuda = self.torch.cuda
        properties = cuda.get_device_properties(cuda.current_device())
        driver, clock, memory_clock = _asked(getattr(properties, "uuid", None))
        return GpuFacts(
            name=properties.name,
            capability=f"{properties.major}.{properties.minor}",
            multiprocessors=properties.multi_processor_count,
            memory=properties.total_memory,
            cache=properties.L2_cache_size,
            driver=driver,
            cuda=self.torch.version.cuda,
            clock=clock,
            memory_clock=memory_clock,
            bandwidth=0.0,
        )

    def event(self) -> Event:
        """Return a CUDA event that takes the time."""
        event: Event = self.torch.cuda.Event(enable_timing=True)
        return event

    def synchronise(self) -> None:
        """Wait for all streams."""
        self.torch.cuda.synchronize()

    def free_memory(self) -> float:
        """Return what the device has, and what PyTorch holds of it without using it."""
        free, _ = self.torch.cuda.mem_get_info()
        unused = self.torch.cuda.memory_reserved() - self.torch.cuda.memory_allocated()
        return float(free + unused)

    def release(self) -> None:
        """Empty PyTorch's cache of blocks."""
        self.torch.cuda.empty_cache()


def _without_cuda(torch: Any) -> str:
    """Return why PyTorch has no NVIDIA GPU, or ""."""
    version = f"PyTorch {torch.__version__}"
    if torch.version.cuda is None:
        built = "ROCm" if torch.version.hip else "the CPU alone"
        return f"{version}, which is built for {built}"
    if not torch.cuda.is_available():
        return f"{version} for CUDA {torch.version.cuda}, which sees no GPU or no driver"
    return ""


def _refusal(problem: str, came: str, hint: str | None) -> ArgumentValueError:
    return ArgumentValueError(_OPTION, problem, came=came, accepted=_ACCEPTED, hint=hint)


def _asked(uuid: object) -> tuple[str, int, int]:
    """Return driver version and highest clocks in MHz as ``nvidia-smi`` tells; ("", 0, 0) if not.

    Parameters
    ----------
    uuid : object
        The GPU's, as PyTorch gives it (without the "GPU-" before it); None if it does not.
    """
    program = shutil.which("nvidia-smi")
    if program is None or uuid is None:
        return "", 0, 0
    query = "--query-gpu=driver_version,clocks.max.sm,clocks.max.memory"
    try:
        done = subprocess.run(  # noqa: S603 (the driver's program; the argument is PyTorch's)
            [program, query, "--format=csv,noheader,nounits", f"--id=GPU-{uuid}"],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=True,
        )
        driver, clock, memory_clock = done.stdout.strip().split(", ")
    except (OSError, subprocess.SubprocessError, ValueError):
        return "", 0, 0
    return driver, _megahertz(clock), _megahertz(memory_clock)


def _megahertz(text: str) -> int:
    # "[N/A]" where a virtual machine hides them.
    return int(text) if text.isdigit() else 0
