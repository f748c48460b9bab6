"""Mistakes of the backward pass that depend on the inputs, or vary another mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from backnorm.conformance.formula._channels import Channels
from backnorm.conformance.formula._formula import Mistake
from backnorm.conformance.formula._known import Known, Sums, always, counting, image_size, sums_of

Array = np.ndarray

# By which sums change, of dy and of dy*(x - mean): steps that follow from them, and their words.
_PARTS: dict[tuple[bool, ...], dict[tuple[str, ...], str]] = {
    (True, True): {
        ("dgamma",): "dgamma",
        ("dbeta",): "dbeta",
        ("dgamma", "dbeta"): "dgamma and dbeta",
        ("mean_dy",): "the term sum(dy)/M of dx",
        ("projection",): "the term along x - mean of dx",
        ("mean_dy", "projection"): "dx",
    },
    (False, True): {
        ("dgamma",): "dgamma",
        ("projection",): "dx",
    },
}


def of_vectors(channels: Channels) -> list[Mistake]:
    """Return the mistakes of vectorised loops in the last elements.

    Such a loop adds 4 to 64 elements at a time. It forgets the elements at the end of a row, of an
    image or of a channel that do not fill a vector; or its last vector overlaps the one before,
    whose elements count twice.
    """
    found = []
    sizes = {
        channels.row: "each row",
        image_size(channels): "each image",
        channels.count: "a channel",
    }
    for size, whole in sizes.items():
        steps = [step for step in (4, 8, 16, 32, 64) if size % step and size > step]
        index = np.arange(channels.count) % max(size, 1)
        for rest in sorted({size % step for step in steps}):
            # `MISTAKES` already has the mistake that leaves out only the last element.
            if (rest, size) != (1, channels.count):
                says = f"the sums lack the last {rest} of the {size} elements of {whole}"
                places = np.flatnonzero(index >= size - rest)
                found.append(Mistake("tail-left-out", says, "sums", counting(always(places), 0)))
        for step in steps:
            first, last = size - step, size // step * step
            which = f"element {first}" if last - first == 1 else f"elements {first} to {last - 1}"
            says = f"the sums count {which} of {whole} twice"
            places = np.flatnonzero((index >= first) & (index < last))
            found.append(
                Mistake("overlap-counted-twice", says, "sums", counting(always(places), 2))
            )
    return found


def in_parts(mistakes: Iterable[Mistake], channels: Channels) -> Iterator[Mistake]:
    """Yield the mistakes of sums, each in a part of the results.

    A kernel that computes a part alone has its own sums for this part.
    """
    mean, centred = channels.mean, channels.x - channels.mean[:, None]
    right = sums_of(channels, mean, centred)
    for mistake in mistakes:
        if mistake.step != "sums":
            continue
        sums = mistake.function(channels, mean, centred)
        changed = tuple(not np.allclose(*pair) for pair in zip(sums, right, strict=True))
        for steps, words in _PARTS.get(changed, {}).items():
            (step, function), *also = (
                (step, partial(_with_sums, mistake.function, step)) for step in steps
            )
            name = f"{mistake.name}-only-{'-'.join(steps)}"
            yield Mistake(name, f"{mistake.says}, in {words} alone", step, function, dict(also))


def _with_sums(sums: Sums, step: str, known: Known) -> Array:
    """Return the right result of a step with other sums."""
    sum_dy, sum_dy_xmu = sums(known.channels, known.channels.mean, known.centred)
    changed: Array = getattr(replace(known, sum_dy=sum_dy, sum_dy_xmu=sum_dy_xmu), step)
    return changed


def _s(channels: Channels) -> Array:
    s: Array = 1.0 / np.sqrt(channels.variance + channels.epsilon)
    return s[:, None]


def _is_positive(channels: Channels) -> Array:
    """Return where gamma*(x - mean) is positive."""
    positive: Array = channels.gamma[:, None] * (channels.x - channels.mean[:, None]) > 0
    return positive


# By a name: a sentence, and a function that returns other x and dy for the channels.
_OTHER_INPUTS: dict[str, tuple[str, Callable[[Channels], dict[str, Array]]]] = {
    "x-normalised": (
        "x is used for (x - mean)*s, as if x were normalised already",
        lambda ch: {"x": ch.mean[:, None] + ch.x / _s(ch)},
    ),
    "dy-gamma": ("gamma*dy is used for dy", lambda ch: {"dy": ch.dy * ch.gamma[:, None]}),
    "dy-s": ("s*dy is used for dy", lambda ch: {"dy": ch.dy * _s(ch)}),
    "dy-of-neighbour": (
        "the dy of the next channel is used", lambda ch: {"dy": np.roll(ch.dy, -1, 0)}
    ),
    "dy-of-channel-before": (
        "the dy of the channel before is used", lambda ch: {"dy": np.roll(ch.dy, 1, 0)}
    ),
    "x-of-neighbour": (
        "the x of the next channel is used", lambda ch: {"x": np.roll(ch.x, -1, 0)}
    ),
    "x-of-channel-before": (
        "the x of the channel before is used", lambda ch: {"x": np.roll(ch.x, 1, 0)}
    ),
    "relu-mask": (
        "dy counts only where gamma*(x - mean) is positive, as before a ReLU",
        lambda ch: {"dy": np.where(_is_positive(ch), ch.dy, 0.0)},
    ),
    "relu-mask-inverted": (
        "dy counts only where gamma*(x - mean) is not positive, as with an inverted mask of a ReLU",
        lambda ch: {"dy": np.where(_is_positive(ch), 0.0, ch.dy)},
    ),
    "relu-mask-of-x": (
        "dy counts only where x is positive, as behind a ReLU",
        lambda ch: {"dy": np.where(ch.x > 0, ch.dy, 0.0)},
    ),
}  # fmt: skip


def other_inputs(channels: Channels) -> Iterator[tuple[str, str, Channels]]:
    """Yield the name of a mistake, its sentence, and the inputs for which its results are right."""
    for name, (says, change) in _OTHER_INPUTS.items():
        changed: Any = change(channels)
        yield name, says, replace(channels, **changed)


def of_images(channels: Channels) -> Channels:
    """Return the channels of instance normalisation: each image's channels are channels."""
    images, count = max(channels.images, 1), image_size(channels)
    x, dy = (each.reshape(-1, count) for each in (channels.x, channels.dy))
    mean, variance, gamma, beta = (
        np.repeat(each, images)
        for each in (channels.mean, channels.variance, channels.gamma, channels.beta)
    )
    values = {"x": x, "dy": dy, "mean": mean, "variance": variance, "gamma": gamma, "beta": beta}
    changed: Any = values | {"images": 1}
    return replace(channels, **changed)
