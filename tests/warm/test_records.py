"""What is remembered of jobs, and what is removed."""

from __future__ import annotations

import os
import time

import pytest

from backnorm.warm import records
from backnorm.warm.jobs import Job
from backnorm.warm.records import UNUSED_DAYS, Size, prune, ready, record, size

_JOB = Job("backward", "float32", "segments")
_OTHER = Job("backward", "float32", "columns")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("BACKNORM_CACHE_DIR", str(tmp_path))
    return tmp_path


def kernel(folder, name, days=0.0, content=b"code"):
    path = folder / f"{name}.nbc"
    path.write_bytes(content)
    age(path, days)
    return path


def age(path, days):
    then = time.time() - days * 86400
    os.utime(path, (then, then))


def test_a_job_is_ready_when_all_that_it_needs_is_there(folder):
    assert not ready(_JOB)
    one, two = kernel(folder, "one"), kernel(folder, "two")
    record(_JOB, [one.name, two.name])
    assert ready(_JOB)
    assert not ready(_OTHER)
    two.unlink()
    assert not ready(_JOB)


def test_a_job_that_left_nothing_is_not_ready():
    record(_JOB, [])
    assert not ready(_JOB)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"version": 1, "files": 3}', b"\xff"]
)
def test_a_damaged_record_is_none(folder, content):
    record(_JOB, [kernel(folder, "one").name])
    (path,) = folder.glob("*.job")
    path.write_bytes(content)
    assert not ready(_JOB)
    assert prune() == Size(0, 0)
    assert not path.exists()


def test_another_version_has_other_records(folder, monkeypatch):
    record(_JOB, [kernel(folder, "one").name])
    monkeypatch.setattr(records, "_version", lambda: "another")
    assert not ready(_JOB)


def test_the_version_follows_the_sources(monkeypatch):
    before = records._version()
    assert records._version.__wrapped__() == before
    monkeypatch.setattr(records, "_FOLDERS", ("kernels/cpu",))
    assert records._version.__wrapped__() != before


def test_size_counts_kernels_and_all_bytes(folder):
    assert size() == Size(0, 0)
    kernel(folder, "one", content=b"12345")
    record(_JOB, ["one.nbc"])
    (path,) = folder.glob("*.job")
    assert size() == Size(1, 5 + path.stat().st_size)


def test_what_has_not_been_used_for_long_is_removed(folder):
    old, recent = kernel(folder, "old", UNUSED_DAYS + 1), kernel(folder, "recent", UNUSED_DAYS - 1)
    assert prune() == Size(1, 4)
    assert not old.exists()
    assert recent.exists()


def test_reading_is_using(folder):
    path = kernel(folder, "old", UNUSED_DAYS + 1)
    now = time.time()
    os.utime(path, (now, now - (UNUSED_DAYS + 1) * 86400))
    assert prune() == Size(0, 0)


def test_what_this_version_needs_stays(folder):
    path = kernel(folder, "needed", UNUSED_DAYS + 1)
    record(_JOB, [path.name])
    assert prune() == Size(0, 0)
    assert ready(_JOB)


def test_what_another_version_needed_goes_when_it_is_old(folder, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(records, "_version", lambda: "another")
        record(_JOB, [kernel(folder, "old", UNUSED_DAYS + 1).name])
        record(_OTHER, [kernel(folder, "recent").name])
        assert ready(_JOB)
        assert ready(_OTHER)
    assert prune() == Size(1, 4)
    # A record goes with its kernels.
    assert len(list(folder.glob("*.job"))) == 1
    with monkeypatch.context() as context:
        context.setattr(records, "_version", lambda: "another")
        assert ready(_OTHER)


def test_nothing_else_is_ever_removed(folder):
    others = [folder / "notes.txt", folder / "tmp123.tmp", folder / "folder.nbc" / "one.nbc"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
        age(path, 1000)
    age(folder / "folder.nbc", 1000)
    assert prune() == Size(0, 0)
    assert all(path.exists() for path in others)


def test_a_file_that_another_process_removes_first_is_not_counted(folder, monkeypatch):
    path = kernel(folder, "old", UNUSED_DAYS + 1)
    unused = records._unused

    def removed_meanwhile(candidate):
        answer = unused(candidate)
        path.unlink()
        return answer

    monkeypatch.setattr(records, "_unused", removed_meanwhile)
    assert prune() == Size(0, 0)


def test_without_a_folder_there_is_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("BACKNORM_CACHE_DIR", str(tmp_path / "absent"))
    assert not ready(_JOB)
    assert prune() == size() == Size(0, 0)


def test_a_cache_that_cannot_be_written_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BACKNORM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="file"):
        records.check_writable()
    monkeypatch.setenv("BACKNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(records.os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="denied"):
        records.check_writable()
