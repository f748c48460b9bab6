"""The properties of a GPU, read from the device or set by a test."""

from __future__ import annotations

from dataclasses import dataclass

#: Compute capabilities of devices that compute float64 at half the rate of float32 (CUDA C++
#: Programming Guide, "Throughput of Native Arithmetic Instructions"): P100, V100, A100, H100 and
#: H200, B200. On other devices, float64 runs at a 32nd of the rate of float32, or more slowly.
_FAST_FLOAT64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})


@dataclass(frozen=True, slots=True)
class Gpu:
    """Facts of a device. Plans depend only on `capability`.

    Attributes
    ----------
    name : str
        The name of the device, for messages.
    capability : (int, int)
        CUDA compute capability.
    """

    name: str
    capability: tuple[int, int]

    @property
    def fast_float64(self) -> bool:
        """Whether the float64 arithmetic of a kernel takes no longer than its memory traffic."""
        return self.capability in _FAST_FLOAT64


#: GPUs by name. Plans can be made for them on machines that do not have the GPU.
KNOWN = {
    "h200": Gpu("NVIDIA H200", (9, 0)),
    "a100": Gpu("NVIDIA A100", (8, 0)),
    "l40s": Gpu("NVIDIA L40S", (8, 9)),
    "t4": Gpu("NVIDIA T4", (7, 5)),
}
