"""What it costs to normalise over several processes, and how exact it is.

``python -m benchmarks.synchronised``, by hand. Every process, of gloo on this machine, has a part
of 8 images of 160 x 160 of each of ResNet-50's layers. In turns: our layer of one process, ours
synchronised, the same with reproducible sums, and one of PyTorch's operators that does what
PyTorch's SyncBatchNorm does where that runs (not on the CPU). With ``--errors`` the gradients of
those, of parts of a batch of different sizes, beside the exact ones of the batch. With
``--messages`` the messages alone, of processes that do nothing else. Tables in Markdown go to
standard output.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

import backnorm.torch
from backnorm import reference
from backnorm.conformance.data import LayerData, realistic_data
from backnorm.dtypes import FLOAT32
from benchmarks.errors import RATIOS, TITLES, errors_of

__all__ = ["LAYERS", "main"]

#: Channels and side of the layers, and how many there are of a kind.
LAYERS = (
    (64, 80, 1), (64, 40, 6), (256, 40, 4), (128, 40, 1), (128, 20, 7), (512, 20, 5),
    (256, 20, 1), (256, 10, 11), (1024, 10, 7), (512, 10, 1), (512, 5, 5), (2048, 5, 4),
)  # fmt: skip
_SAMPLES = 8
_ROUNDS = 15

# Of messages alone.
_CHANNELS = (64, 2048)
_MESSAGES = 200


class _OfOperators(Function):
    """Forward and backward pass as of PyTorch's SyncBatchNorm, by operators that CPUs have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        axes = [0, 2, 3]
        variance, mean = torch.var_mean(x, axes, correction=0)
        count = mean.new_full((1,), x.numel() // x.shape[1])
        own = torch.cat((mean, variance, count))
        every = own.new_empty(dist.get_world_size() * own.shape[0])
        dist.all_gather_single(every, own)
        every = every.view(dist.get_world_size(), -1)
        channels, counts = x.shape[1], every[:, -1:]
        share = counts / counts.sum()
        means = every[:, :channels]
        mean = (share * means).sum(0)
        variance = (share * (every[:, channels:-1] + (means - mean) ** 2)).sum(0)
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse, counts.sum())
        scale = weight * inverse
        y: Tensor = x * scale.view(-1, 1, 1) + (bias - mean * scale).view(-1, 1, 1)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        centred = x - mean.view(-1, 1, 1)
        sum_dy, sum_dy_xmu = dy.sum([0, 2, 3]), (dy * centred).sum([0, 2, 3])
        total = torch.cat((sum_dy, sum_dy_xmu))
        dist.all_reduce(total)
        mean_dy, mean_dy_xmu = (total / count).view(2, -1, 1, 1)
        slope = (inverse * inverse).view(-1, 1, 1) * mean_dy_xmu
        dx = (dy - mean_dy - centred * slope) * (weight * inverse).view(-1, 1, 1)
        return dx, sum_dy_xmu * inverse, sum_dy, None


_Reproducible = functools.partial(backnorm.torch.SyncBatchNorm, reproducible=True)


class _ByHand(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = _OfOperators.apply(input, self.weight, self.bias, self.eps)
        return y


def _step(layer: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        x.grad = None
        layer(x).backward(dy)
        assert x.grad is not None
        return x.grad

    return step


def _worker(rank: int, size: int, store: str, threads: int, what: str) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group(
        "gloo", rank=rank, world_size=size, store=dist.FileStore(store, size),
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    {"times": _times, "errors": _errors, "messages": _messages}[what](rank, size)
    dist.barrier()
    dist.destroy_process_group()


def _times(rank: int, size: int) -> None:
    ours = backnorm.torch.SyncBatchNorm
    makes: tuple[Any, ...] = backnorm.torch.BatchNorm2d, ours, _Reproducible, _ByHand
    totals = [0.0] * len(makes)
    if rank == 0:
        print("| layer | of one process | synchronised | reproducible | by hand | bytes |")
        print("|---|---|---|---|---|---|")
    for channels, side, number in LAYERS:
        torch.manual_seed(rank)
        shape = _SAMPLES, channels, side, side
        x, dy = torch.randn(shape, requires_grad=True), torch.randn(shape)
        steps = [_step(make(channels), x, dy) for make in makes]
        alone, *every = (step() for step in steps)
        for each in every:
            torch.testing.assert_close(each, every[-1], rtol=1e-4, atol=1e-5)
            assert not torch.equal(alone, each)
        samples: list[list[float]] = [[] for _ in makes]
        for _ in range(_ROUNDS):
            for step, times in zip(steps, samples, strict=True):
                step()
                dist.barrier()
                begun = time.perf_counter()
                step()
                times.append(time.perf_counter() - begun)
        medians = [statistics.median(times) for times in samples]
        totals = [total + number * each for total, each in zip(totals, medians, strict=True)]
        if rank == 0:
            numbers = 8 * (2 * channels + 1) * (size - 1), 16 * channels * 2 * (size - 1) // size
            bins = 8 * (8 * channels + 1) * (size - 1)
            text = f"{numbers[0]}, {numbers[1]}; reproducible {bins} each"
            _print(f"{number} x {shape}", medians, text)
    if rank == 0:
        _print("all", totals, "")


def _errors(rank: int, size: int) -> None:
    """Print how far the gradients of a batch are from the exact ones, in float32."""
    shape = 16, 16, 28, 28
    # The first process has two thirds of the batch.
    first = shape[0] * 2 // 3
    parts = np.split(np.arange(shape[0]), [first + k for k in range(size - 1)])
    if rank == 0:
        print("| mean/deviation | layer | " + " | ".join(TITLES.values()) + " |")
        print("|" + "---|" * (2 + len(TITLES)))
    for ratio in RATIOS:
        data = realistic_data(shape, FLOAT32, rng=np.random.default_rng(int(ratio)), ratio=ratio)
        of_batch = reference.forward(data.x, data.gamma, data.beta, epsilon=data.epsilon)
        statistics = of_batch.mean.hi, of_batch.variance.hi
        exact = reference.backward(data.x, data.dy, *statistics, data.gamma, epsilon=data.epsilon)
        whole = np.arange(shape[0])
        contestants: tuple[tuple[str, Any, Any], ...] = (
            ("ours, one process", backnorm.torch.BatchNorm2d, whole),
            ("ours, synchronised", backnorm.torch.SyncBatchNorm, parts[rank]),
            ("ours, reproducible", _Reproducible, parts[rank]),
            ("PyTorch's, one process", nn.BatchNorm2d, whole),
            ("PyTorch's formula, by hand", _ByHand, parts[rank]),
        )
        for name, make, mine in contestants:
            own = _gradients(make(shape[1], eps=data.epsilon), data, mine)
            every: list[Any] = [None] * size
            dist.all_gather_object(every, own)
            every = every[:1] if mine is whole else every
            found = {
                "dx": np.concatenate([each[0] for each in every]),
                "dgamma": np.sum([each[1] for each in every], axis=0),
                "dbeta": np.sum([each[2] for each in every], axis=0),
            }
            if rank == 0:
                errors = errors_of(found, exact)
                pairs = [getattr(errors, title) for title in TITLES]
                texts = [f"{most:.3g}, {mean:.2g}" for most, mean in pairs]
                print(f"| {ratio:g} | {name} | " + " | ".join(texts) + " |", flush=True)


def _messages(rank: int, size: int) -> None:
    """Print how long a message of the forward pass and one of the backward pass take."""
    if rank == 0:
        print("| processes | channels | forward | backward | reproducible | PyTorch's forward |")
        print("|---|---|---|---|---|---|")
    for channels in _CHANNELS:
        moments = torch.ones(2 * channels + 1, dtype=torch.float64)
        bins = torch.ones(8 * channels + 1, dtype=torch.int64)
        narrow = moments.float()
        calls: tuple[Callable[[], Any], ...] = (
            functools.partial(dist.all_gather_single, moments.repeat(size), moments),
            functools.partial(dist.all_reduce, moments[:-1].clone()),
            functools.partial(dist.all_gather_single, bins.repeat(size), bins),
            functools.partial(dist.all_gather_single, narrow.repeat(size), narrow),
        )
        samples: list[list[float]] = [[] for _ in calls]
        for _ in range(_MESSAGES):
            for call, times in zip(calls, samples, strict=True):
                dist.barrier()
                begun = time.perf_counter()
                call()
                times.append(time.perf_counter() - begun)
        if rank == 0:
            _print(f"{size} | {channels}", [statistics.median(times) for times in samples])


def _gradients(layer: nn.Module, data: LayerData, part: np.ndarray) -> list[np.ndarray]:
    """Return dx, dgamma and dbeta of a part of a batch."""
    parameters = [layer.weight, layer.bias]
    with torch.no_grad():
        for parameter, values in zip(parameters, (data.gamma, data.beta), strict=True):
            parameter.copy_(torch.from_numpy(values))
    x = torch.from_numpy(data.x[part]).requires_grad_()
    layer(x).backward(torch.from_numpy(data.dy[part]))
    return [each.grad.numpy() for each in (x, *parameters)]


def _print(name: str, seconds: list[float], *rest: str) -> None:
    times = [f"{1e6 * each:.0f} µs" for each in seconds]
    print("| " + " | ".join([name, *times, *rest]) + " |", flush=True)


def main() -> None:
    """Start the processes, the first of which prints the table."""
    parser = argparse.ArgumentParser(description="What it costs to normalise in several processes.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--errors", action="store_true", help="how exact it is, and not how fast")
    what.add_argument("--messages", action="store_true", help="the messages alone")
    given = parser.parse_args()
    table = "errors" if given.errors else "messages" if given.messages else "times"
    with tempfile.TemporaryDirectory() as folder:
        arguments = given.processes, str(Path(folder) / "store"), given.threads, table
        torch.multiprocessing.spawn(_worker, arguments, nprocs=given.processes)


if __name__ == "__main__":
    main()
