"""The `backnorm` command: options in, exit status out.

Exit status: 0 fine; 1 a check failed; 2 bad input, or results that cannot be written, said in one
line on stderr; 128 and the number of the signal that ended it (129 hung up, 130 interrupted, 143
terminated).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import backnorm
from backnorm.cli import streams, text
from backnorm.cli.allowance import MEBIBYTES
from backnorm.cli.signals import signals
from backnorm.errors import BacknormError

__all__ = ["app", "main"]

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130

# Typer has its own copy of click in some releases and depends on click in others; either way
# this is the base of the errors about the command line: BadParameter < UsageError < this.
_CommandLineError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="backnorm",
    help="Batch normalisation and its gradient in every dialect, exact to one rounding.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads to use (default: all).", show_default=False)
]


def main() -> None:
    """Run the command and exit; the console script."""
    streams.prepare()
    signals.watch()
    status = 0
    try:
        status = _status()
        signals.leave()
    # Also what became of a signal's exception in somebody else's hands.
    except BaseException:
        signals.leave()
        if signals.received is None:
            raise
    if signals.received is not None:
        status = 128 + signals.received
    sys.exit(status)


def _status() -> int:
    """Run the command and return its exit status; nothing is left to be printed then."""
    try:
        with _exits_in_one_line():
            status: int | None = app(standalone_mode=False)
            sys.stdout.flush()
    except _CommandLineError as error:
        text.warn(f"error: {error.format_message()}")
        return BAD_INPUT
    except typer.Exit as end:
        return end.exit_code
    return status or 0


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if version:
        print(f"backnorm {backnorm.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="oneDNN Graph JSON, or a call of any dialect.")],
    tensors: Annotated[
        Path | None, typer.Option(help="The inputs: a .npz or .safetensors file.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the results (.npz, .safetensors).")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the results with the exact ones.")
    ] = False,
    random: Annotated[
        int | None,
        typer.Option(metavar="SEED", min=0, help="Make up missing tensors with this seed."),
    ] = None,
    threads: Threads = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Time this many calls, after one that does not count.")
    ] = 3,
    max_unpacked: Annotated[
        int,
        typer.Option(
            metavar="MIB",
            min=1,
            help="Most memory for what compressed tensors unpack to, and for JSON.",
        ),
    ] = MEBIBYTES,
    json: Json = False,
) -> None:
    """Run the operators that FILE describes, on tensors from a file."""
    with _exits_in_one_line():
        from backnorm.cli.render import run_table
        from backnorm.cli.run import RunOptions, run_file

        _begin(threads)
        report = run_file(RunOptions(file, tensors, out, check, random, repeat, max_unpacked))
    if json:
        text.print_json(report.to_dict())
    else:
        text.print_table(run_table(report))
    if not report.passed:
        for step in report.steps:
            for name, verdict in (step.verdicts or {}).items():
                if not verdict.passed:
                    text.warn(f"check failed: {step.label} {name}: {verdict.detail}")
        raise typer.Exit(FAILED)


@app.command()
def demo(threads: Threads = None, json: Json = False) -> None:
    """Run all dialects, layouts and types on tensors of a real network, and compare."""
    with _exits_in_one_line():
        from backnorm.cli.demo import run_demo
        from backnorm.cli.demo_table import demo_table

        _begin(threads)
        report = run_demo()
    if json:
        text.print_json(report.to_dict())
    else:
        text.print_table(demo_table(report))
        print(report.verdict)
    if not report.passed:
        raise typer.Exit(FAILED)


@app.command()
def bench(
    suite: Annotated[
        str,
        typer.Option(
            help="resnet50, inception, densenet, tensorflow, 3d, other, small, sweep; with "
            "--device cuda also batch256; or all."
        ),
    ] = "resnet50",
    op: Annotated[str, typer.Option(help="backward, forward, inference; or all.")] = "backward",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, float64; or all that a suite lists.")
    ] = "float32",
    layout: Annotated[str, typer.Option(help="NCX, NXC; or all.")] = "all",
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
    with _exits_in_one_line():
        from backnorm.cli.bench import BenchOptions, comparison, run_bench, settings_for

        _begin(threads)
        if compare is not None:
            print(text.plain(comparison(*compare)))
            return
        settings = settings_for(condition, rounds, samples, warm_up, limit)
        report = run_bench(
            BenchOptions(suite, op, dtype, layout, peers, quick, out, settings, device, condition)
        )
    text.print_table(report.table())
    for line in report.summary():
        print(line)
    for failure in report.failures:
        text.warn(f"not exact: {failure}")
    if report.interrupted:
        text.warn("interrupted")
        raise typer.Exit(INTERRUPTED)
    if report.failures:
        raise typer.Exit(FAILED)


@app.command()
def train(
    framework: Annotated[str, typer.Option(help="torch, jax, tensorflow.")] = "torch",
    model: Annotated[
        str,
        typer.Option(
            help="digits: a small residual network, trained; resnet50: one step, timed (torch)."
        ),
    ] = "digits",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64.")] = "float32",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="digits: epochs (default: 8).", show_default=False)
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="digits: trainings (default: 5).", show_default=False)
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=2, help="Images in a step (default: 64; resnet50: 16).", show_default=False
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            min=32, help="resnet50: height and width of images (default: 224).", show_default=False
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="resnet50: steps of each in each format (default: 7).", show_default=False
        ),
    ] = None,
    threads: Threads = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for result.json, report.html and plots.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Less of everything: seconds instead of minutes.")
    ] = False,
) -> None:
    """Train a network twice, with the framework's batch normalisation and with ours."""
    with _exits_in_one_line():
        from backnorm.cli.train import TrainOptions, run_train

        _begin(threads)
        report = run_train(
            TrainOptions(framework, model, dtype, epochs, seeds, batch, size, rounds, quick, out)
        )
    table = report.table()
    if table is not None:
        text.print_table(table)
    for line in report.summary():
        print(line)
    for failure in report.failures():
        text.warn(f"not the same: {failure}")
    if report.interrupted:
        text.warn("interrupted")
        raise typer.Exit(INTERRUPTED)
    if report.failures():
        raise typer.Exit(FAILED)


@app.command()
def info(
    dialect: Annotated[str | None, typer.Argument(help="A dialect.")] = None,
    op: Annotated[str | None, typer.Argument(help="One of its operators.")] = None,
    json: Json = False,
) -> None:
    """Show versions and machine; or a dialect's operators; or all about one operator."""
    with _exits_in_one_line():
        from backnorm.cli.info import describe
        from backnorm.cli.info_table import info_tables

        _begin()
        facts = describe(dialect, op)
    if json:
        text.print_json(facts)
    else:
        for table in info_tables(facts):
            text.print_table(table)


@contextlib.contextmanager
def _exits_in_one_line() -> Iterator[None]:
    """Turn bad input, or an interruption, into one line on stderr and an exit status."""
    try:
        yield
    except KeyboardInterrupt:
        text.warn("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BacknormError as error:
        message = str(error)
    except OSError as error:
        reason = error.strerror or str(error)
        message = reason if error.filename is None else f"{error.filename}: {reason}"
    except MemoryError:
        message = "there is not enough memory"
    else:
        return
    text.warn(f"error: {message}")
    raise typer.Exit(BAD_INPUT)


def _begin(threads: int | None = None) -> None:
    """Begin a command: all is imported, which nothing should interrupt."""
    signals.release()
    if threads is not None:
        backnorm.set_num_threads(threads)
