"""Training steps with PyTorch, eager and compiled; eager steps can be profiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import backnorm
import backnorm.torch
from backnorm.torch.modules import _BatchNorm
from benchmarks.models import libraries
from benchmarks.models.cases import MODELS, Case
from benchmarks.models.steps import CLASSES, MOMENTUM, RATE

__all__ = ["Trainer", "start"]

# The number of profiled steps.
_PROFILED = 7

# The profiler's names of normalisation, activations and additions, without their callers.
_OF_NORMALIZATION = (
    "backnorm::", "aten::native_batch_norm", "aten::relu", "aten::clamp_min", "aten::threshold",
    "aten::hardtanh", "aten::hardswish", "aten::silu", "aten::add",
)  # fmt: skip


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
        return _Step(self._case, variant, copy.deepcopy(self._model), self._x)

    def exact(self) -> list[np.ndarray]:
        """Return the gradients of all parameters in float64."""
        wide = copy.deepcopy(self._model).double()
        return _gradients(wide, list(wide.parameters()), self._x.double(), "float32")


class _Step:
    """A training step: gradients of a loss, and a change of the parameters."""

    def __init__(self, case: Case, variant: str, model: nn.Module, x: Tensor) -> None:
        reports: list[backnorm.torch.LayerReport] = []
        if variant.startswith("backnorm"):
            backnorm.torch.convert(model, fuse="fused" in variant, report=reports.append)
        self.layers = sum(isinstance(each, _BatchNorm) for each in model.modules())
        self.fused = sum(report.fused for report in reports)
        self._x, self._precision = x, case.precision
        self._parameters = list(model.parameters())
        self._run: Callable[[Tensor], Any] = model
        self._compiled = variant.endswith("compiled")
        if self._compiled:
            self._run = torch.compile(model)
        self._optimizer = torch.optim.SGD(self._parameters, lr=RATE, momentum=MOMENTUM)

    def __call__(self) -> None:
        """Make a step."""
        self._renew_gradients()
        self._optimizer.step()

    def _renew_gradients(self) -> None:
        self._optimizer.zero_grad()
        _backward(self._run, self._x, self._precision)

    def gradients(self) -> list[np.ndarray]:
        """Return the gradients of all parameters."""
        return _gradients(self._run, self._parameters, self._x, self._precision)

    def normalization(self) -> float | None:
        """Return the seconds of a step in normalisation, activations and additions, if eager.

        The optimizer's additions do not count.
        """
        if self._compiled:
            return None
        found = []
        for _ in range(_PROFILED):
            with profile(activities=[ProfilerActivity.CPU]) as watched:
                self._renew_gradients()
            events = watched.key_averages()
            spent = [e.self_cpu_time_total for e in events if e.key.startswith(_OF_NORMALIZATION)]
            found.append(sum(spent) * 1e-6)
        return float(np.median(found))


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
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            # Random numbers would differ between variants.
            module.p = 0.0
        if type(module).__name__ in ("StochasticDepth", "DropPath"):
            module.p = module.drop_prob = 0.0
    model.train()
    x = torch.randn(case.shape)
    if case.layout == "channels_last":
        last = torch.channels_last if len(case.shape) == 4 else torch.channels_last_3d
        model, x = (each.to(memory_format=last) for each in (model, x))
    return model, x


def _backward(run: Callable[[Tensor], Any], x: Tensor, precision: str) -> None:
    """Compute the gradients of a loss."""
    context: Any = nullcontext()
    if precision == "bfloat16":
        context = torch.autocast("cpu", torch.bfloat16)
    with context:
        found = run(x)
        # Models for segmentation return a dictionary.
        outputs = list(found.values()) if isinstance(found, dict) else [found]
        losses = [functional.cross_entropy(each, _labels(each)) for each in outputs]
        loss = torch.stack(losses).sum()
    loss.backward()


def _labels(output: Tensor) -> Tensor:
    shape = (output.shape[0], *output.shape[2:])
    return torch.arange(int(np.prod(shape))).reshape(shape) % CLASSES


def _gradients(
    run: Callable[[Tensor], Any], parameters: Sequence[Tensor], x: Tensor, precision: str
) -> list[np.ndarray]:
    _backward(run, x, precision)
    return [each.grad.numpy() for each in parameters if each.grad is not None]
