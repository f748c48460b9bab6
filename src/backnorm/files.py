"""Write result files atomically."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from backnorm.errors import ArgumentValueError


def check_writable(path: Path) -> None:
    """Raise if a result file cannot be written at `path`. Commands call this before they do any
    work.
    """
    if path.exists() and not path.is_file():
        raise ArgumentValueError(str(path), "is not a regular file")
    if not path.parent.is_dir():
        raise ArgumentValueError(str(path), "its folder does not exist")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ArgumentValueError(str(path), "its folder is not writable")


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to `path`; move it into place once it is complete and on disk.

    If the block raises, the temporary file is removed and `path` stays as it was. If `path` is a
    symbolic link, the link stays, and the file that it points to is replaced.

    Raises
    ------
    OSError
        If the file cannot be written; the error has the name of the file.
    """
    target = Path(os.path.realpath(path))
    # The temporary name does not contain the target's name, because it could then be too long.
    temporary = target.with_name(f".backnorm.{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
