"""The command as a process: exit status, streams, signals."""

from __future__ import annotations

import subprocess
import sys

import pytest

import backnorm
from backnorm.cli import app, program


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "backnorm", *arguments],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def no_signals(monkeypatch):
    """Leave this process's handlers of signals alone."""
    for name in ("watch", "release", "leave"):
        monkeypatch.setattr(program.signals, name, lambda: None)


@pytest.fixture
def main(monkeypatch, capsys):
    """Call the console script's function in this process; return (status, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["backnorm", *map(str, arguments)])
        no_signals(monkeypatch)
        with pytest.raises(SystemExit) as exit_:
            app.main()
        return (exit_.value.code or 0, *capsys.readouterr())

    return call


def test_version(main):
    assert main("--version") == (0, f"backnorm {backnorm.__version__}\n", "")


def test_without_a_command_there_is_help(main):
    status, out, _ = main()
    assert status == 0
    for command in ("run", "demo", "info"):
        assert command in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nonsense",), "nonsense"),
        (("run",), "Missing argument"),
        (("run", "a.json", "--repeat", "0"), "--repeat"),
        (("run", "a.json", "--threads", "many"), "--threads"),
        (("demo", "--nope"), "--nope"),
        (("info", "a", "b", "c"), "c"),
    ],
)
def test_bad_usage_is_one_line(main, arguments, says):
    status, out, err = main(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("backnorm: error: ")
    assert err.count("\n") == 1
    assert says in err


def test_an_interruption_is_no_traceback(main, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("backnorm.cli.info.describe", interrupted)
    status, _, err = main("info")
    assert status == 130
    assert err.strip() == "backnorm: interrupted"


def test_a_bug_is_not_hidden(monkeypatch):
    def bug(*_):
        raise AssertionError("a bug")

    monkeypatch.setattr("backnorm.cli.info.describe", bug)
    monkeypatch.setattr(sys, "argv", ["backnorm", "info"])
    no_signals(monkeypatch)
    with pytest.raises(AssertionError, match="a bug"):
        app.main()


def test_bad_input_in_a_process_of_its_own(tmp_path):
    process = run("run", str(tmp_path / "none.json"))
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"backnorm: error: {tmp_path / 'none.json'}: no such file\n"


def test_a_reader_that_leaves_causes_no_traceback():
    command = f"{sys.executable} -m backnorm info onednn_spec BatchNormTrainingBackprop | true"
    process = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert process.stderr == ""


def test_the_command_loads_no_framework():
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
