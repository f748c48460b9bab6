"""Gradients of `DistributedDataParallel` with the same bits on any number of processes.

The package is not part of batch normalisation. `backnorm.torch` exports its two names and imports
the package when one of them is first used; no other module of backnorm uses it.
"""

from backnorm.torch.reproducible.ddp_hook import reproducible_hook
from backnorm.torch.reproducible.micro_batches import ReproducibleGradients

__all__ = ["ReproducibleGradients", "reproducible_hook"]
