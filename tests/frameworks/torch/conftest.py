"""Fixtures of the PyTorch adapter's tests: seeded tensors, layouts, comparison."""

from __future__ import annotations

import subprocess
import sys
import time
import zlib

import pytest
import torch

# Seconds for all processes of a run, less than one test may take.
_LIMIT = 240


def _sliced(x):
    wide = torch.randn(*x.shape[:-1], 2 * x.shape[-1]).to(x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def _expanded(x):
    return x[:1].expand(x.shape)


LAYOUTS = {
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "channels_last": lambda x: x.clone(
        memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    ),
    # Dense, in an order that has no name.
    "permuted": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "sliced": _sliced,
    "expanded": _expanded,
}


#: What `convert` can fuse in a `Block`.
PAIRS = [("bn1", "act")]


class Block(torch.nn.Module):
    """A convolution and three layers, two of them before a ReLU, one with an addition."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 3, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(3, momentum=0.3)
        self.bn2 = torch.nn.BatchNorm2d(3)
        self.bn3 = torch.nn.BatchNorm2d(3)
        self.act = torch.nn.ReLU()

    def forward(self, x):
        out = self.act(self.bn1(self.conv(x)))
        out = torch.relu(self.bn2(out) + x)
        return self.bn3(out)


@pytest.fixture(autouse=True)
def seeded(request):
    """Seed PyTorch by the name of the test."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def one_thread():
    """Let many small steps run in one thread: on a busy machine a team of PyTorch's waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=LAYOUTS)
def layout(request):
    """A function that lays a tensor out in memory."""
    return LAYOUTS[request.param]


@pytest.fixture
def parameters():
    """Make weight, bias, running mean and running variance, none of them trivial."""

    def make(channels, dtype=torch.float64, running=None):
        weight, bias = torch.rand(channels) + 0.5, torch.randn(channels)
        mean, variance = torch.randn(channels), torch.rand(channels) + 0.5
        running = running or dtype
        return weight.to(dtype), bias.to(dtype), mean.to(running), variance.to(running)

    return make


@pytest.fixture
def close():
    """Assert that tensors (in any nesting) are equal within a few roundings of their type."""

    def assert_close(actual, expected, *, factor=1.0):
        actual, expected = map(torch.utils._pytree.tree_leaves, (actual, expected))
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            if one is None or other is None:
                assert one is other
                continue
            assert one.dtype == other.dtype
            if not one.dtype.is_floating_point:
                assert torch.equal(one, other)
                continue
            # Relative to the terms, which are of order 1 or more: where they cancel, the other side
            # is no better.
            scale = float(other.detach().abs().max()) if other.numel() else 0.0
            tolerance = factor * 64 * torch.finfo(one.dtype).eps * max(scale, 1.0)
            torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)

    return assert_close


@pytest.fixture
def step():
    """Run a forward and backward pass; return y, and the gradients of the tensors that want one."""

    def run(function, *tensors, dy):
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors
        ]
        y = function(*leaves)
        y.backward(dy)
        return y.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)

    return run


@pytest.fixture
def layouts():
    """Functions that lay a tensor out in memory, by name."""
    return LAYOUTS


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    """Return a function: run a module in some processes, and return what each has saved.

    Its arguments are `name` if there is one, the process's number, how many there are, a file for
    them to meet in, and the file to save to.
    """

    def run(module, size, *name):
        folder = tmp_path_factory.mktemp("processes")
        logs = [folder / f"{rank}.txt" for rank in range(size)]
        results = [folder / f"{rank}.pt" for rank in range(size)]
        running = []
        try:
            for rank, log in enumerate(logs):
                arguments = *name, rank, size, folder / "store", results[rank]
                command = [sys.executable, "-W", "error::FutureWarning", module.__file__]
                with log.open("w") as stream:
                    command += map(str, arguments)
                    running.append(subprocess.Popen(command, stdout=stream, stderr=stream))
            end = time.monotonic() + _LIMIT
            for process in running:
                process.wait(end - time.monotonic())
        finally:
            for process in running:
                process.kill()
                process.wait()
        said = "\n".join(log.read_text()[-5000:] for log in logs)
        assert [process.returncode for process in running] == [0] * size, said
        # One that was made to end has saved nothing.
        return [torch.load(each) for each in results if each.exists()]

    return run
