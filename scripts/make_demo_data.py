"""Make src/backnorm/data/digits_batchnorm.npz: batch-normalisation tensors of a real training step.

A small convolutional network with three batch-normalisation layers learns scikit-learn's
handwritten digits for two epochs. In one more step, the operands of each layer's backward pass are
captured: x (the layer's input), dy (the gradient of the loss with respect to the layer's output),
gamma, and the mean and biased variance of x, all float32, channels first:

    conv8   (96, 16, 8, 8)   after the first convolution
    conv4   (96, 32, 4, 4)   after the second convolution, of stride 2
    dense   (96, 48)         after the fully connected layer

Needs torch and scikit-learn. Run from the repository root:

    python -m scripts.make_demo_data [OUTPUT.npz]
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

BATCH = 96
EPOCHS = 2
OUTPUT = Path(__file__).parents[1] / "src" / "backnorm" / "data" / "digits_batchnorm.npz"


class Network(nn.Module):
    """Two convolutions and a dense layer, each followed by batch normalisation and ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv8 = nn.BatchNorm2d(16)
        self.conv4 = nn.BatchNorm2d(32)
        self.dense = nn.BatchNorm1d(48)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            self.conv8,
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            self.conv4,
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 48, bias=False),
            self.dense,
            nn.ReLU(),
            nn.Linear(48, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, (N, 10), of images (N, 1, 8, 8)."""
        return self.layers(images)


def train(network: Network, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Train for `EPOCHS` passes over the images."""
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(images)).split(BATCH)[:-1]:
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(images[chosen]), labels[chosen]).backward()
            optimiser.step()


def capture(network: Network, images: torch.Tensor, labels: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the tensors of each batch-normalisation layer in one training step."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def watch(name: str, layer: nn.Module) -> None:
        def keep(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            output.retain_grad()
            # Clone the input, so that no later operation can overwrite it.
            seen[name] = (inputs[0].detach().clone(), output)

        layer.register_forward_hook(keep)

    names = ("conv8", "conv4", "dense")
    for name in names:
        watch(name, getattr(network, name))
    # The sum, not the mean, keeps the gradients in float16's normal range, as loss scaling does.
    loss = nn.functional.cross_entropy(network(images), labels, reduction="sum")
    loss.backward()

    tensors: dict[str, np.ndarray] = {}
    for name in names:
        x, output = seen[name]
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        exact = x.double().numpy()
        tensors[f"{name}.x"] = x.numpy()
        tensors[f"{name}.dy"] = output.grad.numpy()
        tensors[f"{name}.mean"] = exact.mean(axes).astype(np.float32)
        tensors[f"{name}.variance"] = exact.var(axes).astype(np.float32)
        tensors[f"{name}.gamma"] = getattr(network, name).weight.detach().numpy().copy()
    print(f"loss {loss.item() / len(labels):.4f} per image")
    return tensors


def save(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write a compressed .npz without time stamps: its bytes depend only on the tensors."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in tensors.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w") as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)


def main() -> None:
    """Train, capture, save, and print what was saved."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(20)
    digits = load_digits()
    images = torch.from_numpy((digits.images / 16.0).astype(np.float32))[:, None]
    labels = torch.from_numpy(digits.target.astype(np.int64))
    network = Network()
    train(network, images, labels)
    tensors = capture(network, images[:BATCH], labels[:BATCH])
    save(tensors, path)
    for name, array in tensors.items():
        print(f"{name:16} {array.dtype} {array.shape}")
    print(f"{path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
