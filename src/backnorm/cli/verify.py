"""`backnorm verify`, `judge`, `cases`: judge other implementations."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from backnorm.cli.program import exits_in_one_line, listed, shape_of, takes_records
from backnorm.cli.progress import progress
from backnorm.cli.text import LiteralConsole
from backnorm.conformance.verify.names import OperationName, PassName
from backnorm.conformance.verify.options import Operator, Options, option
from backnorm.errors import ArgumentValueError, counted, visible

PassOfCases = Annotated[PassName, typer.Option("--operation", help="The pass of the cases.")]

# A huge case has more elements than this, the number that a signed 32-bit index can address.
_HUGE = 1 << 31
_STDOUT = Path("-")


def _seed(value: object) -> int:
    """Return the number that a text says; for "random" a random one."""
    text = str(value)
    if text == "random":
        return secrets.randbelow(1 << 32)
    if not text.isdecimal():
        accepted = "a whole number of at least 0, or random"
        raise typer.BadParameter(f"{text!r} is not {accepted}.")
    return int(text)


@dataclass(frozen=True, slots=True)
class Draw:
    """The cases of a tier, and the seed of their data."""

    tier: Literal["smoke", "full"] = option(
        "smoke", "smoke takes seconds; full has shapes of networks."
    )
    seed: int = option(0, "The seed of random values; random: draw it.", parser=_seed, metavar="N")


@dataclass(frozen=True, slots=True)
class Cases(Draw):
    """The cases of a command."""

    dtypes: str = option("float32,bfloat16,float16", "Element types, separated by commas.")
    layouts: str = option("NCX,NXC", "Layouts: NCX, NXC.")
    only: list[str] | None = option(None, "Only cases whose names match the glob; repeatable.")
    skip: list[str] | None = option(None, "Skip cases whose names match the glob; repeatable.")
    shape: list[str] | None = option(
        None, "Random data of the shape N,C,... in the place of the tier's cases; repeatable."
    )

    def selection(self, operation: OperationName, huge: int = 0) -> Any:
        """Return the selection of these cases of an operation."""
        from backnorm.conformance.verify.cases import DTYPES, LAYOUTS, Selection, check_names

        dtypes, layouts = listed(self.dtypes), listed(self.layouts)
        check_names("--dtypes", dtypes, DTYPES)
        check_names("--layouts", layouts, LAYOUTS)
        only, skip = tuple(self.only or ()), tuple(self.skip or ())
        shapes = tuple(shape_of(each, least=0) for each in self.shape or ())
        return Selection(self.tier, dtypes, layouts, only, skip, self.seed, shapes, operation, huge)


@dataclass(frozen=True, slots=True)
class Reports:
    """The reports of the results that a command judges."""

    at_least: Literal["exact", "float64", "float32", "pairwise", "blocked", "serial"] = option(
        "serial", "An output worse than this rung is a finding."
    )
    xfail: Path | None = option(
        None, "Failures that are expected, as --write-xfail writes them.", metavar="FILE"
    )
    write_xfail: Path | None = option(
        None, "Write the failures of this run for --xfail.", metavar="FILE"
    )
    show: bool = option(
        False, "Print the element that decides each verdict, and what the subject prints."
    )
    json: Path | None = option(None, "Write a JSON report; - prints it.", metavar="FILE")
    junit: Path | None = option(None, "Write a JUnit XML report.", metavar="FILE")
    markdown: Path | None = option(None, "Write a Markdown report.", metavar="FILE")

    @property
    def files(self) -> dict[str, Path]:
        """The paths of the reports by format, see `RENDERERS`; - is standard output."""
        paths = {"json": self.json, "junit": self.junit, "markdown": self.markdown}
        paths["write-xfail"] = self.write_xfail
        return {form: path for form, path in paths.items() if path is not None}

    def known(self) -> list[Any]:
        """Read the known failures, and raise if a file could not be written after the run."""
        from backnorm.conformance.verify.report import read_xfail

        known = [] if self.xfail is None else read_xfail(self.xfail)
        for path in self.files.values():
            _check_writable(path)
        return known

    def write(self, results: Any, known: Sequence[Any]) -> bool:
        """Print and write the reports of a run; return whether the run failed."""
        from backnorm.conformance.verify.renderers import RENDERERS
        from backnorm.conformance.verify.report import Report

        report = Report.of(results, known, self.at_least)
        console = LiteralConsole(stderr=_STDOUT in self.files.values())
        for form in ("text", *["elements"] * self.show):
            console.print(RENDERERS[form](report), crop=False)
        for form, path in self.files.items():
            text = str(RENDERERS[form](report))
            sys.stdout.write(text) if path == _STDOUT else path.write_text(text, "utf-8")
        return report.failed


def _check_writable(path: Path) -> None:
    is_new = not path.exists()
    # Opening a pipe would wait for its reader.
    if path != _STDOUT and (is_new or path.is_file() or path.is_dir()):
        path.open("a").close()
        if is_new:
            path.unlink()


def _print_schema(wanted: bool) -> None:
    if wanted:
        folder = resources.files("backnorm.conformance.verify") / "schemas"
        print((folder / "verdict.json").read_text(), end="")
        raise typer.Exit


@takes_records
def verify(
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="SUBJECT...",
            help="module:function, file.py:function, library.so:symbol, or one of numpy, torch, "
            "torch-compiled, jax, tensorflow, tensorflow-xla, onednn, onednn-graph, "
            "onnxruntime, backnorm.",
        ),
    ],
    options: Options,
    cases: Cases,
    reports: Reports,
    operation: Annotated[
        OperationName | None,
        typer.Option(
            help="The pass that the subject computes; layer: both, by a layer of a framework "
            "(default: layer for a layer, otherwise backward); layer-norm and others: the "
            "backward pass of this normalisation."
        ),
    ] = None,
    huge: Annotated[
        bool,
        typer.Option("--huge", help="Add a case with more than 2**31 elements, which takes 13 GB."),
    ] = False,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            is_eager=True,
            callback=_print_schema,
            help="Print the JSON Schema of the reports of --json.",
        ),
    ] = False,
) -> None:
    """Judge implementations of the backward pass, or of the forward pass in training.

    Each implementation runs in its own process, on inputs between unreadable memory pages. Exit
    status: 0 no finding, 1 a finding or nothing judged, 2 bad usage, 130 interrupted.
    """
    from backnorm.conformance.verify.job import Job
    from backnorm.conformance.verify.run import verify as run_job

    for form, path in reports.files.items():
        if path != _STDOUT and len(subjects) > 1:
            came = f"{len(subjects)} subjects"
            raise ArgumentValueError(f"--{form}", "must be used with one subject", came=came)
    known, failed = reports.known(), False
    selection = cases.selection(operation or "backward", _HUGE if huge else 0)
    for subject in subjects:
        job = Job(subject, selection, echo=reports.show, **asdict(options))
        with progress() as advance:
            advance(subject, 0)
            try:
                results = run_job(job, partial(advance, subject))
            except ArgumentValueError as error:
                if error.argument not in ("--operation", "--only") or operation is not None:
                    raise
                # The subject is a module, which only its process imports, or `only` names cases of
                # modules.
                job = replace(job, selection=replace(selection, operation="layer"))
                results = run_job(job, partial(advance, subject))
        failed = reports.write(results, known) or failed
        if results.interrupted:
            raise typer.Exit(130)
    raise typer.Exit(int(failed))


@takes_records
def judge(
    cases: Annotated[
        Path, typer.Argument(metavar="CASES", help="The folder that cases export wrote.")
    ],
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            help="A folder that has, for each case, a folder with a file for each output, such as "
            "dx.bin (or .npy), or an .npz or .safetensors file with the names case/output.",
        ),
    ],
    reports: Reports,
) -> None:
    """Judge results that were computed from the files that cases export writes."""
    from backnorm.conformance.verify.files import judge as judge_files

    known = reports.known()
    raise typer.Exit(int(reports.write(judge_files(cases, results), known)))


cases_app = typer.Typer(help="List the cases of verify, or write them to files.")


@cases_app.command("list")
@exits_in_one_line()
@takes_records
def cases_list(cases: Cases, operation: PassOfCases = "backward") -> None:
    """Print the name of each case and the shape of its x."""
    from backnorm.conformance.verify.cases import recipes

    for recipe in recipes(cases.selection(operation)):
        print(recipe.name, "x".join(map(str, recipe.shape)))


@cases_app.command("show")
@exits_in_one_line()
@takes_records
def cases_show(
    name: Annotated[str, typer.Argument(metavar="CASE", help="A name that cases list prints.")],
    draw: Draw,
    operation: PassOfCases = "backward",
) -> None:
    """Print the inputs of a case, its bounds, and which wrong kernels it rejects."""
    from backnorm.conformance.verify.cases import DTYPES, Selection, recipes
    from backnorm.conformance.verify.renderers import about

    every = recipes(Selection(draw.tier, tuple(DTYPES), operation=operation))
    recipe = next((each for each in every if each.name == name), None)
    if recipe is None:
        raise ArgumentValueError(
            "CASE", "unknown", came=name, accepted="a name that cases list prints"
        )
    LiteralConsole().print(about(recipe.case(draw.seed)), crop=False)


@cases_app.command("export")
@exits_in_one_line()
@takes_records
def cases_export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
    cases: Cases,
    operator: Operator,
    form: Annotated[
        Literal["raw", "npy", "npz", "safetensors", "flashinfer", "hipdnn", "mlir"],
        typer.Option(
            "--format",
            help="A file format of arrays; or problems of flashinfer-bench, bundles of hipDNN, or "
            "modules of StableHLO.",
        ),
    ] = "raw",
    operation: PassOfCases = "backward",
) -> None:
    """Write cases with exact results and the bounds of every element."""
    from backnorm.conformance.verify.export import export

    selection = cases.selection(operation)
    number, refused = export(folder, selection, form=form, **asdict(operator))
    for reason, count in refused.items():
        print(f"left out {counted(count, 'case')}: {reason}")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(visible(f"{number} cases, {size / 1e6:.1f} MB, {folder}"))
