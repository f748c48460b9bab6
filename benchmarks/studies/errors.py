"""Measure the errors of results: the tables of docs/measurements/errors.md.

Each contestant of `operator` computes gradients in its own process, from the same arrays and
statistics. ``--compiled``: layers of PyTorch and ours under `torch.compile`, each with the
statistics that it computes itself. ``--second``: the gradients of the backward pass.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import backnorm
from backnorm import ArgumentError, reference
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import GRADIENTS, ulp_error
from backnorm.dtypes import FLOAT32, FLOAT64
from benchmarks.accuracy import Truth, truth_of
from benchmarks.cells import OURS, OURS_IN_FLOAT32, Cell, Layout
from benchmarks.child import Child, ChildEndedError, serve_parent
from benchmarks.peers import CONTESTANTS
from benchmarks.peers.base import Data, Missing, Unsupported
from benchmarks.studies import arguments, show
from benchmarks.worker import load

__all__ = ["PLANES", "RATIOS", "Errors", "compiled", "errors_of", "exact_gradients", "gradients_of",
           "make", "measured", "second_order", "tables"]  # fmt: skip

#: Elements of a side of a plane, and mean over standard deviation.
PLANES, RATIOS = (7, 14, 28, 56, 112), (1.0, 1e2, 1e4)

# Samples and channels.
_SAMPLES, _CHANNELS = 16, 16

#: Title, name of the contestant, and layout.
ENTRIES = (
    ("backnorm, float64", OURS, "NCX"), ("backnorm, float32, NCX", OURS_IN_FLOAT32, "NCX"),
    ("backnorm, float32, NXC", OURS_IN_FLOAT32, "NXC"), ("PyTorch, contiguous", "torch", "NCX"),
    ("PyTorch, channels_last", "torch", "NXC"), ("TensorFlow, NHWC", "tensorflow", "NXC"),
    ("oneDNN, NCHW", "onednn", "NCX"), ("oneDNN, NHWC", "onednn", "NXC"),
    ("JAX, NCHW", "jax", "NCX"), ("JAX, NHWC", "jax", "NXC"),
)  # fmt: skip

#: Largest error and root mean square by quantity: dx in units in the last place of the exact
#: element, and each result in units of 2**-24 T, where T is the sum of the magnitudes of its terms.
Errors = dict[str, tuple[float, float]]

#: Errors by title, plane and ratio.
Found = Mapping[str, Mapping[tuple[int, float], Errors]]


def make(plane: int, ratio: float, layout: str) -> Data:
    """Return the arrays of a cell, with the same values in both layouts."""
    rng = np.random.default_rng([plane, int(ratio)])
    layer = realistic_data((_SAMPLES, _CHANNELS, plane, plane), FLOAT32, rng=rng, ratio=ratio)
    x, dy = layer.x, layer.dy
    if layout == "NXC":
        x, dy = (np.ascontiguousarray(np.moveaxis(array, 1, -1)) for array in (x, dy))
    channels = layer.mean, layer.variance, layer.gamma, layer.beta
    return Data(x, dy, *channels, layer.epsilon, layout, out=np.empty_like(x))


def exact_gradients(data: Data, *, takes_inverse: bool) -> Truth:
    """Return the exact gradients for the arrays that a contestant gets.

    PyTorch gets 1/sqrt(variance + epsilon) rounded to float32. If `takes_inverse`, the variance is
    computed from that number.
    """
    variance, epsilon = data.variance, data.epsilon
    if takes_inverse:
        inverse = (1.0 / np.sqrt(variance.astype(FLOAT64) + epsilon)).astype(FLOAT32)
        variance, epsilon = 1.0 / inverse.astype(FLOAT64) ** 2, 0.0
    inputs = data.x, data.dy, data.mean, variance, data.gamma
    exact = reference.backward(*inputs, epsilon=epsilon, data_format=data.data_format)
    return truth_of(exact, GRADIENTS)


def errors_of(results: Mapping[str, np.ndarray], truth: Truth) -> Errors:
    """Return the errors of results."""
    found = {"dx in ulp": _summary(ulp_error(results["dx"], truth["dx"][0], FLOAT32))}
    for name, (exact, terms) in truth.items():
        lost = np.abs((results[name].astype(FLOAT64) - exact.hi) - exact.lo)
        found[f"{name} in 2⁻²⁴ T"] = _summary(lost / (terms * 2.0**-24))
    return found


def _summary(errors: np.ndarray) -> tuple[float, float]:
    return float(errors.max()), float(np.sqrt(np.square(errors).mean()))


def measured(name: str, layout: str) -> Iterator[tuple[tuple[int, float], Errors]]:
    """Yield the errors of a contestant, which runs in its own process.

    Raises
    ------
    ChildEndedError
    """
    with gradients_of(name) as gradients:
        for plane, ratio in itertools.product(PLANES, RATIOS):
            data = make(plane, ratio, layout)
            exact = exact_gradients(data, takes_inverse=name == "torch")
            yield (plane, ratio), errors_of(gradients(data), exact)


@contextmanager
def gradients_of(
    name: str, variables: Mapping[str, str] | None = None
) -> Iterator[Callable[[Data], dict[str, np.ndarray]]]:
    """Yield a function that returns a contestant's gradients for float32 data.

    The contestant runs in its own process, with `variables` in its environment. The function raises
    ChildEndedError if the contestant has no gradients.
    """
    child = Child("benchmarks.studies.errors", variables)

    def gradients(data: Data) -> dict[str, np.ndarray]:
        results: dict[str, np.ndarray] | str = child.ask("results", CONTESTANTS["cpu"][name], data)
        if isinstance(results, str):
            raise ChildEndedError(results)
        return results

    try:
        yield gradients
    finally:
        child.stop()


class Work:
    """The process of a contestant."""

    def results(self, place: str, data: Data) -> object:
        """Return the contestant's gradients, or the reason why there are none."""
        try:
            contestant = load(place)()
            contestant.start(2)
            shape = tuple(np.moveaxis(data.x, data.channel_axis, 1).shape)
            layout: Layout = "NXC" if data.data_format == "NXC" else "NCX"
            cell = Cell("", "backward", shape, layout, "float32")
            prepared = next(iter(contestant.prepare(cell, data).values()))
            found = prepared.results(prepared.call())
            return {name: np.array(found[name]) for name in GRADIENTS}
        except (Missing, Unsupported, ArgumentError) as error:
            return str(error)


def compiled(planes: Iterable[int], ratios: Iterable[float]) -> Found:
    """Return the errors of compiled layers, ours and PyTorch's, by title, plane and ratio."""
    import torch

    import backnorm.torch

    formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    functions = {"PyTorch": torch.nn.functional.batch_norm, "backnorm": backnorm.torch.batch_norm}
    found: dict[str, dict[tuple[int, float], Errors]] = {}
    for plane, (name, function) in itertools.product(planes, functions.items()):
        # Compile for one shape, because code for dynamic shapes is different.
        torch._dynamo.reset()
        run = torch.compile(function, dynamic=False)
        for ratio, (layout, memory) in itertools.product(ratios, formats.items()):
            data = make(plane, ratio, "NCX")
            exact = reference.forward(data.x, data.gamma, data.beta, epsilon=1e-5)
            moments = exact.mean.hi, exact.variance.hi
            backward = reference.backward(data.x, data.dy, *moments, data.gamma, epsilon=1e-5)
            truth = {**truth_of(backward, GRADIENTS), **truth_of(exact, ["y"])}
            x, dy = (
                torch.tensor(each).contiguous(memory_format=memory) for each in (data.x, data.dy)
            )
            operands = [x, *map(torch.tensor, (data.gamma, data.beta))]
            x, weight, bias = (each.requires_grad_() for each in operands)
            y = run(x, None, None, weight, bias, True, 0.1, 1e-5)
            gradients = torch.autograd.grad(y, (x, weight, bias), dy)
            results = dict(zip(GRADIENTS, (each.numpy() for each in gradients), strict=True))
            results["y"] = y.detach().numpy()
            found.setdefault(f"{layout}, {name}", {})[plane, ratio] = errors_of(results, truth)
    return found


def second_order() -> Iterator[Sequence[object]]:
    """Yield the largest errors of gradients of the backward pass, in multiples of u T.

    u is the unit roundoff of the type.
    """
    yield "", "type", "x", "dy", "gamma"
    for (label, function), dtype in itertools.product(_SECOND.items(), (FLOAT32, FLOAT64)):
        rng = np.random.default_rng(0)
        data = realistic_data((32, 16, 14, 14), dtype, rng=rng)
        shapes = {"ddx": data.x.shape, "ddgamma": data.gamma.shape, "ddbeta": data.gamma.shape}
        by: dict[str, Any] = {
            name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()
        }
        inputs = data.backward_inputs
        x, dy, mean, variance, gamma = inputs
        exact = reference.double_backward(x, dy, mean, variance, gamma, **by, **data.options)
        errors = []
        gradients = function(inputs, by, data.epsilon)
        for name, actual in zip(("x", "dy", "gamma"), gradients, strict=True):
            value, terms = getattr(exact, name), getattr(exact, f"{name}_terms")
            lost = np.abs((actual.astype(FLOAT64) - value.hi) - value.lo)
            errors.append(f"{(lost / (np.finfo(dtype).eps / 2 * terms)).max():.2g}")
        yield label, dtype, *errors


def _second_of_torch(
    inputs: Sequence[np.ndarray], by: Mapping[str, np.ndarray], epsilon: float
) -> Iterable[np.ndarray]:
    import torch

    x, dy, mean, variance, gamma = map(torch.tensor, inputs)
    inverse = (1 / torch.sqrt(variance.double() + epsilon)).to(variance.dtype)
    leaves = [each.requires_grad_() for each in (x, dy, gamma)]
    gradients = torch.ops.aten.native_batch_norm_backward(
        dy, x, gamma, None, None, mean, inverse, True, epsilon, [True, True, True]
    )
    found = torch.autograd.grad(gradients, leaves, [torch.tensor(each) for each in by.values()])
    return [each.numpy() for each in found]


#: Functions of the second order: from the operands of the backward pass and the gradients of its
#: results to the gradients of x, dy and gamma.
_SECOND: dict[str, Callable[..., Iterable[np.ndarray]]] = {
    "PyTorch": _second_of_torch,
    "backnorm": lambda inputs, by, epsilon: backnorm.batch_norm_double_backward(
        *inputs, **by, epsilon=epsilon
    ),
}


def tables(found: Found) -> Iterator[str]:
    """Yield the lines of a table for each ratio, over all planes."""
    titles = list(next(iter(next(iter(found.values())).values())))
    sides = ", ".join(f"{plane} x {plane}" for plane in PLANES)
    for ratio in RATIOS:
        yield f"Mean over standard deviation {ratio:g}, planes of {sides}:\n"
        yield f"| | {' | '.join(titles)} |\n{'|---' * (1 + len(titles))}|"
        for label, cells in found.items():
            values = []
            for title in titles:
                most, squares = zip(*(cells[plane, ratio][title] for plane in PLANES), strict=True)
                values.append(f"{max(most):.3g}, {np.sqrt(np.mean(np.square(squares))):.2g}")
            yield f"| {label} | {' | '.join(values)} |"
        yield ""


def main() -> None:
    """Measure all, and print the tables; name contestants that cannot run on standard error."""
    options = arguments(__doc__, compiled=False, second=False)
    if options.second:
        show(second_order())
        return
    found = dict(compiled(PLANES, RATIOS) if options.compiled else {})
    for title, name, layout in () if options.compiled else ENTRIES:
        try:
            found[title] = dict(measured(name, layout))
        except ChildEndedError as error:
            print(f"{title}: {error}", file=sys.stderr)
    print("\n".join(tables(found)))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].isdecimal():
        serve_parent(Work())
    else:
        main()
