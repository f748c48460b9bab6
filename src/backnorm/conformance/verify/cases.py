"""The cases that subjects are run on."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from backnorm.conformance.battery import Case, cases
from backnorm.conformance.data import realistic_data
from backnorm.conformance.diagnosis import diagnostic_data
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, is_16_bit

__all__ = ["DTYPES", "LAYOUTS", "TIERS", "Selection", "selected"]

#: Element types by the names of the command.
DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16, "float64": FLOAT64}
LAYOUTS = ("NCX", "NXC")
TIERS = ("smoke", "full")

# Shapes (N, C, space) of layers: ResNet-50, Inception-v3, DenseNet-121, MobileNet, 3-D U-Net, 2-D.
_NETWORKS = {
    "resnet50": (8, 256, 28, 28),
    "resnet50-last": (16, 2048, 7, 7),
    "inception": (4, 192, 35, 35),
    "densenet": (8, 1024, 14, 14),
    "mobilenet": (8, 96, 56, 56),
    "unet3d": (1, 32, 24, 32, 32),
    "linear": (256, 1000),
}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which cases are run.

    Attributes
    ----------
    tier : {"smoke", "full"}
    dtypes, layouts : tuple of str
    only, skip : tuple of str
        Patterns of case names, as of a shell; `only` empty: all.
    seed : int
    """

    tier: str = "smoke"
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    layouts: tuple[str, ...] = LAYOUTS
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    seed: int = 0

    def takes(self, name: str) -> bool:
        """Whether the patterns let a case through."""
        matched = not self.only or _matches(name, self.only)
        return matched and not _matches(name, self.skip)


def selected(selection: Selection) -> Iterator[Case]:
    """Yield the cases of a selection, always in the same order with the same values.

    The first cases of each type and layout are those in which mistakes have a name.
    """
    for case in _of_tier(selection):
        x = case.data.x
        if str(x.dtype) not in selection.dtypes or case.data.data_format not in selection.layouts:
            continue
        if selection.takes(case.name):
            yield case


def _of_tier(selection: Selection) -> Iterator[Case]:
    for dtype in DTYPES.values():
        for layout in LAYOUTS:
            data = diagnostic_data(dtype, data_format=layout, seed=selection.seed)
            types = f"{dtype}-{data.mean.dtype}-{layout}"
            yield Case(f"diagnostic-{types}", data)
            yield Case(f"diagnostic-frozen-{types}", data, training=False)
    for case in cases(selection.seed):
        # Statistics of 16 bits are a convention of few; the default is float32 beside them.
        if selection.tier == "full" or not is_16_bit(case.data.mean.dtype):
            yield case
    if selection.tier == "full":
        yield from _of_networks(selection.seed)


def _of_networks(seed: int) -> Iterator[Case]:
    rng = np.random.default_rng(seed + 1)
    for dtype in DTYPES.values():
        for layout in LAYOUTS:
            for name, shape in _NETWORKS.items():
                ordered = shape if layout == "NCX" else (shape[0], *shape[2:], shape[1])
                data = realistic_data(ordered, dtype, data_format=layout, rng=rng)
                types = f"{dtype}-{data.mean.dtype}-{layout}"
                yield Case(f"{name}-{types}", data)
            large = (64, 4, 56, 56) if layout == "NCX" else (64, 56, 56, 4)
            data = realistic_data(large, dtype, data_format=layout, rng=rng)
            one_sign = replace(data, dy=np.abs(data.dy))
            types = f"{dtype}-{data.mean.dtype}-{layout}"
            yield Case(f"sums-of-one-sign-{types}", one_sign)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
