"""The command in every situation that a terminal, a shell or a disk can put it in.

Each is a process of its own: it ends with the status of what it was asked for, and never with a
traceback.
"""

from __future__ import annotations

import fcntl
import os
import pty
import resource
import struct
import subprocess
import sys
import termios
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

COMMAND = [sys.executable, "-m", "backnorm"]
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
RANDOM = ["run", str(EXAMPLES / "call_random.json"), "--random", "1", "--repeat", "1"]
# What settles how a terminal is treated, and is none of a test's surroundings.
TERMINAL = ("COLUMNS", "LINES", "TERM", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "CLICOLOR")
PLAIN = {name: text for name, text in os.environ.items() if name not in TERMINAL}

# A run whose check fails.
FINDING = """
import sys
import numpy as np
from backnorm.cli import app, run

right = run.run_step
run.run_step = lambda *a: {name: array + np.float32(1) for name, array in right(*a).items()}
sys.argv = ["backnorm", *sys.argv[1:]]
app.main()
"""


class Asked(NamedTuple):
    """A command, and its exit status where nothing is in its way."""

    arguments: list[str]
    status: int = 0
    prints: bool = True


ASKED = {
    "run": Asked([*COMMAND, *RANDOM]),
    "run --json": Asked([*COMMAND, *RANDOM, "--json"]),
    "a finding": Asked([sys.executable, "-c", FINDING, *RANDOM, "--check"], 1),
    "info": Asked([*COMMAND, "info"]),
    "info, an operator": Asked([*COMMAND, "info", "onednn_spec", "BatchNormTrainingBackprop"]),
    "help": Asked([*COMMAND, "--help"]),
    "help of run": Asked([*COMMAND, "run", "--help"]),
    "no command": Asked(COMMAND),
    "version": Asked([*COMMAND, "--version"]),
    "no such file": Asked([*COMMAND, "run", "none.json"], 2, prints=False),
    "no such option": Asked([*COMMAND, "info", "--none"], 2, prints=False),
    "a name that is no text": Asked([*COMMAND, "info", b"\xff\x1b[31m"], 2, prints=False),
}


class Surroundings(NamedTuple):
    """What a command is run in: variables of the environment, and a line of the shell."""

    environment: dict[str, str]
    line: str = '"$@"'
    full: bool = False


POSIX = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SURROUNDINGS = {
    "as it is": Surroundings({}),
    "ASCII": Surroundings({"PYTHONIOENCODING": "ascii"}),
    "POSIX": Surroundings(POSIX),
    "Latin-1": Surroundings({"PYTHONIOENCODING": "latin-1"}),
    "dumb": Surroundings({"TERM": "dumb"}),
    "one column": Surroundings({"COLUMNS": "1"}),
    "no number of columns": Surroundings({"COLUMNS": "many", "LINES": "-1"}),
    "colours": Surroundings({"FORCE_COLOR": "1", "COLUMNS": "1", "PYTHONIOENCODING": "ascii"}),
    "no colours": Surroundings({"NO_COLOR": "1"}),
    "unbuffered": Surroundings({"PYTHONUNBUFFERED": "1"}),
    "a full disk": Surroundings({}, '"$@" >/dev/full', full=True),
    "a full disk, unbuffered": Surroundings(
        {"PYTHONUNBUFFERED": "1"}, '"$@" >/dev/full', full=True
    ),
    "errors to a full disk": Surroundings({}, '"$@" 2>/dev/full'),
    "a bar to a full disk": Surroundings({"FORCE_COLOR": "1"}, '"$@" 2>/dev/full'),
    "no stdin": Surroundings({}, '"$@" <&-'),
    "no stdout": Surroundings({}, '"$@" >&-'),
    "no stderr": Surroundings({}, '"$@" 2>&-'),
    "no streams": Surroundings({}, '"$@" <&- >&- 2>&-'),
    "a reader that leaves": Surroundings({}, 'set -o pipefail; "$@" | true'),
    "a reader of one line": Surroundings({}, 'set -o pipefail; "$@" | head -1'),
    "a reader of errors that leaves": Surroundings(
        {"FORCE_COLOR": "1"}, 'set -o pipefail; "$@" 2>&1 >/dev/null | true'
    ),
}
# Quick: one command in those that are unlike each other. Long: that command in all, and every other
# command in these. The rest is a sweep.
TELLING = ("POSIX", "a full disk", "no streams", "a reader that leaves")
THOROUGH = "run"


def _marks(thorough, telling):
    if thorough and telling:
        return ()
    return pytest.mark.long if thorough or telling else pytest.mark.sweep


TABLE = [
    pytest.param(
        asked,
        around,
        id=f"{asked}, {around}",
        marks=_marks(asked == THOROUGH, around in TELLING),
    )
    for asked in ASKED
    for around in SURROUNDINGS
]


def ended(done, status):
    """Assert that a process ended as it should."""
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert b"Exception ignored" not in done.stderr, done.stderr.decode()
    assert done.returncode == status, done.stderr.decode()


@pytest.mark.parametrize(("asked", "around"), TABLE)
def test_a_situation(tmp_path, asked, around):
    arguments, status, prints = ASKED[asked]
    environment, line, full = SURROUNDINGS[around]
    done = subprocess.run(
        ["bash", "-c", line, "bash", *arguments],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        env=PLAIN | environment,
        timeout=120,
    )
    ended(done, 2 if full and prints else status)
    if full and prints:
        said = b"backnorm: error: standard output: No space left on device\n"
        assert said in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("columns", "kind"), [(0, None), (1, "dumb"), (1, "xterm"), (80, "none-of-these")]
)
def test_a_terminal(columns, kind):
    """Whatever the terminal says of itself, and however small it is, down to nothing."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("4H", columns, columns, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, *RANDOM, "--check"],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        env=PLAIN if kind is None else PLAIN | {"TERM": kind},
    )
    os.close(secondary)
    shown = b""
    # A terminal that nobody writes to any more is an error for who reads.
    with suppress(OSError):
        while piece := os.read(primary, 65536):
            shown += piece
    os.close(primary)
    assert process.wait(timeout=60) == 0
    assert b"Traceback" not in shown
    assert columns != 80 or b"ngraph" in shown or b"onednn" in shown or b"tensorflow" in shown


def test_what_is_printed_is_not_in_a_file(tmp_path):
    """Of a closed standard output the next file that is opened would have the number."""
    script = """
import os, sys
import numpy as np
from backnorm.cli import app

write = np.lib.format.write_array

def printing(*given, **options):
    os.write(1, b"printed by a library")
    write(*given, **options)

np.lib.format.write_array = printing
app.main()
"""
    out = tmp_path / "out.npz"
    command = [sys.executable, "-c", script, *RANDOM, "--out", str(out)]
    done = subprocess.run(
        ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", *command],
        capture_output=True,
        check=False,
    )
    ended(done, 0)
    assert b"printed" not in out.read_bytes()
    with np.load(out) as file:
        assert file.files


def test_a_disk_that_is_full(tmp_path):
    """A file that may not grow is the nearest to it that needs no disk."""
    out = tmp_path / "out.npz"
    done = subprocess.run(
        [*COMMAND, *RANDOM, "--out", str(out)],
        capture_output=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    ended(done, 2)
    assert done.stderr.decode() == f"backnorm: error: {out}: File too large\n"
    assert not list(tmp_path.iterdir())


def test_too_little_memory(tmp_path):
    """Where the system refuses memory, as it does within a limit."""
    done = subprocess.run(
        [sys.executable, "-c", SCARCE, *RANDOM], capture_output=True, check=False, cwd=tmp_path
    )
    ended(done, 2)
    assert done.stderr == b"backnorm: error: there is not enough memory\n"


SCARCE = """
import sys
from backnorm.cli import app, run

def fill(*_):
    return bytearray(2**62)

run.fill = fill
app.main()
"""


# The most memory that the process itself had: what the system counts for it begins with ours.
MEASURED = """
import re, sys
from pathlib import Path
from backnorm.cli import app

try:
    app.main()
finally:
    status = Path("/proc/self/status").read_text()
    Path("peak").write_text(re.search(r"VmHWM:\\s*(\\d+)", status)[1])
"""


def peak(arguments, cwd):
    """Run the command; return how it ended and the most memory that it had, in MiB."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments], capture_output=True, check=False, cwd=cwd
    )
    return done, int((cwd / "peak").read_text()) // 1024


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """The most memory, in MiB, of a run that reads next to nothing."""
    done, memory = peak(RANDOM, tmp_path_factory.mktemp("usual"))
    ended(done, 0)
    return memory


def bomb(path, gibibytes):
    """Write a .npz file whose x unpacks to `gibibytes` of zeros."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = packer.compress(bytes(2**26)) + packer.flush(zlib.Z_FULL_FLUSH)
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({gibibytes * 2**28},), }}".encode()
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head
    opening = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = opening.compress(head) + opening.flush(zlib.Z_FULL_FLUSH) + piece * (16 * gibibytes)
    data += zlib.compressobj(9, zlib.DEFLATED, -15).flush()
    size, name = len(head) + gibibytes * 2**30, b"x.npy"
    # Sizes beyond 32 bits are in an extra field. Nobody gets to the checksum.
    extra = struct.pack("<HHQQ", 1, 16, size, len(data))
    fields = struct.pack("<5H3I2H", 45, 0, 8, 0, 33, 0, 2**32 - 1, 2**32 - 1, len(name), len(extra))
    local = b"PK\3\4" + fields + name + extra
    central = b"PK\1\2" + struct.pack("<H", 45) + fields + bytes(14) + name + extra
    end = struct.pack("<4H2IH", 0, 0, 1, 1, len(central), len(local) + len(data), 0)
    path.write_bytes(local + data + central + b"PK\5\6" + end)


CALL = '{"dialect": "ngraph", "op": "BatchNormInference", "inputs": {"input": "x"}}'


def test_a_small_file_that_unpacks_to_much(tmp_path, usual):
    bomb(tmp_path / "in.npz", 4)
    assert (tmp_path / "in.npz").stat().st_size < 5 * 2**20
    (tmp_path / "call.json").write_text(CALL)
    done, memory = peak(["run", "call.json", "--tensors", "in.npz"], tmp_path)
    ended(done, 2)
    assert b"in.npz[x]: unpacks to too much" in done.stderr
    assert b"--max-unpacked" in done.stderr
    assert memory < usual + 100


def test_a_large_header(tmp_path, usual):
    entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    text = b"{" + b"".join(entry % i for i in range(1_650_000)) + b'"x":1}'
    assert 90e6 < len(text) < 100e6
    (tmp_path / "in.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    (tmp_path / "call.json").write_text(CALL)
    done, memory = peak(["run", "call.json", "--tensors", "in.safetensors"], tmp_path)
    ended(done, 2)
    assert b"the header is too large" in done.stderr
    assert b"--max-unpacked" in done.stderr
    assert memory < usual + 100


def test_an_archive_of_nothing_but_names(tmp_path, usual):
    """zipfile would read the directory, which no member has to stand behind."""
    entry = b"PK\1\2" + bytes(24) + struct.pack("<H", 5) + bytes(16) + b"x.npy"
    count = 1_000_000
    end = struct.pack("<4H2IH", 0, 0, 65535, 65535, len(entry) * count, 0, 0)
    (tmp_path / "in.npz").write_bytes(entry * count + b"PK\5\6" + end)
    (tmp_path / "call.json").write_text(CALL)
    done, memory = peak(["run", "call.json", "--tensors", "in.npz"], tmp_path)
    ended(done, 2)
    assert b"the archive's directory is too large" in done.stderr
    assert memory < usual + 100


@pytest.mark.sweep
@pytest.mark.parametrize(
    "piece", ["[[[[[[[[[[]]]]]]]]]]", '{"":{}}', '{"a":0}', "[]", "1.5", '"é"']
)
def test_json_takes_no_more_than_is_allowed(tmp_path, usual, piece):
    text = "[" + ",".join([piece] * ((16 * 2**20 - 2) // (len(piece.encode()) + 1))) + "]"
    (tmp_path / "call.json").write_text(text)
    done, memory = peak(["run", "call.json"], tmp_path)
    ended(done, 2)
    assert memory < usual + 1024
