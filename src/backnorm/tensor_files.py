"""Read and write tensor files: .npz and .npy by NumPy, .safetensors by the package safetensors.

Files are written atomically.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from backnorm.dtypes import BFLOAT16
from backnorm.errors import ArgumentValueError, BacknormError

#: The default of `max_unpacked`.
MEBIBYTES = 1024

# NumPy writes the bfloat16 arrays of ml_dtypes to files with this type, which says only that an
# element has two bytes.
_OPAQUE = np.dtype("V2")

Names = Callable[[Collection[str]], Mapping[str, str]]


def _all(names: Collection[str]) -> Mapping[str, str]:
    return {name: name for name in names}


def read_tensors(
    path: Path, select: Names = _all, max_unpacked: int = MEBIBYTES
) -> dict[str, np.ndarray]:
    """Return tensors of a file, in native byte order.

    Parameters
    ----------
    path : Path
    select : callable, optional
        Takes the names in the file; returns the names to read, by their keys in the result. The
        default reads all tensors.
    max_unpacked : int, optional
        Mebibytes by which an archive may be larger unpacked than it is on disk.

    Raises
    ------
    ArgumentValueError
        If the file is neither .npz nor .safetensors, is damaged, or is too large.
    OSError
        If it cannot be read.
    """
    kind = _kind(path)
    with _opened(path) as stream:
        if kind == ".npz":
            tensors = _read_npz(path, stream, select, max_unpacked)
        else:
            with safe_open(path, "np") as file:
                names = select(file.keys())
                tensors = {key: file.get_tensor(name) for key, name in names.items()}
    return {key: _native(array) for key, array in tensors.items()}


def read_array(path: Path) -> np.ndarray:
    """Return the array of an .npy file, in native byte order.

    Raises
    ------
    ArgumentValueError
        If the file is no .npy file, is damaged, or has Python objects.
    OSError
        If it cannot be read.
    """
    with _opened(path) as stream:
        return _native(np.lib.format.read_array(stream, allow_pickle=False))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file; an exception that its contents cause becomes an error with the file's name."""
    try:
        # Every format's file is opened here, so that an unreadable file causes the same error.
        with path.open("rb") as stream:
            yield stream
    except (BacknormError, OSError, MemoryError):
        raise
    # NumPy and zipfile raise many kinds of exceptions for damaged files.
    except Exception as error:
        raise ArgumentValueError(str(path), f"cannot be read: {error}") from error


def check_output(path: Path) -> None:
    """Raise if no tensor file can be written to `path`; called before anything is computed."""
    _kind(path)
    if path.exists() and not path.is_file():
        raise ArgumentValueError(str(path), "is not a regular file")
    if not path.parent.is_dir():
        raise ArgumentValueError(str(path), "its folder does not exist")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ArgumentValueError(str(path), "its folder is not writable")


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write `tensors` to `path` atomically: if writing fails, the file is unchanged."""
    # safetensors writes the memory of an array and ignores the array's strides. So every array is
    # first made row-major.
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    with atomic_writer(path) as stream:
        if _kind(path) == ".safetensors":
            stream.write(save(arrays))
            return
        # The archive is written here, array by array, because `numpy.savez` cannot write an array
        # named "file".
        with zipfile.ZipFile(stream, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)


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


def _read_npz(
    path: Path, stream: BinaryIO, select: Names, max_unpacked: int
) -> dict[str, np.ndarray]:
    # If a file is not a zip archive, NumPy would treat it as a pickle, and NumPy's error would be
    # misleading.
    if not zipfile.is_zipfile(stream):
        raise ArgumentValueError(str(path), "is not a .npz file")
    stream.seek(0)
    with np.load(stream, allow_pickle=False) as file:
        unpacked = sum(member.file_size for member in file.zip.infolist())
        if unpacked - path.stat().st_size > max_unpacked * 2**20:
            raise ArgumentValueError(
                str(path),
                "is too large when unpacked",
                came=f"{unpacked} bytes",
                accepted=f"at most {max_unpacked} MiB more than the size of the file",
                hint="backnorm run --max-unpacked MIB allows more",
            )
        return {key: np.asarray(file[name]) for key, name in select(file.files).items()}


def _native(array: np.ndarray) -> np.ndarray:
    if array.dtype == _OPAQUE:
        return array.view(BFLOAT16)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _kind(path: Path) -> str:
    kind = path.suffix.lower()
    if kind not in (".npz", ".safetensors"):
        raise ArgumentValueError(
            str(path),
            "unknown kind of tensor file",
            came=f"extension {path.suffix!r}",
            accepted=".npz or .safetensors",
        )
    return kind
