"""Running statistics recomputed by one, two, three and eight processes, each with some batches.

``python recomputation_cases.py RANK 1 STORE OUT`` forks eight processes, which is quicker than
starting them: they share what the first has imported. The state_dicts of the model go to OUT; the
first is of one process.
"""

from __future__ import annotations

import datetime
import multiprocessing
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import backnorm.torch
from backnorm.torch import recompute_statistics

SIZES = 1, 2, 3, 8


def model():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv1d(3, 4, 3),
        nn.BatchNorm1d(4),
        nn.Dropout(0.5),
        nn.Conv1d(4, 2, 1),
        backnorm.torch.BatchNorm1d(2, dtype=torch.float64),
    )
    return layers.insert(4, _Double())


class _Double(nn.Module):
    def forward(self, x):
        return x.double()


def batches():
    """Return batches of many sizes; the last two of eight processes get none."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, 9, generator=generator) * n + n for n in (5, 2, 1, 7, 3, 4)]


def _process(rank, store, out):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=max(SIZES),
        store=dist.FileStore(store, max(SIZES)), timeout=datetime.timedelta(seconds=100),
    )  # fmt: skip
    # All processes must make all groups.
    groups = {size: dist.new_group(range(size)) for size in SIZES}
    found = []
    for size, group in groups.items():
        if rank < size:
            layers = model()
            # Of eight processes, two have no batch: the wrapper must not exchange buffers.
            wrapped = DistributedDataParallel(layers) if size == max(SIZES) else layers
            recompute_statistics(wrapped, batches()[rank::size], process_group=group)
            # Here each batch is split, so some parts of a batch are empty.
            split = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3))
            backnorm.torch.convert(split, sync=True, process_group=group, reproducible=True)
            parts = [batch.tensor_split(size)[rank] for batch in batches()]
            recompute_statistics(split, parts, process_group=group)
            found.append(nn.ModuleList([layers, split]).state_dict())
    torch.save(found, out)
    dist.destroy_process_group()


def main(_rank, _size, store, out):
    # Import PyTorch's compiler once.
    torch.compiler.set_stance("default")
    context = multiprocessing.get_context("fork")
    files = [f"{out}.{rank}" for rank in range(max(SIZES))]
    forked = [
        context.Process(target=_process, args=(k, store, file)) for k, file in enumerate(files)
    ]
    for process in forked:
        process.start()
    for process in forked:
        process.join()
    torch.save([each for file in files for each in torch.load(file)], out)


if __name__ == "__main__":
    main(*sys.argv[1:])
