"""Training steps with PyTorch, eager and compiled; eager steps can be profiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import backnorm
from backnorm.torch.training import TrainingStep, disable_dropout, in_layout, lay_out
from benchmarks.models import libraries
from benchmarks.models.cases import MODELS, Case
from benchmarks.models.steps import CLASSES

__all__ = ["Trainer", "start"]

# The number of profiled steps of a process.
_PROFILED = 3


def start(threads: int) -> dict[str, str]:
    """Limit this process to `threads` threads; return versions of packages."""
    torch.set_num_threads(threads)
    backnorm.set_num_threads(threads)
    torchvision, timm = libraries.torchvision(), libraries.timm()
    return {
        "backnorm": backnorm.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
    }


class Trainer:
    """See `steps.Trainer`."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._model, self._x = _made(case)

    def step(self, variant: str) -> _Step:
        """Return a step of a variant."""
        return _Step(self._case.precision, variant, copy.deepcopy(self._model), self._x)

    def exact(self) -> list[np.ndarray]:
        """Return the gradients of all parameters in float64."""
        wide = copy.deepcopy(self._model).double()
        return _Step("float32", "torch", wide, self._x.double()).gradients()


class _Step(TrainingStep):
    """A training step with cross-entropy, eager or compiled, in float32 or under autocast."""

    def __init__(self, precision: str, variant: str, model: nn.Module, x: Tensor) -> None:
        super().__init__(model, variant, self._cross_entropy)
        self._x, self._precision = x, precision
        self._compiled = variant.endswith("compiled")
        self._run: Callable[[Tensor], Any] = torch.compile(model) if self._compiled else model

    def normalization(self) -> float | None:
        """Return the seconds of a step in normalisation, activations and additions, if eager."""
        return None if self._compiled else self.profile(_PROFILED).normalization

    def _cross_entropy(self) -> Tensor:
        context: Any = nullcontext()
        if self._precision == "bfloat16":
            context = torch.autocast("cpu", torch.bfloat16)
        with context:
            found = self._run(self._x)
            # Models for segmentation return a dictionary.
            outputs = list(found.values()) if isinstance(found, dict) else [found]
            losses = [functional.cross_entropy(each, _labels(each)) for each in outputs]
            return torch.stack(losses).sum()


def _made(case: Case) -> tuple[nn.Module, Tensor]:
    """Return a model in training mode and a batch, the same in every process."""
    torch.manual_seed(0)
    library, _ = MODELS[case.model]
    if library == "timm":
        model = libraries.timm().create_model(case.model, num_classes=CLASSES)
    else:
        options: dict[str, Any] = {"weights": None, "num_classes": CLASSES}
        if case.model == "inception_v3":
            # Drawing weights takes a minute; the auxiliary classifier needs images of 299 x 299.
            options["init_weights"] = options["aux_logits"] = False
        if case.model.startswith("deeplab"):
            options["weights_backbone"] = None
        model = libraries.torchvision().models.get_model(case.model, **options)
    # Random numbers would differ between variants.
    disable_dropout(model)
    model.train()
    x = torch.randn(case.shape)
    lay_out(model, case.layout)
    return model, in_layout(x, case.layout)


def _labels(output: Tensor) -> Tensor:
    shape = (output.shape[0], *output.shape[2:])
    return torch.arange(int(np.prod(shape))).reshape(shape) % CLASSES
