"""``python -m benchmarks operator`` and ``python -m benchmarks models``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

import backnorm
from benchmarks import cells, results
from benchmarks.environment import environment
from benchmarks.models import cases, report
from benchmarks.models.run import ModelsRun
from benchmarks.operators import DeviceRefusedError, OperatorRun
from benchmarks.peers import CONTESTANTS, PLACES, peers
from benchmarks.turns import SETTINGS

__all__ = ["app"]

app = typer.Typer(name="benchmarks", add_completion=False, pretty_exceptions_enable=False)

# Exit statuses: a result of ours is wrong; interrupted.
_FAILED, _INTERRUPTED = 1, 130

Rounds = Annotated[int | None, Option(min=1, help="Turns of each contestant.")]
Threads = Annotated[int | None, Option(min=1, help="Threads of each contestant.")]
Out = Annotated[Path | None, Option(file_okay=False, help="Folder of result.json and plot.svg.")]


@app.command()
def operator(
    suite: Annotated[str, Option(help="Names of benchmarks/workloads, or all.")] = "resnet50",
    op: Annotated[str, Option(help="backward, forward, inference, or all.")] = "backward",
    dtype: Annotated[str, Option(help="float32, bfloat16, ..., or all of a suite.")] = "float32",
    layout: Annotated[str, Option(help="NCX, NXC, or all.")] = "all",
    peer: Annotated[str, Option(help="torch, jax, onednn, ..., all, or none.")] = "all",
    device: Annotated[Literal["cpu", "cuda"], Option(help="Device of all contestants.")] = "cpu",
    condition: Annotated[
        str, Option(help="quiet, or after-convolution: with one before each call.")
    ] = "quiet",
    quick: Annotated[bool, Option("--quick", help="A few cells, in two minutes.")] = False,
    rounds: Rounds = None,
    threads: Threads = None,
    out: Out = None,
) -> None:
    """Judge our operators and those of other libraries, then time them in turns.

    Lists are separated by commas.
    """
    if (device, condition) not in PLACES:
        expected = [known for place, known in PLACES if place == device]
        message = f"got {condition!r}; expected {', '.join(expected)} with --device {device}"
        raise typer.BadParameter(message, param_hint="--condition")
    wanted = cells.chosen("--peer", peer, (*peers(device), "none"))
    contestants = {
        name: place
        for name, place in CONTESTANTS[device].items()
        if name in wanted or name not in peers(device)
    }
    chosen = cells.quick(device) if quick else cells.select(suite, op, dtype, layout, device)
    settings = SETTINGS[condition]
    settings = dataclasses.replace(settings, rounds=rounds or settings.rounds)
    number = threads or backnorm.get_num_threads()
    with OperatorRun(contestants, PLACES[device, condition], number, settings) as run:
        try:
            rows, complete = _measured(run.measure, chosen)
        except DeviceRefusedError as reason:
            raise typer.BadParameter(str(reason), param_hint="--device, --condition") from None
    facts = {"settings": dataclasses.asdict(settings), "device": run.device}
    where = environment("operator", number, run.versions, condition=condition, **facts)
    for failure in run.failures:
        typer.echo(f"not exact: {failure}", err=True)
    shown = results.operator_table, results.operator_lines, results.operator_plot
    _finish(where, rows, shown, out, _INTERRUPTED * (not complete) or _FAILED * bool(run.failures))


@app.command()
def models(
    model: Annotated[str, Option(help="resnet18, resnet50, ..., or all.")] = "all",
    layout: Annotated[str, Option(help="contiguous, channels_last, or all.")] = "all",
    precision: Annotated[str, Option(help="float32, bfloat16 (autocast), or all.")] = "float32",
    batch: Annotated[str, Option(help="small, large, or all.")] = "all",
    variant: Annotated[str, Option(help="backnorm, torch-compiled, ..., or all.")] = "all",
    allocator: Annotated[str, Option(help="keeping, default, huge, or all.")] = "keeping",
    processes: Annotated[int, Option(help="Processes of each variant.", min=1)] = 3,
    rounds: Annotated[int, Option(help="Turns of each process.", min=1)] = 9,
    threads: Threads = None,
    host: Annotated[str, Option(help="Words that pages add to the processor's name.")] = "",
    out: Out = None,
) -> None:
    """Time training steps of models in turns, with our layers and with the framework's own.

    The gradients are judged first: the error of ours may be at most twice the framework's, or 5 %
    if that is more.
    """
    variants = cells.chosen("--variant", variant, cases.VARIANTS)
    every = cases.cases(
        cells.chosen("--model", model, tuple(cases.MODELS)),
        cells.chosen("--layout", layout, cases.LAYOUTS),
        cells.chosen("--precision", precision, cases.PRECISIONS),
        cells.chosen("--batch", batch, cases.BATCHES),
        cells.chosen("--allocator", allocator, cases.ALLOCATORS),
    )
    number = threads or backnorm.get_num_threads()
    run = ModelsRun(variants, number, processes, rounds)
    rows, complete = _measured(run.measure, list(every))
    settings = {"processes": processes, "rounds": rounds}
    where = environment("models", number, run.versions, settings=settings, host=host)
    shown = report.models_table, report.models_lines, report.models_plot
    _finish(where, rows, shown, out, _INTERRUPTED * (not complete))


def _measured(
    measure: Callable[[Any], dict[str, Any]], subjects: Sequence[Any]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows of cells or cases, and whether they are complete."""
    rows: list[dict[str, Any]] = []
    try:
        for number, subject in enumerate(subjects, 1):
            typer.echo(f"{number}/{len(subjects)} {subject}", err=True)
            rows.append(measure(subject))
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
    return rows, len(rows) == len(subjects)


def _finish(
    where: dict[str, Any],
    rows: list[dict[str, Any]],
    shown: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]],
    out: Path | None,
    status: int,
) -> None:
    """Write the result, print table and summary, draw the plot, and exit."""
    table, lines, plot = shown
    if rows:
        result = results.result_of(where, rows)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            results.write(result, out / "result.json")
        typer.echo("\n".join([results.markdown(table(result)), *lines(result)]))
        if out is not None:
            plot(result, out / "plot.svg")
    raise typer.Exit(status)


if __name__ == "__main__":
    app()
