"""Measure the time and the errors of normalising over several processes.

Each process (gloo, on this machine) has the inputs of ResNet-50's layers for 8 images of 160 x 160.
The layers timed in turns are ours of one process, ours synchronised, ours with reproducible sums,
and the formula of PyTorch's SyncBatchNorm in PyTorch's operators, because SyncBatchNorm does not
run on the CPU. ``--errors``: compare the layers' gradients, from parts of different sizes, with the
exact gradients of the batch. ``--messages``: time the messages alone, in processes that do nothing
else.
"""

from __future__ import annotations

import datetime
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
from backnorm.conformance.judge import GRADIENTS
from backnorm.dtypes import FLOAT32
from benchmarks.accuracy import truth_of
from benchmarks.studies import arguments, show
from benchmarks.studies.errors import RATIOS, errors_of

# Channels and side of each kind of layer, and the number of such layers.
_LAYERS = ((64, 80, 1), (64, 40, 6), (256, 40, 4), (128, 40, 1), (128, 20, 7), (512, 20, 5),
          (256, 20, 1), (256, 10, 11), (1024, 10, 7), (512, 10, 1), (512, 5, 5),
          (2048, 5, 4))  # fmt: skip
_SAMPLES = 8
_ROUNDS = 15

# Channels and repetitions of runs that only exchange messages.
_CHANNELS = (64, 2048)
_MESSAGES = 200


class _OfOperators(Function):
    """The passes of PyTorch's SyncBatchNorm, by operators that exist for CPUs."""

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


def _worker(rank: int, size: int, store: str, threads: int, table: str) -> None:
    torch.set_num_threads(threads)
    patience = datetime.timedelta(seconds=60)
    files = dist.FileStore(store, size)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=files, timeout=patience)
    rows = {"times": _times, "errors": _errors, "messages": _messages}[table](rank, size)
    if rank == 0:
        show(rows)
    else:
        list(rows)
    dist.barrier()
    dist.destroy_process_group()


def _medians(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median seconds of calls in turns, which all processes begin together."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, samples, strict=True):
            dist.barrier()
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
    return [statistics.median(times) for times in samples]


def _microseconds(seconds: Sequence[float]) -> list[str]:
    return [f"{1e6 * each:.0f} µs" for each in seconds]


def _times(rank: int, size: int) -> Iterator[Sequence[object]]:
    makes: list[Any] = [backnorm.torch.BatchNorm2d, backnorm.torch.SyncBatchNorm]
    makes += [_Reproducible, _ByHand]
    totals = np.zeros(len(makes))
    yield "layer", "of one process", "synchronised", "reproducible", "by hand"
    for channels, side, number in _LAYERS:
        torch.manual_seed(rank)
        shape = _SAMPLES, channels, side, side
        x, dy = torch.randn(shape, requires_grad=True), torch.randn(shape)
        steps = [_step(make(channels), x, dy) for make in makes]
        alone, *every = (step() for step in steps)
        for each in every:
            torch.testing.assert_close(each, every[-1], rtol=1e-4, atol=1e-5)
            assert not torch.equal(alone, each)
        medians = _medians(steps, _ROUNDS)
        totals += np.multiply(number, medians)
        yield f"{number} x {shape}", *_microseconds(medians)
    yield "all", *_microseconds(list(totals))


def _errors(rank: int, size: int) -> Iterator[Sequence[object]]:
    """Yield the errors of the float32 gradients of a batch."""
    shape = 16, 16, 28, 28
    # The first process has two thirds of the batch.
    first = shape[0] * 2 // 3
    parts = np.split(np.arange(shape[0]), [first + k for k in range(size - 1)])
    for ratio in RATIOS:
        data = realistic_data(shape, FLOAT32, rng=np.random.default_rng(int(ratio)), ratio=ratio)
        of_batch = reference.forward(data.x, data.gamma, data.beta, epsilon=data.epsilon)
        moments = of_batch.mean.hi, of_batch.variance.hi
        inputs = data.x, data.dy, *moments, data.gamma
        truth = truth_of(reference.backward(*inputs, epsilon=data.epsilon), GRADIENTS)
        whole = np.arange(shape[0])
        contestants: tuple[tuple[str, Any, Any], ...] = (
            ("ours, one process", backnorm.torch.BatchNorm2d, whole),
            ("ours, synchronised", backnorm.torch.SyncBatchNorm, parts[rank]),
            ("ours, reproducible", _Reproducible, parts[rank]),
            ("PyTorch's, one process", nn.BatchNorm2d, whole),
            ("PyTorch's formula, by hand", _ByHand, parts[rank]),
        )
        for name, make, part in contestants:
            every: list[Any] = [None] * size
            own = _gradients(make(shape[1], eps=data.epsilon), data, part)
            dist.all_gather_object(every, own)
            dx, dgamma, dbeta = zip(*(every[:1] if part is whole else every), strict=True)
            found = {"dx": np.concatenate(dx), "dgamma": sum(dgamma), "dbeta": sum(dbeta)}
            errors = errors_of(found, truth)
            if ratio == RATIOS[0] and name == contestants[0][0]:
                yield "mean/deviation", "layer", *errors
            yield f"{ratio:g}", name, *(f"{most:.3g}, {mean:.2g}" for most, mean in errors.values())


def _messages(rank: int, size: int) -> Iterator[Sequence[object]]:
    """Yield the times of a message of the forward pass and of one of the backward pass."""
    yield "processes", "channels", "forward", "backward", "reproducible", "PyTorch's forward"
    for channels in _CHANNELS:
        moments = torch.ones(2 * channels + 1, dtype=torch.float64)
        bins = torch.ones(8 * channels + 1, dtype=torch.int64)

        def gather(message: Tensor) -> Callable[[], object]:
            return functools.partial(dist.all_gather_single, message.repeat(size), message)

        add = functools.partial(dist.all_reduce, moments[:-1].clone())
        calls = gather(moments), add, gather(bins), gather(moments.float())
        yield size, channels, *_microseconds(_medians(calls, _MESSAGES))


def _gradients(layer: nn.Module, data: LayerData, part: np.ndarray) -> list[np.ndarray]:
    """Return dx, dgamma and dbeta of a part of a batch."""
    parameters = [layer.weight, layer.bias]
    with torch.no_grad():
        for parameter, values in zip(parameters, (data.gamma, data.beta), strict=True):
            parameter.copy_(torch.from_numpy(values))
    x = torch.from_numpy(data.x[part]).requires_grad_()
    layer(x).backward(torch.from_numpy(data.dy[part]))
    return [each.grad.numpy() for each in (x, *parameters)]


if __name__ == "__main__":
    options = arguments(__doc__, processes=2, threads=1, errors=False, messages=False)
    table = "errors" if options.errors else "messages" if options.messages else "times"
    with tempfile.TemporaryDirectory() as folder:
        operands = options.processes, str(Path(folder) / "store"), options.threads, table
        torch.multiprocessing.spawn(_worker, operands, nprocs=options.processes)
