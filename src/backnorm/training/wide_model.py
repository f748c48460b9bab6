"""What timing wide steps finds: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from backnorm.training.frameworks import LAYERS, DType, Layer
from benchmarks.model import Environment, Timing
from benchmarks.turns import summary

__all__ = ["MEMORY_FORMATS", "WideCheck", "WideResult", "WideSettings", "WideStep"]

#: Orders of a wide step's images and activations in memory.
MEMORY_FORMATS = ("contiguous", "channels_last")


@dataclass(frozen=True, slots=True)
class WideSettings:
    """Which wide step to time, and how often.

    Attributes
    ----------
    framework : str
    dtype : str
    batch, size : int
        Images, and their height and width.
    rounds : int
        Steps of each network in each memory format that count.
    threads : int
    """

    framework: str
    dtype: DType
    batch: int
    size: int
    rounds: int
    threads: int


@dataclass(frozen=True, slots=True)
class WideCheck:
    """The first step of both networks on the same weights and images.

    `gradients` is the norm of the difference of all gradients over the norm of all gradients.
    """

    memory: str
    own_loss: float
    backnorm_loss: float
    gradients: float

    def loss_difference(self) -> float:
        """Return the difference of the losses over the framework's."""
        return abs(self.own_loss - self.backnorm_loss) / abs(self.own_loss)


@dataclass(frozen=True, slots=True)
class WideStep:
    """One step: its seconds, and by stage those of normalisation, ReLU and addition in it."""

    memory: str
    layer: Layer
    seconds: float
    forward: dict[str, float]
    backward: dict[str, float]


@dataclass(slots=True)
class WideResult:
    """What has been found so far."""

    environment: Environment
    settings: WideSettings
    checks: list[WideCheck] = field(default_factory=list)
    steps: list[WideStep] = field(default_factory=list)

    def add(self, value: object) -> bool:
        """Take in what the timing tells; return whether it was a finding."""
        if isinstance(value, WideCheck):
            self.checks.append(value)
        elif isinstance(value, WideStep):
            self.steps.append(value)
        else:
            return False
        return True

    def something(self) -> bool:
        """Return whether there is anything worth keeping."""
        return bool(self.formats())

    def failures(self) -> list[str]:
        """Return a line for each memory format in which the losses are apart.

        Gradients are not judged: with weights that nothing has trained they are ill-conditioned.
        """
        unit = 2.0**-7 if self.settings.dtype in ("bfloat16", "float16") else 1e-4
        return [
            f"{check.memory}: the losses of the first step are {check.loss_difference():.1e} "
            f"apart; allowed: {unit:.1e}"
            for check in self.checks
            # So that NaN fails.
            if not check.loss_difference() <= unit
        ]

    def formats(self) -> list[str]:
        """Return the memory formats in which both networks have been timed."""
        return [
            memory for memory in MEMORY_FORMATS if all(self._of(memory, layer) for layer in LAYERS)
        ]

    def step_timing(self, memory: str, layer: Layer) -> Timing:
        """Return the seconds of a whole step."""
        return summary([step.seconds for step in self._of(memory, layer)])

    def norm_timing(self, memory: str, layer: Layer) -> Timing:
        """Return the seconds of normalisation, ReLU and addition in a step."""
        return summary(
            [
                sum(step.forward.values()) + sum(step.backward.values())
                for step in self._of(memory, layer)
            ]
        )

    def stages(self, memory: str, layer: Layer) -> dict[str, tuple[float, float]]:
        """Return the medians of the forward and of the backward pass by stage."""
        steps = self._of(memory, layer)
        return {
            stage: (
                median(step.forward[stage] for step in steps),
                median(step.backward[stage] for step in steps),
            )
            for stage in steps[0].forward
        }

    def _of(self, memory: str, layer: Layer) -> list[WideStep]:
        return [s for s in self.steps if (s.memory, s.layer) == (memory, layer)]
