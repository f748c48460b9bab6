"""The contestants of `operator`, one per file."""

from __future__ import annotations

from benchmarks.cells import FLOOR, OURS, OURS_IN_FLOAT32

__all__ = ["CONTESTANTS", "PLACES", "peers"]

#: The class of each device, by device and condition.
PLACES = {
    ("cpu", "quiet"): "benchmarks.host:Host",
    ("cpu", "after-convolution"): "benchmarks.host:AfterConvolution",
    ("cuda", "quiet"): "benchmarks.cuda.device:Cuda",
}

#: The class of each contestant, by device and name, in the order of the tables.
CONTESTANTS = {
    "cpu": {
        "backnorm": "benchmarks.peers.ours:Backnorm",
        "backnorm-float32": "benchmarks.peers.ours:BacknormInFloat32",
        "backnorm-reproducible": "benchmarks.peers.ours:BacknormReproducible",
        "floor": "benchmarks.peers.floor:Floor",
        "torch": "benchmarks.peers.pytorch:Torch",
        "tensorflow": "benchmarks.peers.tensorflow:TensorFlow",
        "jax": "benchmarks.peers.jax:Jax",
        "onednn": "benchmarks.peers.onednn:OneDnn",
        "numpy": "benchmarks.peers.textbook:Textbook",
    },
    "cuda": {
        "backnorm": "benchmarks.peers.cuda:Backnorm",
        "floor": "benchmarks.peers.cuda:Floor",
        "torch": "benchmarks.peers.cuda:Native",
        "cudnn": "benchmarks.peers.cuda:CuDnn",
        "compile": "benchmarks.peers.cuda:Compiled",
        "jax": "benchmarks.peers.jax:JaxOnGpu",
    },
}

_ALWAYS = (OURS, OURS_IN_FLOAT32, FLOOR)


def peers(device: str) -> tuple[str, ...]:
    """Return the names that ``--peer`` accepts for a device; all others always run."""
    return tuple(name for name in CONTESTANTS[device] if name not in _ALWAYS)
