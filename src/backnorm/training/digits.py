"""Real images: the handwritten digits that scikit-learn brings in its wheel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.report.libraries import needs

__all__ = ["Digits", "batches", "load_digits", "steps"]

# Of 1797 images those that no step sees. A quarter: with fewer, the accuracy would say less.
_TESTED = 450

# Which they are; not the seed of a training.
_SPLIT = 0


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """Images, float32, (N, 8, 8), with mean 0 and variance 1 over those to learn; labels, int64."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits() -> Digits:
    """Return the data, always divided alike.

    Raises
    ------
    BacknormError
        If scikit-learn is not installed.
    """
    data = needs("sklearn.datasets", "the digits", "'backnorm[train]'").load_digits()
    images, labels = np.asarray(data.images), np.asarray(data.target, np.int64)
    order = np.random.default_rng(_SPLIT).permutation(len(images))
    test, learn = order[:_TESTED], order[_TESTED:]
    mean, deviation = images[learn].mean(), images[learn].std()
    images = ((images - mean) / deviation).astype(np.float32)
    return Digits(images[learn], labels[learn], images[test], labels[test])


def steps(digits: Digits, batch: int) -> int:
    """Return how many steps an epoch has: whole batches only, so that all have one shape."""
    return len(digits.images) // batch


def batches(
    digits: Digits, batch: int, seed: int, epoch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the images and labels of each step of an epoch, in an order of the seed's."""
    order = np.random.default_rng((seed, epoch)).permutation(len(digits.images))
    for number in range(steps(digits, batch)):
        chosen = order[number * batch : (number + 1) * batch]
        yield digits.images[chosen], digits.labels[chosen]
