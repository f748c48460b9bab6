"""One of two processes that train together: ``python distributed_cases.py RANK 2 STORE OUT``.

Every case is run with PyTorch's layers and with ours, some with ours fused; what comes of it goes
to the file OUT. `check_distributed` starts both and compares.
"""

from __future__ import annotations

import datetime
import functools
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import backnorm.torch

PLACEMENTS = {"replicated": Replicate(), "over the batch": Shard(0), "over channels": Shard(1)}


def model(kind):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(6 * 16, 4),
        nn.BatchNorm1d(4),
    )
    return layers if kind == "theirs" else backnorm.torch.convert(layers, fuse=kind == "fused")


def whole(tensor):
    """Return a plain tensor, of all shards."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def sharded(layers, **options):
    for layer in layers:
        if isinstance(layer, nn.Sequential | nn.modules.batchnorm._BatchNorm):
            fully_shard(layer, **options)
    return fully_shard(layers, **options)


def compiled(layers):
    return torch.compile(layers, backend="aot_eager")


def parallel(layers, **options):
    return DistributedDataParallel(layers, **options)


WRAPPED = {
    "FSDP2": sharded,
    "FSDP2, parameters kept": lambda layers: sharded(layers, reshard_after_forward=False),
    "FSDP2, compiled": lambda layers: compiled(sharded(layers)),
    "DDP": parallel,
    "DDP, gradients in buckets": lambda layers: parallel(
        layers, gradient_as_bucket_view=True, static_graph=True
    ),
    "DDP, compiled": lambda layers: compiled(parallel(layers)),
    "DDP of compiled": lambda layers: parallel(compiled(layers)),
}


def trained(wrap, kind):
    """Return the losses of some steps, parameters and buffers after them, and no place."""
    torch._dynamo.reset()
    layers = wrap(model(kind))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        x = torch.randn(5, 3, 8, 8, generator=data)
        target = torch.randn(5, 4, generator=data)
        loss = (layers(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    layers.eval()
    losses.append(layers(x).detach())
    return [*losses, *(whole(tensor) for tensor in layers.state_dict().values())], None


def relu_of_theirs(x, residual, *arguments, **options):
    return torch.relu(functional.batch_norm(x, *arguments, **options) + residual)


def relu_of_ours(x, residual, *arguments):
    return backnorm.torch.batch_norm(x, *arguments, activation="relu", residual=residual)


def distributed(kind, placement, training, relu, channels=4, compile=False):
    """Return y, running statistics and gradients of two orders, and where on the mesh y is."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)

    def on_mesh(tensor, where=placement):
        return distribute_tensor(tensor, mesh, [where])

    x, residual, dy, ddx = (on_mesh(torch.randn(6, channels, 3, 2)) for _ in range(4))
    running_mean, running_var, weight, bias = (
        on_mesh(torch.rand(channels) + 0.5, Shard(0) if placement == Shard(1) else Replicate())
        for _ in range(4)
    )
    wanted = [x, weight, bias, dy, *([residual] if relu else [])]
    for tensor in wanted:
        tensor.requires_grad_()
    arguments = running_mean, running_var, weight, bias, training
    function = functional.batch_norm if kind == "theirs" else backnorm.torch.batch_norm
    if relu:
        function = relu_of_theirs if kind == "theirs" else relu_of_ours
        arguments = (residual, *arguments)
    if compile:
        torch._dynamo.reset()
        # The backward pass of PyTorch's own layer (2.13) does not always compile.
        function = torch.compile(function, backend="eager", fullgraph=True)
    y = function(x, *arguments)
    first = [x, weight, bias, *wanted[4:]]
    gradients = torch.autograd.grad(y, first, dy, create_graph=not compile)
    second = ()
    if not compile and not (training and placement == Replicate()):
        # Replicated in training, PyTorch's own second order has no rule.
        # Where the statistics are given, dx does not depend on x.
        second = torch.autograd.grad(gradients[0], (x, dy) if training else (dy,), ddx)
    results = [y, running_mean, running_var, *gradients, *second]
    return [whole(each) for each in results], str(y.placements)


def mixed(kind):
    """Return what is said of tensors of which only one is on the mesh."""
    x = distribute_tensor(torch.randn(6, 4), init_device_mesh("cpu", (2,)), [Replicate()])
    function = functional.batch_norm if kind == "theirs" else backnorm.torch.batch_norm
    try:
        function(x, torch.zeros(4), torch.ones(4), training=True)
    except RuntimeError as error:
        return str(error)
    return ""


def cases():
    """Yield names, the kinds of layers, and functions of the kind."""
    for name, wrap in WRAPPED.items():
        kinds = ("theirs", "fused") if "compiled" in name else ("theirs", "ours", "fused")
        yield name, kinds, lambda kind, wrap=wrap: trained(wrap, kind)
    for where, placement in PLACEMENTS.items():
        for training in (True, False):
            for relu in (False, True):
                more = [{}, {"channels": 5}]
                if relu and training:
                    more.append({"compile": True})
                for each in more:
                    options = {"training": training, "relu": relu, **each}
                    name = f"{where}, {options}"
                    options["placement"] = placement
                    run = functools.partial(distributed, **options)
                    yield name, ("theirs", "ours"), run
    yield "mixed", ("theirs", "ours"), mixed


def main():
    rank, store, out = int(sys.argv[1]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=200),
    )
    results = {}
    for name, kinds, case in cases():
        print(name, flush=True)
        results[name] = {kind: case(kind) for kind in kinds}
    torch.save(results, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
