"""The command as a process: exit status, streams, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import backnorm
from backnorm.cli import app

COMMAND = [sys.executable, "-m", "backnorm"]
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "call_random.json"
RUN = ["run", str(EXAMPLE), "--random", "1", "--repeat", "1"]


def run(*arguments, shell='"$@"', **environment):
    """Run the command in a line of the shell."""
    return subprocess.run(
        ["bash", "-c", shell, "bash", *COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture
def main(monkeypatch, capsys):
    """Call the console script's function in this process; return (status, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["backnorm", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            app.main()
        return (exit_.value.code or 0, *capsys.readouterr())

    return call


def test_version_option_prints_the_version(main):
    assert main("--version") == (0, f"backnorm {backnorm.__version__}\n", "")


def test_command_without_arguments_prints_help(main):
    status, out, _ = main()
    assert status == 0
    for command in ("run", "demo", "info"):
        assert command in out


def test_help_has_examples(main):
    status, out, _ = main("-h")
    assert status == 0
    assert all(f"backnorm {example}" in out for example in ("demo", "verify torch", "info ngraph"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nonsense",), "nonsense"),
        (("run",), "Missing argument"),
        (("run", "a.json", "--repeat", "0"), "--repeat"),
        (("run", "a.json", "--random", "-1"), "--random"),
        (("run", "a.json", "--threads", "many"), "--threads"),
        (("demo", "--nope"), "--nope"),
        (("info", "a", "b", "c"), "c"),
    ],
)
def test_command_with_bad_usage_exits_with_2_and_names_option(main, arguments, says):
    status, out, err = main(*arguments)
    assert (status, out) == (2, "")
    assert says in err


def test_main_when_interrupted_exits_with_130_and_one_line(main, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("backnorm.cli.app.describe", interrupted)
    assert main("info") == (130, "", "backnorm: interrupted\n")


def test_main_propagates_unexpected_exceptions(monkeypatch):
    def bug(*_):
        raise AssertionError("a bug")

    monkeypatch.setattr("backnorm.cli.app.describe", bug)
    monkeypatch.setattr(sys, "argv", ["backnorm", "info"])
    with pytest.raises(AssertionError, match="a bug"):
        app.main()


def test_run_of_missing_file_exits_with_2_and_one_line(tmp_path):
    done = run("run", str(tmp_path / "none.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"backnorm: error: {tmp_path / 'none.json'}: No such file or directory\n"


ASCII = {"PYTHONIOENCODING": "ascii", "COLUMNS": "1"}
POSIX = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TERM": "dumb"}


@pytest.mark.parametrize(
    ("shell", "environment", "status", "says"),
    [
        ('"$@"', ASCII, 0, ""),
        ('"$@"', POSIX, 0, ""),
        ('set -o pipefail; "$@" | true', {}, 0, ""),
        ('"$@" >&- 2>&- <&-', {}, 0, ""),
        ('"$@" >/dev/full', {"PYTHONUNBUFFERED": "1"}, 2, "No space left on device\n"),
    ],
)
def test_run_with_restricted_streams_has_expected_status(shell, environment, status, says):
    done = run(*RUN, shell=shell, **environment)
    assert (done.returncode, done.stderr.count("\n")) == (status, says.count("\n"))
    assert done.stderr.endswith(says)


ZEROS = Path(__file__).parents[1] / "conformance" / "wrong_subjects.py"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("tolerance",), 0),
        (("cases", "list", "--dtypes", "float32"), 0),
        (("verify", f"{ZEROS}:zeros", "--only", "diagnostic-float32-float32-NCX"), 1),
    ],
)
def test_command_with_closed_stdout_keeps_exit_status(arguments, status):
    done = run(*arguments, shell='set -o pipefail; "$@" | true')
    assert (done.returncode, done.stderr.strip()) == (status, "")


def test_cases_list_to_full_disk_exits_with_2():
    done = run("cases", "list", "--dtypes", "float32", shell='"$@" >/dev/full')
    message = "backnorm: error: standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, message)


SLOW = """
import time
from backnorm.cli import app
from backnorm.graph import run

def step(*_):
    print("begun", flush=True)
    time.sleep(60)

run.run_step = step
app.main()
"""


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_run_on_signal_exits_with_status_of_signal(number, heed_interrupts):
    number = signal.Signals[number]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *RUN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_interrupts,
    )
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    if number == signal.SIGINT:
        assert (process.returncode, err) == (130, b"backnorm: interrupted\n")
    else:
        assert (process.returncode, err) == (-number, b"")


def test_command_imports_no_framework():
    script = (
        "import sys; sys.argv = ['backnorm', 'info', 'ngraph']\n"
        "from backnorm.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'jax', 'tensorflow', 'sklearn'} & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert process.stdout.endswith("[]\n")
