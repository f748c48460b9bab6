"""The contestants of the benchmark, a file each; frameworks are imported here and nowhere else.

On a GPU the device imports PyTorch, whose clock and memory all contestants there share; and so does
`bench.convolution`, for what precedes the calls of all contestants.
"""

from __future__ import annotations

from backnorm.bench.model import FLOOR, OURS, DeviceName

__all__ = ["CONTESTANTS", "peers"]

#: Every contestant of a device and where it is defined, in the order in which a report shows them.
CONTESTANTS: dict[DeviceName, dict[str, str]] = {
    "cpu": {
        "backnorm": "backnorm.bench.peers.ours:Backnorm",
        "floor": "backnorm.bench.peers.floor:Floor",
        "torch": "backnorm.bench.peers.pytorch:Torch",
        "tensorflow": "backnorm.bench.peers.tensorflow:TensorFlow",
        "jax": "backnorm.bench.peers.jax:Jax",
        "onednn": "backnorm.bench.peers.onednn:OneDnn",
        "numpy": "backnorm.bench.peers.textbook:Textbook",
    },
    "cuda": {
        "backnorm": "backnorm.bench.peers.cuda.ours:Backnorm",
        "floor": "backnorm.bench.peers.cuda.floor:Floor",
        "torch": "backnorm.bench.peers.cuda.native:Native",
        "cudnn": "backnorm.bench.peers.cuda.cudnn:CuDnn",
        "compile": "backnorm.bench.peers.cuda.compiled:Compiled",
        "jax": "backnorm.bench.peers.jax:JaxOnGpu",
    },
}


def peers(device: DeviceName) -> tuple[str, ...]:
    """Return those that ``--peers`` chooses from on a device."""
    return tuple(name for name in CONTESTANTS[device] if name not in (OURS, FLOOR))
