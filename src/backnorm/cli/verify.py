"""`backnorm verify`, `judge`, `cases`, `tolerance`: judge other implementations."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from backnorm.cli.program import exits_in_one_line
from backnorm.cli.progress import progress
from backnorm.cli.text import LiteralConsole
from backnorm.errors import ArgumentError, ArgumentValueError, counted, visible
from backnorm.graph.logical_tensor import check_elements

Rung = Literal["exact", "float64", "float32", "pairwise", "blocked", "serial"]
Tier = Annotated[
    Literal["smoke", "full"], typer.Option(help="smoke takes seconds; full has shapes of networks.")
]
Dtypes = Annotated[str, typer.Option(help="Element types, separated by commas.")]
Layouts = Annotated[str, typer.Option(help="Layouts: NCX, NXC.")]
Only = Annotated[
    list[str] | None, typer.Option(help="Only cases whose names match the glob; repeatable.")
]
Skip = Annotated[
    list[str] | None, typer.Option(help="Skip cases whose names match the glob; repeatable.")
]
Seed = Annotated[int, typer.Option(min=0, help="The seed of random values.")]
Op = Annotated[
    str | None,
    typer.Option(help="The operator of the dialect (default: the first of the operation)."),
]
AtLeast = Annotated[
    Rung | None,
    typer.Option(help="An output worse than this rung is a finding; by default serial."),
]
Xfail = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Expected failures, a line each: glob of CASE or CASE/OUTPUT  # reason.",
    ),
]
Baseline = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="An earlier JSON report; only outputs that got worse fail."),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write a JSON report; - prints it.")
]
Junit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a JUnit XML report.")]
Markdown = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Markdown report.")]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the printed report as HTML.")
]
Show = Annotated[
    bool,
    typer.Option(
        "--show", help="Print the element that decides each verdict, and what the subject prints."
    ),
]

# A huge case has more elements than this, the number that a signed 32-bit index can address.
_HUGE = 1 << 31
_DTYPES, _LAYOUTS = "float32,bfloat16,float16", "NCX,NXC"
# Defaults of `tolerance`. Its options are None by default, so that a given option is recognised.
_DTYPE, _ELEMENTS, _SHAPE = "float32", 50176, "16,8,14,14"


@dataclass(frozen=True, slots=True)
class _Reports:
    """The command-line options for reports and for expected failures."""

    requested: Rung | None
    show: bool
    json: Path | None
    junit: Path | None
    markdown: Path | None
    html: Path | None
    xfail: Path | None
    baseline: Path | None

    @property
    def at_least(self) -> Rung:
        """The worst rung that does not count as a finding."""
        return self.requested or "serial"

    def read(self) -> tuple[list[Any] | None, Any]:
        """Return the expected failures and the baseline, each None without its option.

        The function is called before the run, and raises if :meth:`write` would not be able to
        write a file. It reads each file once, so that a file may be a pipe.
        """
        from backnorm.conformance.verify import _expected as expected

        known = None if self.xfail is None else expected.read_expectations(self.xfail)
        before = None
        if self.baseline is not None:
            before = expected.read_baseline(self.baseline)
            if self.json is not None and self.json.resolve() == self.baseline.resolve():
                raise ArgumentValueError(
                    "--json", "must not be the file of --baseline, because a run that fails would "
                    "become the baseline", came=str(self.json), accepted="another file",
                )  # fmt: skip
        for path in (self.json, self.junit, self.markdown, self.html):
            if path is None or path == Path("-"):
                continue
            is_new = not path.exists()
            if not (is_new or path.is_file() or path.is_dir()):
                # Opening a pipe would wait for its reader.
                continue
            path.open("a").close()
            if is_new:
                path.unlink()
        return known, before

    def console(self) -> Console:
        """Return the console on which tables are printed."""
        return LiteralConsole(stderr=self.json == Path("-"), record=self.html is not None)

    def write(self, results: Any, console: Console, known: list[Any] | None, before: Any) -> bool:
        """Print and write the reports of a run; return whether the run failed.

        `known` and `before` are the results of :meth:`read`.
        """
        from backnorm.conformance.verify import _expected as expected
        from backnorm.conformance.verify import _report as report
        from backnorm.conformance.verify.findings import counts, findings, mistake_of

        judged = counts(results)["judged"]
        passed, unmatched, expired = list[str](), list[str](), list[str]()
        if known is not None:
            expired = [f"{e.pattern} (until {e.until})" for e in known if e.is_expired]
            known = [each for each in known if not each.is_expired]
            results, passed, unmatched = expected.with_expected(results, known, self.at_least)

        is_failure = partial(expected.fails, at_least=self.at_least)
        fails: Callable[[Any], bool] = is_failure
        found = findings(results, self.at_least)
        failed: list[Any] = found
        if before is not None:
            compared, mistake = before.number(results), partial(mistake_of, found=found)

            def fails(verdict: Any) -> bool:
                return bool(before.is_worse(verdict, mistake(verdict), self.requested))

            failed = [verdict for verdict in results.verdicts if fails(verdict)]
            new = [verdict for verdict in failed if is_failure(verdict)]
            found = [
                replace(each, known=bool(compared) and not any(map(each.explains, new)))
                for each in found
            ]
        report.show(results, found, console, self.at_least)
        if passed:
            number = counted(len(passed), "output")
            title = f"passed, although {self.xfail} expects a failure: {number}"
            _print_list(title, passed, console)
        if expired:
            _print_list(f"{self.xfail} has expired lines:", expired, console)
        if unmatched:
            _print_list(f"{self.xfail} has patterns that match no output:", unmatched, console)
        if before is not None:
            if not compared and not results.interrupted:
                raise ArgumentValueError(
                    "--baseline", "has no output of this run", came=str(self.baseline),
                    accepted="a report with the operation, types, tier and seed of the run",
                )  # fmt: skip
            title = f"{compared} of {len(results.verdicts)} outputs are in {self.baseline}"
            changes = [before.change(each, mistake(each)) for each in failed]
            _print_list(f"{title}; {len(failed)} worse", changes, console)
        if self.show:
            report.show_case(results, console)
        if self.json is not None:
            text = report.as_json(results, found, self.at_least)
            sys.stdout.write(text) if self.json == Path("-") else self.json.write_text(text)
        if self.junit is not None:
            self.junit.write_text(report.as_junit(results, found, fails), "utf-8")
        if self.markdown is not None:
            self.markdown.write_text(report.as_markdown(results, found, self.at_least), "utf-8")
        if self.html is not None:
            console.save_html(str(self.html))
        return bool(failed) or not judged


def _print_list(title: str, lines: list[str], console: Console) -> None:
    """Print a title, the first lines below the title, and the number of the remaining lines."""
    from backnorm.conformance.verify._report import NAMED

    more = len(lines) - NAMED
    shown = [f"  {line}" for line in lines[:NAMED]] + [f"  and {more} more"] * (more > 0)
    text = "\n".join([title, *shown])
    console.print(text, soft_wrap=True)


def _print_schema(wanted: bool) -> None:
    if wanted:
        folder = resources.files("backnorm.conformance.verify") / "schemas"
        print((folder / "verdict.json").read_text(), end="")
        raise typer.Exit


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
    dialect: Annotated[
        str | None, typer.Option(help="The dialect whose arguments the function has.")
    ] = None,
    op: Op = None,
    operation: Annotated[
        Literal["backward", "forward"], typer.Option(help="The pass that the subject computes.")
    ] = "backward",
    command: Annotated[
        bool,
        typer.Option(
            "--command",
            help="SUBJECT is a command. In it, {inputs} is replaced by a folder as cases export "
            "writes it, and {outputs} by a folder for the results, as judge reads it.",
        ),
    ] = False,
    tier: Tier = "smoke",
    dtypes: Dtypes = _DTYPES,
    layouts: Layouts = _LAYOUTS,
    only: Only = None,
    skip: Skip = None,
    seed: Seed = 0,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Judge random data of the shape N,C,...; repeatable."),
    ] = None,
    huge: Annotated[
        bool,
        typer.Option(
            "--huge",
            help="With --tier full: add a case with more than 2**31 elements, which takes 13 GB.",
        ),
    ] = False,
    at_least: AtLeast = None,
    any_order: Annotated[
        bool,
        typer.Option("--any-order", help="Accept calls that differ in bits if both are right."),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="The time limit of the calls of a case, in seconds.")
    ] = 30.0,
    memory: Annotated[
        int, typer.Option(min=0, help="The memory limit of the subject, in MiB; 0: none.")
    ] = 0,
    xfail: Xfail = None,
    baseline: Baseline = None,
    show: Show = False,
    json: JsonFile = None,
    junit: Junit = None,
    markdown: Markdown = None,
    html: Html = None,
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
    from backnorm.conformance.verify.run import Job
    from backnorm.conformance.verify.run import verify as run_job

    if op is not None and dialect is None:
        raise ArgumentValueError("--op", "must be used with --dialect", came=op)
    if command and dialect is not None:
        raise ArgumentValueError("--dialect", "must be absent with --command", came=dialect)
    if huge and (tier != "full" or command):
        came = "a command" if command else f"tier {tier}"
        raise ArgumentValueError(
            "--huge",
            "must be used with --tier full and without --command",
            came=came,
            accepted="--tier full",
        )
    if command and operation != "backward":
        raise ArgumentValueError("--operation", "must be backward with --command", came=operation)
    files = {"--junit": junit, "--markdown": markdown, "--html": html}
    files |= {} if json == Path("-") else {"--json": json}
    for option, path in files.items():
        if path is not None and len(subjects) > 1:
            came = f"{len(subjects)} subjects"
            raise ArgumentValueError(option, "must be used with one subject", came=came)
    reports = _Reports(at_least, show, json, junit, markdown, html, xfail, baseline)
    expected = reports.read()
    console, failed = reports.console(), False
    selection = _selection(tier, dtypes, layouts, only, skip, seed)
    shapes = tuple(_shape(each, least=0) for each in shape or ())
    selection = replace(selection, shapes=shapes, operation=operation, huge=_HUGE if huge else 0)
    for subject in subjects:
        job = Job(subject, selection, dialect, op, timeout, memory, command, any_order, echo=show)
        with progress() as advance:
            advance(subject, 0)
            results = run_job(job, partial(advance, subject))
        failed = reports.write(results, console, *expected) or failed
        if results.interrupted:
            raise typer.Exit(130)
    raise typer.Exit(int(failed))


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
    at_least: AtLeast = None,
    xfail: Xfail = None,
    baseline: Baseline = None,
    show: Show = False,
    json: JsonFile = None,
    junit: Junit = None,
    markdown: Markdown = None,
    html: Html = None,
) -> None:
    """Judge results that were computed from the files that cases export writes."""
    from backnorm.conformance.verify.export import judge as judge_files

    reports = _Reports(at_least, show, json, junit, markdown, html, xfail, baseline)
    expected = reports.read()
    judged = judge_files(cases, results)
    raise typer.Exit(int(reports.write(judged, reports.console(), *expected)))


cases_app = typer.Typer(help="List the cases of verify, or write them to files.")


@cases_app.command("list")
@exits_in_one_line()
def cases_list(
    tier: Tier = "smoke",
    dtypes: Dtypes = _DTYPES,
    layouts: Layouts = _LAYOUTS,
    only: Only = None,
    skip: Skip = None,
    seed: Seed = 0,
) -> None:
    """Print the name of each case and the shape of its x."""
    from backnorm.conformance.verify.cases import selected

    for case in selected(_selection(tier, dtypes, layouts, only, skip, seed)):
        print(case.name, "x".join(map(str, case.data.x.shape)))


@cases_app.command("show")
@exits_in_one_line()
def cases_show(
    name: Annotated[str, typer.Argument(metavar="CASE", help="A name that cases list prints.")],
    tier: Tier = "smoke",
    seed: Seed = 0,
) -> None:
    """Print the inputs of a case, its bounds, and which wrong kernels it rejects."""
    from backnorm.conformance.verify._about import show_about
    from backnorm.conformance.verify.cases import DTYPES, Selection, selected

    every = selected(Selection(tier, tuple(DTYPES), seed=seed))
    case = next((each for each in every if each.name == name), None)
    if case is None:
        raise ArgumentValueError(
            "CASE", "unknown", came=name, accepted="a name that cases list prints"
        )
    show_about(case, LiteralConsole())


@cases_app.command("export")
@exits_in_one_line()
def cases_export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
    form: Annotated[
        Literal["raw", "npy", "npz", "safetensors"],
        typer.Option("--format", help="The format of the arrays."),
    ] = "raw",
    tier: Tier = "smoke",
    dtypes: Dtypes = _DTYPES,
    layouts: Layouts = _LAYOUTS,
    only: Only = None,
    skip: Skip = None,
    seed: Seed = 0,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Write random data of the shape N,C,... instead; repeatable."),
    ] = None,
    operation: Annotated[
        Literal["backward", "forward"], typer.Option(help="The pass of the cases.")
    ] = "backward",
    dialect: Annotated[
        str | None, typer.Option(help="The dialect whose names and shapes the files have.")
    ] = None,
    op: Op = None,
) -> None:
    """Write cases with exact results and the bounds of every element."""
    from backnorm.conformance.verify.export import export

    if op is not None and dialect is None:
        raise ArgumentValueError("--op", "must be used with --dialect", came=op)
    selection = replace(
        _selection(tier, dtypes, layouts, only, skip, seed),
        shapes=tuple(_shape(each, least=0) for each in shape or ()),
        operation=operation,
    )
    number, refused = export(folder, selection, form=form, dialect=dialect, op=op)
    for reason, count in refused.items():
        print(f"left out {counted(count, 'case')}: {reason}")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(visible(f"{number} cases, {size / 1e6:.1f} MB, {folder / 'manifest.json'}"))


def tolerance(
    dtype: Annotated[
        str | None, typer.Option(help="The element type of x.", show_default=_DTYPE)
    ] = None,
    elements: Annotated[
        int | None,
        typer.Option(min=1, help="Elements per channel, M.", show_default=str(_ELEMENTS)),
    ] = None,
    audit: Annotated[
        str | None,
        typer.Option(
            metavar="TOLERANCE",
            help="List the wrong kernels that pass a test with this tolerance: "
            "rtol=1e-2,atol=1e-2, or a number after pcc=, cosine=, rms=, l2= or ulp=.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Like --audit, for the test of a project, e.g. pytorch."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="FUNCTION",
            help="Like --audit, with a function of an array and the expected array: "
            "file.py:function or module:function.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="The data of the test: randn, rand, layer, uniform, small, sparse, or FILE.npz "
            "with x and dy.",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="The shape of x, channels second.", show_default=_SHAPE),
    ] = None,
    loss: Annotated[
        Literal["none", "sum", "mean", "square", "cube"] | None,
        typer.Option(help="The loss whose gradient is dy; none: dy is part of DATA."),
    ] = None,
) -> None:
    """Print the error bounds of right kernels, or the wrong kernels that a tolerance accepts."""
    tests = {"--audit": audit, "--policy": policy, "--compare": compare}
    named = [option for option, value in tests.items() if value is not None]
    if len(named) > 1:
        raise ArgumentValueError(
            named[1], "must be the only test", came=" and ".join(named), accepted="one of them"
        )
    if named:
        _check_absent(f"with {named[0]}", **{"--elements": elements})
        _print_audit(audit, policy, compare, dtype, data, shape, loss)
    else:
        unused = {"--data": data, "--shape": shape, "--loss": loss}
        _check_absent("without --audit, --policy or --compare", **unused)
        _print_bounds(_DTYPE if dtype is None else dtype, elements or _ELEMENTS)


def _check_absent(condition: str, **options: object) -> None:
    """Raise an error if one of `options` was given. `condition` says when they have no effect, as
    in "without --audit".
    """
    for option, value in options.items():
        if value is not None:
            raise ArgumentValueError(
                option, f"has no effect {condition}", came=str(value), hint="leave it out"
            )


def _print_audit(
    tolerance: str | None,
    policy: str | None,
    compare: str | None,
    dtype: str | None,
    data: str | None,
    shape: str | None,
    loss: str | None,
) -> None:
    from backnorm.conformance.formula import IMPRECISE
    from backnorm.conformance.verify import audit_data, policies, tolerances
    from backnorm.conformance.verify.audit import audit

    project = None if policy is None else policies.policy_of(policy)
    epsilon = 1e-5 if project is None else project.epsilon
    data = data or ("randn" if project is None else project.data)
    if data.endswith(".npz"):
        unused = {"--dtype": dtype, "--shape": shape, "--loss": loss}
        _check_absent("with a file of x and dy", **unused)
        runs = [audit_data.read(Path(data), epsilon)]
        dtype = str(runs[0].inputs[0].dtype)
        about = f"{data}, {dtype}, x of {runs[0].inputs[0].shape}"
    else:
        loss = loss or ("none" if project is None else project.loss)
        dtype = _DTYPE if dtype is None else dtype
        sizes = _shape(_SHAPE if shape is None else shape)
        runs = list(audit_data.runs(data, sizes, loss, epsilon, _element_type(dtype)))
        about = f"{data}, loss {loss}, {dtype}, x of {','.join(map(str, sizes))}, {len(runs)} seeds"
    if project is not None:
        test, text = project.test(dtype), f"{policy}: {project.text(dtype)}"
    elif compare is not None:
        test, text = tolerances.from_function(_comparison(compare)), compare
    else:
        assert tolerance is not None
        test, text = tolerances.from_text(tolerance), tolerance
    print(visible(f"{text} on {about}"))
    if project is not None:
        print(f"  {project.source}")
    found = audit(test, runs)
    # Imprecise kernels have a list of their own, because a right kernel in float32 may be no more
    # accurate than they are.
    for is_imprecise, noun in ((False, "wrong formula"), (True, "imprecise kernel")):
        caught, missed, invisible = (
            [each for each in mistakes if (each in IMPRECISE) == is_imprecise]
            for mistakes in (found.caught, found.missed, found.invisible)
        )
        judged = counted(len(caught) + len(missed), noun)
        print(f"  {len(caught)} of {judged} caught." + " These pass:" * bool(missed))
        _print_mistakes(missed)
        print(f"  {counted(len(invisible), noun)} with the right results on such data:")
        _print_mistakes(invisible)
    for name, number in found.false_alarms.items():
        print(f"  a right kernel, {name}: rejected in {number} of {found.runs}")
    if data != "layer" or loss not in ("none", "cube"):
        print("  --data layer --loss cube shows every mistake that a loss can show.")


def _comparison(name: str) -> Callable[..., Any]:
    """Return the function that --compare names.

    The function takes two arguments: an array, and the expected array.
    """
    from backnorm.conformance.verify.subjects import described, function_of

    try:
        function = function_of(name, "--compare")
        inspect.signature(function).bind(None, None)
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentValueError(
            "--compare", "cannot be imported, or does not take two arrays", came=name,
            hint=described(error),
        ) from error  # fmt: skip
    return function


def _print_mistakes(mistakes: list[Any]) -> None:
    for mistake in mistakes:
        print(f"    {mistake.says} ({mistake.name})")


def _print_bounds(dtype: str, elements: int) -> None:
    from backnorm.conformance.judge import GRADIENTS
    from backnorm.conformance.ladder import KINDS, bound, rungs
    from backnorm.dtypes import statistics_types

    own = _element_type(dtype)
    statistics = statistics_types(own)[-1]
    unit = 2.0**-53 if dtype == "float64" else 2.0**-24
    title = f"{dtype}, {elements} elements a channel"
    table = Table(title=title, box=None, title_justify="left", pad_edge=False)
    for head in ("rung", "output", "expected", "guaranteed"):
        table.add_column(head, no_wrap=head != "expected")
    for rung in rungs(own):
        for name in GRADIENTS:
            output = own if name == "dx" else statistics
            texts = [
                bound(rung, name, output, own, elements, kind=kind).in_units(unit) for kind in KINDS
            ]
            table.add_row(rung, name, *texts)
    console = LiteralConsole()
    console.print(table)
    console.print(
        f"u = 2**{math.log2(unit):.0f}; ulp: of the output's type at the exact value; T: the sum "
        "of the magnitudes of the terms; V, S, R: see docs/tolerance.md, which derives the bounds."
    )


def _selection(
    tier: str,
    dtypes: str,
    layouts: str,
    only: list[str] | None,
    skip: list[str] | None,
    seed: int,
) -> Any:
    from backnorm.conformance.verify.cases import DTYPES, LAYOUTS, Selection, check_names

    check_names("--dtypes", _listed(dtypes), DTYPES)
    check_names("--layouts", _listed(layouts), LAYOUTS)
    return Selection(
        tier, _listed(dtypes), _listed(layouts), tuple(only or ()), tuple(skip or ()), seed
    )


def _element_type(name: str) -> Any:
    from backnorm.conformance.verify.cases import DTYPES, check_names

    check_names("--dtype", [name], DTYPES)
    return DTYPES[name]


def _shape(text: str, least: int = 1) -> tuple[int, ...]:
    sizes = _listed(text)
    if len(sizes) < 2 or not all(size.isdecimal() and int(size) >= least for size in sizes):
        accepted = f"two or more sizes of at least {least}, separated by commas"
        raise ArgumentValueError("--shape", "must be a shape", came=repr(text), accepted=accepted)
    shape = tuple(map(int, sizes))
    check_elements(shape, "--shape")
    return shape


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())
