"""One of several processes that train, one after the other in groups of different sizes.

``python hook_cases.py NAME RANK SIZE STORE OUT`` runs the cases called NAME in this one of
SIZE processes; what comes of them goes to the file OUT. `test_hooks` starts all of them, and
compares the bits.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import backnorm
import backnorm.torch
from backnorm.torch import ReproducibleGradients, exact_sums, reproducible_hook

# Twelve pieces, for groups of one to four.
BATCH, PIECE = 48, 4


class Block(nn.Module):
    """Uses a parameter twice, one of its own beside its children's, and arguments by name."""

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

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 5, 3, padding=1), nn.GELU(), nn.Conv2d(5, 6, 3), nn.ReLU()
        )
        self.block = Block()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        y = self.conv(x).mean((2, 3))
        for _ in range(2):
            y = self.block(y, residual=y)
        return self.head(y)


class Apart(Network):
    """The same beside something that has the whole batch: each module comes in pieces by itself."""

    def __init__(self):
        super().__init__()
        self.whole = nn.Identity()

    def forward(self, x):
        return super().forward(self.whole(x))


class Normalised(nn.Sequential):
    """Has batch normalisation over all processes, reproducibly or not."""

    def __init__(self, group, **how):
        def layer():
            return backnorm.torch.SyncBatchNorm(8, process_group=group, **how)

        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), layer(), nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), layer(), nn.SiLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
        )  # fmt: skip


def data(batch, seed=0):
    """Return images of 8 x 8 with a bright corner, and which corner it is."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (batch,), generator=generator)
    images = torch.randn(batch, 1, 8, 8, generator=generator)
    for k, label in enumerate(labels):
        images[k, 0, 4 * (label % 2) :, 4 * (label // 2) :][:4, :4] += 1
    return images, labels


class Case(NamedTuple):
    """How a network is trained: the pieces of each process in groups of one, two, ... processes."""

    parts: tuple[tuple[int, ...], ...] = ((12,), (6, 6), (4, 4, 4), (3, 3, 3, 3))
    make: type[nn.Module] = Network
    hook: str = "pieces"
    dtype: torch.dtype = torch.float32
    # Backward passes in a step; gradients of all but the last are not exchanged.
    passes: int = 1
    average: bool = False
    channels_last: bool = False
    autocast: bool = False
    views: bool = False


CASES = {
    "equal parts": Case(),
    "uneven parts": Case(parts=((12,), (5, 7), (1, 10, 1), (2, 1, 0, 9))),
    "around what has the whole batch": Case(make=Apart),
    "averaged": Case(parts=((12,), (6, 6), (), (3, 3, 3, 3)), average=True),
    "accumulated": Case(parts=((12,), (6, 6), (4, 4, 4)), passes=2),
    "channels last": Case(parts=((12,), (5, 7)), channels_last=True),
    "gradients in buckets": Case(parts=((12,), (5, 7)), views=True, passes=2),
    "float64": Case(parts=((12,), (), (5, 4, 3)), dtype=torch.float64),
    "autocast": Case(parts=((12,), (5, 7)), autocast=True),
    "bfloat16": Case(parts=((12,), (), (5, 4, 3)), dtype=torch.bfloat16),
    # What the others would be without one of both: their bits must differ.
    "no pieces": Case(hook="sums"),
    "no hook": Case(hook="none"),
}


def steps(wrapped, mine, scale, count, passes=1, autocast=False):
    """Train some steps on a part of each batch; return parameters and momenta."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    kind = next(wrapped.parameters()).dtype
    for step in range(count):
        optimizer.zero_grad()
        for k in range(passes):
            x, labels = data(mine.batch, seed=step * passes + k)
            last = k + 1 == passes
            with contextlib.nullcontext() if last else wrapped.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    y = wrapped(x[mine.part].to(kind))
                loss = functional.cross_entropy(y, labels[mine.part], reduction="sum")
                (loss / scale).backward()
        optimizer.step()
    found = {}
    for name, p in wrapped.module.named_parameters():
        found[name] = p.detach().clone()
        found[f"momentum of {name}"] = optimizer.state[p]["momentum_buffer"].clone()
    return found


class Mine(NamedTuple):
    """Which samples of a batch are this process's."""

    batch: int
    part: slice


def trained(case, pieces, group):
    """Return what becomes of a case's network in a group of as many processes as have pieces."""
    torch.manual_seed(1)
    model = case.make().to(case.dtype)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
    state = group
    if case.hook == "pieces":
        state = ReproducibleGradients(
            model, PIECE, process_group=group, average=case.average,
            exclude=[model.whole] if case.make is Apart else [],
        )  # fmt: skip
    wrapped = DistributedDataParallel(
        model, process_group=group, gradient_as_bucket_view=case.views, bucket_cap_mb=0.0005
    )
    if case.hook != "none":
        wrapped.register_comm_hook(state, reproducible_hook)
    rank = dist.get_rank(group)
    first = PIECE * sum(pieces[:rank])
    mine = Mine(BATCH, slice(first, first + PIECE * pieces[rank]))
    # What averages divides by the number of processes.
    averaged = case.average or case.hook != "pieces"
    scale = BATCH * case.passes / (len(pieces) if averaged else 1)
    return steps(wrapped, mine, scale, 4, case.passes, case.autocast)


def networks(groups):
    """Yield every case, and what becomes of it in groups of each size this process is in."""
    for name, case in CASES.items():
        yield (
            name,
            {
                len(pieces): trained(case, pieces, groups[len(pieces)])
                for pieces in case.parts
                if len(pieces) > dist.get_rank()
            },
        )


def gradients(size=2000):
    """Return the gradients of four processes: of all magnitudes, cancelling, and not finite."""
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


ORDERS = ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0))


class Given(nn.Module):
    """Has the gradients that it is called with."""

    def __init__(self, size):
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(size))

    def forward(self, gradient):
        return (self.parameter * gradient).sum()


def orders(_groups):
    """Yield the averages of gradients that are given to processes in some orders."""
    every = gradients()
    for hook in ("ours", "none"):
        found = []
        for order in ORDERS:
            wrapped = DistributedDataParallel(Given(every.shape[1]))
            if hook == "ours":
                wrapped.register_comm_hook(None, reproducible_hook)
            wrapped(every[order[dist.get_rank()]]).backward()
            found.append(wrapped.module.parameter.grad)
        yield hook, torch.stack(found)


class Elsewhere(nn.Module):
    """Uses a parameter of a module that it does not call, beside batch normalisation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(functional.linear(x, self.linear.weight)) + self.linear.bias


def refused(_groups):
    """Yield what is said of what cannot be added up: in all processes, as no other one waits."""
    kinds = {
        "elsewhere": (Elsewhere(), None, 4, 8192),
        "too many": (nn.Linear(2, 2), None, 1, 16),
        "a state": (nn.Linear(2, 2), "a state", 1, 8192),
    }
    for name, (model, state, size, most) in kinds.items():
        exact_sums.MOST = most
        state = state or ReproducibleGradients(model, size)
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(state, reproducible_hook)
        try:
            wrapped(torch.randn(4, 2)).square().sum().backward()
            yield name, ""
        except (ValueError, TypeError) as error:
            yield name, str(error)
        exact_sums.MOST = 8192


class Sparse(nn.Module):
    """Has a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")

    def forward(self, index):
        return self.table(index)


def counts(_groups):
    """Yield what is said of sparse gradients, and sums of as many gradients as are allowed."""
    wrapped = DistributedDataParallel(Sparse())
    wrapped.register_comm_hook(None, reproducible_hook)
    try:
        wrapped(torch.arange(4).view(2, 2)).sum().backward()
        yield "sparse", ""
    except backnorm.ArgumentError as error:
        yield "sparse", str(error)
    most, size = exact_sums.MOST // dist.get_world_size(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64):
        for own in (most, most - 1, 1, most + 1):
            # One process has so many, the others have less.
            count = own if dist.get_rank() == 1 else max(own - 255, 1)
            parts = [exact_sums.Part(0, torch.ones(1, dtype=dtype)) for _ in range(count - 1)]
            try:
                future = exact_sums.sum_of_all(torch.ones(1, dtype=dtype), parts, None)
                found = int(future.wait())
            except backnorm.ArgumentValueError as error:
                found = str(error)
            yield (dtype, own), (found, own + (size - 1) * max(own - 255, 1))


# Samples of each process in a group of one, two, three and four.
PARTS = ((32,), (16, 16), (8, 16, 8), (8, 8, 8, 8))


def normalised(groups, count=200):
    """Yield what becomes of a network with batch normalisation in groups of all sizes."""
    for size in range(1, 5):
        if dist.get_rank() < size:
            yield size, with_statistics(groups[size], count, reproducible=True)


def not_reproducible(groups):
    """Yield the same with layers that are not reproducible."""
    for size in range(1, 5):
        if dist.get_rank() < size:
            yield size, with_statistics(groups[size], 10)


def with_statistics(group, count, **how):
    torch.manual_seed(2)
    parts, rank = PARTS[dist.get_world_size(group) - 1], dist.get_rank(group)
    model = Normalised(group, **how)
    state = ReproducibleGradients(model, 8, process_group=group, average=False)
    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(state, reproducible_hook)
    first = sum(parts[:rank])
    found = steps(wrapped, Mine(32, slice(first, first + parts[rank])), 32, count)
    return found | {name: each.clone() for name, each in model.named_buffers()}


RUNS = {
    "networks": networks,
    "orders": orders,
    "refused": refused,
    "counts": counts,
    "normalised": normalised,
    "not reproducible": not_reproducible,
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
