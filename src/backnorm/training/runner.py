"""Has a training, or the timing of a wide step, done in a process of its framework's own."""

from __future__ import annotations

from collections.abc import Callable

import backnorm
from backnorm.errors import BacknormError
from backnorm.training.digits import Digits
from backnorm.training.model import Settings, TrainingResult
from backnorm.training.network import sites
from backnorm.training.wide_model import WideResult, WideSettings
from benchmarks.child import Child, ChildEndedError
from benchmarks.environment import environment, now
from benchmarks.model import Environment

__all__ = ["run", "start"]

# Seconds without a sign of life after which the process counts as hanging. Compiling the first
# step, or a wide step on a slow machine, is the longest silence.
_PATIENCE = 600.0


def start(settings: Settings | WideSettings) -> TrainingResult | WideResult:
    """Return the result of a run that has found nothing yet."""
    here: Environment = environment(settings.threads, {"backnorm": backnorm.__version__}, now())
    if isinstance(settings, WideSettings):
        return WideResult(here, settings)
    places = tuple((site.name, site.shape) for site in sites(settings.batch))
    return TrainingResult(here, settings, places)


def run(
    result: TrainingResult | WideResult, data: Digits | None, watch: Callable[[object], None]
) -> None:
    """Do what `result.settings` ask for, and fill `result` with what is found as it is found.

    The other process is gone when this returns, however it does.

    Parameters
    ----------
    result : TrainingResult or WideResult
    data : Digits or None
        What a training learns.
    watch : callable
        Told everything that the other process tells: what is found, and `session.Moment`.

    Raises
    ------
    BacknormError
        If the framework is not installed, or its process ends before the work does.
    """
    name = result.settings.framework
    child = Child("backnorm.training.worker")
    try:
        child.send((result.settings, data))
        while True:
            kind, value = child.receive(_PATIENCE)
            if kind == "done":
                return
            if kind == "refused":
                raise BacknormError(value)
            if kind == "missing":
                raise BacknormError(
                    f"--framework {name} needs {value}, which is not installed: "
                    f"pip install 'backnorm[{name}]'"
                )
            if kind == "ready":
                result.environment.versions.update(value)
            else:
                result.add(value)
                watch(value)
    except ChildEndedError as end:
        raise BacknormError(f"the process that trains with {name} failed: {end}") from None
    finally:
        child.stop()
