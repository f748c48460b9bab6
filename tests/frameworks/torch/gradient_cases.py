"""One of several processes that train, in groups of different sizes one after the other.

``python gradient_cases.py NAMES RANK SIZE STORE OUT`` runs the cases called NAMES in this one of
SIZE processes and saves the results to the file OUT. `test_reproducible_gradients` starts all
processes and compares the bits.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import backnorm
import backnorm.torch
from backnorm.torch import ReproducibleGradients, reproducible_hook
from backnorm.torch.reproducible_gradients import exact_sums

# Twelve micro-batches, for groups of one to four.
BATCH, MICRO_BATCH = 48, 4


class Block(nn.Module):
    """Uses a module twice, a parameter of its own, and an argument by name."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x, *, residual):
        y = functional.gelu(self.linear(self.linear(x)) * self.scale)
        return self.norm(y + residual)


class Network(nn.Module):
    """Calls a module twice in a step, and has no batch normalisation."""

    def __init__(self, group=None):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 5, 3, padding=1), nn.GELU(), nn.Conv2d(5, 6, 3), nn.ReLU()
        )
        self.block = Block()
        self.head = nn.Linear(6, 3)
        self.whole = nn.Identity()

    def forward(self, x):
        y = self.conv(self.whole(x)).mean((2, 3))
        for _ in range(2):
            y = self.block(y, residual=y)
        return self.head(y)


class Normalised(nn.Sequential):
    """Has batch normalisation over all processes."""

    def __init__(self, group, reproducible):
        def layer():
            return backnorm.torch.SyncBatchNorm(8, process_group=group, reproducible=reproducible)

        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), layer(), nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), layer(), nn.SiLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
        )  # fmt: skip


class Case(NamedTuple):
    """The training of a network, and the micro-batches of each process in groups of 1, 2, ..."""

    parts: tuple[tuple[int, ...], ...] = ((12,), (), (5, 4, 3))
    make: Callable[..., nn.Module] = Network
    hook: str = "micro-batches"
    steps: int = 4
    # Backward passes in a step. Only the last one exchanges gradients.
    passes: int = 1
    dtype: torch.dtype = torch.float32
    average: bool = False
    exclude: bool = False
    channels_last: bool = False
    autocast: bool = False
    bucket_views: bool = False


UNEVEN = ((12,), (6, 6), (1, 10, 1), (2, 1, 0, 9))
CASES = {
    "uneven parts": Case(UNEVEN),
    "averaged": Case(((12,), (6, 6), (), (3, 3, 3, 3)), average=True),
    "modules by themselves": Case(exclude=True),
    "accumulated": Case(passes=2),
    "channels last, gradients in buckets": Case(passes=2, channels_last=True, bucket_views=True),
    "float64": Case(dtype=torch.float64),
    "bfloat16": Case(dtype=torch.bfloat16),
    "autocast": Case(autocast=True),
    # Their bits must differ.
    "without micro-batches": Case(hook="sums"),
    "without hook": Case(hook="none"),
}
LONG = {
    "200 steps": Case(UNEVEN, functools.partial(Normalised, reproducible=True), steps=200),
    # Their bits must differ.
    "other layers": Case(UNEVEN, functools.partial(Normalised, reproducible=False), steps=10),
}


def data(seed):
    """Return images of 8 x 8 with a bright corner, and the corner's number."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (BATCH,), generator=generator)
    images = torch.randn(BATCH, 1, 8, 8, generator=generator)
    for image, label in zip(images, labels, strict=True):
        image[0, 4 * (label % 2) :, 4 * (label // 2) :][:4, :4] += 1
    return images, labels


def trained(case, parts, group):
    """Return the state of a network and its momenta after training in a group."""
    torch.manual_seed(1)
    model = case.make(group).to(case.dtype)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
    state = group
    if case.hook == "micro-batches":
        state = ReproducibleGradients(
            model, MICRO_BATCH, process_group=group, average=case.average,
            exclude=[model.whole] if case.exclude else [],
        )  # fmt: skip
    wrapped = DistributedDataParallel(
        model, process_group=group, gradient_as_bucket_view=case.bucket_views, bucket_cap_mb=0.0005
    )
    if case.hook != "none":
        wrapped.register_comm_hook(state, reproducible_hook)
    rank = dist.get_rank(group)
    first = MICRO_BATCH * sum(parts[:rank])
    mine = slice(first, first + MICRO_BATCH * parts[rank])
    is_average = case.average or case.hook != "micro-batches"
    scale = BATCH * case.passes / (len(parts) if is_average else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(case.steps):
        optimizer.zero_grad()
        for k in range(case.passes):
            x, labels = data(step * case.passes + k)
            is_last = k + 1 == case.passes
            with contextlib.nullcontext() if is_last else wrapped.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    y = wrapped(x[mine].to(case.dtype))
                loss = functional.cross_entropy(y, labels[mine], reduction="sum")
                (loss / scale).backward()
        optimizer.step()
    momenta = {k: each["momentum_buffer"] for k, each in optimizer.state_dict()["state"].items()}
    return {key: each.clone() for key, each in (model.state_dict() | momenta).items()}


def networks(groups, cases=CASES):
    """Yield every case, and its results in the groups of each size that this process is in."""
    for name, case in cases.items():
        yield (
            name,
            {
                len(parts): trained(case, parts, groups[len(parts)])
                for parts in case.parts
                if len(parts) > dist.get_rank()
            },
        )


def gradients(size=2000):
    """Return gradients of four processes: of all magnitudes, cancelling, and not finite."""
    generator = torch.Generator().manual_seed(3)
    found = torch.randn(4, size, generator=generator)
    found *= 2.0 ** torch.randint(-30, 30, found.shape, generator=generator)
    found[1, :500] = -found[0, :500]
    found[:, 500:600] *= 2.0**-130
    inf, nan = torch.inf, torch.nan
    found[:, 600:604] = torch.tensor(
        [[inf, 1, 1, 1], [inf, -inf, 1, 1], [inf, nan, 1, 1], [3e38, 3e38, 3e38, 3e38]]
    ).T
    return found


class Product(nn.Module):
    """Has its input as its gradient."""

    def __init__(self, size):
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return (self.parameter * x).sum()


def orders(_groups):
    """Yield averages of gradients that the processes have in several orders."""
    every = gradients()
    for hook in (reproducible_hook, None):
        averages = []
        for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)):
            wrapped = DistributedDataParallel(Product(every.shape[1]))
            if hook:
                wrapped.register_comm_hook(None, hook)
            wrapped(every[order[dist.get_rank()]]).backward()
            averages.append(wrapped.module.parameter.grad)
        yield "hook" if hook else "none", torch.stack(averages)


class Outside(nn.Module):
    """Uses parameters of a module that it does not call, around batch normalisation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(functional.linear(x, self.linear.weight)) + self.linear.bias


class Sparse(nn.Module):
    """Has a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")

    def forward(self, x):
        return self.table(x.long())


def errors(_groups):
    """Yield messages of errors: every process raises, so none waits for another one."""
    outside, linear = Outside(), nn.Linear(2, 2)
    cases = {
        "outside": (outside, ReproducibleGradients(outside, 4), torch.randn(4, 2)),
        "too many": (linear, ReproducibleGradients(linear, 1), torch.randn(2048, 2)),
        "state": (nn.Linear(2, 2), "a state", torch.randn(4, 2)),
        "sparse": (Sparse(), None, torch.ones(4, 2)),
    }
    for name, (model, state, x) in cases.items():
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(state, reproducible_hook)
        try:
            wrapped(x).square().sum().backward()
            yield name, ""
        except backnorm.ArgumentError as error:
            yield name, str(error)


def counts(_groups):
    """Yield sums of up to as many ones as are allowed, or errors, beside the exact sums."""
    size = dist.get_world_size()
    most = exact_sums.MAX_TERMS // size
    for dtype in (torch.float32, torch.float64):
        for largest in (1, most - 1, most, most + 1):
            # Only one process has so many.
            other = max(largest - 255, 1)
            count = largest if dist.get_rank() == 1 else other
            own, *others = torch.ones(count, 1, dtype=dtype)
            parts = [exact_sums.Part(0, each) for each in others]
            try:
                found = int(exact_sums.sum_of_all(own, parts, None).wait())
            except backnorm.ArgumentValueError as error:
                found = str(error)
            yield (dtype, largest * size), (found, largest + (size - 1) * other)


RUNS = {
    "networks": networks,
    "long": functools.partial(networks, cases=LONG),
    "orders": orders,
    "errors": errors,
    "counts": counts,
}


def main(names, rank, size, store, out):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=int(rank), world_size=int(size),
        store=dist.FileStore(store, int(size)), timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    groups = {n: dist.new_group(range(n)) for n in range(1, int(size) + 1)}
    torch.save({name: dict(RUNS[name](groups)) for name in names.split(", ")}, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
