"""Gradients of `DistributedDataParallel` with the same bits on any number of processes.

`backnorm.torch` exports both names, and imports this package when one of them is first used; no
other module of backnorm uses it.
"""

from backnorm.torch.reproducible.ddp_hook import reproducible_hook
from backnorm.torch.reproducible.micro_batches import ReproducibleGradients

__all__ = ["ReproducibleGradients", "reproducible_hook"]
