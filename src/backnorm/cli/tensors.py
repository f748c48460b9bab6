"""Tensor files of either kind: .npz and .safetensors, told apart by their extension."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from backnorm.cli.allowance import Allowance
from backnorm.cli.npz import NpzFile, write_npz
from backnorm.cli.safetensors_file import SafetensorsFile, write_safetensors
from backnorm.errors import ArgumentValueError
from backnorm.files import atomic_writer, check_readable, check_writable, errors_named

__all__ = ["TensorFile", "check_output", "open_tensors", "write_tensors"]

_READERS: dict[str, Callable[[Path, Allowance], AbstractContextManager[TensorFile]]] = {
    ".npz": NpzFile,
    ".safetensors": SafetensorsFile,
}
_WRITERS = {".npz": write_npz, ".safetensors": write_safetensors}


class TensorFile(Protocol):
    """An open file of named arrays."""

    names: tuple[str, ...]

    def load(self, name: str) -> np.ndarray:
        """Return the array `name`, read and checked now."""


@contextmanager
def open_tensors(path: Path, allowance: Allowance) -> Iterator[TensorFile]:
    """Open a tensor file for reading, which may take no more memory than is allowed."""
    reader = _READERS[_kind(path)]
    check_readable(path)
    with errors_named(path), reader(path, allowance) as file:
        yield file


def check_output(path: Path) -> None:
    """Raise if `path` cannot become a tensor file; called before any work is done."""
    _kind(path)
    check_writable(path)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write `tensors` to `path`, which then holds all of them or is as it was."""
    with atomic_writer(path) as stream:
        _WRITERS[_kind(path)](stream, tensors)


def _kind(path: Path) -> str:
    kind = path.suffix.lower()
    if kind not in _READERS:
        raise ArgumentValueError(
            str(path),
            "unknown kind of tensor file",
            came=f"extension {path.suffix!r}",
            accepted=" or ".join(_READERS),
        )
    return kind
