"""OMP_NUM_THREADS and `torch.set_num_threads`: ``team_size.py COUNT``."""

import sys
import threading

import backnorm

count = int(sys.argv[1])
alone = backnorm.get_num_threads()
import torch
from layer import Layer, thread_ids, verdict

from backnorm import machine
from backnorm_kernels.threads import region

available = machine.processors()
layer = Layer()
as_many = backnorm.get_num_threads() == min(count, available)
layer()
torch.randn(64, 64, 64).mul_(2)
before = thread_ids()
for _ in range(100):
    layer()
    torch.randn(64, 64, 64).mul_(2)
changed = len(before ^ thread_ids())
torch.set_num_threads(1)
one = backnorm.get_num_threads()
right = layer.is_right()
torch.set_num_threads(available)
all_of_them = backnorm.get_num_threads()
right = right and layer.is_right()
backnorm.set_num_threads(1)
bound = backnorm.get_num_threads()
# Of the calling thread: a new one starts with what PyTorch was told.
torch.set_num_threads(1)
told = []
thread = threading.Thread(target=lambda: told.append((region(), layer.is_right())))
thread.start()
thread.join()
verdict(
    alone=alone - min(count, available),
    as_many=as_many,
    changed=changed,
    one=one - 1,
    right=right,
    all_of_them=all_of_them - available,
    bound=bound - 1,
    told=told == [(1, True)],
)
