"""How far off compiled layers are: ``python -m benchmarks.models.errors``, by hand.

PyTorch's function and ours under `torch.compile` with Inductor, each with the statistics that it
computes itself, beside the exact results of the same arrays. A table in Markdown, that of
docs/explanation/exactness.md, goes to standard output, and where ours is not nearer to standard
error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

import backnorm.torch
from backnorm import reference
from backnorm.dtypes import FLOAT64
from benchmarks.errors import PLANES, RATIOS, errors_of, make

__all__ = ["Found", "measured", "nearer"]

EPSILON = 1e-5

#: Root mean squares by quantity: dx in ulp, and all in 2**-24 of the magnitudes of their terms.
Errors = dict[str, float]
#: By ratio of mean to deviation, memory format, plane and whose they are.
Found = dict[tuple[float, str, int, str], Errors]

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def _theirs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.batch_norm(x, None, None, weight, bias, True, 0.1, EPSILON)


def _ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return backnorm.torch.batch_norm(x, None, None, weight, bias, True, 0.1, EPSILON)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {"PyTorch": _theirs, "backnorm": _ours}


def measured(planes: tuple[int, ...] = PLANES, ratios: tuple[float, ...] = RATIOS) -> Found:
    """Return the errors of both in every cell."""
    found: Found = {}
    for plane in planes:
        for name, function in FUNCTIONS.items():
            # Of one shape: one that varies is another program.
            torch._dynamo.reset()
            run = torch.compile(function, dynamic=False)
            for ratio in ratios:
                for layout in _FORMATS:
                    found[ratio, layout, plane, name] = _errors(run, plane, ratio, layout)
    return found


def nearer(found: Found) -> Iterator[str]:
    """Yield a line for each error of ours that is not the smaller one."""
    for (ratio, layout, plane, name), mine in found.items():
        theirs = found[ratio, layout, plane, "PyTorch"]
        for quantity, error in mine.items():
            if name == "backnorm" and error >= theirs[quantity]:
                where = f"{quantity}, {plane} x {plane}, {layout}, mean/deviation {ratio:g}"
                yield f"{where}: {error:.3g}, PyTorch {theirs[quantity]:.3g}"


def _errors(run: Callable[..., Tensor], plane: int, ratio: float, layout: str) -> Errors:
    data = make(plane, ratio, "NCX")
    exact = reference.forward(data.x, data.gamma, data.beta, epsilon=EPSILON)
    statistics = exact.mean.hi, exact.variance.hi
    gradients = reference.backward(data.x, data.dy, *statistics, data.gamma, epsilon=EPSILON)
    x, dy = (
        torch.tensor(each).contiguous(memory_format=_FORMATS[layout]) for each in (data.x, data.dy)
    )
    inputs = [each.requires_grad_() for each in (x, *map(torch.tensor, (data.gamma, data.beta)))]
    y = run(*inputs)
    dx, dgamma, dbeta = (each.numpy() for each in torch.autograd.grad(y, inputs, dy))
    off = errors_of({"dx": dx, "dgamma": dgamma, "dbeta": dbeta}, gradients)
    lost = np.abs((y.detach().numpy().astype(FLOAT64) - exact.y.hi) - exact.y.lo)
    of_y = float(np.sqrt(np.square(lost / (exact.y_terms * 2.0**-24)).mean()))
    return {
        "y": of_y,
        "dx": off.dx_terms[1],
        "dx in ulp": off.dx[1],
        "dgamma": off.dgamma[1],
        "dbeta": off.dbeta[1],
    }


def main() -> None:
    """Measure both, and print the table."""
    found = measured()
    quantities = list(next(iter(found.values())))
    print(f"| mean/deviation | | | {' | '.join(quantities)} |")
    print("|---" * (3 + len(quantities)) + "|")
    for ratio in RATIOS:
        for layout in _FORMATS:
            for name in FUNCTIONS:
                cells = [found[ratio, layout, plane, name] for plane in PLANES]
                means = [np.sqrt(np.mean([each[q] ** 2 for each in cells])) for q in quantities]
                texts = " | ".join(f"{mean:.2g}" for mean in means)
                print(f"| {ratio:g} | {layout} | {name} | {texts} |")
    for line in nearer(found):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
