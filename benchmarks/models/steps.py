"""Training steps of a model: made, checked, timed in turns, profiled. For PyTorch, in a child."""

from __future__ import annotations

import copy
import resource
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
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
from benchmarks.models.cases import MODELS, Case, Outcome, Row, Variant
from benchmarks.turns import HOST, Settings, summary, take_turns

__all__ = ["measure", "memory", "start"]

_CLASSES = 100

# A distance from float64 that is larger by so much than that of PyTorch's layers is a fault, but
# for what comes of a few elements on the other side of a ReLU.
_WORST, _CHAOS = 2.0, 0.05

# What a profiler calls normalisation, activations and additions, without what calls those.
_OF_NORMALIZATION = (
    "backnorm::", "aten::native_batch_norm", "aten::relu", "aten::clamp_min", "aten::threshold",
    "aten::hardtanh", "aten::hardswish", "aten::silu", "aten::add",
)  # fmt: skip


def start(threads: int) -> dict[str, str]:
    """Limit everything to so many threads; return versions."""
    torch.set_num_threads(threads)
    backnorm.set_num_threads(threads)
    torchvision, timm = libraries.torchvision(), libraries.timm()
    return {
        "backnorm": backnorm.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
    }


def measure(case: Case, variants: Sequence[Variant], settings: Settings) -> Row:
    """Return what became of variants; "torch" is measured whether it is among them or not."""
    model, x = _made(case)
    wide = copy.deepcopy(model).double()
    exact = _gradients(wide, list(wide.parameters()), x.double(), "float32")
    steps: dict[Variant, _Step] = {}
    outcomes: dict[Variant, Outcome] = {}
    limit = float("inf")
    for variant in dict.fromkeys(("torch", *variants)):
        try:
            step = _Step(case, variant, copy.deepcopy(model), x)
            off = _distance(step.gradients(), exact)
        except Exception as error:  # Whatever a compiler raises.
            outcomes[variant] = Outcome(variant, f"{type(error).__name__}: {error}"[:200])
            if variant == "torch":
                # Nobody is judged without it, or timed.
                others = dict.fromkeys(each for each in variants if each != "torch")
                failed = (Outcome(each, "not compared: torch failed") for each in others)
                return Row(case, (outcomes["torch"], *failed))
            continue
        if variant == "torch":
            limit = max(_WORST * off, _CHAOS)
        detail = f"gradients are {off:.2g} off, more than {limit:.2g}" if off > limit else ""
        outcomes[variant] = Outcome(variant, detail, error=off, layers=step.layers)
        if not detail:
            steps[variant] = step
    estimates = dict.fromkeys(steps, 0.0)
    samples = take_turns(steps, settings, lambda variant: None, estimates, HOST)
    found = []
    for variant, known in outcomes.items():
        if variant not in steps:
            found.append(known)
            continue
        ratios = np.divide(samples[variant], samples["torch"])
        found.append(
            Outcome(
                variant,
                step=summary(samples[variant]),
                ratio=float(np.median(ratios)),
                normalization=None if "compiled" in variant else _normalization(steps[variant]),
                error=known.error,
                layers=known.layers,
            )
        )
    return Row(case, tuple(found))


class _Step:
    """A training step: gradients of a loss, and a change of the parameters."""

    def __init__(self, case: Case, variant: Variant, model: nn.Module, x: Tensor) -> None:
        if variant.startswith("backnorm"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", backnorm.torch.FusionWarning)
                backnorm.torch.convert(model, fuse="fused" in variant)
        self.layers = sum(isinstance(each, _BatchNorm) for each in model.modules())
        self._x, self._precision = x, case.precision
        self._parameters = list(model.parameters())
        self._run: Callable[[Tensor], Any] = model
        if variant.endswith("compiled"):
            self._run = torch.compile(model)
        # So little that a thousand steps train nothing.
        self._optimizer = torch.optim.SGD(self._parameters, lr=1e-7, momentum=0.9)

    def __call__(self) -> None:
        """Make a step."""
        self._optimizer.zero_grad()
        _backward(self._run, self._x, self._precision)
        self._optimizer.step()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all parameters."""
        return _gradients(self._run, self._parameters, self._x, self._precision)


def memory(case: Case, variant: Variant) -> int:
    """Return the bytes by which resident memory grows in steps of a variant: once in a process."""
    step = _Step(case, variant, *_made(case))
    before = _resident()
    for _ in range(3):
        step()
    return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _made(case: Case) -> tuple[nn.Module, Tensor]:
    """Return a model in training mode and a batch, the same in every process."""
    torch.manual_seed(0)
    library, _ = MODELS[case.model]
    if library == "timm":
        model = libraries.timm().create_model(case.model, num_classes=_CLASSES)
    else:
        models = libraries.torchvision().models
        options: dict[str, Any] = {"weights": None, "num_classes": _CLASSES}
        if case.model == "inception_v3":
            # PyTorch draws these for a minute.
            options["init_weights"] = False
        if case.model.startswith("deeplab"):
            models, options["weights_backbone"] = models.segmentation, None
        models = models.video if case.model.startswith("r3d") else models
        model = getattr(models, case.model)(**options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            # Random numbers would be others in each variant.
            module.p = 0.0
        if type(module).__name__ in ("StochasticDepth", "DropPath"):
            module.p = module.drop_prob = 0.0
    model.train()
    x = torch.randn(case.shape)
    if case.layout == "channels_last":
        model, x = (each.to(memory_format=_format(case)) for each in (model, x))
    return model, x


def _format(case: Case) -> torch.memory_format:
    return torch.channels_last if len(case.shape) == 4 else torch.channels_last_3d


def _backward(run: Callable[[Tensor], Any], x: Tensor, precision: str) -> None:
    """Compute the gradients of a loss."""
    context: Any = nullcontext()
    if precision == "bfloat16":
        context = torch.autocast("cpu", torch.bfloat16)
    with context:
        found = run(x)
        # Of segmentation a dictionary, of Inception a pair of which the second is an auxiliary.
        outputs = found.values() if isinstance(found, dict) else found
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        losses = [functional.cross_entropy(each, _labels(each)) for each in outputs]
        loss = torch.stack(losses).sum()
    loss.backward()


def _labels(output: Tensor) -> Tensor:
    shape = (output.shape[0], *output.shape[2:])
    return torch.arange(int(np.prod(shape))).reshape(shape) % _CLASSES


def _gradients(
    run: Callable[[Tensor], Any], parameters: Sequence[Tensor], x: Tensor, precision: str
) -> list[Tensor]:
    _backward(run, x, precision)
    return [each.grad for each in parameters if each.grad is not None]


def _distance(found: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """Return how far gradients are from the exact ones, relative to their length."""
    pairs = list(zip(found, exact, strict=True))
    off = sum(float((one.double() - other).square().sum()) for one, other in pairs)
    length = sum(float(other.square().sum()) for _, other in pairs)
    return float(np.sqrt(off / length))


def _normalization(step: Callable[[], object]) -> float:
    """Return the seconds of a step in normalisation, activations and additions."""
    found = []
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU]) as watched:
            step()
        events = watched.key_averages()
        spent = [e.self_cpu_time_total for e in events if e.key.startswith(_OF_NORMALIZATION)]
        found.append(sum(spent) * 1e-6)
    return float(np.median(found))
