"""Train a residual network on handwritten digits twice: with PyTorch's normalisation and with ours.

    python examples/train_digits_torch.py [--epochs 4] [--seed 0]

Both networks begin with the same weights and see the same images in the same order. The table has
the loss and the error of the gradients of the first step, the last loss, and the test accuracy.
"""

import copy

import rich
import torch
import typer
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import backnorm.torch


class Block(nn.Module):
    """Two convolutions with normalisation, and the input added before the last ReLU."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def network(seed):
    torch.manual_seed(seed)
    stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*stem, Block(16, 32), Block(32, 64), *head)


def digits():
    """Return images of 8x8 pixels and their labels: 1347 to learn from, 450 to test with."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 8 - 1
    labels = torch.tensor(data.target)[order]
    return (images[:-450], labels[:-450]), (images[-450:], labels[-450:])


def first_step(net, images, labels):
    """Return the loss of a batch, and its gradient by each parameter; `net` is unchanged."""
    net = copy.deepcopy(net)
    loss = nn.functional.cross_entropy(net(images), labels)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in net.named_parameters()}


def farthest(gradients, exact):
    """Return the largest error of a gradient, relative to the gradient's largest element."""
    return max(((gradients[k] - exact[k]).abs().max() / exact[k].abs().max()).item() for k in exact)


def train(net, learn, test, epochs, seed, batch=64):
    """Train; return the mean loss of the last epoch and the test accuracy."""
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        losses = []
        for chosen in torch.randperm(len(learn[1]), generator=order).split(batch)[:-1]:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(learn[0][chosen]), learn[1][chosen])
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        schedule.step()
    net.eval()
    with torch.no_grad():
        accuracy = (net(test[0]).argmax(1) == test[1]).double().mean()
    return sum(losses) / len(losses), accuracy.item()


def main(epochs: int = 4, seed: int = 0):
    learn, test = digits()
    images, labels = learn[0][:64], learn[1][:64]
    own = network(seed)
    ours = backnorm.torch.convert(copy.deepcopy(own), fuse=True)
    _, exact = first_step(copy.deepcopy(own).double(), images.double(), labels)
    table = Table("", "torch.nn.BatchNorm2d", "backnorm.torch", title="Digits in PyTorch")
    found = []
    for net in (own, ours):
        loss, gradients = first_step(net, images, labels)
        last, accuracy = train(net, learn, test, epochs, seed)
        error = farthest(gradients, exact)
        found.append((f"{loss:.7f}", f"{error:.1e}", f"{last:.4f}", f"{accuracy:.1%}"))
    rows = ("first loss", "error of its gradients", f"loss of epoch {epochs}", "test accuracy")
    for row in zip(rows, *found, strict=True):
        table.add_row(*row)
    rich.print(table)
    rich.print("Error: the largest difference from float64, over the largest element.")


if __name__ == "__main__":
    typer.run(main)
