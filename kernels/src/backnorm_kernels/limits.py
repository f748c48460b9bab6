"""Let threadpoolctl, if it is installed, limit backnorm's threads like those of BLAS and OpenMP."""

from __future__ import annotations

import importlib
import importlib.util

from backnorm import threads
from backnorm.errors import MachineCodeError
from backnorm.version import __version__
from backnorm_kernels import library
from backnorm_kernels.kinds import THREADS


def offer() -> None:
    """Register backnorm for ``threadpool_limits`` and ``threadpool_info`` of threadpoolctl.

    threadpoolctl recognises loaded libraries by their file names. Therefore this function loads the
    library of the thread pool, if it is built.
    """
    if importlib.util.find_spec("threadpoolctl") is None:
        return
    try:
        if library.path_of(THREADS) is None:
            return
        library.load(THREADS)
    except MachineCodeError:
        # The error is not lost: the first call of an operator raises it again.
        return
    threadpoolctl = importlib.import_module("threadpoolctl")

    class Controller(threadpoolctl.LibController):  # type: ignore[misc, name-defined]
        """Reads and sets the largest number of threads of a call."""

        user_api = internal_api = "backnorm"
        filename_prefixes = (f"{THREADS}-",)
        check_symbols = ("bn_run",)

        def get_num_threads(self) -> int:
            """Return how many threads a call may have."""
            return threads.limit()

        def set_num_threads(self, num_threads: int) -> None:
            """Set how many threads a call may have."""
            threads.set_limit(num_threads)

        def get_version(self) -> str:
            """Return the version of backnorm."""
            return __version__

    if hasattr(threadpoolctl, "register"):
        threadpoolctl.register(Controller)
