"""A rank of ``torchrun``: each has as many threads as PyTorch gives it, and no more."""

import sys

import torch
from layer import Layer, at_rest, statuses, thread_ids, verdict

import backnorm

image, weight = torch.randn(4, 16, 28, 28), torch.randn(16, 16, 3, 3)
layer = Layer()
torch.nn.functional.conv2d(image, weight, padding=1)
before = thread_ids()
wrong = 0
for _ in range(200):
    torch.nn.functional.conv2d(image, weight, padding=1)
    wrong += not layer.is_right()
sys.stdout.flush()
verdict(
    threads=backnorm.get_num_threads() - torch.get_num_threads(),
    one=torch.get_num_threads() - 1,
    wrong=wrong,
    changed=len(before ^ thread_ids()),
    ours=len(statuses()),
    at_rest=at_rest(),
)
