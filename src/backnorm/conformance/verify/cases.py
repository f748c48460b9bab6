"""The cases on which `verify` runs the functions that it judges."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backnorm.conformance import battery
from backnorm.conformance.axes import BATCH_NORM, Normalization
from backnorm.conformance.battery import Case, Recipe, Variant
from backnorm.conformance.data import LayerData, in_layout, realistic_data
from backnorm.conformance.diagnosis import (
    DIAGNOSTIC,
    FORWARD_DIAGNOSTIC,
    ROW_DIAGNOSTIC,
    diagnostic_data,
)
from backnorm.conformance.forward_battery import forward_recipe, has_forward
from backnorm.conformance.layers import has_layer, layer_recipe, layer_recipes
from backnorm.conformance.verify.draws import drawn, is_drawn
from backnorm.conformance.verify.grid import grid
from backnorm.conformance.verify.names import OperationName
from backnorm.conformance.verify.operations import OPERATIONS
from backnorm.dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    is_16_bit,
    statistics_types,
)
from backnorm.errors import ArgumentValueError
from backnorm.problem import channel_axis_of

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "TIERS",
    "Selection",
    "check_names",
    "has_case",
    "of_operation",
    "recipes",
    "selected",
    "variants_to_draw",
]

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

# The numbers of groups of group normalisation: the first that divides the channels of a case.
_GROUPS = 4, 3, 2, 1
# Sizes (N, C) of long rows, for normalisations whose rows are the channels of one place.
_LONG_ROWS = (4, 1 << 14)
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
        Shell patterns for the names of cases. If `only` is empty, all cases are selected. A name of
        a drawn case in `only` adds this case.
    seed : int
    shapes : tuple of tuple of int
        Shapes (N, C, space) of cases with random data, which replace the cases of a tier.
    operation : OperationName
    huge : int
        A further case of bfloat16 has more elements than this; 0: no such case. Only the backward
        and the forward pass of batch normalisation have it.
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

    def takes(self, recipe: Recipe) -> bool:
        """Whether the types, the layout and the name of a case are selected."""
        dtype, _, layout = recipe.variant
        if str(dtype) not in self.dtypes or layout not in self.layouts:
            return False
        matched = not self.only or _matches(recipe.name, self.only)
        return matched and not self.skips(recipe.name)

    def skips(self, name: str) -> bool:
        """Whether a pattern of `skip` matches the name of a case."""
        return _matches(name, self.skip)


def check_names(argument: str, names: Sequence[str], known: Collection[str]) -> None:
    """Raise an error that lists the known names if a name is not one of them."""
    for name in names:
        if name not in known:
            accepted = ", ".join(known)
            raise ArgumentValueError(argument, "unknown", came=repr(name), accepted=accepted)


def selected(selection: Selection) -> Iterator[Case]:
    """Draw the cases of a selection one after the other; see :func:`recipes`."""
    for recipe in recipes(selection):
        yield recipe.case(selection.seed)


def recipes(selection: Selection) -> Iterator[Recipe]:
    """Yield the recipes of the cases of a selection, always in the same order.

    The first cases of a tier are the diagnostic cases, from whose results `verify` can name a
    mistake.
    """
    named = [drawn(name) for name in selection.only if is_drawn(name) and "*" not in name]
    known = _of_shapes(selection) if selection.shapes else _of_tier(selection)
    huge = [_of_huge(selection.huge)] if selection.huge else []
    for recipe in itertools.chain(known, huge, named):
        if selection.takes(recipe) and has_case(recipe, selection.operation):
            yield of_operation(recipe, selection.operation)


def of_operation(recipe: Recipe, operation: OperationName) -> Recipe:
    """Return the recipe of an operation's case with the data of a backward case."""
    kind = OPERATIONS[operation].normalization
    if kind.has_groups:
        recipe = _in_groups(recipe, kind)
    elif kind != BATCH_NORM:
        recipe = replace(recipe, normalization=kind)
    if operation == "layer":
        return layer_recipe(recipe)
    return forward_recipe(recipe) if OPERATIONS[operation].is_forward else recipe


def has_case(recipe: Recipe, operation: OperationName) -> bool:
    """Whether the case of a backward pass of batch normalisation is one of an operation, too.

    All other normalisations have variable statistics, and exact data have only channels for rows.
    """
    if operation == "layer":
        return has_layer(recipe)
    kind = OPERATIONS[operation].normalization
    fits = recipe.variant.data_format in kind.layouts
    is_row = recipe.training and not recipe.purpose.startswith("exact")
    return kind == BATCH_NORM or (fits and is_row)


def _in_groups(recipe: Recipe, kind: Normalization) -> Recipe:
    """Return the recipe of a normalisation with groups that divide the channels of a case. If none
    does, and the name of the case has no sizes, the case has twice the channels.
    """
    axis = channel_axis_of(recipe.variant.data_format)
    shape, has_sizes = list(recipe.shape), re.search(r"-\d+x", recipe.purpose)
    if not has_sizes and all(shape[axis] % n for n in _GROUPS[:-1]):
        shape[axis] *= 2
    groups = next(n for n in _GROUPS if shape[axis] % n == 0)
    return replace(recipe, shape=tuple(shape), normalization=replace(kind, groups=groups))


def variants_to_draw(selection: Selection) -> list[Variant]:
    """Return the types and layouts of drawn cases, the simplest first."""
    variants = (
        Variant(dtype, statistics, layout)
        for dtype in map(DTYPES.__getitem__, selection.dtypes)
        for statistics in reversed(statistics_types(dtype))
        for layout in selection.layouts
        if layout in OPERATIONS[selection.operation].normalization.layouts
    )
    is_layer = selection.operation == "layer"
    return [
        each for each in variants
        if _is_in_tier(each, selection) and not (is_layer and each.data_format == "NXC")
    ]  # fmt: skip


def _is_in_tier(variant: Variant, selection: Selection) -> bool:
    # Few implementations have 16-bit statistics. In the smoke tier, only the grid's options have
    # them.
    return selection.tier == "full" or not is_16_bit(variant.statistics)


def _of_shapes(selection: Selection) -> Iterator[Recipe]:
    for variant in _variants():
        for shape in selection.shapes:
            yield _of_layer(f"shape-{'x'.join(map(str, shape))}", variant, shape)


def _variants() -> Iterator[Variant]:
    """Yield each element type in each layout; 16-bit types have statistics of float32."""
    for dtype in DTYPES.values():
        for layout in LAYOUTS:
            yield Variant(dtype, statistics_types(dtype)[-1], layout)


def _of_layer(purpose: str, variant: Variant, shape: tuple[int, ...], **settings: Any) -> Recipe:
    """Return a recipe of random data; `shape` is in the order N, C, space, for NXC, too."""
    return Recipe(purpose, variant, in_layout(shape, variant.data_format), **settings)


def _of_battery(selection: Selection) -> Iterator[Recipe]:
    forward = OPERATIONS[selection.operation].is_forward
    kind = OPERATIONS[selection.operation].normalization.name
    for variant in _variants():
        diagnostic: tuple[int, ...] = FORWARD_DIAGNOSTIC if forward else DIAGNOSTIC
        if kind in ROW_DIAGNOSTIC:
            diagnostic = in_layout(ROW_DIAGNOSTIC[kind], variant.data_format)
        yield Recipe("diagnostic", variant, diagnostic, _diagnostic)
        if not forward:
            yield Recipe("diagnostic-frozen", variant, diagnostic, _diagnostic, training=False)
    for recipe in battery.recipes():
        if _is_in_tier(recipe.variant, selection) and (has_forward(recipe) or not forward):
            yield recipe


def _of_tier(selection: Selection) -> Iterator[Recipe]:
    forward, full = OPERATIONS[selection.operation].is_forward, selection.tier == "full"
    yield from layer_recipes() if selection.operation == "layer" else _of_battery(selection)
    yield from grid(forward=forward)
    for variant in _variants():
        if full or variant.dtype == FLOAT32:
            for sizes in (_LONG_SUMS, *_LONGER_SUMS) if full else (_LONG_SUMS,):
                yield _of_layer(f"sums-of-{math.prod(sizes) // sizes[1]}", variant, sizes)
            if selection.operation.startswith(("layer-norm", "rms-norm")):
                yield _of_layer("sums-of-long-rows", variant, _LONG_ROWS)
    if full:
        for variant in _variants():
            for name, shape in _NETWORKS.items():
                yield _of_layer(name, variant, shape)
            yield _of_layer("sums-of-one-sign", variant, (64, 4, 56, 56), make=_of_one_sign)


def _of_huge(least: int) -> Recipe:
    repeats = least // math.prod(_HUGE) + 1
    return _of_layer("beyond-int32", Variant(BFLOAT16, FLOAT32, "NCX"), _HUGE, repeats=repeats)


def _diagnostic(shape: tuple[int, ...], *, rng: np.random.Generator, **options: Any) -> LayerData:
    return diagnostic_data(shape=shape, seed=rng, **options)


def _of_one_sign(*arguments: Any, **options: Any) -> LayerData:
    data = realistic_data(*arguments, **options)
    return replace(data, dy=np.abs(data.dy))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
