"""In PyTorch's team: ``team.py FIRST``, what is imported first; prints who serves."""

import importlib
import sys

# Of scikit-learn, what brings a libgomp of its own.
importlib.import_module({"sklearn": "sklearn.cluster"}.get(sys.argv[1], sys.argv[1]))
import torch
from layer import Layer, statuses, thread_ids, verdict

from backnorm_kernels.threads import service

image, weight = torch.randn(4, 16, 28, 28), torch.randn(16, 16, 3, 3)


def convolve() -> None:
    torch.nn.functional.conv2d(image, weight, padding=1)


layer = Layer()
convolve()
layer()
before = thread_ids()
wrong = 0
for k in range(1000):
    if k % 3:
        convolve()
    wrong += not layer.is_right()
found = service()
print(found.reason)
verdict(
    team=found.name == "team",
    wrong=wrong,
    # Neither does anybody start a thread, nor end one.
    changed=len(before ^ thread_ids()),
    ours=len(statuses()),
)
