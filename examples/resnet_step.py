"""Time a training step of ResNet-50 in PyTorch, with PyTorch's batch normalisation and with ours.

    python examples/resnet_step.py [--batch 16] [--size 224] [--rounds 5] [--threads N]

The network is torchvision's; `convert` fuses 49 of its 53 layers with the ReLU that follows them. A
step is forward pass, loss, backward pass and update. The images are scikit-learn's digits, enlarged
to the size of photographs, in contiguous and in channels_last memory. The two networks have the
same weights and take steps in turns, so that other load on the machine slows both. The first step
of each is compared and not timed. The run needs some 3 GB of memory; with --size 64 --batch 4, much
less.
"""

import copy
import statistics
import sys
import time
from pathlib import Path

import rich
import torch
import typer
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import backnorm.torch

sys.path.append(str(Path(__file__).parents[1]))
# Imports torchvision, also one that was built for another PyTorch.
from benchmarks.models.libraries import torchvision


def images_of(batch, size):
    """Return digits as images of three colours, and their labels."""
    data = load_digits()
    images = torch.tensor(data.images[:batch], dtype=torch.float32)[:, None] / 8 - 1
    images = nn.functional.interpolate(images, size=(size, size), mode="bilinear")
    return images.expand(-1, 3, -1, -1).contiguous(), torch.tensor(data.target[:batch])


def stepper(net, images, labels):
    """Return a function that makes a training step and returns its seconds, loss and gradients."""
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    net.train()

    def step():
        start = time.perf_counter()
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimiser.step()
        seconds = time.perf_counter() - start
        return seconds, loss.item(), [p.grad for p in net.parameters()]

    return step


def difference(ours, own):
    """Return the distance of our gradients from PyTorch's, relative to the norm of PyTorch's."""
    apart = sum((a - b).double().square().sum() for a, b in zip(ours, own, strict=True))
    return (apart / sum(b.double().square().sum() for b in own)).sqrt().item()


def converted(net, images):
    """Return a copy of a ResNet with our layers, and a report for each of them."""
    reports = []
    # The first layer is in no block, so it is named. A few images prove that the ReLU follows it.
    net = backnorm.torch.convert(copy.deepcopy(net), fuse=[("bn1", "relu")], example=images[:2])
    return backnorm.torch.convert(net, fuse=True, report=reports.append), reports


def compare(images, labels, memory_format, rounds):
    """Return the first losses, the median seconds of a step, the distance of gradients, and a
    report for each layer of batch normalisation.
    """
    torch.manual_seed(0)
    own = torchvision().models.resnet50(num_classes=10).to(memory_format=memory_format)
    ours, reports = converted(own, images)
    images = images.to(memory_format=memory_format)
    steps = [stepper(net, images, labels) for net in (own, ours)]
    _, losses, (own_gradients, our_gradients) = zip(*(step() for step in steps), strict=True)
    apart = difference(our_gradients, own_gradients)
    seconds = [[step()[0] for step in steps] for _ in range(rounds)]
    medians = [statistics.median(each) for each in zip(*seconds, strict=True)]
    return losses, medians, apart, reports


def main(batch: int = 16, size: int = 224, rounds: int = 5, threads: int | None = None):
    if threads:
        torch.set_num_threads(threads)
    images, labels = images_of(batch, size)
    rich.print(
        f"ResNet-50, float32, {batch} images of {size} x {size}, PyTorch {torch.__version__}"
    )
    rich.print(f"{torch.get_num_threads()} threads, medians of {rounds} steps of each, in turns")
    for name in ("contiguous_format", "channels_last"):
        losses, seconds, apart, reports = compare(images, labels, getattr(torch, name), rounds)
        fused = sum(report.fused for report in reports)
        table = Table(name.removesuffix("_format"), "torch.nn", "backnorm.torch")
        table.add_row("fused layers", "", f"{fused} of {len(reports)}")
        table.add_row("first loss", *(f"{loss:.6f}" for loss in losses))
        table.add_row("first gradients, apart", "", f"{apart:.1e}")
        table.add_row("seconds of a step", *(f"{each:.3f}" for each in seconds))
        table.add_row("ratio", "", f"{seconds[1] / seconds[0]:.2f}")
        rich.print(table)


if __name__ == "__main__":
    typer.run(main)
