"""Result files appear whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from backnorm.tensor_files import atomic_writer, write_tensors


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
@pytest.mark.parametrize("before", [None, b"before"])
def test_atomic_writer_on_error_keeps_previous_file(tmp_path, error, before):
    path = tmp_path / "out.npz"
    if before is not None:
        path.write_bytes(before)

    def write():
        with atomic_writer(path) as stream:
            stream.write(b"half")
            raise error

    with pytest.raises(error):
        write()
    assert names(tmp_path) == ([] if before is None else ["out.npz"])
    assert before is None or path.read_bytes() == before


def test_atomic_writer_error_names_file(tmp_path):
    def write(error):
        with atomic_writer(tmp_path / "out.npz"):
            raise error

    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: '.*out\.npz'"):
        write(OSError(28, "No space left on device"))


SCRIPT = """
import os, sys
import numpy as np
from backnorm.cli import app

number = int(sys.argv.pop())

def killed(stream, *_, **__):
    stream.write(b"half")
    os.kill(os.getpid(), number)

np.lib.format.write_array = killed
app.main()
"""


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_run_signalled_while_writing_keeps_previous_file(
    tmp_path, npz, write_json, call, heed_interrupts, number
):
    number = signal.Signals[number]
    out = tmp_path / "out.npz"
    out.write_bytes(b"before")
    arguments = ["run", write_json(call()), "--tensors", npz, "--out", out, number.value]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        capture_output=True,
        check=False,
        preexec_fn=heed_interrupts,
    )
    assert out.read_bytes() == b"before"
    if number == signal.SIGINT:
        assert (done.returncode, done.stderr) == (130, b"backnorm: interrupted\n")
        assert not list(tmp_path.glob(".*"))
    else:
        assert done.returncode == -number


def test_write_tensors_gives_new_file_default_permissions(tmp_path):
    plain, ours = tmp_path / "plain", tmp_path / "out.npz"
    plain.touch()
    write_tensors(ours, {"x": np.ones(2)})
    assert ours.stat().st_mode == plain.stat().st_mode


def test_write_tensors_replaces_target_of_symbolic_link(tmp_path, read_npz):
    target, link = tmp_path / "target.npz", tmp_path / "out.npz"
    link.symlink_to(target)
    write_tensors(link, {"x": np.ones(2)})
    assert link.is_symlink()
    assert read_npz(target)["x"].tolist() == [1, 1]


def test_write_tensors_syncs_before_replacing_file(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *a: (events.append("replace"), replace(*a)))
    write_tensors(tmp_path / "out.safetensors", {"x": np.ones(2)})
    assert events == ["fsync", "replace"]
