"""``python -m benchmarks``: options in; a table, files and an exit status out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from backnorm.cli import text
from backnorm.cli.program import FAILED, INTERRUPTED, Threads, begin, exits_in_one_line
from backnorm.errors import ArgumentValueError, BacknormError

__all__ = ["app", "main"]

app = typer.Typer(name="benchmarks", add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run the benchmark and exit."""
    app()


Suite = Annotated[
    str,
    typer.Option(
        help="resnet50, inception, densenet, tensorflow, 3d, other, small, sweep; with "
        "--device cuda also batch256; or all."
    ),
]
Op = Annotated[str, typer.Option(help="backward, forward, inference; or all.")]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, float64; or all that a suite lists.")
]
Layout = Annotated[str, typer.Option(help="NCX, NXC; or all.")]


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    suite: Suite = "resnet50",
    op: Op = "backward",
    dtype: Dtype = "float32",
    layout: Layout = "all",
    peers: Annotated[
        str,
        typer.Option(
            help="torch, tensorflow, jax, onednn, numpy; with --device cuda: torch, cudnn, "
            "compile, jax; all; or none."
        ),
    ] = "all",
    device: Annotated[str, typer.Option(help="cpu, cuda: where all of it runs.")] = "cpu",
    condition: Annotated[
        str,
        typer.Option(
            help="quiet: each contestant's calls in a row; after-convolution: right before each "
            "call a convolution of PyTorch's, as in a network."
        ),
    ] = "quiet",
    threads: Threads = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for result.json, report.md and report.html.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few telling cells, in less than two minutes.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Turns of each contestant in a cell (default: 4; after-convolution: 10).",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples of a turn (default: 3; after-convolution: 5).",
            show_default=False,
        ),
    ] = None,
    warm_up: Annotated[
        float, typer.Option(min=0.0, help="Seconds of calls that do not count before each turn.")
    ] = 0.02,
    limit: Annotated[
        float, typer.Option(min=0.0, help="Seconds after which a contestant gets no more samples.")
    ] = 0.4,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing: compare two result.json, before and after."),
    ] = None,
) -> None:
    """Time all operations beside those of other libraries, once all have been checked.

    Options that name several things take lists with commas.
    """
    if context.invoked_subcommand is not None:
        return
    with exits_in_one_line():
        try:
            from benchmarks.options import BenchOptions, comparison, run_bench, settings_for
        except ModuleNotFoundError as error:
            raise BacknormError(
                f"the report needs {error.name}, which is not installed: pip install --group bench"
            ) from None

        begin(threads)
        if compare is not None:
            print(text.plain(comparison(*compare)))
            return
        settings = settings_for(condition, rounds, samples, warm_up, limit)
        report = run_bench(
            BenchOptions(suite, op, dtype, layout, peers, quick, out, settings, device, condition)
        )
    text.print_report({}, [report.table()], as_json=False)
    for line in report.summary():
        print(line)
    for failure in report.failures:
        text.warn(f"not exact: {failure}")
    if report.interrupted:
        text.warn("interrupted")
        raise typer.Exit(INTERRUPTED)
    if report.failures:
        raise typer.Exit(FAILED)


@app.command("plans")
def plans(
    suite: Suite = "resnet50",
    op: Op = "backward",
    dtype: Dtype = "float32",
    layout: Layout = "all",
    threads: Threads = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="A JSON file for all that was measured.")
    ] = None,
) -> None:
    """Try all plans of each cell in turns; show where the one chosen is not among the best.

    A plan decides how work is cut and shared out; those that are tried give the same bits. A cell
    is shown if the best plan saves more than 5 % of the time.
    """
    with exits_in_one_line():
        from benchmarks.options import run_plans

        begin(threads)
        report = run_plans((suite, op, dtype, layout), None if out is None else _file_path(out))
    text.print_report({}, [report.table()], as_json=False)
    print(report.summary())
    if report.interrupted:
        text.warn("interrupted")
        raise typer.Exit(INTERRUPTED)


@app.command("models")
def models(
    model: Annotated[str, typer.Option(help="Models of torchvision and timm; or all.")] = "all",
    layout: Annotated[str, typer.Option(help="contiguous, channels_last; or all.")] = "all",
    precision: Annotated[
        str, typer.Option(help="float32; bfloat16, which is autocast; or all.")
    ] = "float32",
    batch: Annotated[
        str, typer.Option(help="small, 8 of 160 x 160; large, 16 of 224 x 224; or all.")
    ] = "all",
    variant: Annotated[
        str,
        typer.Option(
            help="torch, backnorm, backnorm-fused, and each with -compiled behind it; or all."
        ),
    ] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each variant.")] = 9,
    threads: Threads = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="A JSON file for all that was measured.")
    ] = None,
) -> None:
    """Time whole training steps of models with our layers beside the same with PyTorch's.

    The gradients are compared first: ours may be no further off than twice what PyTorch's are.
    """
    with exits_in_one_line():
        from benchmarks.models.options import run_models

        begin(threads)
        path = None if out is None else _file_path(out)
        report = run_models((model, layout, precision, batch, variant), rounds, path)
    text.print_report({}, [report.table()], as_json=False)
    for line in report.summary():
        print(line)
    if report.interrupted:
        text.warn("interrupted")
        raise typer.Exit(INTERRUPTED)


def _file_path(text: str) -> Path:
    """Return `text` as the path of a file; raise if it can only be that of a folder."""
    if os.path.basename(text) in ("", ".", ".."):
        raise ArgumentValueError(text or repr(text), "must be the path of a file, not of a folder")
    return Path(text)
