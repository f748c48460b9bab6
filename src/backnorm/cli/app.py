"""The `backnorm` command: its subcommands, their options and their reports."""

from __future__ import annotations

import io
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import backnorm
from backnorm import engines
from backnorm.cli import text
from backnorm.cli.compare import compare_model
from backnorm.cli.demo import run_demo
from backnorm.cli.info import describe, info_tables
from backnorm.cli.program import FAILED, Json, Threads, begin, exits_in_one_line, takes_records
from backnorm.cli.render import demo_details, demo_summary, run_table
from backnorm.cli.run import RunOptions, run_file
from backnorm.cli.tolerance import tolerance
from backnorm.cli.verify import cases_app, judge, verify
from backnorm.errors import ArgumentValueError
from backnorm.graph.override import REFUSED

_HELP = """Batch normalisation and its gradient in the dialects of ten specifications.

\b
Examples:
  backnorm demo            compare all dialects on tensors of a real network
  backnorm verify torch    judge the gradients that PyTorch computes
  backnorm info ngraph     list the operators of a dialect
"""

app = typer.Typer(
    name="backnorm",
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

for command in (verify, judge, tolerance, compare_model):
    app.command()(exits_in_one_line()(command))
app.add_typer(cases_app, name="cases")


def main() -> None:
    """Run the console script `backnorm` and exit."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        # If the terminal's encoding lacks a character, an escape sequence with the character's code
        # is printed.
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(text.Output(sys.stdout.fileno(), "wb", closefd=False)),
            encoding=sys.stdout.encoding,
            errors="backslashreplace",
            line_buffering=True,
        )
    app()


@app.callback(invoke_without_command=True)
@exits_in_one_line()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if version:
        text.print_line(f"backnorm {backnorm.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        text.print_line(context.get_help())


class _Run(TyperCommand):
    """`backnorm run`, which says what to write instead of other options of benchdnn."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, unless it has an option of benchdnn that is refused."""
        with exits_in_one_line():
            for name in (argument.partition("=")[0] for argument in args):
                if name in REFUSED:
                    raise ArgumentValueError(
                        name, "is an option only of benchdnn", hint=f"write {REFUSED[name]}"
                    )
        return super().parse_args(ctx, args)


@app.command(cls=_Run)
@exits_in_one_line()
@takes_records
def run(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A oneDNN graph, or a call of an operator, as JSON."),
    ],
    options: RunOptions,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Run the operators that FILE describes on tensors from a file.

    --in-shapes, --dt and --op-attrs change a oneDNN graph as benchdnn does.
    """
    begin(threads)
    report = run_file(file, options)
    text.print_report(asdict(report), [run_table(report)], json)
    for note in report.notes:
        text.warn(f"note: {note}")
    for step in report.steps:
        for name, detail in step.failures.items():
            text.warn(f"check failed: {step.label} {name}: {detail}")
    if not report.passed:
        raise typer.Exit(FAILED)


@app.command()
@exits_in_one_line()
def demo(
    threads: Threads = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print a row per call, with its time and errors.")
    ] = False,
    json: Json = False,
) -> None:
    """Compute gradients in all dialects on tensors of a real network, check and compare them."""
    begin(threads)
    if not json:
        text.print_line(f"Engine: {engines.summary()}")
    report = run_demo()
    if not json:
        text.print_line(f"{report.verdict}\n")
    table = demo_details(report) if details else demo_summary(report)
    text.print_report(asdict(report), [table], json)
    if not report.passed:
        raise typer.Exit(FAILED)


@app.command()
@exits_in_one_line()
def info(
    dialect: Annotated[str | None, typer.Argument(help="A dialect, such as ngraph.")] = None,
    op: Annotated[str | None, typer.Argument(help="An operator of the dialect.")] = None,
    json: Json = False,
) -> None:
    """Show the installation, the operators of a dialect, or the rules of an operator."""
    facts = describe(dialect, op)
    text.print_report(facts, info_tables(facts), json)
