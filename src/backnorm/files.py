"""Files: what may be read, and results that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from backnorm.errors import ArgumentValueError

__all__ = [
    "atomic_writer",
    "check_readable",
    "check_writable",
    "errors_named",
    "file_path",
    "prepare_folder",
]


def file_path(text: str) -> Path:
    """Return `text` as the path of a file; raise if it can only be that of a folder.

    `Path` drops a slash or a dot at the end: "out.npz/" would be the file "out.npz".
    """
    if os.path.basename(text) in ("", ".", ".."):
        raise ArgumentValueError(text or repr(text), "must be the path of a file, not of a folder")
    return Path(text)


def check_readable(path: Path) -> None:
    """Raise unless `path` is a regular file (a pipe or a device could block for ever)."""
    if not path.is_file():
        problem = "is not a regular file" if path.exists() else "no such file"
        raise ArgumentValueError(str(path), problem)


def check_writable(path: Path) -> None:
    """Raise if `path` cannot become a result file; called before any work is done."""
    if path.exists() and not path.is_file():
        raise ArgumentValueError(str(path), "is not a regular file")
    target = _target(path)
    if target.is_symlink():
        raise ArgumentValueError(str(path), "is a symbolic link that leads to itself")
    # Of "missing/../out.npz" only the path itself shows that its folder does not exist.
    if not (path.parent.is_dir() and target.parent.is_dir()):
        raise ArgumentValueError(str(path), "its folder does not exist")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ArgumentValueError(str(path), "its folder is not writable")


def prepare_folder(folder: Path, *names: str) -> None:
    """Make a folder with its parents, and raise if a file of one of `names` cannot be in it.

    Raises
    ------
    ArgumentValueError
        If there is something else of that name, or a file cannot be written.
    OSError
        If the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ArgumentValueError(str(folder), "is not a folder") from error
    for name in names:
        check_writable(folder / name)


@contextlib.contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Give errors of the system the name of the file that is read or written, if they have none."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; move it into place once it is complete and on disk.

    If the block raises, or is interrupted, the temporary file is removed and whatever was at
    `path` stays as it was.
    """
    target = _target(path)
    # Short, whatever the length of the target's name, and a name that nobody else can have chosen:
    # what is called so is removed even if a signal comes just as the file is made.
    temporary = target.with_name(f".backnorm.{secrets.token_hex(8)}.part")
    ours = True
    try:
        with errors_named(path):
            try:
                stream = open(temporary, "xb", opener=_private)  # noqa: SIM115
            except FileExistsError:
                ours = False
                raise
            with stream:
                yield stream
                stream.flush()
                os.fchmod(stream.fileno(), _mode(target))
                os.fsync(stream.fileno())
            temporary.replace(target)
    except BaseException:
        if ours:
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _target(path: Path) -> Path:
    # Through a symbolic link, so that the link stays and its target is replaced.
    return Path(os.path.realpath(path))


def _private(path: str, flags: int) -> int:
    # Until it is complete it is nobody else's.
    return os.open(path, flags, 0o600)


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
