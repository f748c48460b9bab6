"""`backnorm verify`, `judge`, `cases`, `tolerance`: judge other implementations."""

from __future__ import annotations

import inspect
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from backnorm.cli.program import exits_in_one_line
from backnorm.cli.progress import progress
from backnorm.cli.text import LiteralConsole
from backnorm.conformance.verify.names import OperationName, PassName
from backnorm.errors import ArgumentError, ArgumentValueError, counted, visible
from backnorm.graph.logical_tensor import check_elements

Rung = Literal["exact", "float64", "float32", "pairwise", "blocked", "serial"]
PassOfCases = Annotated[PassName, typer.Option("--operation", help="The pass of the cases.")]
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


def _seed(value: object) -> int:
    """Return the number that a text says; for "random" a random one."""
    text = str(value)
    if text == "random":
        return secrets.randbelow(1 << 32)
    if not text.isdecimal():
        accepted = "a whole number of at least 0, or random"
        raise typer.BadParameter(f"{text!r} is not {accepted}.")
    return int(text)


Seed = Annotated[
    int,
    typer.Option(parser=_seed, metavar="N", help="The seed of random values; random: draw it."),
]
Op = Annotated[
    str | None,
    typer.Option(help="The operator of the dialect (default: the first of the operation)."),
]
AtLeast = Annotated[Rung, typer.Option(help="An output worse than this rung is a finding.")]
Xfail = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Failures that are expected, as --write-xfail writes them."),
]
WriteXfail = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the failures of this run for --xfail.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write a JSON report; - prints it.")
]
Junit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a JUnit XML report.")]
Markdown = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Markdown report.")]
Show = Annotated[
    bool,
    typer.Option(
        "--show", help="Print the element that decides each verdict, and what the subject prints."
    ),
]

# A huge case has more elements than this, the number that a signed 32-bit index can address.
_HUGE = 1 << 31
_STDOUT = Path("-")
_DTYPES, _LAYOUTS = "float32,bfloat16,float16", "NCX,NXC"
# Defaults of `tolerance`. Its options are None by default, so that a given option is recognised.
_DTYPE, _ELEMENTS, _SHAPE = "float32", 50176, "16,8,14,14"


@dataclass(frozen=True, slots=True)
class _Output:
    """The reports of the results that a command judges.

    Attributes
    ----------
    at_least : Rung
    show : bool
        Whether to print an element of each output.
    known : list of KnownFailure
    files : mapping
        The paths of the reports by format, see `RENDERERS`; - is standard output.
    """

    at_least: Rung
    show: bool
    known: list[Any]
    files: Mapping[str, Path]

    @classmethod
    def of(
        cls, at_least: Rung, show: bool, xfail: Path | None, files: Mapping[str, Path | None]
    ) -> _Output:
        """Read the known failures, and raise if a file could not be written after the run."""
        from backnorm.conformance.verify.report import read_xfail

        paths = {form: path for form, path in files.items() if path is not None}
        known = [] if xfail is None else read_xfail(xfail)
        for path in paths.values():
            _check_writable(path)
        return cls(at_least, show, known, paths)

    def write(self, results: Any) -> bool:
        """Print and write the reports of a run; return whether the run failed."""
        from backnorm.conformance.verify.renderers import RENDERERS
        from backnorm.conformance.verify.report import Report

        report = Report.of(results, self.known, self.at_least)
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
        OperationName | None,
        typer.Option(
            help="The pass that the subject computes; layer: both, by a layer of a framework "
            "(default: layer for a layer, otherwise backward); layer-norm and others: the "
            "backward pass of this normalisation."
        ),
    ] = None,
    tensors: Annotated[
        Literal["torch", "jax"] | None,
        typer.Option(help="The tensors that the function gets (default: NumPy's arrays)."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="The device of the tensors, such as cuda or mps.", show_default="cpu"),
    ] = None,
    command: Annotated[
        bool,
        typer.Option(
            "--command",
            help="SUBJECT is a command. In it, {inputs} is replaced by a folder as cases export "
            "writes it, and {outputs} by a folder for the results, as judge reads it.",
        ),
    ] = False,
    solution: Annotated[
        bool,
        typer.Option(
            "--solution",
            help="SUBJECT is a solution.json of flashinfer-bench or SOL-ExecBench, for a "
            "definition that cases export writes.",
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
    at_least: AtLeast = "serial",
    any_order: Annotated[
        bool,
        typer.Option("--any-order", help="Accept calls that differ in bits if both are right."),
    ] = False,
    budget: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="After the cases, draw random ones for this time, and shrink what fails; needs "
            "the package hypothesis (pip install hypothesis).",
        ),
    ] = 0.0,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="The time limit of the calls of a case, in seconds.")
    ] = 30.0,
    memory: Annotated[
        int, typer.Option(min=0, help="The memory limit of the subject, in MiB; 0: none.")
    ] = 0,
    xfail: Xfail = None,
    write_xfail: WriteXfail = None,
    show: Show = False,
    json: JsonFile = None,
    junit: Junit = None,
    markdown: Markdown = None,
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
    if tensors is not None and command:
        raise ArgumentValueError("--tensors", "must be absent with --command", came=tensors)
    if solution:
        unused = {"--dialect": dialect, "--tensors": tensors, "--command": command or None}
        _check_absent("with --solution", **unused)
    if device is not None and tensors is None and not solution:
        raise ArgumentValueError("--device", "must be used with --tensors", came=device)
    if huge and (tier != "full" or command):
        came = "a command" if command else f"tier {tier}"
        raise ArgumentValueError(
            "--huge",
            "must be used with --tier full and without --command",
            came=came,
            accepted="--tier full",
        )
    alone = {"--command": command, "--solution": solution}
    alone |= {"--huge": huge} if operation != "layer" else {}
    for option in (option for option, is_given in alone.items() if is_given):
        if operation not in (None, "backward", "forward"):
            problem = f"must be backward or forward with {option}"
            raise ArgumentValueError("--operation", problem, came=operation)
    files = {"json": json, "junit": junit, "markdown": markdown, "write-xfail": write_xfail}
    output = _Output.of(at_least, show, xfail, files)
    for form, path in output.files.items():
        if path != _STDOUT and len(subjects) > 1:
            came = f"{len(subjects)} subjects"
            raise ArgumentValueError(f"--{form}", "must be used with one subject", came=came)
    selection, failed = _selection(tier, dtypes, layouts, only, skip, seed), False
    shapes = tuple(_shape(each, least=0) for each in shape or ())
    selection = replace(
        selection, shapes=shapes, operation=operation or "backward", huge=_HUGE if huge else 0
    )
    for subject in subjects:
        job = Job(
            subject, selection, dialect, op, timeout, memory, command, any_order=any_order,
            solution=solution, echo=show, tensors=tensors, device=device or "cpu", budget=budget,
        )  # fmt: skip
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
        failed = output.write(results) or failed
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
    at_least: AtLeast = "serial",
    xfail: Xfail = None,
    write_xfail: WriteXfail = None,
    show: Show = False,
    json: JsonFile = None,
    junit: Junit = None,
    markdown: Markdown = None,
) -> None:
    """Judge results that were computed from the files that cases export writes."""
    from backnorm.conformance.verify.files import judge as judge_files

    files = {"json": json, "junit": junit, "markdown": markdown, "write-xfail": write_xfail}
    output = _Output.of(at_least, show, xfail, files)
    raise typer.Exit(int(output.write(judge_files(cases, results))))


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
    operation: PassOfCases = "backward",
) -> None:
    """Print the name of each case and the shape of its x."""
    from backnorm.conformance.verify.cases import recipes

    selection = _selection(tier, dtypes, layouts, only, skip, seed)
    for recipe in recipes(replace(selection, operation=operation)):
        print(recipe.name, "x".join(map(str, recipe.shape)))


@cases_app.command("show")
@exits_in_one_line()
def cases_show(
    name: Annotated[str, typer.Argument(metavar="CASE", help="A name that cases list prints.")],
    tier: Tier = "smoke",
    seed: Seed = 0,
    operation: PassOfCases = "backward",
) -> None:
    """Print the inputs of a case, its bounds, and which wrong kernels it rejects."""
    from backnorm.conformance.verify.cases import DTYPES, Selection, recipes
    from backnorm.conformance.verify.renderers import about

    every = recipes(Selection(tier, tuple(DTYPES), operation=operation))
    recipe = next((each for each in every if each.name == name), None)
    if recipe is None:
        raise ArgumentValueError(
            "CASE", "unknown", came=name, accepted="a name that cases list prints"
        )
    LiteralConsole().print(about(recipe.case(seed)), crop=False)


@cases_app.command("export")
@exits_in_one_line()
def cases_export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
    form: Annotated[
        Literal["raw", "npy", "npz", "safetensors", "flashinfer", "hipdnn", "mlir"],
        typer.Option(
            "--format",
            help="A file format of arrays; or problems of flashinfer-bench, bundles of hipDNN, or "
            "modules of StableHLO.",
        ),
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
    operation: PassOfCases = "backward",
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
    print(visible(f"{number} cases, {size / 1e6:.1f} MB, {folder}"))


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
            "rtol=1e-2,atol=1e-2 (atol/M= grows with M, share=0.99 of the elements suffice), or a "
            "number after pcc=, cosine=, rms=, l2= or ulp=.",
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
            help="The data of the test: randn, scaled, fresh, rand, traced, layer, uniform, "
            "small, sparse, or FILE.npz with x and dy.",
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
    from backnorm.conformance.audit import audit as audit_of
    from backnorm.conformance.audit import bounds, lines, policies
    from backnorm.conformance.audit import data as audit_data

    tests = {"--audit": audit, "--policy": policy, "--compare": compare}
    named = [option for option, value in tests.items() if value is not None]
    if len(named) > 1:
        raise ArgumentValueError(
            named[1], "must be the only test", came=" and ".join(named), accepted="one of them"
        )
    if not named:
        unused = {"--data": data, "--shape": shape, "--loss": loss}
        _check_absent("without --audit, --policy or --compare", **unused)
        own = _element_type(_DTYPE if dtype is None else dtype)
        LiteralConsole().print(bounds(own, elements or _ELEMENTS))
        return
    _check_absent(f"with {named[0]}", **{"--elements": elements})
    if policy is not None:
        chosen, label = policies.policy_of(policy), f"{policy}: "
    elif compare is not None:
        chosen, label = policies.of_function(compare, _comparison(compare)), ""
    else:
        assert audit is not None
        chosen, label = policies.of_text(audit), ""
    is_layer = chosen.operation == "layer"
    if is_layer:
        _check_absent("with the test of a layer", **{"--loss": loss})
    chosen = replace(chosen, data=data or chosen.data, loss=loss or chosen.loss)
    if chosen.data.endswith(".npz") and not is_layer:
        unused = {"--dtype": dtype, "--shape": shape, "--loss": loss}
        _check_absent("with a file of x and dy", **unused)
        runs = [audit_data.read(Path(chosen.data), chosen.epsilon)]
        dtype = str(runs[0].data.x.dtype)
        about = f"{chosen.data}, {dtype}, x of {runs[0].data.x.shape}"
        has_every_mistake = False
    else:
        dtype = _DTYPE if dtype is None else dtype
        if shape is not None or not chosen.shapes:
            chosen = replace(chosen, shapes=[_shape(_SHAPE if shape is None else shape)])
        runs = list(chosen.runs(_element_type(dtype)))
        sizes = " and ".join(",".join(map(str, each)) for each in chosen.shapes)
        about = chosen.data if is_layer else f"{chosen.data}, loss {chosen.loss}"
        about += f", {dtype}, x of {sizes}, {audit_data.SEEDS} seeds"
        has_every_mistake = chosen.data == "layer" and chosen.loss in ("none", "cube")
    print(visible(f"{label}{chosen.text(dtype)} on {about}"))
    if chosen.source:
        print(f"  {chosen.source}")
    if chosen.forgives:
        print(f"  {chosen.forgives}")
    for line in lines(audit_of(chosen.test(dtype), runs)):
        print(f"  {line}")
    if not (has_every_mistake or is_layer):
        print("  --data layer --loss cube shows every mistake that a loss can show.")


def _check_absent(condition: str, **options: object) -> None:
    """Raise an error if one of `options` was given. `condition` says when they have no effect, as
    in "without --audit".
    """
    for option, value in options.items():
        if value is not None:
            raise ArgumentValueError(
                option, f"has no effect {condition}", came=str(value), hint="leave it out"
            )


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
