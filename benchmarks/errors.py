"""How far off everyone's float32 gradients are: ``python -m benchmarks.errors``, by hand.

Everyone gets the same arrays and the same statistics, each in a process of its own. Tables in
Markdown, those of docs/explanation/exactness.md, go to standard output.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from backnorm import ArgumentError, reference
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import ulp_error
from backnorm.dtypes import FLOAT32, FLOAT64
from benchmarks.child import Child, ChildEndedError, serve_parent
from benchmarks.model import OURS, OURS_IN_FLOAT32, Cell
from benchmarks.peers import CONTESTANTS
from benchmarks.peers.base import Contestant, Data, Missing, Unsupported
from benchmarks.worker import load

__all__ = [
    "ENTRIES",
    "Errors",
    "Found",
    "errors_of",
    "exact_of",
    "larger",
    "make",
    "measured",
    "tables",
]

#: Elements of a side of a plane, and mean over standard deviation.
PLANES, RATIOS = (7, 14, 28, 56, 112), (1.0, 1e2, 1e4)

# Samples and channels.
_SAMPLES, _CHANNELS = 16, 16

# Seconds until a contestant is given up.
_PATIENCE = 300.0

#: Who takes part: what it is called, its name among the contestants, and layout.
ENTRIES = (
    ("backnorm, float64", OURS, "NCX"),
    ("backnorm, float32, NCX", OURS_IN_FLOAT32, "NCX"),
    ("backnorm, float32, NXC", OURS_IN_FLOAT32, "NXC"),
    ("PyTorch, contiguous", "torch", "NCX"),
    ("PyTorch, channels_last", "torch", "NXC"),
    ("TensorFlow, NHWC", "tensorflow", "NXC"),
    ("oneDNN, NCHW", "onednn", "NCX"),
    ("oneDNN, NHWC", "onednn", "NXC"),
    ("JAX, NCHW", "jax", "NCX"),
    ("JAX, NHWC", "jax", "NXC"),
)


@dataclass(frozen=True, slots=True)
class Errors:
    """Largest and root mean square errors.

    Attributes
    ----------
    dx : (float, float)
        In units in the last place of the exact element.
    dx_terms, dgamma, dbeta : (float, float)
        In units of 2**-24 of the sum of the magnitudes of a result's terms.
    """

    dx: tuple[float, float]
    dx_terms: tuple[float, float]
    dgamma: tuple[float, float]
    dbeta: tuple[float, float]


#: Fields of `Errors`, and what they are in a table: the largest, and the root mean square.
TITLES = {
    "dx": "dx in ulp",
    "dx_terms": "dx in 2⁻²⁴ T",
    "dgamma": "dgamma in 2⁻²⁴ T",
    "dbeta": "dbeta in 2⁻²⁴ T",
}

#: Errors by whose they are, plane and ratio.
Found = dict[str, dict[tuple[int, float], Errors]]


def make(plane: int, ratio: float, layout: str) -> Data:
    """Return the arrays of a cell, the same in both layouts."""
    rng = np.random.default_rng([plane, int(ratio)])
    layer = realistic_data((_SAMPLES, _CHANNELS, plane, plane), FLOAT32, rng=rng, ratio=ratio)
    x, dy = layer.x, layer.dy
    if layout == "NXC":
        x, dy = (np.ascontiguousarray(np.moveaxis(array, 1, -1)) for array in (x, dy))
    channels = layer.mean, layer.variance, layer.gamma, layer.beta
    return Data(x, dy, *channels, layer.epsilon, layout, out=np.empty_like(x))


def exact_of(data: Data, *, takes_inverse: bool) -> reference.ExactGradients:
    """Return the exact gradients of what a contestant is given.

    PyTorch is given 1/sqrt(variance + epsilon) rounded to float32, and is not to blame for that.
    """
    variance, epsilon = data.variance, data.epsilon
    if takes_inverse:
        inverse = (1.0 / np.sqrt(variance.astype(FLOAT64) + epsilon)).astype(FLOAT32)
        variance, epsilon = 1.0 / inverse.astype(FLOAT64) ** 2, 0.0
    inputs = data.x, data.dy, data.mean, variance, data.gamma
    return reference.backward(*inputs, epsilon=epsilon, data_format=data.data_format)


def errors_of(results: dict[str, np.ndarray], exact: reference.ExactGradients) -> Errors:
    """Return how far off results are."""
    found = {}
    for name in ("dx", "dgamma", "dbeta"):
        right, terms = getattr(exact, name), getattr(exact, f"{name}_terms")
        lost = np.abs((results[name].astype(FLOAT64) - right.hi) - right.lo)
        found[name] = _summary(lost / (terms * 2.0**-24))
    dx = _summary(ulp_error(results["dx"], exact.dx, FLOAT32))
    return Errors(dx, found["dx"], found["dgamma"], found["dbeta"])


def _summary(errors: np.ndarray) -> tuple[float, float]:
    return float(errors.max()), float(np.sqrt(np.square(errors).mean()))


def measured(entry: tuple[str, str, str]) -> Iterator[tuple[int, float, Errors]]:
    """Yield plane, ratio and errors of a contestant, which runs in a process of its own.

    Raises
    ------
    ChildEndedError
    """
    _, name, layout = entry
    child = Child("benchmarks.errors")
    try:
        for plane in PLANES:
            for ratio in RATIOS:
                child.send((CONTESTANTS["cpu"][name], plane, ratio, layout))
                results = child.receive(_PATIENCE)
                if isinstance(results, str):
                    raise ChildEndedError(results)
                exact = exact_of(make(plane, ratio, layout), takes_inverse=name == "torch")
                yield plane, ratio, errors_of(results, exact)
    finally:
        child.stop()


def serve(connection: Connection) -> None:
    """Compute what is asked for until the other end closes the pipe."""
    contestants: dict[str, Contestant] = {}
    while True:
        try:
            place, plane, ratio, layout = connection.recv()
        except EOFError:
            return
        try:
            if place not in contestants:
                contestants[place] = load(place)()
                contestants[place].start(2)
            data = make(plane, ratio, layout)
            cell = Cell(
                "errors", "backward", (_SAMPLES, _CHANNELS, plane, plane), layout, "float32"
            )
            prepared: Any = next(iter(contestants[place].prepare(cell, data).values()))
            found = prepared.results(prepared.call())
            connection.send({name: np.array(found[name]) for name in ("dx", "dgamma", "dbeta")})
        except (Missing, Unsupported, ArgumentError) as error:
            connection.send(str(error))


def tables(found: Found, *, planes: bool) -> Iterator[str]:
    """Yield the lines of a table for each ratio, over all planes or of each."""
    groups = [(plane,) for plane in PLANES] if planes else [PLANES]
    for ratio, group in itertools.product(RATIOS, groups):
        sides = ", ".join(f"{plane} x {plane}" for plane in group)
        yield f"Mean over standard deviation {ratio:g}, planes of {sides}:\n"
        yield _line(["", *TITLES.values()])
        yield _line(["---"] * (1 + len(TITLES)))
        for label, cells in found.items():
            values = []
            for name in TITLES:
                pairs = [getattr(cells[plane, ratio], name) for plane in group]
                most, mean = max(p[0] for p in pairs), np.sqrt(np.mean([p[1] ** 2 for p in pairs]))
                values.append(f"{most:.3g}, {mean:.2g}")
            yield _line([label, *values])
        yield ""


def larger(found: Found) -> Iterator[str]:
    """Yield a line for each root mean square of ours in float32 that is not below a peer's."""
    ours = [label for label in found if label.startswith("backnorm, float32")]
    peers = [label for label in found if not label.startswith("backnorm")]
    for name, one, peer in itertools.product(TITLES, ours, peers):
        for (plane, ratio), cell in found[one].items():
            mine, other = getattr(cell, name)[1], getattr(found[peer][plane, ratio], name)[1]
            if mine >= other:
                where = f"{name}, {plane} x {plane}, mean/deviation {ratio:g}"
                yield f"{where}: {one} {mine:.3g}, {peer} {other:.3g}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure everyone, and print the tables; who cannot take part is said on standard error."""
    parser = argparse.ArgumentParser(description="How far off everyone's float32 gradients are.")
    parser.add_argument("--planes", action="store_true", help="a table for each size of planes")
    planes = parser.parse_args().planes
    found: Found = {}
    for entry in ENTRIES:
        try:
            found[entry[0]] = {(plane, ratio): each for plane, ratio, each in measured(entry)}
        except ChildEndedError as error:
            print(f"{entry[0]}: {error}", file=sys.stderr)
    print("\n".join(tables(found, planes=planes)))
    for line in larger(found):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].isdecimal():
        serve_parent(serve)
    else:
        main()
