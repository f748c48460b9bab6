"""Train a network on sequences of different lengths: packed, and padded with and without a mask.

    python examples/train_padded_sequences.py [--steps 60] [--seed 0]

Short synthetic "words" of 1 to 40 frames are classified by convolutions along time. Every training
begins with the same weights and sees the same batches, in float64. If `lengths` says which frames
of a padded batch count, the losses of all steps are those of packed batches, which have no padding.
"""

import copy
import itertools

import rich
import torch
import typer
from rich.table import Table
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import backnorm.torch

BANDS, WORDS, FRAMES, BATCH = 16, 5, 40, 16


def words(number, seed):
    """Return sequences of shape (BANDS, length), and the number of the word in each."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(WORDS, (number,), generator=rng)
    band = torch.arange(BANDS, dtype=torch.float64)[:, None]
    sequences = []
    for label in labels:
        time = torch.arange(int(torch.randint(1, FRAMES + 1, (1,), generator=rng)))
        tone = torch.sin((label + 1) * (0.1 * time + 0.4 * band)) + 1.5
        noise = torch.randn(tone.shape, generator=rng, dtype=torch.float64)
        sequences.append(tone + noise)
    return sequences, labels


class Network(nn.Module):
    """Convolutions along time, each with normalisation and ReLU; the mean of all frames; scores."""

    def __init__(self):
        super().__init__()
        sizes = (BANDS, 24, 24, 32)
        self.convs = nn.ModuleList(
            nn.Conv1d(inputs, outputs, 5, padding=2, bias=False)
            for inputs, outputs in itertools.pairwise(sizes)
        )
        self.norms = nn.ModuleList(backnorm.torch.BatchNorm1d(size) for size in sizes[1:])
        self.head = nn.Linear(sizes[-1], WORDS)

    def packed(self, sequences):
        """Return scores. Layers normalise the frames of all sequences, one behind the other."""
        lengths = [sequence.shape[1] for sequence in sequences]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            frames = torch.cat([conv(sequence) for sequence in sequences], 1)
            sequences = torch.relu(norm(frames[None]))[0].split(lengths, 1)
        return self.head(torch.stack([sequence.mean(1) for sequence in sequences]))

    def padded(self, sequences, masked=True):
        """Return scores. Layers normalise a tensor of shape (N, C, T) with zeros as padding."""
        lengths = torch.tensor([sequence.shape[1] for sequence in sequences])
        x = pad_sequence([sequence.T for sequence in sequences], batch_first=True).transpose(1, 2)
        frames = (torch.arange(x.shape[2]) < lengths[:, None])[:, None]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(x), lengths=lengths if masked else None)
            # The next convolution must find zeros behind a sequence, as if it was alone.
            x = torch.relu(y) * frames
        return self.head(x.sum(2) / lengths[:, None])

    def padding_counted(self, sequences):
        return self.padded(sequences, masked=False)


def train(net, scores, steps, seed):
    """Train, with the method `scores`; return the loss of each step and the test accuracy."""
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        sequences, labels = words(BATCH, seed + step)
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(scores(net, sequences), labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    net.eval()
    with torch.no_grad():
        sequences, labels = words(200, seed - 1)
        accuracy = (net.packed(sequences).argmax(1) == labels).double().mean().item()
    return torch.tensor(losses, dtype=torch.float64), accuracy


def main(steps: int = 60, seed: int = 0):
    torch.manual_seed(seed)
    own = Network().double()
    forms = {
        "packed": Network.packed,
        "padded, lengths=": Network.padded,
        "padding counted": Network.padding_counted,
    }
    found = [train(copy.deepcopy(own), scores, steps, seed) for scores in forms.values()]
    table = Table("", *forms, title="Padded sequences")
    expected, _ = found[0]
    apart = [f"{((losses - expected).abs() / expected).max():.0e}" for losses, _ in found[1:]]
    table.add_row("first loss", *(f"{losses[0]:.7f}" for losses, _ in found))
    table.add_row(f"loss of step {steps}", *(f"{losses[-1]:.7f}" for losses, _ in found))
    table.add_row("farthest loss", "", *apart)
    table.add_row("test accuracy", *(f"{accuracy:.1%}" for _, accuracy in found))
    rich.print(table)
    rich.print("Farthest: the largest difference of a step's loss from packed, over the loss.")


if __name__ == "__main__":
    typer.run(main)
