"""What is measured: models with the size of their images, and who trains them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from benchmarks.model import Timing

__all__ = [
    "BATCHES",
    "FRAMEWORKS",
    "LAYOUTS",
    "MODELS",
    "PRECISIONS",
    "VARIANTS",
    "Batch",
    "Case",
    "Framework",
    "Layout",
    "Outcome",
    "Precision",
    "Row",
    "Variant",
    "cases",
]

Batch = Literal["small", "large"]
Layout = Literal["contiguous", "channels_last"]
Precision = Literal["float32", "bfloat16"]

#: Whose layers, and whether `torch.compile` compiled the model. Fused: with ReLU and addition in
#: the layer (`convert(fuse=True)`, or `activation="relu"`). float32: with ``arithmetic="float32"``.
_OfTorch = Literal[
    "torch",
    "backnorm",
    "backnorm-fused",
    "torch-compiled",
    "backnorm-compiled",
    "backnorm-fused-compiled",
]
_OfFlax = Literal[
    "flax", "backnorm", "backnorm-fused", "backnorm-float32", "backnorm-fused-float32"
]
_OfKeras = Literal["keras", "backnorm", "backnorm-float32"]
Variant = Literal[_OfTorch, _OfFlax, _OfKeras]


@dataclass(frozen=True, slots=True)
class Framework:
    """Who trains.

    Attributes
    ----------
    module : str
        Its training steps: `Trainer` (see `steps`), and `start`.
    variants : tuple of str
        What is compared in it; the first is its own layers, which all others are beside.
    layouts, precisions : tuple of str
        What its models are trained in.
    """

    module: str
    variants: tuple[Variant, ...]
    layouts: tuple[Layout, ...]
    precisions: tuple[Precision, ...]


BATCHES: tuple[Batch, ...] = get_args(Batch)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
VARIANTS: tuple[Variant, ...] = get_args(Variant)

FRAMEWORKS: dict[str, Framework] = {
    "torch": Framework("benchmarks.models.of_torch", get_args(_OfTorch), LAYOUTS, PRECISIONS),
    # Compiled as a whole by XLA, and by TensorFlow without it.
    "flax": Framework(
        "benchmarks.models.of_flax", get_args(_OfFlax), ("channels_last",), ("float32",)
    ),
    "keras": Framework(
        "benchmarks.models.of_keras", get_args(_OfKeras), ("channels_last",), ("float32",)
    ),
}

_FRAMEWORK_OF = {"torchvision": "torch", "timm": "torch", "flax": "flax", "keras": "keras"}

#: Library, and shapes of inputs as (N, C, ...), whatever their layout: a small batch, of 8 at
#: 160 x 160, and a large one, of 16 at 224 x 224; of videos and of segmentation, which take longer,
#: a small one alone.
MODELS: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
    "resnet18": ("torchvision", ((8, 3, 160, 160), (16, 3, 224, 224))),
    "resnet50": ("torchvision", ((8, 3, 160, 160), (16, 3, 224, 224))),
    "densenet121": ("torchvision", ((8, 3, 160, 160), (16, 3, 224, 224))),
    "inception_v3": ("torchvision", ((8, 3, 160, 160), (16, 3, 224, 224))),
    "mobilenet_v2": ("torchvision", ((8, 3, 160, 160), (16, 3, 224, 224))),
    "mobilenet_v3_large": ("torchvision", ((8, 3, 160, 160), (16, 3, 224, 224))),
    "r3d_18": ("torchvision", ((2, 3, 8, 112, 112),)),
    "deeplabv3_resnet50": ("torchvision", ((2, 3, 160, 160),)),
    "efficientnet_b0": ("timm", ((8, 3, 160, 160), (16, 3, 224, 224))),
    "regnety_008": ("timm", ((8, 3, 160, 160), (16, 3, 224, 224))),
    # Those of small images have a stem without a stride, as for CIFAR.
    "flax-resnet18": ("flax", ((16, 3, 32, 32), (8, 3, 160, 160))),
    "keras-resnet50": ("keras", ((4, 3, 96, 96), (8, 3, 160, 160))),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a batch.

    Attributes
    ----------
    model : str
    shape : tuple of int
        Of the inputs.
    layout : {"contiguous", "channels_last"}
        Of inputs and weights.
    precision : {"float32", "bfloat16"}
        bfloat16: under autocast.
    """

    model: str
    shape: tuple[int, ...]
    layout: Layout
    precision: Precision

    @property
    def framework(self) -> Framework:
        """Who trains it."""
        return _framework_of(self.model)

    def variants(self, wanted: Sequence[Variant]) -> tuple[Variant, ...]:
        """Return which of these there are in its framework, its own layers first, asked for or not.

        Nobody is judged or timed without those.
        """
        own, *others = self.framework.variants
        return (own, *(each for each in wanted if each in others))

    def __str__(self) -> str:
        """Return the case as a short line."""
        shape = "x".join(map(str, self.shape))
        return f"{self.model} {shape} {self.layout} {self.precision}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a variant in a case.

    Attributes
    ----------
    variant : str
    detail : str
        Why there is no timing; empty if there is.
    step : Timing, optional
        Seconds of a training step.
    ratio : float, optional
        Of the time of a step to that of the framework's own in the same turns: the median.
    normalization : float, optional
        Seconds of a step in batch normalisation, activations and additions; of eager ones.
    error : float, optional
        Of the gradients of all parameters: distance from those in float64, relative to those.
    memory : int, optional
        Bytes by which resident memory grows in steps, in a process of its own; of eager ones.
    layers : int
        How many layers of batch normalisation are ours.
    """

    variant: Variant
    detail: str = ""
    step: Timing | None = None
    ratio: float | None = None
    normalization: float | None = None
    error: float | None = None
    memory: int | None = None
    layers: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A case, with what became of all variants."""

    case: Case
    outcomes: tuple[Outcome, ...]


def cases(
    models: Sequence[str],
    layouts: Sequence[Layout],
    precisions: Sequence[Precision],
    batches: Sequence[Batch],
) -> Iterator[Case]:
    """Yield the cases of models."""
    for model in models:
        _, shapes = MODELS[model]
        framework = _framework_of(model)
        # A model of one shape has no large batch.
        sizes = dict(zip(BATCHES, shapes, strict=False))
        for shape in (sizes[batch] for batch in batches if batch in sizes):
            for layout in (each for each in layouts if each in framework.layouts):
                for precision in (each for each in precisions if each in framework.precisions):
                    yield Case(model, shape, layout, precision)


def _framework_of(model: str) -> Framework:
    library, _ = MODELS[model]
    return FRAMEWORKS[_FRAMEWORK_OF[library]]
