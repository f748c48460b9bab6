"""Gradients of `DistributedDataParallel` with the same bits on any number of processes.

Not part of batch normalisation, and imported by nothing else in backnorm: `backnorm.torch` only
offers its two names, and imports it when one of them is used.
"""

from backnorm.torch.reproducible.ddp_hook import reproducible_hook
from backnorm.torch.reproducible.micro_batches import ReproducibleGradients

__all__ = ["ReproducibleGradients", "reproducible_hook"]
