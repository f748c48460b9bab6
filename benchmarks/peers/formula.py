"""What each operation takes and gives, by our names, in the order of whoever writes the formula."""

from __future__ import annotations

from benchmarks.model import Operation

__all__ = ["INPUTS", "OUTPUTS"]

INPUTS: dict[Operation, tuple[str, ...]] = {
    "backward": ("x", "dy", "mean", "variance", "gamma"),
    "forward": ("x", "gamma", "beta"),
    "inference": ("x", "mean", "variance", "gamma", "beta"),
}

OUTPUTS: dict[Operation, tuple[str, ...]] = {
    "backward": ("dx", "dgamma", "dbeta"),
    "forward": ("y", "mean", "variance"),
    "inference": ("y",),
}
