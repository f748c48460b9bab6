"""What has been compiled: beside the kernels in the cache, a record of each job that was done.

A record names the kernels that its job needs, so that a look at the folder tells whether they are
there. It is found by a hash of what the job depends on; one that is missing or wrong costs time,
nothing else. Several processes may read, write and prune at once: files come and go whole.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from backnorm import config, machine
from backnorm.files import atomic_writer
from backnorm.warm.jobs import Job

__all__ = [
    "UNUSED_DAYS",
    "Size",
    "check_writable",
    "kernels_of",
    "prune",
    "ready",
    "record",
    "size",
]

#: After how many days without use `prune` removes a kernel.
UNUSED_DAYS = 30

_KERNELS, _RECORDS = "*.nbc", "*.job"
_PACKAGES = ("numba", "llvmlite", "numpy")
_FOLDERS = (".", "kernels/cpu", "warm")


@dataclass(frozen=True, slots=True)
class Size:
    """Kernels in the cache, and the bytes of all its files."""

    kernels: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Record:
    version: str
    files: tuple[str, ...]


def kernels_of(job: Job) -> tuple[str, ...]:
    """Return the files that the record of a job names; none if there is no record."""
    found = _read(_path(job))
    return found.files if found else ()


def ready(job: Job) -> bool:
    """Whether all kernels of a job are in the cache."""
    folder, names = config.cache_directory(), kernels_of(job)
    return bool(names) and all((folder / name).exists() for name in names)


def check_writable() -> None:
    """Raise OSError if the cache cannot be written: what is compiled would be lost."""
    folder = config.cache_directory()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def record(job: Job, files: Iterable[str]) -> None:
    """Note that a job is done and needs these files.

    Raises
    ------
    OSError
        If the cache cannot be written.
    """
    with atomic_writer(_path(job)) as stream:
        stream.write(json.dumps({"version": _version(), "files": sorted(files)}).encode())


def size() -> Size:
    """Return how much is in the cache."""
    kernels, records = _sizes(_KERNELS), _sizes(_RECORDS)
    return Size(len(kernels), sum(kernels.values()) + sum(records.values()))


def prune() -> Size:
    """Remove what nothing has used for `UNUSED_DAYS`; return how much that was.

    Kernels that a record of this version names stay. So do those that something else uses, an
    environment with other versions, say: that shows in their time of access, or where the file
    system does not keep it, in their age. A process that misses a kernel compiles it again.
    """
    notes = {path: _read(path) for path in _sizes(_RECORDS)}
    ours = [found for found in notes.values() if found and found.version == _version()]
    needed = {name for found in ours for name in found.files}
    removed = {
        path: nbytes
        for path, nbytes in _sizes(_KERNELS).items()
        if path.name not in needed and _unused(path) and _remove(path)
    }
    left = {path.name for path in _sizes(_KERNELS)}
    for path, found in notes.items():
        # Without all of its kernels a record says nothing.
        if found is None or not left.issuperset(found.files):
            _remove(path)
    return Size(len(removed), sum(removed.values()))


def _read(path: Path) -> _Record | None:
    try:
        content = json.loads(path.read_bytes())
        return _Record(str(content["version"]), tuple(map(str, content["files"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(job: Job) -> Path:
    digest = hashlib.sha256(f"{_version()} {job}".encode()).hexdigest()[:40]
    return config.cache_directory() / f"{digest}.job"


@functools.cache
def _version() -> str:
    """Return a hash of what decides which kernels a job needs: sources, packages, processor."""
    digest = hashlib.sha256(machine.detect().name.encode())
    for package in _PACKAGES:
        digest.update(metadata.version(package).encode())
    root = Path(__file__).parents[1]
    for folder in _FOLDERS:
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _sizes(pattern: str) -> dict[Path, int]:
    """Return the files of the cache that match, and their bytes."""
    found = {}
    for path in sorted(config.cache_directory().glob(pattern)):
        # Another process may have removed it by now.
        with contextlib.suppress(OSError):
            found[path] = path.stat().st_size
    return found


def _unused(path: Path) -> bool:
    try:
        facts = path.stat()
    except OSError:
        return False
    return time.time() - max(facts.st_atime, facts.st_mtime) > UNUSED_DAYS * 86400


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
