"""Train a residual network on handwritten digits in several processes that share each batch.

    torchrun --nproc-per-node 4 examples/train_digits_distributed.py [--epochs 4] [--seed 0]

The network is trained twice: with layers that normalise each process's part, and with layers that
normalise the whole batch. The table has the errors of the first gradients, compared with one
process that has the whole batch, and the test accuracies.
"""

import copy

import rich
import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import backnorm.torch
from train_digits_torch import digits, farthest, first_step, network

BATCH = 64


def part(tensor):
    """Return this process's part of a batch."""
    return tensor.tensor_split(dist.get_world_size())[dist.get_rank()]


def gradients_of_a_step(net, images, labels):
    """Return the loss of a batch and its gradients, as DistributedDataParallel computes them."""
    net = DistributedDataParallel(copy.deepcopy(net))
    # DDP averages the gradients of the processes. With this factor, the average is the gradient of
    # the mean loss of the whole batch.
    share = len(part(labels)) * dist.get_world_size() / len(labels)
    loss = nn.functional.cross_entropy(net(part(images)), part(labels)) * share
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    grads = {name: p.grad for name, p in net.module.named_parameters()}
    return total.item() / dist.get_world_size(), grads


def train(net, learn, test, epochs, seed):
    """Train; return the test accuracy."""
    wrapped = DistributedDataParallel(net)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(learn[1]), generator=order).split(BATCH)[:-1]:
            optimiser.zero_grad()
            images, labels = learn[0][part(chosen)], learn[1][part(chosen)]
            nn.functional.cross_entropy(wrapped(images), labels).backward()
            optimiser.step()
        schedule.step()
    net.eval()
    with torch.no_grad():
        return (net(test[0]).argmax(1) == test[1]).double().mean().item()


def main(epochs: int = 4, seed: int = 0):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    learn, test = digits()
    images, labels = learn[0][:BATCH], learn[1][:BATCH]
    own = network(seed)
    _, exact = first_step(copy.deepcopy(own).double(), images.double(), labels)
    found = []
    for sync in (False, True):
        net = backnorm.torch.convert(copy.deepcopy(own), fuse=True, sync=sync)
        loss, gradients = gradients_of_a_step(net, images, labels)
        accuracy = train(net, learn, test, epochs, seed)
        error = farthest(gradients, exact)
        found.append((f"{loss:.7f}", f"{error:.1e}", f"{accuracy:.1%}"))
    if dist.get_rank() == 0:
        title = f"Digits in {dist.get_world_size()} processes"
        table = Table("", "each its part", "sync=True", title=title)
        rows = ("first loss", "error of its gradients", "test accuracy")
        for row in zip(rows, *found, strict=True):
            table.add_row(*row)
        rich.print(table)
        rich.print("Error: the largest difference from one process in float64, over the largest.")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
