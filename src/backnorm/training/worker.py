"""The process of one framework: ``python -m backnorm.training.worker DESCRIPTOR``.

Over the pipe come `Settings` with the data, or `WideSettings`. Back go ("ready", versions), then
("found", value) for each value of the work, and ("done", None) at the end. Or, and nothing more:
("missing", package) if the framework is not installed, ("refused", why) for an error of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

import backnorm
from backnorm.errors import BacknormError
from backnorm.training.digits import Digits
from backnorm.training.frameworks import load
from backnorm.training.model import Settings
from backnorm.training.session import train
from backnorm.training.wide_model import WideSettings
from benchmarks.child import serve_parent
from benchmarks.peers.base import Missing

__all__ = ["serve"]

_Tell = Callable[[object], None]


def serve(connection: Connection) -> None:
    """Do the work that the other end asks for, and tell it what there is to tell."""
    settings, data = connection.recv()
    backnorm.set_num_threads(settings.threads)
    try:
        versions, work = _prepare(settings, data)
    except (ModuleNotFoundError, Missing) as error:
        name = error.name if isinstance(error, ModuleNotFoundError) else str(error).split()[0]
        # A module of ours that is not there is a fault, not an answer.
        if name is None or name.split(".")[0] == "backnorm":
            raise
        connection.send(("missing", name))
        return
    connection.send(("ready", versions))
    try:
        work(lambda value: connection.send(("found", value)))
    except BacknormError as error:
        connection.send(("refused", str(error)))
    else:
        connection.send(("done", None))


def _prepare(
    settings: Settings | WideSettings, data: Digits | None
) -> tuple[dict[str, str], Callable[[_Tell], None]]:
    """Import the framework; return its versions and the work."""
    if isinstance(settings, WideSettings):
        from backnorm.training import wide_step

        wide = settings
        return wide_step.versions(), lambda tell: wide_step.time_steps(wide, tell)
    assert data is not None, "a training comes with what it learns"
    framework, digits = load(settings.framework), data
    versions = framework.start(settings.threads)
    return versions, lambda tell: train(framework, settings, digits, tell)


if __name__ == "__main__":
    serve_parent(serve)
