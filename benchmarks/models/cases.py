"""The cases of `models`: models with the size of their images, and each framework's variants."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["ALLOCATORS", "BATCHES", "FRAMEWORKS", "LAYOUTS", "MODELS", "PRECISIONS", "VARIANTS",
           "Case", "Framework", "cases"]  # fmt: skip

BATCHES = ("small", "large")
LAYOUTS = ("contiguous", "channels_last")
PRECISIONS = ("float32", "bfloat16")
ALLOCATORS = ("keeping", "default", "huge")


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework whose training steps are timed.

    Attributes
    ----------
    module : str
        The module of its training steps, with `Trainer` (see `steps`) and `start`.
    variants : tuple of str
        The first has the framework's own layers, which all others are compared with. fused: ReLU
        and addition in the layer. float32: with ``arithmetic="float32"``. compiled: the model is
        compiled by `torch.compile`.
    layouts, precisions : tuple of str
    """

    module: str
    variants: tuple[str, ...]
    layouts: tuple[str, ...] = ("channels_last",)
    precisions: tuple[str, ...] = ("float32",)


FRAMEWORKS = {
    "torch": Framework(
        "benchmarks.models.of_torch",
        ("torch", "backnorm", "backnorm-fused",
         "torch-compiled", "backnorm-compiled", "backnorm-fused-compiled"),
        LAYOUTS,
        PRECISIONS,
    ),
    # flax: each step is compiled as a whole by XLA. Keras: a TensorFlow graph, without XLA.
    "flax": Framework(
        "benchmarks.models.of_flax",
        ("flax", "backnorm", "backnorm-fused", "backnorm-float32", "backnorm-fused-float32"),
    ),
    "keras": Framework("benchmarks.models.of_keras", ("keras", "backnorm", "backnorm-float32")),
}  # fmt: skip

VARIANTS = tuple(dict.fromkeys(name for each in FRAMEWORKS.values() for name in each.variants))

_FRAMEWORK_OF = {"torchvision": "torch", "timm": "torch", "flax": "flax", "keras": "keras"}

# Shapes of inputs as (N, C, ...) in every layout: a small batch and a large one.
_IMAGES = ((8, 3, 160, 160), (16, 3, 224, 224))

#: Library and shapes of inputs. Videos and segmentation take longer, so they have only a small
#: batch.
MODELS: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
    "resnet18": ("torchvision", _IMAGES),
    "resnet50": ("torchvision", _IMAGES),
    "densenet121": ("torchvision", _IMAGES),
    "inception_v3": ("torchvision", _IMAGES),
    "mobilenet_v2": ("torchvision", _IMAGES),
    "mobilenet_v3_large": ("torchvision", _IMAGES),
    "r3d_18": ("torchvision", ((2, 3, 8, 112, 112),)),
    "deeplabv3_resnet50": ("torchvision", ((2, 3, 160, 160),)),
    "efficientnet_b0": ("timm", _IMAGES),
    "regnety_008": ("timm", _IMAGES),
    # On small images this model has a stem without a stride, as for CIFAR.
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
        The shape of the inputs.
    layout : {"contiguous", "channels_last"}
        The layout of inputs and weights.
    precision : {"float32", "bfloat16"}
        bfloat16: under autocast.
    allocator : {"keeping", "default", "huge"}
        glibc's allocator: with settings that keep freed memory, with its defaults, or with settings
        that keep freed memory in huge pages.
    """

    model: str
    shape: tuple[int, ...]
    layout: str
    precision: str
    allocator: str = "keeping"

    @property
    def framework(self) -> Framework:
        """The framework of the model."""
        return FRAMEWORKS[_FRAMEWORK_OF[MODELS[self.model][0]]]

    def variants(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Return the framework's own layers, and the wanted variants that the framework has."""
        own, *others = self.framework.variants
        return (own, *(each for each in others if each in wanted))

    def __str__(self) -> str:
        """Return the case as a short line."""
        size = "x".join(map(str, self.shape))
        return f"{self.model} {size} {self.layout} {self.precision} {self.allocator}"


def cases(
    models: Sequence[str],
    layouts: Sequence[str],
    precisions: Sequence[str],
    batches: Sequence[str],
    allocators: Sequence[str] = ALLOCATORS[:1],
) -> Iterator[Case]:
    """Yield the cases of models."""
    for model in models:
        sizes = dict(zip(BATCHES, MODELS[model][1], strict=False))
        shapes = [sizes[batch] for batch in batches if batch in sizes]
        for settings in itertools.product(shapes, layouts, precisions, allocators):
            case = Case(model, *settings)
            framework = case.framework
            if case.layout in framework.layouts and case.precision in framework.precisions:
                yield case
