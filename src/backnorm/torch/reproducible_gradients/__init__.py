"""Gradients of `DistributedDataParallel` with the same bits on any number of processes.

`backnorm.torch` exports the two names in `__all__`, and imports this package when one of them is
first used. No other module of backnorm uses the package.
"""

from backnorm.torch.reproducible_gradients.ddp_hook import reproducible_hook
from backnorm.torch.reproducible_gradients.micro_batches import ReproducibleGradients

__all__ = ["ReproducibleGradients", "reproducible_hook"]
