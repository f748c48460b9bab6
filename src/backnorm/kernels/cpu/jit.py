"""Compilation of CPU kernels: the one set of Numba options, and the disk cache.

Numba's own disk cache is not used, for two reasons. It stamps only the file of the kernel
itself, so a change in a helper that the kernel inlines leaves stale machine code behind. And it
numbers data files through a shared index, so two processes that compile different signatures
of one kernel at the same time can pair an index entry with the other's code (Numba issue 4807
reports the crashes). Here each compiled signature is one file, named by a hash of everything
that it depends on and moved into place in one step.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import compiler
from numba.core.caching import _Cache

from backnorm import config

__all__ = ["SOURCES", "inlined", "kernel", "native", "outlined"]


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` on first call: no GIL, no error model, machine code kept on disk.

    A kernel is serial: threads are `threads.parallel`'s business, and a serial kernel compiles
    four times faster than one with Numba's ``parallel=True``.
    """
    dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
    dispatcher._cache = _DiskCache(function)
    return dispatcher


def native(dispatcher: Any, *signature: Any) -> int:
    """Return the address of a kernel's machine code for argument types, compiled if need be.

    The code is a function ``int status(result*, error**, arguments...)``; `record.invoke` calls it.
    """
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


def inlined(function: Callable[..., Any]) -> Any:
    """Compile `function` as a part of the kernels that call it."""
    return numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)


def outlined(function: Callable[..., Any]) -> Any:
    """Compile `function` as a call for the kernels to make where it is rarely made."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def _digest_of_sources() -> str:
    """Hash of all kernel sources and of the versions that turn them into machine code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    for version in (numba.__version__, llvmlite.__version__, np.__version__):
        digest.update(version.encode())
    return digest.hexdigest()


#: Now, because these are the sources that this process runs, whatever is on the disk later.
SOURCES = _digest_of_sources()


class _DiskCache(_Cache):
    """One file per (kernel, signature, processor, sources); a miss is never an error."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._enabled = True

    @property
    def cache_path(self) -> str:
        return str(config.cache_directory())

    def _path(self, signature: Any, codegen: Any) -> Path:
        identity = repr((self._name, str(signature), codegen.magic_tuple(), SOURCES))
        name = self._name.rpartition(".")[2]
        digest = hashlib.sha256(identity.encode()).hexdigest()[:40]
        return config.cache_directory() / f"{name}-{digest}.nbc"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        if not self._enabled:
            return None
        target_context.refresh()
        path = self._path(sig, target_context.codegen())
        try:
            payload = pickle.loads(path.read_bytes())  # noqa: S301 (the user's own cache folder)
        except (OSError, EOFError, pickle.UnpicklingError, ValueError):
            return None
        return compiler.CompileResult._rebuild(target_context, *payload)

    def save_overload(self, sig: Any, data: Any) -> None:
        if not self._enabled:
            return
        path = self._path(sig, data.codegen)
        # A read-only or full disk costs the next process a compilation, nothing else.
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    pickle.dump(data._reduce(), file, protocol=pickle.HIGHEST_PROTOCOL)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def flush(self) -> None:
        """Keep what is on disk; forgetting is done by removing the folder."""
