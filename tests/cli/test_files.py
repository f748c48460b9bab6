"""Result files appear whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from backnorm.cli.tensors import write_tensors
from backnorm.files import atomic_writer


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
@pytest.mark.parametrize("before", [None, b"what was there"])
def test_an_interrupted_write_leaves_what_was_there(tmp_path, error, before):
    path = tmp_path / "out.npz"
    if before is not None:
        path.write_bytes(before)

    def write():
        with atomic_writer(path) as stream:
            stream.write(b"half")
            stream.flush()
            raise error

    with pytest.raises(error):
        write()
    assert names(tmp_path) == ([] if before is None else ["out.npz"])
    assert before is None or path.read_bytes() == before


def test_the_command_interrupted_while_writing_leaves_nothing(
    cli, write_json, npz, call, tmp_path, monkeypatch
):
    file = write_json(call())
    before = names(tmp_path)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(np.lib.format, "write_array", interrupted)
    result = cli("run", file, "--tensors", npz, "--out", tmp_path / "out.npz")
    assert result.exit_code != 0
    assert names(tmp_path) == before


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_leaves_no_half_file(tmp_path, npz, write_json, call, sent):
    """SIGTERM leaves nothing at all; SIGKILL cannot be answered, but `--out` does not exist."""
    script = f"""
import os, sys
import numpy as np
from backnorm.cli import app

def killed(stream, *_, **__):
    stream.write(b"half")
    os.kill(os.getpid(), {int(sent)})

np.lib.format.write_array = killed
app.main()
"""
    out = tmp_path / "out.npz"
    arguments = ["run", write_json(call()), "--tensors", npz, "--out", out]
    process = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, check=False
    )
    assert process.returncode == (143 if sent == signal.SIGTERM else -signal.SIGKILL)
    assert not out.exists()
    assert (sent == signal.SIGTERM) == (not list(tmp_path.glob(".*.part")))


def test_a_new_file_has_the_permissions_of_new_files(tmp_path):
    plain, ours = tmp_path / "plain", tmp_path / "out.npz"
    plain.touch()
    write_tensors(ours, {"x": np.ones(2)})
    assert ours.stat().st_mode == plain.stat().st_mode


def test_a_replaced_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "out.npz"
    path.touch(mode=0o640)
    write_tensors(path, {"x": np.ones(2)})
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_symbolic_link_stays_one(tmp_path, read_npz):
    target, link = tmp_path / "target.npz", tmp_path / "out.npz"
    link.symlink_to(target)
    write_tensors(link, {"x": np.ones(2)})
    assert link.is_symlink()
    assert read_npz(target)["x"].tolist() == [1, 1]


def test_the_file_is_on_disk_before_it_is_in_place(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *a: (events.append("replace"), replace(*a)))
    write_tensors(tmp_path / "out.safetensors", {"x": np.ones(2)})
    assert events[:2] == ["fsync", "replace"]
