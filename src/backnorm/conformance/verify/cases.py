"""The cases on which `verify` runs the functions that it judges."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from backnorm.conformance.battery import Case, cases
from backnorm.conformance.data import in_layout, realistic_data
from backnorm.conformance.diagnosis import diagnostic_data, forward_diagnostic_data
from backnorm.conformance.forward_battery import has_forward, of_backward
from backnorm.conformance.verify.operations import OperationName
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, is_16_bit
from backnorm.errors import ArgumentValueError

__all__ = ["DTYPES", "LAYOUTS", "TIERS", "Selection", "selected"]

#: The element types by their names on the command line.
DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16, "float64": FLOAT64}
LAYOUTS = ("NCX", "NXC")
TIERS = ("smoke", "full")

# Shapes (N, C, spatial axes) of layers of ResNet-50, Inception-v3, DenseNet-121, MobileNet and a
# 3-D U-Net, and of a layer after a fully connected layer.
_NETWORKS = {
    "resnet50": (8, 256, 28, 28),
    "resnet50-last": (16, 2048, 7, 7),
    "inception": (4, 192, 35, 35),
    "densenet": (8, 1024, 14, 14),
    "mobilenet": (8, 96, 56, 56),
    "unet3d": (1, 32, 24, 32, 32),
    "linear": (256, 1000),
}
# Sizes (N, C, space) of cases with long sums. Only with so many terms do the error bounds of the
# ladder's rungs differ from each other (docs/tolerance.md).
_LONG_SUMS = (16, 32, 256)
_LONGER_SUMS = (64, 8, 1024), (1, 2, 1 << 20)

# The case that `Selection.huge` adds repeats the channels of small data many times. These are the
# sizes (N, C, space) of the small data.
_HUGE = (1, 64, 1 << 12)


@dataclass(frozen=True, slots=True)
class Selection:
    """The selection of cases to run.

    Attributes
    ----------
    tier : {"smoke", "full"}
    dtypes, layouts : tuple of str
    only, skip : tuple of str
        Shell patterns for the names of cases. If `only` is empty, all cases are selected.
    seed : int
    shapes : tuple of tuple of int
        Shapes (N, C, space) of cases with random data, which replace the cases of a tier.
    operation : {"backward", "forward"}
    huge : int
        A further case of bfloat16 has more elements than this; 0: no such case.
    """

    tier: str = "smoke"
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    layouts: tuple[str, ...] = LAYOUTS
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    seed: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    operation: OperationName = "backward"
    huge: int = 0

    def takes(self, name: str) -> bool:
        """Whether the patterns `only` and `skip` select the case with this name."""
        matched = not self.only or _matches(name, self.only)
        return matched and not _matches(name, self.skip)


def check_names(argument: str, names: Sequence[str], known: Collection[str]) -> None:
    """Raise an error that lists the known names if a name is not one of them."""
    for name in names:
        if name not in known:
            accepted = ", ".join(known)
            raise ArgumentValueError(argument, "unknown", came=repr(name), accepted=accepted)


def selected(selection: Selection) -> Iterator[Case]:
    """Yield the cases of a selection, always in the same order with the same values.

    The first cases of a tier are the diagnostic cases, from whose results `verify` can name a
    mistake.
    """
    for found in _of_shapes(selection) if selection.shapes else _of_tier(selection):
        case = of_backward(found) if selection.operation == "forward" else found
        x = case.data.x
        if str(x.dtype) not in selection.dtypes or case.data.data_format not in selection.layouts:
            continue
        if selection.takes(case.name):
            yield case


def _of_shapes(selection: Selection) -> Iterator[Case]:
    rng = np.random.default_rng(selection.seed)
    for dtype in DTYPES.values():
        for layout in LAYOUTS:
            for shape in selection.shapes:
                name = f"shape-{'x'.join(map(str, shape))}"
                yield _of_layer(name, shape, dtype, layout, rng)


def _of_layer(
    name: str, shape: tuple[int, ...], dtype: np.dtype, layout: str, rng: np.random.Generator
) -> Case:
    """Return a case of a given shape; `shape` is in the order N, C, space, for NXC, too."""
    data = realistic_data(in_layout(shape, layout), dtype, data_format=layout, rng=rng)
    return Case(f"{name}-{dtype}-{data.mean.dtype}-{layout}", data)


def _of_tier(selection: Selection) -> Iterator[Case]:
    forward = selection.operation == "forward"
    for dtype in DTYPES.values():
        for layout in LAYOUTS:
            diagnostic = forward_diagnostic_data if forward else diagnostic_data
            data = diagnostic(dtype, data_format=layout, seed=selection.seed)
            types = f"{dtype}-{data.mean.dtype}-{layout}"
            yield Case(f"diagnostic-{types}", data)
            if not forward:
                yield Case(f"diagnostic-frozen-{types}", data, training=False)
    for case in cases(selection.seed):
        if forward and not has_forward(case):
            continue
        # Few implementations have 16-bit statistics, so the smoke tier leaves them out.
        if selection.tier == "full" or not is_16_bit(case.data.mean.dtype):
            yield case
    yield from _of_long_sums(selection)
    if selection.huge:
        rng = np.random.default_rng(selection.seed + 3)
        case = _of_layer("beyond-int32", _HUGE, BFLOAT16, "NCX", rng)
        yield replace(case, repeats=selection.huge // case.data.x.size + 1)
    if selection.tier == "full":
        yield from _of_networks(selection.seed)


def _of_long_sums(selection: Selection) -> Iterator[Case]:
    rng = np.random.default_rng(selection.seed + 2)
    dtypes, shapes = [FLOAT32], [_LONG_SUMS]
    if selection.tier == "full":
        dtypes, shapes = list(DTYPES.values()), [_LONG_SUMS, *_LONGER_SUMS]
    for dtype in dtypes:
        for layout in LAYOUTS:
            for shape in shapes:
                count = math.prod(shape) // shape[1]
                yield _of_layer(f"sums-of-{count}", shape, dtype, layout, rng)


def _of_networks(seed: int) -> Iterator[Case]:
    rng = np.random.default_rng(seed + 1)
    for dtype in DTYPES.values():
        for layout in LAYOUTS:
            for name, shape in _NETWORKS.items():
                yield _of_layer(name, shape, dtype, layout, rng)
            case = _of_layer("sums-of-one-sign", (64, 4, 56, 56), dtype, layout, rng)
            yield replace(case, data=replace(case.data, dy=np.abs(case.data.dy)))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
