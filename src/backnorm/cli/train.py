"""`backnorm train`: train, or time a wide step; show, write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rich.table import Table

import backnorm
from backnorm.cli.signals import signals
from backnorm.cli.text import counted, warn
from backnorm.cli.train_live import training_progress, wide_progress
from backnorm.cli.train_table import (
    training_lines,
    training_table,
    wide_lines,
    wide_table,
)
from backnorm.errors import ArgumentValueError
from backnorm.training.digits import load_digits, steps
from backnorm.training.frameworks import DTYPES, FRAMEWORKS, DType
from backnorm.training.model import Settings, TrainingResult
from backnorm.training.report.write import prepare, write_report
from backnorm.training.runner import run, start
from backnorm.training.wide_model import WideResult, WideSettings
from benchmarks.report.words import label

__all__ = ["MODELS", "TrainOptions", "TrainReport", "run_train"]

#: What `--model` takes.
MODELS = ("digits", "resnet50")

# The only framework of the wide step.
_WIDE = "torch"


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What to do; None is the default of the model, or of a quick run."""

    framework: str
    model: str
    dtype: str
    epochs: int | None
    seeds: int | None
    batch: int | None
    size: int | None
    rounds: int | None
    quick: bool
    out: Path | None


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What came of it.

    Attributes
    ----------
    result : TrainingResult or WideResult
    written : list of Path
    interrupted : bool
        Whether `result` is but the beginning.
    """

    result: TrainingResult | WideResult
    written: list[Path]
    interrupted: bool

    def table(self) -> Table | None:
        """Return what was measured; None if nothing was."""
        if isinstance(self.result, TrainingResult):
            return training_table(self.result) if self.result.timed() else None
        return wide_table(self.result) if self.result.formats() else None

    def summary(self) -> list[str]:
        """Return what it comes to, and where to find more."""
        if isinstance(self.result, TrainingResult):
            lines = training_lines(self.result)
        else:
            lines = wide_lines(self.result)
        return [*lines, *(f"wrote {path}" for path in self.written)]

    def failures(self) -> list[str]:
        """Return a line for whatever of ours is not what it has to be."""
        return self.result.failures()


def run_train(options: TrainOptions) -> TrainReport:
    """Do what the options ask for, as far as one lets it, and write it where they say.

    Raises
    ------
    BacknormError
        For a value that is not accepted, a package that is not installed, or if the process of
        the framework fails.
    OSError
        If the report cannot be written.
    """
    settings = _settings(options)
    # All that can be missing is missed now, and not after all the work.
    data = load_digits() if isinstance(settings, Settings) else None
    if isinstance(settings, Settings) and data is not None and not steps(data, settings.batch):
        most = f"2 to {len(data.images)}"
        raise ArgumentValueError(
            "--batch", "there are not so many images", came=settings.batch, accepted=most
        )
    if options.out is not None:
        prepare(options.out)
    warn(_announcement(settings))
    result = start(settings)
    interrupted = False
    try:
        if isinstance(settings, Settings):
            with training_progress(settings) as watch:
                run(result, data, watch)
        else:
            with wide_progress(settings) as watch:
                run(result, data, watch)
    except KeyboardInterrupt:
        signals.heed()
        interrupted = True
    written = []
    if options.out is not None and result.something():
        written = write_report(result, options.out)
    return TrainReport(result, written, interrupted)


def _settings(options: TrainOptions) -> Settings | WideSettings:
    model = _chosen("--model", options.model, MODELS)
    framework = _chosen("--framework", options.framework, tuple(FRAMEWORKS))
    dtype = cast("DType", _chosen("--dtype", options.dtype, DTYPES))
    threads = backnorm.get_num_threads()
    if model == "digits":
        _refuse(model, {"--size": options.size, "--rounds": options.rounds})
        return Settings(
            framework,
            dtype,
            epochs=_given(options.epochs, 2 if options.quick else 8),
            seeds=_given(options.seeds, 1 if options.quick else 5),
            batch=_given(options.batch, 64),
            threads=threads,
        )
    if framework != _WIDE:
        raise ArgumentValueError(
            "--framework", f"cannot do --model {model}", came=framework, accepted=_WIDE
        )
    _refuse(model, {"--epochs": options.epochs, "--seeds": options.seeds})
    return WideSettings(
        framework,
        dtype,
        batch=_given(options.batch, 2 if options.quick else 16),
        size=_given(options.size, 64 if options.quick else 224),
        rounds=_given(options.rounds, 2 if options.quick else 7),
        threads=threads,
    )


def _chosen(option: str, value: str, accepted: tuple[str, ...]) -> str:
    if value not in accepted:
        raise ArgumentValueError(option, "unknown", came=repr(value), accepted=", ".join(accepted))
    return value


def _refuse(model: str, options: dict[str, int | None]) -> None:
    for option, value in options.items():
        if value is not None:
            raise ArgumentValueError(option, f"says nothing to --model {model}", came=value)


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _announcement(settings: Settings | WideSettings) -> str:
    threads = counted(settings.threads, "thread")
    common = f"{label(settings.framework)}, {settings.dtype}, batch {settings.batch}, {threads}"
    if isinstance(settings, WideSettings):
        size = f"{settings.size}x{settings.size}"
        return f"ResNet-50 on {size}, {settings.rounds} rounds in two memory formats: {common}"
    return f"digits, {settings.seeds} x {settings.epochs} epochs, two networks: {common}"
