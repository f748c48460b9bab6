"""`backnorm verify` names wrong subjects and grades right ones; no subject ends the command."""

from __future__ import annotations

import ctypes
import datetime
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from backnorm.cli.app import app
from backnorm.conformance.ladder import RUNGS, Grade
from backnorm.conformance.verify._events import UNKNOWN_ACCESS
from backnorm.conformance.verify._memory import Guarded
from backnorm.conformance.verify._segfault import last_access
from backnorm.conformance.verify.cases import Selection, recipes, selected
from backnorm.conformance.verify.findings import Finding, findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.renderers import RENDERERS
from backnorm.conformance.verify.report import KnownFailure, Report, known_failures, read_xfail
from backnorm.conformance.verify.run import Results, verify
from backnorm.conformance.verify.subjects import subject_of
from backnorm.conformance.verify.verdicts import STATUSES, Verdict
from backnorm.errors import ArgumentValueError
from tests.support.required import require

from .in_process import verified
from .wrong_subjects import CRASHING, WRONG

HERE = Path(__file__).parent
WRONG_FILE = HERE / "wrong_subjects.py"
QUICK = "last_cached", "writes_input", "wrong_for_unaligned_memory"
SMALL = Selection(dtypes=("float32",), only=("diagnostic-*", "realistic-*", "large-sums-*"))

ONE = Selection(dtypes=("float32",), only=("diagnostic-float32-float32-NCX",))


def found_in(subject, selection=SMALL, *, run=verified, **options):
    results = run(Job(subject, selection, **options))
    return results, findings(results)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in WRONG],
)
def test_verify_of_wrong_subject_reports_expected_finding(name):
    timeout = 2.0 if name == "never_returns" else 30.0
    results, found = found_in(f"{WRONG_FILE}:{name}", timeout=timeout, run=verify)
    assert found, name
    ids = [set(finding.id.split("-and-")) for finding in found]
    expected = WRONG[name]
    texts = [finding.id for finding in found]
    assert any(all(part in text for part in expected.split("|")) for text in texts), (texts, ids)
    assert Report.of(results).counts["judged"]


@pytest.mark.parametrize(("name", "access"), CRASHING.items())
def test_verify_of_crashing_subject_names_array_and_access(name, access):
    _, (finding,) = found_in(f"{WRONG_FILE}:{name}", ONE, run=verify)
    ends = "the subject ends its process: the process ended by SIGSEGV"
    assert (finding.id, finding.says) == ("crash", f"{ends}: {access}")


_VECTORS, _NO_RECORD = struct.pack("@2I16x", 0x46508001, 24), bytes(8)


def _syndrome(value):
    return struct.pack("@2IQ", 0x45535201, 16, value)


@pytest.mark.parametrize(
    ("records", "access"),
    [
        (_VECTORS + _syndrome(0x24 << 26 | 0x40), "it wrote right behind the end of dx"),
        (_syndrome(0x25 << 26), "it read right behind the end of dx"),
        (_syndrome(0x20 << 26), "it jumped to an address that has no code"),
        (_syndrome(0x3C << 26), UNKNOWN_ACCESS),
        (_VECTORS + _NO_RECORD, UNKNOWN_ACCESS),
    ],
    ids=["write", "read", "instruction", "breakpoint", "no-syndrome"],
)
def test_last_access_on_aarch64_is_that_of_syndrome(records, access, tmp_path, monkeypatch):
    stack, last = 0x7F0000000000, 0x7F1000000000
    line = json.dumps([stack, [["dx", last - 3 * 4096, last]]]).encode()
    registers = struct.pack("@Q280x", last - 4096)
    context = bytes(16) + struct.pack("@PiN", stack, 0, 1 << 18) + bytes(136) + registers
    (tmp_path / "segfault").write_bytes(line.ljust(1 << 14) + context + records)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert last_access(tmp_path) == access


def test_verify_right_subject_has_no_finding():
    results, found = found_in("backnorm", run=verify)
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
    assert Report.of(results).counts["judged"] == 3


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
    results, found = found_in(f"{WRONG_FILE}:reads_beyond", selection, run=verify)
    number = Report.of(results).counts["not_run"] // 3
    console = Console(file=io.StringIO(), width=200)
    console.print(RENDERERS["text"](Report.of(results)), crop=False)
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
    known, junit = tmp_path / "known.txt", tmp_path / "junit.xml"
    mistake = "dbeta is multiplied by s"
    known.write_text(
        f"# A comment.\n\n*-NCX dbeta {mistake}\n*-NXC * dbeta*  # a bug of the compiler\n"
        f"no-case * {mistake}\n* dx {mistake}\n* dbeta hang # once [until 2020-01-01]\n"
    )
    done = CliRunner().invoke(
        app,
        ["verify", f"{WRONG_FILE}:DbetaWithS", "--dtypes", "float32",
         "--only", "diagnostic-float32*", "--xfail", str(known), "--junit", str(junit)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "4 outputs judged: 4 passed, 2 expected to fail; 0 findings" in done.output
    assert (
        "known failures that no output of this run shows:\n"
        f"  no-case * {mistake}\n  * dx {mistake}\n"
        "known failures that have expired:\n  * dbeta hang (until 2020-01-01)\n"
    ) in done.output
    assert 'failures="0" skipped="2"' in junit.read_text()
    assert f'skipped message="{mistake}"' in junit.read_text()
    assert 'skipped message="a bug of the compiler"' in junit.read_text()


def test_verify_with_xfail_from_pipe_reads_its_lines():
    reader, writer = os.pipe()
    os.write(writer, b"* * *\n")
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


KERNELS = """
import numpy as np
from backnorm import batch_norm_backward

def wrong(*inputs, **options):
    dx, dgamma, dbeta = batch_norm_backward(*inputs, **options)
    return dx, dgamma, dbeta * np.float32(3)

def wrong_in_another_way(*inputs, **options):
    dx, dgamma, dbeta = batch_norm_backward(*inputs, **options)
    return dx, dgamma, dbeta * np.float32(5)

def wrong_in_ncx(*inputs, data_format, **options):
    return (wrong if data_format == "NCX" else batch_norm_backward)(
        *inputs, data_format=data_format, **options)

def fails_for_two_axes(x, *inputs, **options):
    if x.ndim == 2:
        raise ValueError("no space")
    return batch_norm_backward(x, *inputs, **options)

def fails(*inputs, **options):
    raise ValueError("no space")
"""


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        (
            "wrong",
            ["*-float32-float32-* dbeta dbeta is 3 times what it should be in every channel"],
        ),
        (
            "wrong_in_ncx",
            ["*-float32-float32-NCX dbeta dbeta is 3 times what it should be in every channel"],
        ),
        ("fails_for_two_axes", ["one-element-float32-float32-NCX * error"]),
    ],
)
def test_verify_with_xfail_that_it_wrote_passes(before, lines, tmp_path):
    (tmp_path / "mine.py").write_text(KERNELS)
    known = tmp_path / "known.txt"
    run = ["verify", f"{tmp_path / 'mine.py'}:{before}", "--dtypes", "float32",
           "--only", "diagnostic-float32*", "--only", "one-element-*"]  # fmt: skip
    done = CliRunner().invoke(app, [*run, "--write-xfail", str(known)])
    assert done.exit_code == 1
    assert known.read_text().splitlines()[1:] == lines
    # The file may be written anew by the run that reads it.
    done = CliRunner().invoke(app, [*run, "--xfail", str(known), "--write-xfail", str(known)])
    assert done.exit_code == 0, done.output
    assert "known failures" not in done.output
    assert known.read_text().splitlines()[1:] == lines


@pytest.mark.parametrize(
    ("before", "now", "finding"),
    [
        ("wrong", "wrong_in_another_way", "dbeta is 5 times"),
        ("wrong_in_ncx", "wrong", "dbeta is 3 times"),
        ("fails_for_two_axes", "fails", "the call fails"),
    ],
)
def test_verify_with_xfail_of_another_kernel_finds_only_new_failures(
    before, now, finding, tmp_path
):
    (tmp_path / "mine.py").write_text(KERNELS)
    known, runner = str(tmp_path / "known.txt"), CliRunner()
    run = ["--dtypes", "float32", "--only", "diagnostic-float32*", "--only", "one-element-*"]
    runner.invoke(app, ["verify", f"{tmp_path / 'mine.py'}:{before}", *run, "--write-xfail", known])
    subject = f"{tmp_path / 'mine.py'}:{now}"
    done = runner.invoke(app, ["verify", subject, *run, "--xfail", known])
    assert done.exit_code == 1
    assert f"\n{finding}" in done.output
    assert "; 1 finding\n" in done.output
    assert ("known failures that no output" in done.output) == (now == "wrong_in_another_way")


def test_known_failures_of_fault_have_a_line_for_each_kind_of_case():
    cases = "a-case-float32-float32-NCX", "a-case-float32-float32-NXC", "b-float32-float32-NCX"
    finding = Finding("crash", "", ("dx", "dbeta"), frozenset(cases), cases[0])
    assert [*map(str, known_failures(finding, ("dx", "dgamma", "dbeta")))] == [
        "a-case-float32-float32-* dx crash",
        "a-case-float32-float32-* dbeta crash",
        "b-float32-float32-NCX dx crash",
        "b-float32-float32-NCX dbeta crash",
    ]


def report_of(*statuses, at_least="serial"):
    verdicts = [Verdict("a-case", "dx", "float32", "NCX", status) for status in statuses]
    return Report.of(Results(Job("subject"), verdicts), at_least=at_least)


def test_junit_counts_rung_below_minimum_as_failure():
    text = RENDERERS["junit"](report_of("float32", "serial", "hang", at_least="float32"))
    assert 'failures="2" skipped="0"' in text


def test_markdown_cell_lists_faults_or_worst_rung():
    markdown = RENDERERS["markdown"]
    report = report_of("exact", "serial", "nonfinite", "wrong", "refused")
    assert "| dx | WRONG, NONFINITE |" in markdown(report)
    assert "| dx | serial |" in markdown(report_of("exact", "serial"))


def test_markdown_counts_rung_below_minimum_as_not_passed():
    text = RENDERERS["markdown"](report_of("exact", "serial", at_least="float32"))
    assert "| dx | SERIAL |" in text
    assert "\n2 outputs judged: 1 passed, 1 serial; 1 finding\n" in text


def test_markdown_cell_lists_expected_failures_after_rung():
    markdown = RENDERERS["markdown"]
    text = markdown(report_of("exact", "float32", "expected_to_fail"))
    assert "| dx | float32, expected to fail |" in text
    assert "| dx | expected to fail |" in markdown(report_of("expected_to_fail"))


@pytest.mark.parametrize("option", ["--json", "--junit", "--markdown", "--write-xfail"])
def test_verify_report_file_of_two_subjects_is_bad_usage(option, tmp_path):
    done = CliRunner().invoke(app, ["verify", "no:f", "no:g", option, str(tmp_path / "report")])
    assert done.exit_code == 2
    assert f"error: {option}: must be used with one subject; got 2 subjects" in done.stderr
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    "line",
    [
        "*/dbeta",
        "* dbeta # no mistake",
        "* dbeta error # known until 2027-03-01",
        "* dbeta error # Until: 2027",
        "* dbeta error # [until 2027-02-30]",
    ],
)
def test_verify_xfail_line_of_another_form_is_bad_usage(line, tmp_path):
    (tmp_path / "known.txt").write_text(f"* * error\n{line}")
    done = CliRunner().invoke(app, ["verify", "no:f", "--xfail", str(tmp_path / "known.txt")])
    assert done.exit_code == 2
    assert f"--xfail: line 2 is no known failure; got {line}" in done.stderr
    assert "expected CASE OUTPUT MISTAKE, then # REASON [until YYYY-MM-DD] if " in done.stderr


def test_known_failure_with_future_date_has_not_expired(tmp_path):
    (tmp_path / "known.txt").write_text("* dx dx is 1 + 1 # of v1.0 [until 9999-01-01]")
    assert read_xfail(tmp_path / "known.txt") == [
        KnownFailure("*", "dx", "dx is 1 + 1", "of v1.0", datetime.date(9999, 1, 1))
    ]
    assert not read_xfail(tmp_path / "known.txt")[0].is_expired


def test_verify_xfail_that_is_not_utf8_is_bad_usage(tmp_path):
    (tmp_path / "expected.txt").write_bytes(b"*/dbeta # gef\xfchlt\n")
    done = CliRunner().invoke(app, ["verify", "no:f", "--xfail", str(tmp_path / "expected.txt")])
    assert done.exit_code == 2
    assert "--xfail: must be UTF-8 (byte 13); got " in done.stderr


def drawing(folder, monkeypatch, code):
    """Run `code` in a worker whenever it draws `recipe`."""
    (folder / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if 'backnorm.conformance.verify._worker' in sys.orig_argv:\n"
        "    from backnorm.conformance.battery import Recipe\n"
        "    case = Recipe.case\n"
        "    def slowly(recipe, seed):\n"
        f"        {code}\n"
        "        return case(recipe, seed)\n"
        "    Recipe.case = slowly\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))


def test_verify_time_limit_does_not_count_drawing_of_data(monkeypatch, tmp_path):
    drawing(tmp_path, monkeypatch, "time.sleep(1)")
    selection = replace(ONE, only=("diagnostic-*",))
    results, found = found_in("backnorm", selection, timeout=0.5, run=verify)
    assert found == []
    assert Report.of(results).counts["judged"] == 12


def test_verify_after_a_crash_draws_only_the_cases_that_are_left(monkeypatch, tmp_path):
    log = tmp_path / "drawn"
    drawing(tmp_path, monkeypatch, f"print(os.getpid(), recipe.name, file=open({str(log)!r}, 'a'))")
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "from backnorm import batch_norm_backward\n"
        "def backward(x, *inputs, training, **options):\n"
        "    if not training:\n"
        "        os.abort()\n"
        "    return batch_norm_backward(x, *inputs, **options)\n"
    )
    results, _ = found_in(f"{tmp_path / 'mine.py'}:backward", SMALL, run=verify)
    assert {v.status for v in results.verdicts if "frozen" in v.case} == {"crash"}
    processes, drawn = zip(*map(str.split, log.read_text().splitlines()), strict=True)
    assert len(set(processes)) == 3
    assert list(drawn) == list(dict.fromkeys(v.case for v in results.verdicts))


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
    files = {form: tmp_path / form for form in ("json", "junit", "markdown")}
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
    read = json.loads(files["json"].read_text())
    assert "\x1b[31m \x00 \ud800" in read["findings"][0]["says"]


@pytest.mark.parametrize(
    ("name", "text"), [("nowhere/report", "No such file or directory"), ("", "Is a directory")]
)
@pytest.mark.parametrize("option", ["--json", "--write-xfail"])
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
    (recipe,) = recipes(ONE)
    verdict = Verdict(recipe.name, "dx", "float32", "NCX", "wrong", grade=grade)
    console = Console(file=io.StringIO())
    report = Report.of(Results(Job("subject"), [verdict], {recipe.name: recipe}))
    console.print(RENDERERS["elements"](report), crop=False)
    assert f"{recipe.name} dx[4, 1]: wrong; got 1.5 " in console.file.getvalue()
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
        ("./mine.so:f", {"operation": "layer"}, "--operation: must be backward or forward for a"),
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
    assert Report.of(results).counts["passed"] > 0


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


def test_verify_of_subject_that_needs_more_memory_to_be_imported_names_the_limit(tmp_path):
    (tmp_path / "mine.py").write_text("raise MemoryError\n")
    subject = f"{tmp_path / 'mine.py'}:f"
    done = CliRunner().invoke(app, ["verify", subject, "--memory", "4096", "--dtypes", "float32"])
    assert "--memory: must suffice for Python and a case; got 4096 MiB" in done.stderr
    done = CliRunner().invoke(app, ["verify", subject, "--dtypes", "float32"])
    assert "SUBJECT: cannot be imported" in done.stderr


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
        "        time.sleep(600)\n"
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
    # A command that waited for the case would end after ten minutes.
    printed, errors = process.communicate(timeout=120)
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
    _, found = found_in(f"{WRONG_FILE}:middle_dy_twice", selection)
    assert found[0].says.endswith(
        "but wrong for one element per channel: an element may be added twice, or be missing"
    )


def test_verify_of_wrong_end_in_float32_does_not_call_the_rest_right():
    selection = Selection(dtypes=("float64",), layouts=("NCX",), only=("diagnostic-float64*",))
    _, found = found_in(f"{WRONG_FILE}:wrong_end_in_float32", selection)
    says = next(each.says for each in found if each.id == "partly-wrong")
    assert re.search("; the rest is right to 2[0-4] bits$", says), says
