"""Files: what may be read, and results that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from backnorm.errors import ArgumentValueError

__all__ = ["atomic_writer", "check_readable", "check_writable"]


def check_readable(path: Path) -> None:
    """Raise unless `path` is a regular file (a pipe or a device could block for ever)."""
    if not path.is_file():
        problem = "is not a regular file" if path.exists() else "no such file"
        raise ArgumentValueError(str(path), problem)


def check_writable(path: Path) -> None:
    """Raise if `path` cannot become a result file; called before any work is done."""
    if path.exists() and not path.is_file():
        raise ArgumentValueError(str(path), "is not a regular file")
    folder = _target(path).parent
    if not folder.is_dir():
        raise ArgumentValueError(str(path), "its folder does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ArgumentValueError(str(path), "its folder is not writable")


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; move it into place once it is complete and on disk.

    If the block raises, or is interrupted, the temporary file is removed and whatever was at
    `path` stays as it was.
    """
    target = _target(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fchmod(stream.fileno(), _mode(target))
            os.fsync(stream.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _target(path: Path) -> Path:
    # Through a symbolic link, so that the link stays and its target is replaced.
    return Path(os.path.realpath(path))


def _mode(target: Path) -> int:
    """Return the permissions of the file to be replaced, or those of any new file."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _sync_folder(folder: Path) -> None:
    # Not every file system can; the file itself is safe by now.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
