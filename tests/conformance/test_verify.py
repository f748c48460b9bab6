"""Wrong subjects are found and named, right ones are graded, and no end of a subject is ours."""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from backnorm.cli.app import app
from backnorm.conformance.ladder import RUNGS, Grade
from backnorm.conformance.verify._expected import Baseline, fails
from backnorm.conformance.verify._memory import Guarded
from backnorm.conformance.verify._report import as_junit, as_markdown, show, show_case
from backnorm.conformance.verify.cases import Selection, selected
from backnorm.conformance.verify.findings import counts, findings
from backnorm.conformance.verify.run import STATUSES, Job, Results, Verdict, verify
from backnorm.conformance.verify.subjects import subject_of
from backnorm.errors import ArgumentValueError
from tests.required import require

from .wrong_subjects import WRONG

HERE = Path(__file__).parent
WRONG_FILE = HERE / "wrong_subjects.py"
QUICK = ["DgammaWithGamma", "rolled", "last_cached", "reads_past_last_element", "writes_input"]
QUICK += ["forks_and_crashes", "wrong_for_unaligned_memory"]
SMALL = Selection(dtypes=("float32",), only=("diagnostic-*", "realistic-*", "large-sums-*"))

ONE = Selection(dtypes=("float32",), only=("diagnostic-float32-float32-NCX",))


def found_in(subject, selection=SMALL, **options):
    results = verify(Job(subject, selection, **options))
    return results, findings(results)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in WRONG],
)
def test_verify_of_wrong_subject_reports_expected_finding(name):
    results, found = found_in(
        f"{WRONG_FILE}:{name}", timeout=2.0 if name == "never_returns" else 30.0
    )
    assert found, name
    ids = [set(finding.id.split("-and-")) for finding in found]
    expected = WRONG[name]
    texts = [finding.id for finding in found]
    assert any(all(part in text for part in expected.split("|")) for text in texts), (texts, ids)
    assert counts(results)["judged"]


def test_verify_right_subject_has_no_finding():
    results, found = found_in("backnorm")
    assert found == []
    assert {v.status for v in results.verdicts} <= set(RUNGS)


def test_verify_of_sums_in_an_order_that_depends_on_alignment_has_no_finding(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np, backnorm\n"
        "def backward(x, dy, mean, variance, gamma, **options):\n"
        "    dx, dgamma, dbeta = backnorm.batch_norm_backward(\n"
        "        x, dy, mean, variance, gamma, **options)\n"
        "    step = -1 if x.ctypes.data % 64 else 1\n"
        "    order = np.cumsum(dy.sum((2, 3), dtype='f')[::step], axis=0, dtype='f')\n"
        "    return dx, dgamma, order[-1]\n"
    )
    results, found = found_in(f"{tmp_path / 'mine.py'}:backward", ONE)
    assert found == []
    assert counts(results)["judged"] == 3


def test_finding_in_float64_has_reproduce_command_with_dtype():
    selection = Selection(dtypes=("float64",), only=("diagnostic-float64-*",))
    _, found = found_in(f"{WRONG_FILE}:DgammaWithGamma", selection)
    assert "--dtypes float64 --only" in found[0].reproduce


def test_subject_of_missing_package_raises_error_naming_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArgumentValueError, match="needs onnxruntime-training"):
        subject_of("onnxruntime")


def test_verify_of_crashing_subject_stops_and_keeps_case_order():
    selection = Selection(dtypes=("float32",))
    results, found = found_in(f"{WRONG_FILE}:reads_beyond", selection)
    number = counts(results)["not_run"] // 3
    console = Console(file=io.StringIO(), width=200)
    show(results, found, console)
    text = f"\n  not run in {number} cases: the subject ended 8 processes in a row\n"
    assert text in console.file.getvalue()
    found = list(dict.fromkeys(verdict.case for verdict in results.verdicts))
    assert found == [case.name for case in selected(selection)]


def test_verify_command_prints_finding_and_number_of_cases():
    done = CliRunner().invoke(
        app, ["verify", f"{WRONG_FILE}:DgammaWithGamma", "--dtypes", "float32", "--only", "diag*"]
    )
    assert done.exit_code == 1
    assert "dgamma is multiplied by gamma" in done.output
    assert "WRONG" in done.output
    assert " 4 cases (smoke), " in " ".join(done.output.split())


def test_verify_json_and_junit_contain_finding_and_verdicts(tmp_path):
    report = tmp_path / "report.json"
    done = CliRunner().invoke(
        app,
        ["verify", f"{WRONG_FILE}:DbetaWithS", "--dtypes", "float32",
         "--only", "diagnostic-float32*",
         "--json", str(report), "--junit", str(tmp_path / "junit.xml")],
    )  # fmt: skip
    assert done.exit_code == 1
    read = json.loads(report.read_text())
    assert read["findings"][0]["id"] == "dbeta-s"
    assert read["counts"]["wrong"] == 2
    assert {v["output"] for v in read["verdicts"]} == {"dx", "dgamma", "dbeta"}
    assert 'failures="2"' in (tmp_path / "junit.xml").read_text()
    assert 'message="dbeta is multiplied by s"' in (tmp_path / "junit.xml").read_text()
    wrong = next(each for each in read["verdicts"] if each["status"] == "wrong")
    got, exact = (float.fromhex(wrong[name]) for name in ("got", "exact"))
    assert abs(got - exact) / wrong["ulp"] == pytest.approx(np.spacing(np.float32(abs(exact))))


def test_verify_json_matches_schema(tmp_path):
    require(find_spec("jsonschema"), "jsonschema")
    from jsonschema import Draft202012Validator

    subject = tmp_path / "dx_alone.py"
    subject.write_text(
        "def backward(x, dy, mean, variance, gamma, *, training, epsilon):\n"
        "  return dy / 0 if training else dy[None, 1 // training]\n"
    )
    done = CliRunner().invoke(
        app,
        ["verify", f"{subject}:backward", f"{WRONG_FILE}:DbetaWithS", "--dtypes", "float32",
         "--layouts", "NCX", "--only", "diagnostic-*", "--json", "-"],
    )  # fmt: skip
    schema = json.loads(CliRunner().invoke(app, ["verify", "--schema"]).stdout)
    validator, decoder = Draft202012Validator(schema), json.JSONDecoder()
    assert schema["$defs"]["status"]["enum"] == list(STATUSES)
    first, end = decoder.raw_decode(done.stdout)
    second, _ = decoder.raw_decode(done.stdout[end:].lstrip())
    for read in (first, second):
        assert [error.message for error in validator.iter_errors(read)] == []
    assert {"error", "not_written"} <= first["counts"].keys()
    assert second["findings"]
    assert not validator.is_valid(second | {"tier": "none"})


def test_verify_with_xfail_counts_expected_failures_without_findings(tmp_path):
    expected, junit = tmp_path / "expected.txt", tmp_path / "junit.xml"
    expected.write_text(
        "*/dbeta # dbeta is known to be wrong\n*-NXC/dx # and\nno-case # none\n"
        "diagnostic* # once [until 2020-01-01]\n"
    )
    done = CliRunner().invoke(
        app,
        ["verify", f"{WRONG_FILE}:DbetaWithS", "--dtypes", "float32",
         "--only", "diagnostic-float32*", "--xfail", str(expected), "--junit", str(junit)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "4 outputs judged: 4 passed, 2 expected to fail; 0 findings" in done.output
    assert "expects a failure: 1 output\n  diagnostic-float32-float32-NXC/dx\n" in done.output
    assert "expected.txt has patterns that match no output:\n  no-case\n" in done.output
    assert "expected.txt has expired lines:\n  diagnostic* (until 2020-01-01)\n" in done.output
    assert 'failures="0" skipped="2"' in junit.read_text()
    assert 'skipped message="dbeta is known to be wrong"' in junit.read_text()


def test_verify_with_xfail_from_pipe_reads_its_lines():
    reader, writer = os.pipe()
    os.write(writer, b"* # known\n")
    os.close(writer)
    case = ["--dtypes", "float32", "--only", "diagnostic-float32-float32-NCX"]
    try:
        done = CliRunner().invoke(
            app, ["verify", f"{WRONG_FILE}:DbetaWithS", *case, "--xfail", f"/dev/fd/{reader}"]
        )
    finally:
        os.close(reader)
    assert done.exit_code == 0, done.output
    assert "2 passed, 1 expected to fail; 0 findings" in done.output


def test_verify_with_baseline_skips_known_finding_unless_case_is_new(tmp_path):
    report, junit = str(tmp_path / "report.json"), tmp_path / "junit.xml"
    case = ["--dtypes", "float32", "--only", "diagnostic-float32-float32-NCX", "--json", report]
    subject = f"{WRONG_FILE}:DbetaWithS"
    assert CliRunner().invoke(app, ["verify", subject, *case]).exit_code == 1
    del case[-2:]
    done = CliRunner().invoke(
        app, ["verify", subject, *case, "--baseline", report, "--junit", str(junit)]
    )
    assert done.exit_code == 0, done.output
    assert 'failures="0" skipped="1"' in junit.read_text()
    assert "\nknown: dbeta is multiplied by s  [1 of 1 case]" in done.output
    assert "; 0 findings, 1 known\n" in done.output
    assert f"3 of 3 outputs are in {report}; 0 worse\n" in done.output
    others = [*case[:2], "--only", "diagnostic-float32-float32-N*"]
    done = CliRunner().invoke(app, ["verify", subject, *others, "--baseline", report])
    assert done.exit_code == 1
    assert "known: " not in done.output
    assert "; 1 finding\n" in done.output
    assert f"3 of 6 outputs are in {report}; 1 worse\n" in done.output
    assert "\n  diagnostic-float32-float32-NXC/dbeta: not in it -> wrong\n" in done.output


@pytest.mark.parametrize(
    ("before", "now", "is_worse"),
    [
        ("exact", "serial", True),
        ("exact", "float64", False),
        ("float64", "float32", True),
        ("serial", "exact", False),
        ("exact", "refused", True),
        ("float32", "not_run", True),
        ("exact", "proves_nothing", False),
        ("exact", "expected_to_fail", False),
        ("refused", "wrong", True),
        ("wrong", "wrong", False),
        ("crash", "wrong", False),
        ("wrong", "crash", True),
        (None, "wrong", True),
        (None, "refused", False),
        (None, "serial", False),
    ],
)
def test_baseline_is_worse_compares_status_with_stored_one(before, now, is_worse):
    verdict = Verdict("a-case", "dx", "float32", "NCX", now)
    baseline = Baseline(0, {} if before is None else {("a-case", "dx"): before})
    assert baseline.is_worse(verdict, None) == is_worse


@pytest.mark.parametrize(("sufficient", "is_worse"), [("float64", True), ("float32", False)])
def test_baseline_is_worse_only_below_sufficient_rung(sufficient, is_worse):
    verdict = Verdict("a-case", "dx", "float32", "NCX", "float32")
    baseline = Baseline(0, {("a-case", "dx"): "exact"})
    assert baseline.is_worse(verdict, None, sufficient) == is_worse


@pytest.mark.parametrize(("now", "failed"), [("doubled_dbeta", 0), ("halved_dbeta", 1)])
def test_verify_with_baseline_fails_only_for_another_mistake(now, failed, tmp_path):
    report = str(tmp_path / "report.json")
    case = ["--dtypes", "float32", "--only", "diagnostic-float32-float32-NCX"]
    runner = CliRunner()
    before = f"{WRONG_FILE}:doubled_dbeta"
    assert runner.invoke(app, ["verify", before, *case, "--json", report]).exit_code == 1
    done = runner.invoke(app, ["verify", f"{WRONG_FILE}:{now}", *case, "--baseline", report])
    assert done.exit_code == failed
    line = "dbeta: wrong (dbeta is 2 times what it should be in every channel (gain 1, offset 1, "
    assert (line in done.output) == bool(failed)


@pytest.mark.parametrize("options", [["--seed", "1"], ["--dtypes", "bfloat16"]])
def test_verify_baseline_of_other_outputs_is_bad_usage(options, tmp_path):
    report = str(tmp_path / "report.json")
    case = ["--only", "diagnostic-*-NCX"]
    done = CliRunner().invoke(
        app, ["verify", "backnorm", *case, "--dtypes", "float32", "--json", report]
    )
    assert done.exit_code == 0
    options = ["--dtypes", "float32", *options]
    done = CliRunner().invoke(app, ["verify", "backnorm", *case, *options, "--baseline", report])
    assert done.exit_code == 2
    assert f"--baseline: has no output of this run; got {report}; expected" in done.stderr


def test_junit_counts_rung_below_minimum_as_failure():
    verdicts = [Verdict("a-case", "dx", "float32", "NCX", s) for s in ("float32", "serial", "hang")]
    text = as_junit(Results(Job("subject"), verdicts), [], lambda v: fails(v, "float32"))
    assert 'failures="2" skipped="0"' in text


def test_markdown_cell_lists_faults_or_worst_rung():
    statuses = "exact", "serial", "nonfinite", "wrong", "refused"
    verdicts = [Verdict("a-case", "dx", "float32", "NCX", each) for each in statuses]
    assert "| dx | WRONG, NONFINITE |" in as_markdown(Results(Job("subject"), verdicts), [])
    assert "| dx | serial |" in as_markdown(Results(Job("subject"), verdicts[:2]), [])


def test_markdown_counts_rung_below_minimum_as_not_passed():
    verdicts = [Verdict("a-case", "dx", "float32", "NCX", each) for each in ("exact", "serial")]
    text = as_markdown(Results(Job("subject"), verdicts), [], "float32")
    assert "| dx | SERIAL |" in text
    assert "\n2 outputs judged: 1 passed, 1 serial; 0 findings\n" in text


def test_markdown_cell_lists_expected_failures_after_rung():
    statuses = "exact", "float32", "expected_to_fail"
    verdicts = [Verdict("a-case", "dx", "float32", "NCX", each) for each in statuses]
    text = as_markdown(Results(Job("subject"), verdicts), [])
    assert "| dx | float32, expected to fail |" in text
    text = as_markdown(Results(Job("subject"), verdicts[2:]), [])
    assert "| dx | expected to fail |" in text


@pytest.mark.parametrize("option", ["--json", "--junit", "--markdown", "--html"])
def test_verify_report_file_of_two_subjects_is_bad_usage(option, tmp_path):
    done = CliRunner().invoke(app, ["verify", "no:f", "no:g", option, str(tmp_path / "report")])
    assert done.exit_code == 2
    assert f"error: {option}: must be used with one subject; got 2 subjects" in done.stderr
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("line", ["*/dbeta # known until 2027-03-01", "*/dbeta # until: 2027"])
def test_verify_xfail_date_without_brackets_is_bad_usage(line, tmp_path):
    (tmp_path / "expected.txt").write_text(line)
    done = CliRunner().invoke(app, ["verify", "no:f", "--xfail", str(tmp_path / "expected.txt")])
    assert done.exit_code == 2
    assert "--xfail: line 1 must have its date in brackets" in done.stderr
    assert "expected pattern # reason [until YYYY-MM-DD]" in done.stderr


def test_verify_xfail_that_is_not_utf8_is_bad_usage(tmp_path):
    (tmp_path / "expected.txt").write_bytes(b"*/dbeta # gef\xfchlt\n")
    done = CliRunner().invoke(app, ["verify", "no:f", "--xfail", str(tmp_path / "expected.txt")])
    assert done.exit_code == 2
    assert "--xfail: must be UTF-8 (byte 13); got " in done.stderr


def test_verify_time_limit_does_not_count_drawing_of_data(monkeypatch, tmp_path):
    # The child process draws its data with this module, so that each case takes a second.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "if 'backnorm.conformance.verify._child' in sys.orig_argv:\n"
        "    from backnorm.conformance.verify import cases\n"
        "    selected = cases.selected\n"
        "    cases.selected = lambda s: (time.sleep(1) or case for case in selected(s))\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", path)
    results, found = found_in("backnorm", ONE, timeout=0.5)
    assert found == []
    assert counts(results)["judged"] == 3


KERNEL = (
    "import backnorm\n"
    "def f(*inputs, **options):\n"
    "    dx, dgamma, dbeta = backnorm.batch_norm_backward(*inputs, **options)\n"
    "    return dx, -dgamma, dbeta\n"
)


@pytest.mark.parametrize("name", ["k[v2].py", "a[/b].py", "k\x1b[31m.py"])
def test_verify_prints_name_of_subject_as_it_is(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(KERNEL)
    subject = f"{name}:f"
    done = CliRunner().invoke(
        app, ["verify", subject, "--dtypes", "float32", "--only", "diagnostic-float32*NCX"]
    )
    assert done.exit_code == 1, done.output
    shown = subject.replace("\x1b", "\\x1b")
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert any(line.startswith("backnorm verify ") and shown in line for line in lines), lines
    assert done.stdout.startswith(f"{shown} as backward")


def test_verify_reports_have_no_control_characters(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def f(*inputs, **options):\n"
        "    raise ValueError('a[/b] :smile: \\x1b[31m \\x00 \\ud800 é')\n"
    )
    files = {form: tmp_path / form for form in ("json", "junit", "markdown", "html")}
    done = CliRunner().invoke(
        app, ["verify", f"{tmp_path / 'mine.py'}:f", "--dtypes", "float32",
              "--only", "diagnostic-float32-float32-NCX",
              *(word for form, path in files.items() for word in (f"--{form}", str(path)))],
    )  # fmt: skip
    assert done.exit_code == 1
    message = r"ValueError: a[/b] :smile: \x1b[31m \x00 \ud800 é (mine.py:2)"
    assert message in " ".join(done.stdout.split())
    suite = ElementTree.fromstring(files["junit"].read_bytes())
    assert {each.get("message") for each in suite.iter("failure")} == {message}
    assert message in files["markdown"].read_text("utf-8")
    assert "\x1b" not in files["html"].read_text("utf-8")
    read = json.loads(files["json"].read_text())
    assert "\x1b[31m \x00 \ud800" in read["findings"][0]["says"]


def test_verify_report_that_would_overwrite_the_baseline_is_bad_usage(tmp_path):
    report = str(tmp_path / "report.json")
    case = ["--dtypes", "float32", "--only", "diagnostic-float32-float32-NCX", "--json", report]
    assert CliRunner().invoke(app, ["verify", "backnorm", *case]).exit_code == 0
    done = CliRunner().invoke(app, ["verify", "backnorm", *case, "--baseline", report])
    assert done.exit_code == 2
    assert "--json: must not be the file of --baseline" in done.stderr


def test_verify_with_baseline_reports_missing_outputs_as_worse(tmp_path):
    (tmp_path / "kernel.py").write_text(
        "def f(x, dy, *rest, **options):\n    return dy, None, None"
    )
    report = str(tmp_path / "report.json")
    case = ["--dtypes", "float32", "--only", "diagnostic-float32-float32-NCX"]
    assert CliRunner().invoke(app, ["verify", "backnorm", *case, "--json", report]).exit_code == 0
    subject = f"{tmp_path / 'kernel.py'}:f"
    done = CliRunner().invoke(app, ["verify", subject, *case, "--baseline", report])
    assert done.exit_code == 1
    assert f"3 of 3 outputs are in {report}; 3 worse\n" in done.stdout
    assert "\n  diagnostic-float32-float32-NCX/dbeta: exact -> not_written\n" in done.stdout


@pytest.mark.parametrize("text", ["not JSON", "[]", "{}", '{"verdicts": [1]}'])
def test_verify_with_invalid_baseline_is_bad_usage_before_the_run(text, tmp_path):
    (tmp_path / "baseline.json").write_text(text)
    options = ["--baseline", str(tmp_path / "baseline.json")]
    done = CliRunner().invoke(app, ["verify", "no_such_module:f", *options])
    assert done.exit_code == 2
    assert done.stderr.startswith("backnorm: error: --baseline: must be a report of --json")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text"), [("nowhere/report", "No such file or directory"), ("", "Is a directory")]
)
@pytest.mark.parametrize("option", ["--json", "--html"])
def test_verify_report_that_cannot_be_written_is_bad_usage_before_the_run(
    option, name, text, tmp_path
):
    path = tmp_path / name
    done = CliRunner().invoke(app, ["verify", "no_such_module:f", option, str(path)])
    assert done.exit_code == 2
    assert done.stderr == f"backnorm: error: {path}: {text}\n"


def test_verify_bad_usage_leaves_no_report(tmp_path):
    path = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["verify", "no_such_module:f", "--json", str(path)])
    assert done.exit_code == 2
    assert not path.exists()


def test_verify_unknown_subject_is_bad_usage():
    done = CliRunner().invoke(app, ["verify", "no_such_module:function"])
    assert done.exit_code == 2


def test_verify_with_pattern_without_case_is_bad_usage_with_hint():
    done = CliRunner().invoke(app, ["verify", "backnorm", "--only", "realistic"])
    assert done.exit_code == 2
    assert "expected globs such as 'realistic*'; backnorm cases list prints" in done.stderr


def test_verify_of_subject_that_rejects_each_case_fails(tmp_path):
    refuses = tmp_path / "refuses.py"
    refuses.write_text("def backward(*a, **k):\n    raise NotImplementedError('no float32')\n")
    done = CliRunner().invoke(
        app,
        ["verify", f"{refuses}:backward", "--only", "diagnostic-float32*",
         "--markdown", str(tmp_path / "report.md"), "--junit", str(tmp_path / "junit.xml")],
    )  # fmt: skip
    assert done.exit_code == 1
    reason = "refused in 2 cases: NotImplementedError: no float32"
    assert reason in done.output
    assert "0 findings; nothing was judged, which fails\n" in done.output
    assert f"- {reason}" in (tmp_path / "report.md").read_text()
    assert (
        'skipped message="NotImplementedError: no float32 (refuses.py:2)"'
        in (tmp_path / "junit.xml").read_text()
    )


def finding_ids(folder, body, selection=ONE):
    subject = folder / "mine.py"
    subject.write_text(
        "from backnorm import batch_norm_backward\n"
        "def backward(*a, **k):\n"
        "    dx, dgamma, dbeta = batch_norm_backward(*a, **k)\n"
        f"    {body}\n"
    )
    _, found = found_in(f"{subject}:backward", selection)
    return {finding.id for finding in found}, [finding.says for finding in found]


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        ("return dx, None, None", ("dgamma", "dbeta")),
        ("return (dx,)", ("dgamma", "dbeta")),
        ("return None", ("dx", "dgamma", "dbeta")),
        ("return {'dx': dx, 'dgamma': dgamma}", ("dbeta",)),
    ],
)
def test_verify_of_missing_output_reports_not_written(body, outputs, tmp_path):
    ids, says = finding_ids(tmp_path, body)
    assert ids == {"not_written"}
    for output in outputs:
        shape = "(7, 13, 3, 13)" if output == "dx" else "(13,)"
        assert (
            f"no {output} (missing or None) in 1 case: diagnostic-float32-float32-NCX; "
            f"expected an array of shape {shape}, float32"
        ) in says
    assert len(says) == len(outputs)


def test_verify_of_wrong_dtype_reports_one_finding_per_output(tmp_path):
    ids, says = finding_ids(tmp_path, "return dx, dgamma.astype('f8'), dbeta.astype('f8')", SMALL)
    assert ids == {"wrong-type-or-shape"}
    assert [text.partition(" in ")[0] for text in says] == [
        f"{output} has a wrong type or shape" for output in ("dgamma", "dbeta")
    ]
    assert "got float64 of shape (13,), expected float32 of shape (13,)" in says[0]


def test_show_case_prints_ulp_of_shown_element():
    grade = Grade("wrong", 99.0, {"serial": 3.0}, (4, 1), 1.5, 1.25, 2.0, 1.0)
    verdict = Verdict("a-case", "dx", "float32", "NCX", "wrong", grade=grade)
    console = Console(file=io.StringIO())
    show_case(Results(Job("subject"), [verdict]), console)
    assert "a-case dx[4, 1]: wrong; got 1.5 " in console.file.getvalue()
    assert ", error 2 ulp, " in console.file.getvalue()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return {}['dx']", "KeyError: 'dx' (mine.py:4)"),
        ("__import__('string').Template('$dx').substitute()", "KeyError: 'dx' (mine.py:4)"),
        ("dx.nothing", "AttributeError: "),
        ("raise RecursionError", "RecursionError"),
        ("import no_such_module", "ModuleNotFoundError: "),
        ("raise TypeError('float32')", "TypeError: float32 (mine.py:4)"),
        ("dx + dx[..., :2]", "ValueError: operands could not be broadcast together"),
        ("raise RuntimeError", "RuntimeError"),
        (
            "return dx, dgamma, dbeta, dx",
            "the subject returned 4 outputs; expected dx, dgamma, dbeta",
        ),
        (
            "return dx, 'text', dbeta",
            "the subject returned an object of type str; expected an array",
        ),
    ],
)
def test_verify_of_failing_call_reports_error_finding(body, text, tmp_path):
    ids, [says] = finding_ids(tmp_path, body)
    assert ids == {"error"}
    assert says.startswith(f"the call fails: {text}")


def test_verify_of_overwritten_input_reports_its_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def backward(x, dy, mean, *rest, **options):\n"
        "    dy -= dy.mean()\n"
        "    return dy.copy(), mean, mean\n"
    )
    results, found = found_in(f"{tmp_path / 'mine.py'}:backward", ONE)
    assert "the subject writes to an input: dy" in [finding.says for finding in found]
    assert {v.status for v in results.verdicts} == {"changed_input"}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("def f(:", "SyntaxError: invalid syntax (mine.py, line 1)"),
        ("\n1 / 0", "ZeroDivisionError: division by zero (mine.py:2)"),
        ("import no_such", "ModuleNotFoundError: No module named 'no_such' (mine.py:1)"),
    ],
)
def test_verify_of_subject_with_import_error_raises_error_with_line(code, text, tmp_path):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ArgumentValueError, match=r"^SUBJECT: cannot be imported; ") as raised:
        verify(Job(f"{tmp_path / 'mine.py'}:f", ONE))
    assert str(raised.value).endswith(f"; {text}")


@pytest.mark.parametrize(
    ("subject", "options", "text"),
    [
        ("./mine.so:f", {"operation": "forward"}, "--operation: must be backward for a function"),
        ("jax", {"operation": "forward"}, "SUBJECT: unknown; got 'jax'; expected module:function"),
        ("no_such:f", {}, "SUBJECT: no such module; got no_such; expected module:function"),
        ("mine.c:f", {}, "SUBJECT: no such module; got mine.c; .+ library.so:symbol"),
        (
            "cmath:sqrtt",
            {},
            r"SUBJECT: cmath has no sqrtt; got cmath:sqrtt; expected acos, .+, sqrt",
        ),
        ("cmath:pi", {}, "SUBJECT: must name a function; got cmath:pi of type float"),
    ],
)
def test_verify_of_invalid_subject_raises_argument_error(subject, options, text):
    with pytest.raises(ArgumentValueError, match=f"^{text}"):
        verify(Job(subject, Selection(**options)))


@pytest.mark.parametrize(
    "body",
    [
        "raise NotImplementedError('no bfloat16')",
        "raise type('UnimplementedError', (Exception,), {})",
    ],
)
def test_verify_of_unimplemented_case_has_no_finding(body, tmp_path):
    assert finding_ids(tmp_path, body) == (set(), [])


def test_verify_of_function_without_epsilon_judges_only_default_epsilon(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from backnorm import batch_norm_backward\n"
        "def backward(*inputs, data_format, training):\n"
        "    options = {'data_format': data_format, 'training': training}\n"
        "    return batch_norm_backward(*inputs, epsilon=1e-5, **options)\n"
    )
    results, found = found_in(f"{tmp_path / 'mine.py'}:backward")
    assert found == []
    refused = {v.case.partition("-")[0]: v.text for v in results.verdicts if v.status == "refused"}
    assert refused == {"diagnostic": "the function has no parameter epsilon"}
    assert counts(results)["passed"] > 0


def test_verify_of_misspelt_parameter_names_it_in_refusal(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def backward(x, dy, mean, variance, gamma, *, epsilon, data_fmt='NCX', training=True):\n"
        "    raise NotImplementedError\n"
    )
    selection = Selection(dtypes=("float32",), layouts=("NXC",), only=("diagnostic*",))
    results, _ = found_in(f"{tmp_path / 'mine.py'}:backward", selection)
    assert {v.text for v in results.verdicts} == {
        "the function has no parameter data_format (after the inputs, it has epsilon, data_fmt, "
        "training)"
    }


def test_verify_reports_only_varying_output_as_not_repeatable(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import itertools, backnorm\n"
        "calls = itertools.count(1)\n"
        "def backward(*inputs, **options):\n"
        "    dx, dgamma, dbeta = backnorm.batch_norm_backward(*inputs, **options)\n"
        "    return dx, dgamma * next(calls), dbeta\n"
    )
    results, [finding] = found_in(f"{tmp_path / 'mine.py'}:backward", ONE)
    statuses = {verdict.output: verdict.status for verdict in results.verdicts}
    assert statuses["dgamma"] == "not_repeatable"
    assert {statuses["dx"], statuses["dbeta"]} <= set(RUNGS)
    assert finding.says == "the same inputs give other bits of dgamma in another call"


def test_verify_with_too_little_memory_is_bad_usage():
    done = CliRunner().invoke(app, ["verify", "numpy", "--memory", "1"])
    assert done.exit_code == 2
    text = "--memory: must suffice for Python and a case; got 1 MiB"
    assert done.stderr.strip().endswith(f"backnorm: error: {text}")


def test_finding_has_reproduce_command_with_options_of_run():
    results, _ = found_in(f"{WRONG_FILE}:DgammaWithGamma", ONE, timeout=9.0, any_order=True)
    [finding] = [f for f in findings(results, "float32") if f.id == "dgamma-gamma"]
    assert "--at-least float32 --timeout 9 --any-order --only" in finding.reproduce


def test_verify_when_interrupted_prints_summary_without_waiting(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "from backnorm import batch_norm_backward\n"
        "def backward(*inputs, **options):\n"
        "    if inputs[0].ndim == 3:\n"
        "        open('sleeps', 'w').close()\n"
        "        time.sleep(60)\n"
        "    return batch_norm_backward(*inputs, **options)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "backnorm", "verify", "slow.py:backward"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell starts background jobs with SIGINT ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while not (tmp_path / "sleeps").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    printed, errors = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10, "it waited for the case"
    assert "interrupted" in printed
    assert "0 findings" in printed
    assert "Traceback" not in errors


@pytest.mark.parametrize("show", [["--show"], []])
def test_verify_prints_output_of_subject_only_with_show(show, tmp_path, capfd):
    (tmp_path / "kernel.py").write_text(
        "def f(x, *rest, **options):\n    print('x is', x.shape)\n    raise NotImplementedError"
    )
    case = ["--dtypes", "float32", "--only", "diagnostic-float32-float32-NCX", *show]
    CliRunner().invoke(app, ["verify", f"{tmp_path / 'kernel.py'}:f", *case])
    assert ("x is (7, 13, 3, 13)" in capfd.readouterr().err) == bool(show)


def test_guarded_output_detects_bytes_copied_from_beyond_input():
    values = np.ones(3, np.float32)
    source, target = Guarded(values), Guarded(values, fill=True)
    assert source.holds_canaries()
    assert target.holds_canaries()
    end = values.nbytes
    ctypes.memmove(target.array.ctypes.data + end, source.array.ctypes.data + end, 4)
    assert not target.holds_canaries()


def test_verify_of_element_added_twice_does_not_blame_a_narrow_type():
    selection = Selection(dtypes=("float32",), layouts=("NCX",))
    _, found = found_in(f"{WRONG_FILE}:last_dy_twice", selection)
    assert found[0].says.endswith(
        "but wrong for one element per channel: an element may be added twice, or be missing"
    )


def test_verify_of_wrong_end_in_float32_does_not_call_the_rest_right():
    selection = Selection(dtypes=("float64",), layouts=("NCX",), only=("diagnostic-float64*",))
    _, found = found_in(f"{WRONG_FILE}:wrong_end_in_float32", selection)
    says = next(each.says for each in found if each.id == "partly-wrong")
    assert re.search("; the rest is right to 2[0-4] bits$", says), says
