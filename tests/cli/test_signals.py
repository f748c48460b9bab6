"""Signals to the command: one is enough, nothing is left behind, nothing foreign is touched."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("hangup")

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
RUN = ["run", str(EXAMPLES / "call_random.json"), "--random", "1", "--repeat", "1"]
NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

# What a run does just before it writes its results, or while it does; `sent` sends the signal.
BEGIN = """
import os, sys, time, weakref
from importlib.metadata import entry_points
from pathlib import Path
import numpy as np
from backnorm import files
from backnorm.cli import app, run

number = int(sys.argv.pop(1))

def sent():
    os.kill(os.getpid(), number)
    # Where Python sees to it, if it may.
    for _ in range(10):
        pass

right, write = run.run_step, np.lib.format.write_array
"""

# Where Python drops what a handler raises. The run would go on for a minute.
LOST = {
    "a finaliser": """
class Gone:
    def __del__(self):
        sent()

def step(*given):
    Gone()
    time.sleep(60)

run.run_step = step
""",
    "a weak reference's callback, as in every import": """
class Gone:
    pass

def step(*given):
    gone = Gone()
    watched = weakref.ref(gone, lambda _: sent())
    del gone
    time.sleep(60)

run.run_step = step
""",
    "somebody's hands": """
def step(*given):
    try:
        sent()
    except BaseException:
        pass
    time.sleep(60)

run.run_step = step
""",
    "somebody's hands, time and again": """
def step(*given):
    end = time.monotonic() + 1
    sent_already = False
    while time.monotonic() < end:
        try:
            if not sent_already:
                sent_already = True
                sent()
            time.sleep(0.01)
        except BaseException:
            pass
    time.sleep(60)

run.run_step = step
""",
    "an error that it is taken for": """
def step(*given):
    try:
        sent()
    except BaseException:
        raise ImportError("a module failed to import") from None

run.run_step = step
""",
    "an import": """
begin = app.begin

def importing(threads):
    sent()
    begin(threads)
    time.sleep(60)

app.begin = importing
""",
}

# Signals while results are written, and while what is half written is removed.
WRITING = {
    "half a file": """
def half(stream, *given, **options):
    stream.write(b"half")
    sent()

np.lib.format.write_array = half
""",
    "tidying that takes long": """
def half(stream, *given, **options):
    stream.write(b"half")
    sent()

np.lib.format.write_array = half
unlink = Path.unlink

def slowly(path, **options):
    sent()
    time.sleep(0.5)
    sent()
    unlink(path, **options)

Path.unlink = slowly
""",
    "a file just made": """
make = os.open

def made(path, *given, **options):
    handle = make(path, *given, **options)
    if str(path).endswith(".part"):
        sent()
    return handle

os.open = made
""",
    "a file not yet in place": """
replace = os.replace

def late(*given, **options):
    sent()
    replace(*given, **options)

os.replace = late
""",
}


def launched(tmp_path, number, what, *, heed=None):
    """Run the command with `what` in it; return how it ended."""
    script = tmp_path / "script.py"
    script.write_text(f"{BEGIN}{what}\napp.main()\n")
    return subprocess.run(
        [sys.executable, str(script), str(int(number)), *RUN, "--out", str(tmp_path / "out.npz")],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        preexec_fn=heed,
    )


def check_end(done, number):
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
@pytest.mark.parametrize("lost", LOST)
def test_one_signal_is_enough(tmp_path, heed_interrupts, lost, number):
    begun = time.monotonic()
    check_end(launched(tmp_path, number, LOST[lost], heed=heed_interrupts), number)
    assert time.monotonic() - begun < 40


@pytest.mark.long
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
@pytest.mark.parametrize("writing", WRITING)
def test_nothing_is_left_and_nothing_foreign_goes(tmp_path, heed_interrupts, writing, number):
    foreign = {"out.npz": b"as it was", ".out.npz.part": b"1", ".backnorm.0123.part": b"2"}
    for name, data in foreign.items():
        (tmp_path / name).write_bytes(data)
    check_end(launched(tmp_path, number, WRITING[writing], heed=heed_interrupts), number)
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    del left["script.py"]
    assert left == foreign


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_what_is_to_be_ignored_is_ignored(tmp_path, number):
    """As nohup has SIGHUP, and a shell the interrupts of what runs in the background."""
    ignored = "def step(*given):\n    sent()\n    return right(*given)\n\nrun.run_step = step\n"
    done = launched(tmp_path, number, ignored, heed=lambda: signal.signal(number, signal.SIG_IGN))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.npz").exists()


def test_an_import_that_hangs_is_ended_by_a_second_signal(tmp_path, heed_interrupts):
    hangs = """
def hanging(threads):
    sent()
    sent()
    time.sleep(60)

app.begin = hanging
"""
    done = launched(tmp_path, signal.SIGTERM, hangs, heed=heed_interrupts)
    assert done.returncode == -signal.SIGTERM


def test_a_broken_pipe_is_no_signal_to_end(tmp_path, heed_interrupts):
    done = launched(
        tmp_path,
        signal.SIGPIPE,
        "def step(*given):\n    sent()\n    return right(*given)\n\nrun.run_step = step\n",
        heed=heed_interrupts,
    )
    assert done.returncode == 0, done.stderr


def test_control_c_while_the_package_is_imported_has_no_traceback():
    code = """
import os, signal, sys

class Interrupted:
    def find_spec(self, name, *_):
        if name == "numpy":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupted())
signal.signal(signal.SIGINT, signal.default_int_handler)
from _backnorm_command import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == ""


def test_the_command_is_that_module():
    (script,) = entry_points(group="console_scripts", name="backnorm")
    assert script.value == "_backnorm_command:main"
