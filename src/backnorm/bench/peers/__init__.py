"""The contestants of the benchmark, a file each; frameworks are imported here and nowhere else."""

from __future__ import annotations

__all__ = ["CONTESTANTS", "PEERS"]

#: Every contestant and where it is defined, in the order in which a report shows them.
CONTESTANTS = {
    "backnorm": "backnorm.bench.peers.ours:Backnorm",
    "floor": "backnorm.bench.peers.floor:Floor",
    "torch": "backnorm.bench.peers.pytorch:Torch",
    "tensorflow": "backnorm.bench.peers.tensorflow:TensorFlow",
    "jax": "backnorm.bench.peers.jax:Jax",
    "onednn": "backnorm.bench.peers.onednn:OneDnn",
    "numpy": "backnorm.bench.peers.textbook:Textbook",
}

#: Those that `--peers` chooses from.
PEERS = tuple(name for name in CONTESTANTS if name not in ("backnorm", "floor"))
