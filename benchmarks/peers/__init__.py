"""The contestants of the benchmark, a file each; frameworks are imported here and nowhere else.

On a GPU the device imports PyTorch, whose clock and memory all contestants there share; and so does
`bench.convolution`, for what precedes the calls of all contestants.
"""

from __future__ import annotations

from benchmarks.model import FLOOR, OF_OURS, DeviceName

__all__ = ["CONTESTANTS", "peers"]

#: Every contestant of a device and where it is defined, in the order in which a report shows them.
CONTESTANTS: dict[DeviceName, dict[str, str]] = {
    "cpu": {
        "backnorm": "benchmarks.peers.ours:Backnorm",
        "backnorm-float32": "benchmarks.peers.ours:BacknormInFloat32",
        "floor": "benchmarks.peers.floor:Floor",
        "torch": "benchmarks.peers.pytorch:Torch",
        "tensorflow": "benchmarks.peers.tensorflow:TensorFlow",
        "jax": "benchmarks.peers.jax:Jax",
        "onednn": "benchmarks.peers.onednn:OneDnn",
        "numpy": "benchmarks.peers.textbook:Textbook",
    },
    "cuda": {
        "backnorm": "benchmarks.peers.cuda.ours:Backnorm",
        "floor": "benchmarks.peers.cuda.floor:Floor",
        "torch": "benchmarks.peers.cuda.native:Native",
        "cudnn": "benchmarks.peers.cuda.cudnn:CuDnn",
        "compile": "benchmarks.peers.cuda.compiled:Compiled",
        "jax": "benchmarks.peers.jax:JaxOnGpu",
    },
}


def peers(device: DeviceName) -> tuple[str, ...]:
    """Return those that ``--peers`` chooses from on a device."""
    return tuple(name for name in CONTESTANTS[device] if name not in (*OF_OURS, FLOOR))
