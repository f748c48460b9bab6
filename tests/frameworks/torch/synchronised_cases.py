"""One of several processes that normalise a batch together.

``python synchronised_cases.py NAME RANK SIZE STORE OUT`` runs the cases called NAME in this one of
SIZE processes; what comes of them goes to the file OUT. `test_synchronised` starts all of them,
and computes on one process what should have come.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import backnorm.torch
from backnorm.activations import RELU
from backnorm.torch import SynchronisationError, exchange

CHANNELS = 5
# Seconds after which a group is given up where a process does not come.
ENDED = 3


class Case(NamedTuple):
    """A batch that lies in parts: how many samples each process has."""

    parts: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    arithmetic: str | None = "float64"
    channels_last: bool = False
    relu: bool = False
    affine: bool = True
    offset: float = 0.5
    gathered: bool = True
    space: tuple[int, ...] = (7, 6)
    reproducible: bool = False
    # What a mask counts: "boolean" or "weights"; in all of the samples with these numbers, nothing.
    mask: str | None = None
    uncounted: tuple[int, ...] = ()

    def data(self):
        """Return x and dy of the whole batch."""
        rng = np.random.default_rng(sum(self.parts) + len(self.parts))
        shape = sum(self.parts), CHANNELS, *self.space
        scale = np.linspace(0.5, 3, CHANNELS).reshape(CHANNELS, *[1] * len(self.space))
        x = rng.normal(size=shape) * scale + self.offset
        # Parts of different means.
        x += np.linspace(-2, 2, shape[0]).reshape(-1, *[1] * (x.ndim - 1))
        arrays = x, rng.normal(size=shape)
        found = [torch.from_numpy(each).to(self.dtype) for each in arrays]
        if self.channels_last:
            found = [each.contiguous(memory_format=torch.channels_last) for each in found]
        if self.mask is None:
            return [*found, None]
        counts = rng.random((shape[0], *self.space)) < 0.6
        counts[list(self.uncounted)] = False
        weights = counts * rng.random(counts.shape) * 3
        return [*found, torch.from_numpy(counts if self.mask == "boolean" else weights)]

    def layer(self, make):
        wide = torch.float32 if self.dtype.itemsize == 2 else self.dtype
        options = {"affine": self.affine, "arithmetic": self.arithmetic, "dtype": wide}
        layer = make(CHANNELS, **options, reproducible=self.reproducible)
        if self.relu:
            layer.activation = RELU
        if self.affine:
            with torch.no_grad():
                layer.weight.copy_(torch.linspace(-1.5, 2, CHANNELS))
                layer.bias.copy_(torch.linspace(1, -1, CHANNELS))
        return layer

    def run(self, layer, x, dy, mask):
        """Return everything that comes of a step."""
        x = x.requires_grad_()
        y = layer(x) if mask is None else layer(x, mask=mask)
        y.backward(dy)
        found = {"y": y.detach(), "dx": x.grad}
        if self.affine:
            found |= {"dweight": layer.weight.grad, "dbias": layer.bias.grad}
        return found | {"mean": layer.running_mean, "variance": layer.running_var}


CASES = {
    "two": Case((8, 8)),
    "uneven": Case((1, 11)),
    "empty first": Case((0, 9)),
    "empty last": Case((9, 0)),
    "four": Case((4, 1, 0, 7)),
    "all but one empty": Case((0, 0, 3, 0)),
    "three": Case((2, 3, 4)),
    "relu": Case((5, 3), relu=True),
    "relu, channels last": Case((5, 3, 0, 2), relu=True, channels_last=True),
    "channels last": Case((5, 3), channels_last=True),
    "far from zero": Case((6, 5, 4, 3), offset=1e4),
    "far from zero, reduced": Case((6, 5, 4, 3), offset=1e4, gathered=False),
    "reduced": Case((6, 0, 4, 3), gathered=False),
    "no weight": Case((4, 3), affine=False),
    "float64": Case((4, 3), torch.float64),
    "bfloat16": Case((4, 3), torch.bfloat16),
    "float16, its own arithmetic": Case((4, 3), torch.float16, None, relu=True),
    "float32 arithmetic": Case((4, 3), arithmetic="float32", relu=True),
    "one element of a channel each": Case((1, 1), space=(1, 1)),
    "rank 2": Case((7, 4), space=()),
    "nothing anywhere": Case((0, 0)),
    "mask": Case((3, 5), mask="boolean", relu=True),
    "mask, reduced": Case((4, 0, 3), mask="boolean", gathered=False, channels_last=True),
    "mask, nothing counted in one part": Case((2, 2, 5), mask="boolean", uncounted=(2, 3)),
}

# Of the same bits as in one process.
CASES |= {
    f"reproducible, {name}": case._replace(reproducible=True) for name, case in CASES.items()
} | {
    "reproducible, far apart": Case((3, 4), offset=1e7, reproducible=True),
    "weights": Case((3, 5), torch.float64, mask="weights"),
    "weights, nothing counted in one part": Case((2, 2, 0, 3), mask="weights", uncounted=(0, 1)),
}

# Groups of eight.
EIGHT = {
    f"eight, {mask}": Case((3, 1, 0, 2, 5, 1, 1, 2), mask=mask, uncounted=(0, 1, 2))
    for mask in ("boolean", "weights")
}


def part_of(case, rank):
    first = sum(case.parts[:rank])
    return slice(first, first + case.parts[rank])


def alone(name):
    """Return what comes of a case in one process with our own layer of one process."""
    case = (CASES | EIGHT)[name]
    makes = {0: backnorm.torch.BatchNorm1d, 2: backnorm.torch.BatchNorm2d}
    return case.run(case.layer(makes[len(case.space)]), *case.data())


def parts(groups, cases=CASES):
    """Run all cases in groups of as many processes as they have parts."""
    for name, case in cases.items():
        size, rank = len(case.parts), dist.get_rank()
        if rank >= size:
            continue
        limit = exchange._GATHERED
        exchange._GATHERED = limit if case.gathered else 0
        layer = case.layer(backnorm.torch.SyncBatchNorm)
        layer.process_group = groups[size]
        mine = [None if each is None else each[part_of(case, rank)].clone() for each in case.data()]
        yield name, case.run(layer, *mine)
        exchange._GATHERED = limit
    if dist.get_rank() < 2 and cases is CASES:
        yield "batched", batched(groups[2])
        yield "no gradient", no_gradient(groups[2])
        yield "disagreements", dict(disagreements(groups[2]))


def compiled(groups):
    """Yield what processes say whose compiled layers are different ones."""
    yield "disagreements", dict(disagreements(groups[2], ["compiled"]))


def batched(group):
    """Return gradients of x, weight and bias of three dy at once, and one by one."""
    found = []
    for options in ({}, {"reproducible": True}):
        layer = backnorm.torch.SyncBatchNorm(CHANNELS, process_group=group, **options)
        x = torch.randn(3, CHANNELS, 4, requires_grad=True)
        every = torch.randn(3, *x.shape)
        layer.activation = RELU
        inputs, y = (x, layer.weight, layer.bias), layer(x)
        at_once = torch.autograd.grad(y, inputs, every, retain_graph=True, is_grads_batched=True)
        each = [torch.autograd.grad(y, inputs, dy, retain_graph=True) for dy in every]
        found.append((at_once, [torch.stack(column) for column in zip(*each, strict=True)]))
    return found


class Without(torch.autograd.Function):
    """The identity, of which process 0 has no gradient."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy if dist.get_rank() else None


def no_gradient(group):
    """Return x's gradients where process 0 has none of y, by PyTorch's operators and by ours."""
    whole = torch.randn(6, CHANNELS, generator=torch.Generator().manual_seed(2)).requires_grad_()
    counts = torch.arange(6) > 2
    y = nn.functional.batch_norm(whole, None, None, training=True)
    (y.sin() * counts[:, None]).sum().backward()
    x = whole.detach()[3 * dist.get_rank() :][:3].requires_grad_()
    layer = backnorm.torch.SyncBatchNorm(CHANNELS, process_group=group)
    Without.apply(layer(x)).sin().sum().backward()
    return whole.grad[3 * dist.get_rank() :][:3], x.grad


def disagreements(group, names=None):
    """Yield what processes say that call different layers, or with different settings."""
    first = dist.get_rank() == 0

    def layers(count, channels=4, **options):
        model = nn.ModuleList(nn.BatchNorm1d(channels) for _ in range(count))
        return backnorm.torch.convert(model, sync=True, process_group=group, **options)

    def forward(*layers):
        for layer in layers:
            layer(torch.ones(2, layer.num_features))

    def in_order():
        forward(*layers(2)[:: 1 if first else -1])

    def settings(**options):
        return lambda: forward(*layers(1, **({} if first else options)))

    def activation():
        (layer,) = layers(1)
        layer.activation = RELU if first else None
        layer(torch.ones(2, 4))

    def passes():
        a, b = layers(2)
        y = a(torch.ones(2, 4, requires_grad=True))
        y.sum().backward() if first else b(y)

    def unnamed():
        a, b = (backnorm.torch.SyncBatchNorm(4, process_group=group) for _ in range(2))
        forward(a, b, *((a, b) if first else (b, a)))

    def compiled():
        a, b = layers(2)
        torch.compile(a if first else b, backend="aot_eager")(torch.ones(2, 4))

    runs = {
        "in another order": in_order,
        "reproducible": settings(reproducible=True),
        "channels": settings(channels=5),
        "activation": activation,
        "forward and backward": passes,
        "without names": unnamed,
    }
    for name in names or runs:
        run = compiled if name == "compiled" else runs[name]
        for gathered in (exchange._GATHERED, 0):
            limit, exchange._GATHERED = exchange._GATHERED, gathered
            try:
                run()
                said = ""
            except SynchronisationError as error:
                said = str(error)
            exchange._GATHERED = limit
            yield (name, bool(gathered)), said


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 16, 3),
    )


def images(size=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 3, 8, 8, generator=generator)
    return x, torch.randn(size, 3, generator=generator)


def steps(model, batches, count=3, context=None, no_sync=None):
    """Train some steps, each on the mean over batches of equal size."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        for k, (x, target) in enumerate(batches):
            with context() if context else contextlib.nullcontext():
                loss = ((model(x) - target) ** 2).mean() / len(batches)
            last = no_sync is None or k + 1 == len(batches)
            with contextlib.nullcontext() if last else no_sync():
                loss.backward()
        optimizer.step()


def parameters(model):
    with torch.no_grad():
        state = model.state_dict()
        return {
            name.replace("module.", "").replace("_orig_mod.", ""): (
                each.full_tensor() if hasattr(each, "full_tensor") else each.clone()
            )
            for name, each in state.items()
        }


def batches_of(kind, rank, size):
    """Return the parts of the batches that a process has; of size 1 the whole ones."""
    x, target = images()
    share = len(x) // size
    mine = [each[rank * share :][:share] for each in (x, target)]
    if "halves" not in kind:
        return [mine]
    return [[each[first::2] for each in mine] for first in (0, 1)]


def context_of(kind):
    return (lambda: torch.autocast("cpu", torch.bfloat16)) if "bfloat16" in kind else None


def trained(kind):
    """Train a network in this process's part of a batch; return what its parameters become."""
    torch._dynamo.reset()
    batches = batches_of(kind, dist.get_rank(), dist.get_world_size())
    options = {"fuse": "fused" in kind, "reproducible": "reproducible" in kind}
    model = backnorm.torch.convert(network(), sync=True, **options)
    if kind.startswith("one graph"):
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    no_sync = None
    if "FSDP2" in kind:
        for layer in model:
            if isinstance(layer, nn.Conv2d | nn.modules.batchnorm._BatchNorm):
                fully_shard(layer)
        wrapped = fully_shard(model)
    else:
        wrapped = DistributedDataParallel(_Recomputed(model) if "recomputed" in kind else model)
        no_sync = wrapped.no_sync if "halves" in kind else None
    if "compiled" in kind:
        wrapped = torch.compile(wrapped, backend="inductor" if "inductor" in kind else "aot_eager")
    steps(wrapped, batches, context=context_of(kind), no_sync=no_sync)
    return {name.replace("model.", ""): each for name, each in parameters(wrapped).items()}


def trained_alone(kind, size):
    """Return what the parameters become in one process, with layers of one process."""
    every = zip(*(batches_of(kind, rank, size) for rank in range(size)), strict=True)
    batches = [[torch.cat(each) for each in zip(*parts, strict=True)] for parts in every]
    model = backnorm.torch.convert(network())
    steps(model, batches, context=context_of(kind))
    return parameters(model)


class _Recomputed(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=False)


KINDS = (
    "DDP", "DDP, fused", "DDP, recomputed", "one graph", "one graph, fused",
    "DDP, compiled", "DDP, compiled by inductor",
    "DDP, bfloat16", "DDP, in halves", "FSDP2", "FSDP2, fused",
    "DDP, reproducible", "DDP, reproducible, fused, compiled by inductor",
    "one graph, reproducible",
)  # fmt: skip


def models(_groups):
    for kind in KINDS:
        yield kind, trained(kind)


def ends(when):
    """End, raise or leave out a layer in process 1; return what the others raise, and how soon."""
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    layers.append(nn.BatchNorm2d(4))
    model = backnorm.torch.convert(layers, sync=True)
    x = torch.randn(2, 3, 8, 8)
    model(x).square().mean().backward()
    dist.barrier()
    begun, last = time.monotonic(), dist.get_rank() == 1
    try:
        if last and when == "before":
            os._exit(0)
        y = model[:2](x)
        if last and when == "between":
            os._exit(0)
        y = model[2:](y)
        if last and when == "backward":
            os._exit(0)
        if last and when == "left out":
            # Alive, and elsewhere.
            time.sleep(2 * ENDED)
            os._exit(0)
        y.square().mean().backward()
    except SynchronisationError as error:
        return {"said": str(error), "seconds": time.monotonic() - begun}
    return {"said": "nothing", "seconds": time.monotonic() - begun}


RUNS = {
    "parts": parts, "eight": functools.partial(parts, cases=EIGHT), "compiled": compiled,
    "models": models,
}  # fmt: skip


def main(name, rank, size, store, out):
    torch.set_num_threads(1)
    seconds = ENDED if name.startswith("ends") else 120
    dist.init_process_group(
        "gloo", rank=int(rank), world_size=int(size),
        store=dist.FileStore(store, int(size)), timeout=datetime.timedelta(seconds=seconds),
    )  # fmt: skip
    if name.startswith("ends"):
        torch.save(ends(name.partition(" ")[2]), out)
        # The others are gone.
        os._exit(0)
    groups = {n: dist.new_group(range(n)) for n in range(2, int(size) + 1)}
    torch.save(dict(RUNS[name](groups)), out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
