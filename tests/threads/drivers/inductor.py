"""`torch.compile` makes code that is linked to an OpenMP runtime: ours is still PyTorch's."""

import torch
from layer import Layer, thread_ids, verdict

from backnorm_kernels.threads import service


@torch.compile
def compiled(x: torch.Tensor) -> torch.Tensor:
    return (x.exp() + x.sin()).cumsum(0)


layer = Layer()
operands = torch.randn(512, 512)
compiled(operands)
layer()
before = thread_ids()
wrong = 0
for _ in range(200):
    compiled(operands)
    wrong += not layer.is_right()
print(service().reason)
verdict(team=service().name == "team", wrong=wrong, changed=len(before ^ thread_ids()))
