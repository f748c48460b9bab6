"""``backnorm verify``: judge another implementation of the backward pass."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

__all__ = ["verify"]

_Rung = Literal["exact", "float64", "float32", "pairwise", "blocked", "serial"]


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.replace(",", " ").split() if part)


def verify(
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="SUBJECT...",
            help="module:function, file.py:function, library.so:symbol, or numpy, torch, "
            "tensorflow, backnorm.",
        ),
    ],
    dialect: Annotated[
        str | None, typer.Option(help="Call the function in this specification's words.")
    ] = None,
    op: Annotated[str | None, typer.Option(help="The operator of the dialect.")] = None,
    tier: Annotated[
        Literal["smoke", "full"], typer.Option(help="Seconds, or minutes with networks' shapes.")
    ] = "smoke",
    dtypes: Annotated[
        str, typer.Option(help="Element types, separated by commas.")
    ] = "float32,bfloat16,float16",
    layouts: Annotated[str, typer.Option(help="NCX, NXC.")] = "NCX,NXC",
    only: Annotated[list[str] | None, typer.Option(help="Pattern of case names.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Pattern of case names.")] = None,
    seed: Annotated[int, typer.Option(help="Of random values.")] = 0,
    at_least: Annotated[_Rung, typer.Option(help="Worse arithmetic is a finding.")] = "serial",
    timeout: Annotated[float, typer.Option(help="Seconds for a case.")] = 30.0,
    memory: Annotated[int, typer.Option(help="MiB that the subject may take; 0: any.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="Print the worst elements.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write a report; - for stdout.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write a report.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a report.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write what is printed.")] = None,
) -> None:
    """Judge implementations of the backward pass.

    Every case runs in a process of its own, with read-only inputs between unreadable pages. Exit
    status: 0 fine, 1 a finding or nothing judged, 2 bad usage.
    """
    from backnorm.conformance.verify import report
    from backnorm.conformance.verify.cases import Selection
    from backnorm.conformance.verify.findings import counts, findings
    from backnorm.conformance.verify.run import Job
    from backnorm.conformance.verify.run import verify as run

    to_stdout = json is not None and str(json) == "-"
    console = Console(stderr=to_stdout, record=html is not None)
    selection = Selection(
        tier, _listed(dtypes), _listed(layouts), tuple(only or ()), tuple(skip or ()), seed
    )
    failed = False
    for subject in subjects:
        job = Job(subject, selection, dialect, op, timeout, memory)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(subject, total=None)

            def advance(done: int, total: int, task: TaskID = task) -> None:
                progress.update(task, completed=done, total=total)

            results = run(job, advance)
        found = findings(results, at_least)
        report.show(results, found, console)
        if show:
            report.show_case(results, console)
        failed = failed or bool(found) or not counts(results)["judged"]
        if json is not None:
            text = report.as_json(results, found)
            sys.stdout.write(text) if to_stdout else json.write_text(text)
        if junit is not None:
            junit.write_text(report.as_junit(results))
        if markdown is not None:
            markdown.write_text(report.as_markdown(results, found))
        if results.interrupted:
            raise typer.Exit(130)
    if html is not None:
        console.save_html(str(html))
    raise typer.Exit(int(failed))
