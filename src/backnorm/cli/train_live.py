"""What `backnorm train` shows while it works, on stderr and only where a person watches it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from backnorm.cli.progress import new_bar
from backnorm.training.frameworks import LAYERS
from backnorm.training.model import Epoch, FirstStep, Settings
from backnorm.training.session import Moment
from backnorm.training.wide_model import MEMORY_FORMATS, WideSettings, WideStep
from benchmarks.report.words import label

__all__ = ["training_progress", "wide_progress"]

_Watch = Callable[[object], None]


@contextlib.contextmanager
def training_progress(settings: Settings) -> Iterator[_Watch]:
    """Yield what to tell everything that the training tells; show loss, accuracy, images/s."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    progress = new_bar(console)
    task = progress.add_task("importing, comparing the first step", total=1.0)
    tested: dict[str, float] = {}
    # Seldom: it takes processor time from what is timed.
    with Live(progress, console=console, transient=True, refresh_per_second=2) as live:

        def watch(value: object) -> None:
            if isinstance(value, FirstStep):
                progress.update(task, description="compiling")
            elif isinstance(value, Epoch):
                tested[value.layer] = value.test_accuracy
            elif isinstance(value, Moment):
                text = (
                    f"seed {value.seed + 1}/{settings.seeds}, "
                    f"epoch {value.epoch + 1}/{settings.epochs}"
                )
                progress.update(task, description=text, completed=value.done)
                live.update(Group(_table(settings, value, tested), progress))

        yield watch


@contextlib.contextmanager
def wide_progress(settings: WideSettings) -> Iterator[_Watch]:
    """Yield what to tell everything that the timing tells; show the steps that are done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    # A first step of each network that does not count.
    total = len(MEMORY_FORMATS) * len(LAYERS) * (settings.rounds + 1)
    with new_bar(console) as progress:
        task = progress.add_task("the first steps", total=total)

        def watch(value: object) -> None:
            if isinstance(value, WideStep):
                name = label(settings.framework) if value.layer == "own" else value.layer
                text = f"{value.memory}, {name}: {value.seconds:.2f} s"
                progress.update(task, description=text, advance=1)
            else:
                progress.update(task, advance=len(LAYERS))

        yield watch


def _table(settings: Settings, moment: Moment, tested: dict[str, float]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("layers", "loss", "accuracy", "tested", "images/s"):
        table.add_column(heading, justify="left" if heading == "layers" else "right")
    for layer in LAYERS:
        table.add_row(
            label(settings.framework) if layer == "own" else layer,
            f"{moment.losses[layer]:.4f}",
            f"{moment.accuracies[layer]:.1%}",
            f"{tested[layer]:.1%}" if layer in tested else "",
            f"{moment.rates[layer]:.0f}",
        )
    return table
