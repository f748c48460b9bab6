"""Make src/backnorm/data/digits_batchnorm.npz: batch-normalisation tensors of a real training step.

A small convolutional network with three batch-normalisation layers learns scikit-learn's
handwritten digits for two epochs. In one more step, the operands of each layer's backward pass are
captured: x (the layer's input), dy (the gradient of the loss with respect to the layer's output),
gamma, and the mean and biased variance of x, all float32, channels first:

    conv8   (96, 16, 8, 8)   after the first convolution
    conv4   (96, 32, 4, 4)   after the second convolution, of stride 2
    dense   (96, 48)         after the fully connected layer

Needs torch and scikit-learn.

Usage: python -m scripts.make_demo_data [OUTPUT.npz]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH = 96
EPOCHS = 2
OUTPUT = Path(__file__).parents[1] / "src" / "backnorm" / "data" / "digits_batchnorm.npz"


def network() -> tuple[nn.Sequential, dict[str, nn.Module]]:
    """Return the network, from images (N, 1, 8, 8) to logits (N, 10), and the captured layers."""
    layers = {"conv8": nn.BatchNorm2d(16), "conv4": nn.BatchNorm2d(32), "dense": nn.BatchNorm1d(48)}
    whole = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        *(layers["conv8"], nn.ReLU()),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        *(layers["conv4"], nn.ReLU(), nn.Flatten(), nn.Linear(512, 48, bias=False)),
        *(layers["dense"], nn.ReLU(), nn.Linear(48, 10)),
    )
    return whole, layers


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Train for `EPOCHS` passes over the images."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(images)).split(BATCH)[:-1]:
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimiser.step()


def capture(
    model: nn.Module, layers: dict[str, nn.Module], images: Tensor, labels: Tensor
) -> dict[str, np.ndarray]:
    """Return the tensors of each batch-normalisation layer in one training step."""
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def keep(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        output.retain_grad()
        # Clone the input, so that no later operation can overwrite it.
        seen[layer] = (inputs[0].detach().clone(), output)

    for layer in layers.values():
        layer.register_forward_hook(keep)
    # The sum, not the mean, keeps the gradients in float16's normal range, as loss scaling does.
    loss = nn.functional.cross_entropy(model(images), labels, reduction="sum")
    loss.backward()
    print(f"loss {loss.item() / len(labels):.4f} per image")
    tensors: dict[str, np.ndarray] = {}
    for name, layer in layers.items():
        x, output = seen[layer]
        axes, exact = (0, *range(2, x.ndim)), x.double().numpy()
        tensors[f"{name}.x"] = x.numpy()
        tensors[f"{name}.dy"] = output.grad.numpy()
        tensors[f"{name}.mean"] = exact.mean(axes).astype(np.float32)
        tensors[f"{name}.variance"] = exact.var(axes).astype(np.float32)
        tensors[f"{name}.gamma"] = layer.weight.detach().numpy().copy()
    return tensors


def main() -> None:
    """Train, capture, save, and print what was saved."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(20)
    digits = load_digits()
    images = torch.from_numpy((digits.images / 16.0).astype(np.float32))[:, None]
    labels = torch.from_numpy(digits.target.astype(np.int64))
    model, layers = network()
    train(model, images, labels)
    tensors = capture(model, layers, images[:BATCH], labels[:BATCH])
    # NumPy's files have no time stamps: their bytes depend only on the tensors.
    np.savez_compressed(path, **tensors)
    for name, array in tensors.items():
        print(f"{name:16} {array.dtype} {array.shape}")
    print(f"{path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
