"""Layer, RMS, group and instance normalisation: right kernels pass, wrong ones get their names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

from backnorm import reference
from backnorm.conformance.axes import BATCH_NORM, NORMALIZATIONS
from backnorm.conformance.data import realistic_data
from backnorm.conformance.diagnosis import diagnose
from backnorm.conformance.formula import backward_formula
from backnorm.conformance.ladder import RUNGS, GradientLadder, gradient_ladder
from backnorm.conformance.verify.cases import Selection, recipes
from backnorm.conformance.verify.conventions import Function
from backnorm.conformance.verify.export import export
from backnorm.conformance.verify.files import judge
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.operations import OPERATIONS
from backnorm.conformance.verify.peers import missing_package
from backnorm.conformance.verify.row_operators import row_operator
from backnorm.conformance.verify.run import verify
from backnorm.conformance.verify.verdicts import Outcome, judged
from backnorm.errors import ArgumentValueError
from tests.support.pages import ROOT
from tests.support.required import require

from . import row_forward_kernels as forward_kernels
from . import row_kernels as kernels
from .row_kernels import RIGHT, WRONG

SIBLINGS = [name for name, kind in NORMALIZATIONS.items() if kind != BATCH_NORM]
# Cases in which sums are long, terms cancel, or magnitudes are extreme.
HARD = (
    "realistic-*", "foreign-*", "mean-over-*", "many-*", "huge-*", "large-*", "sums-*", "one-*",
    "no-gamma-*", "zero-gamma-*", "small-variance-*", "nan-*", "grid-3x5x37x29-*", "grid-0x*",
)  # fmt: skip


def operation_of(kernel):
    return f"{kernel.partition('_')[0]}-norm"


def judgements(kernel, function, suffix="", **selection):
    """Yield the judgement of a kernel on each case, in this process."""
    operation = operation_of(kernel) + suffix
    for recipe in recipes(Selection(operation=operation, **selection)):
        case = recipe.case(0)
        outputs = Function(function)(case.inputs, case)
        yield judged(case, Outcome(case.name, outputs=outputs), is_diagnosed=True)


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernel_of_rows_has_no_wrong_output(name):
    found = list(judgements(name, RIGHT[name], dtypes=("float32", "bfloat16"), only=HARD))
    statuses = {verdict.status for each in found for verdict in each.verdicts}
    assert statuses <= {*RUNGS, "proves_nothing"}
    assert sum(each.verdicts[0].status in RUNGS for each in found) > 15


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernel_of_rows_gets_its_name(name):
    function, expected = WRONG[name]
    only = ("diagnostic-float32-*",)
    for judgement in judgements(name, function, dtypes=("float32",), only=only):
        assert any(verdict.status == "wrong" for verdict in judgement.verdicts)
        names = "-".join(judgement.diagnosis.names) if judgement.diagnosis else ""
        assert names == (expected or "")


@pytest.mark.parametrize("name", forward_kernels.RIGHT)
def test_right_forward_pass_of_rows_has_no_wrong_output(name):
    function = forward_kernels.RIGHT[name]
    # A one-pass variance cancels where the mean is large, as it is by chance in some short rows.
    is_one_pass = name.endswith("one_pass")
    only = ("diagnostic-*", "sums-*") if is_one_pass else HARD
    options = {"dtypes": ("float32", "float16"), "only": only, "skip": ("grid-0x*",)}
    found = list(judgements(name, function, "-forward", **options))
    statuses = {verdict.status for each in found for verdict in each.verdicts}
    assert statuses <= {*RUNGS, "proves_nothing"}
    assert sum(each.verdicts[0].status in RUNGS for each in found) > (1 if is_one_pass else 10)


@pytest.mark.parametrize("name", forward_kernels.WRONG)
def test_wrong_forward_pass_of_rows_gets_its_name(name):
    function, expected = forward_kernels.WRONG[name]
    only = ("diagnostic-float32-*",)
    found = list(judgements(name, function, "-forward", dtypes=("float32",), only=only))
    assert found
    for judgement in found:
        assert any(verdict.status == "wrong" for verdict in judgement.verdicts)
        assert judgement.diagnosis.names == (expected,)


def test_verify_of_forward_pass_of_rows_that_returns_y_alone_judges_y(tmp_path):
    code = "def f(x, gamma, *, epsilon):\n    return kernel(x, gamma, epsilon=epsilon)[0]\n"
    start = "from tests.conformance.row_forward_kernels import RIGHT\nkernel = RIGHT['rms_right']\n"
    (tmp_path / "mine.py").write_text(start + code)
    selection = Selection(dtypes=("float32",), only=("re*",), operation="rms-norm-forward")
    results = verify(Job(f"{tmp_path / 'mine.py'}:f", selection))
    assert findings(results) == []
    assert {v.output for v in results.verdicts if v.grade} == {"y"}


@pytest.mark.long
@pytest.mark.parametrize("operation", SIBLINGS)
def test_diagnosis_of_rows_distinguishes_every_mistake_of_the_catalogue(operation):
    only = ("diagnostic-*",)
    recipe = next(recipes(Selection(operation=operation, dtypes=("float32",), only=only)))
    data = recipe.case(0).data
    formula = backward_formula(data.normalization)
    wide = formula.inputs(data, wide=True)
    mistakes = formula.known_mistakes(formula.inputs(data))
    assert len(mistakes) > 80
    for mistake in mistakes:
        outputs = dict(formula.wrong(mistake).outputs(data, wide))
        found = diagnose(data, (outputs["dx"], outputs["dgamma"], outputs.get("dbeta")))
        assert found.names == (mistake.name,), mistake.says


@pytest.mark.parametrize("operation", SIBLINGS)
def test_verify_of_wrong_kernel_of_rows_reports_one_finding(operation):
    kind = operation.removesuffix("-norm")
    name = next(name for name in WRONG if name.startswith(kind) and WRONG[name][1])
    only = "diagnostic-*", "realistic-*"
    selection = Selection(dtypes=("float32",), only=only, operation=operation)
    results = verify(Job(f"{kernels.__name__}:{name}", selection))
    (found,) = findings(results)
    assert found.id == WRONG[name][1]
    assert f"--operation {operation}" in found.reproduce


# The module of a function, and what it is called with, by its name.
OPERATORS = {
    name: (module.__name__, operator)
    for module in (kernels, forward_kernels)
    for name, operator in module.OPERATORS.items()
}


@pytest.mark.parametrize("name", OPERATORS)
def test_verify_of_function_with_arguments_of_an_operator_of_rows(name):
    module, (dialect, op, operation, expected) = OPERATORS[name]
    only = "diagnostic-*", "realistic-*", "no-gamma-*", "grid-3x1023x2-*", "grid-5x1x9-*"
    selection = Selection(dtypes=("float32", "float16"), only=only, operation=operation)
    results = verify(Job(f"{module}:{name}", selection, dialect=dialect, op=op))
    found = findings(results)
    assert [each.id for each in found] == [expected] * (expected is not None)
    if expected is None:
        assert {v.status for v in results.verdicts} <= {*RUNGS, "refused", "not_run"}
        assert sum(v.status in RUNGS for v in results.verdicts) > 10


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("layer_norm", "expected aten native_layer_norm_backward, onednn_graph LayerNormBackward"),
        ("native_group_norm_backward", "--operation: must be group-norm for native_group_norm"),
    ],
)
def test_verify_of_unknown_operator_of_rows_names_the_right_ones(op, message):
    job = Job("x.py:f", Selection(operation="layer-norm"), dialect="aten", op=op)
    with pytest.raises(ArgumentValueError, match=message):
        assert job.schema


PAGE = (ROOT / "docs/how-to/verify-layer-norm.md").read_text("utf-8")
COMMANDS = re.findall(r"^(?:\| .*`)?(backnorm verify [^`\n]+)", PAGE, re.M)


def run(words, folder=None):
    command = [sys.executable, "-m", "backnorm", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("file", ["myrms.py", "myforward.py"])
def test_page_of_rows_shows_the_printed_screen(file, tmp_path):
    function = {"myrms.py": "backward", "myforward.py": "forward"}[file]
    codes = re.findall(r"```python\n(.+?)```", PAGE, re.S)
    (tmp_path / file).write_text(next(code for code in codes if f"def {function}(" in code))
    screen = re.search(rf"```console\n\$ backnorm (verify {file}.+?)\n(.+?)```", PAGE, re.S)
    printed = run(shlex.split(screen[1]), tmp_path)
    lines = [
        [re.sub(r", \d+\.\d s$", "", line.rstrip()) for line in text.splitlines()]
        for text in (screen[2], printed.stdout)
    ]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("command", [each for each in COMMANDS if "mine.py" in each])
def test_page_of_rows_commands_of_operators_judge_right_functions(command):
    words = shlex.split(command)[1:]
    operation, dialect = words[words.index("--operation") + 1], words[words.index("--dialect") + 1]
    words[1] = next(
        f"{module}:{name}"
        for name, (module, (known, _, of, finding)) in OPERATORS.items()
        if (known, of, finding) == (dialect, operation, None)
    )
    done = run([*words, "--dtypes", "float32", "--only", "diagnostic-*"])
    assert done.returncode == 0, done.stdout + done.stderr


def test_page_of_rows_commands_of_cases_list_show_and_judge_them(tmp_path):
    commands = re.findall(r"^backnorm ((?:cases|judge) .+)$", PAGE, re.M)
    # The exact results in an exported folder have the names of results.
    (tmp_path / "results").symlink_to("cases")
    printed = [run(shlex.split(command), tmp_path) for command in commands]
    assert [done.returncode for done in printed] == [0] * 4, [done.stderr for done in printed]
    listed, shown, exported, verdicts = (done.stdout for done in printed)
    assert "realistic-float32-float32-NCX 6x10x3x4\n" in listed
    assert re.search(
        r"108 elements a group.+^mean +float32  3x4 .+rejects 1\d\d of", shown, re.M | re.S
    )
    assert exported.startswith("2 cases")
    assert "6 outputs judged: 6 passed; 0 findings" in verdicts
    dgamma = tmp_path / "cases" / "realistic-float32-float32-NCX" / "dgamma.bin"
    dgamma.write_bytes(dgamma.read_bytes()[::-1])
    assert "5 passed, 1 wrong" in run(shlex.split(commands[-1]), tmp_path).stdout


@pytest.mark.parametrize(
    ("operation", "judged"), [("layer-norm", 3), ("rms-norm-forward", 2), ("instance-norm", 6)]
)
def test_exported_cases_of_rows_have_results_that_judge_finds_exact(operation, judged, tmp_path):
    only = ("grid-*5x4-float32-*", "diagnostic-*")
    selection = Selection(dtypes=("float32",), only=only, operation=operation)
    written, refused = export(tmp_path, selection, form="npy")
    assert not refused
    results = judge(tmp_path, tmp_path)
    assert len(results.recipes) == written >= 2
    assert {verdict.status for verdict in results.verdicts} <= {"exact", "proves_nothing"}
    assert sum(v.status == "exact" for v in results.verdicts) >= judged


@pytest.mark.parametrize(
    ("options", "words"),
    [({"form": "mlir"}, "--format mlir"), ({"dialect": "aten"}, "--dialect aten")],
)
def test_export_of_rows_in_the_format_of_others_raises_error(options, words, tmp_path):
    message = f"--operation: must be backward or forward with {words}; got layer-norm"
    with pytest.raises(ArgumentValueError, match=message):
        export(tmp_path, Selection(operation="layer-norm"), **options)


@pytest.mark.peer
@pytest.mark.long
@pytest.mark.parametrize("command", [each for each in COMMANDS if "mine.py" not in each])
def test_page_of_rows_commands_of_packages_have_no_finding(command):
    words = shlex.split(command)[1:]
    package = words[1].partition(":")[0].partition("-")[0]
    require(missing_package(package) is None, package)
    if "cuda" in words:
        pytest.skip("no GPU")
    done = run([*words, "--only", "diagnostic-float32-*", "--dtypes", "float32"])
    assert done.returncode == 0, done.stdout + done.stderr


def data_of(kind, layout, dtype=np.float32):
    shape = (4, 6, 3, 5) if layout == "NCX" else (4, 3, 5, 6)
    options = {"data_format": layout, "rng": np.random.default_rng(0), "normalization": kind}
    return realistic_data(shape, np.dtype(dtype), **options)


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_gradient_ladder_of_rows_that_are_channels_is_that_of_batch_normalisation(layout):
    data = data_of(BATCH_NORM, layout)
    axes, x, gamma = data.axes, data.axes.rows(data.x), data.axes.over_rows(data.gamma)
    found = reference.backward_of_rows(
        x, axes.rows(data.dy), data.mean, data.variance, gamma, axes.parameters,
        epsilon=data.epsilon, is_centred=True,
    )  # fmt: skip
    expected = GradientLadder.of(*data.backward_inputs, **data.options)
    for name in ("dx", "dgamma", "dbeta"):
        value, right = getattr(found, name), expected.value(name)
        parts = [axes.rows(a) if a.ndim > 1 else a for a in (right.hi, right.lo)]
        difference = (value.hi - parts[0]) + (value.lo - parts[1])
        assert np.abs(difference).max() <= 1e-27 * np.abs(parts[0]).max()


@pytest.mark.parametrize("name", SIBLINGS)
def test_gradient_ladder_of_rows_has_the_exact_gradients(name):
    kind = NORMALIZATIONS[name]
    for layout in kind.layouts:
        data = data_of(kind, layout)
        ladder, axes = gradient_ladder(data), data.axes
        rows, size = axes.rows(data.x, np.longdouble), axes.size
        g = axes.rows(data.dy, np.longdouble) * axes.over_rows(data.gamma.astype(np.longdouble))
        mean, variance = (
            a.reshape(-1, 1).astype(np.longdouble) for a in (data.mean, data.variance)
        )
        s = 1 / np.sqrt(variance + data.epsilon)
        h = (rows - mean) * s
        dx = s * (
            g - g.mean(1, keepdims=True) * kind.is_centred - h * (g * h).mean(1, keepdims=True)
        )
        terms = axes.tensor(axes.rows(data.dy) * h), data.dy.astype(np.longdouble)
        others = tuple(k for k in range(4) if k != data.channel_axis)
        sums = {n: t.sum(others) for n, t in zip(("dgamma", "dbeta"), terms, strict=True)}
        for output, right in {"dx": axes.tensor(dx), **sums}.items():
            error = np.abs(ladder.value(output).hi - right)
            assert (error <= 1e-15 * ladder.terms(output)).all(), (output, layout)
        assert size[0] * size[1] == data.x.size
        assert data.mean.shape == axes.statistics


def test_diagnosis_of_small_error_names_no_mistake_that_changes_less():
    only = ("grid-1x15-float32-float32-NCX",)
    (recipe,) = recipes(Selection("smoke", ("float32",), operation="group-norm", only=only))
    # The passed variance is that of x, but for rounding.
    case = row_operator("aten", None, "group-norm").received(recipe.case(0))
    operation = OPERATIONS["group-norm"]
    ladder = operation.ladder(case)
    outputs = {name: ladder.value(name).hi.astype(np.float32) for name in operation.results}
    outputs["dgamma"][5] = float.fromhex("0x1.3df716p-7")
    assert not ladder.grade("dgamma", outputs["dgamma"]).passed
    assert operation.diagnosis(case, outputs).names == ()
