"""The `backnorm` command: options in; `program` has what is around it, and the exit status."""

from __future__ import annotations

from typing import Annotated

import typer

import backnorm
from backnorm.cli import program, text
from backnorm.cli.allowance import MEBIBYTES
from backnorm.cli.program import FAILED, Threads, begin, exits_in_one_line
from backnorm.cli.verify import cases_app, judge, tolerance, verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="backnorm",
    help="Batch normalisation and its gradient in every dialect, exact to one rounding.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

for command in (verify, judge, tolerance):
    app.command()(exits_in_one_line()(command))
app.add_typer(cases_app, name="cases")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main() -> None:
    """Run the command and exit; the console script."""
    program.main(app)


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
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="oneDNN Graph JSON, or a call of any dialect.")
    ],
    tensors: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The inputs: a .npz or .safetensors file."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where to write the results (.npz, .safetensors)."),
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
    arithmetic: Annotated[
        str | None,
        typer.Option(help="What elements are computed in: float32 or float64.", show_default=False),
    ] = None,
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
    with exits_in_one_line():
        from backnorm.arithmetics import check_arithmetic
        from backnorm.cli.render import run_table
        from backnorm.cli.run import RunOptions, run_file
        from backnorm.files import file_path

        begin(threads)
        how = None if arithmetic is None else check_arithmetic(arithmetic, "--arithmetic")
        report = run_file(
            RunOptions(
                file_path(file),
                tensors=None if tensors is None else file_path(tensors),
                out=None if out is None else file_path(out),
                check=check,
                seed=random,
                repeat=repeat,
                arithmetic=how,
                max_unpacked=max_unpacked,
            )
        )
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
    with exits_in_one_line():
        from backnorm.cli.demo import run_demo
        from backnorm.cli.demo_table import demo_table

        begin(threads)
        report = run_demo()
    if json:
        text.print_json(report.to_dict())
    else:
        text.print_table(demo_table(report))
        print(report.verdict)
    if not report.passed:
        raise typer.Exit(FAILED)


@app.command()
def info(
    dialect: Annotated[str | None, typer.Argument(help="A dialect.")] = None,
    op: Annotated[str | None, typer.Argument(help="One of its operators.")] = None,
    json: Json = False,
) -> None:
    """Show versions and machine; or a dialect's operators; or all about one operator."""
    with exits_in_one_line():
        from backnorm.cli.info import describe
        from backnorm.cli.info_table import info_tables

        begin()
        facts = describe(dialect, op)
    if json:
        text.print_json(facts)
    else:
        for table in info_tables(facts):
            text.print_table(table)
