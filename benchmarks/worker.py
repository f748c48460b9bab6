"""The process of one contestant of `operator`: ``python -m benchmarks.worker DESCRIPTOR``."""

from __future__ import annotations

import gc
import importlib
from typing import Any

from benchmarks.accuracy import Examiner
from benchmarks.cells import FLOOR, OF_OURS, Cell, Form
from benchmarks.child import serve_parent
from benchmarks.data import make_data
from benchmarks.environment import available_memory
from benchmarks.peers import base
from benchmarks.peers.base import Contestant, Data, Missing, Prepared, Unsupported, Verdict
from benchmarks.turns import Settings, Timed, Timing

__all__ = ["Work", "load"]

# If the first call takes more seconds, a second one is timed: the first may have compiled code.
_SLOW = 0.4


class Work:
    """A contestant on its device; the parent calls these methods."""

    def start(
        self, device: str, contestant: str, threads: int
    ) -> tuple[dict[str, str], dict[str, Any]] | Verdict:
        """Start the device and the contestant, each named as "module:class".

        Returns
        -------
        (dict, dict) or Verdict
            Versions, and facts of the device; or a verdict: "missing" if the contestant cannot
            start, "refused" if the device cannot.
        """
        self._device = load(device)()
        try:
            facts = self._device.start(threads)
        except Missing as reason:
            return Verdict("allocate", "refused", str(reason))
        self._contestant: Contestant = load(contestant)()
        self._contestant.device = self._device
        try:
            versions = self._contestant.start(threads)
        except Missing as reason:
            return Verdict("allocate", "missing", str(reason))
        # Frameworks' objects are never freed, so garbage collection need not visit them.
        gc.collect()
        gc.freeze()
        self.release()
        return versions, facts

    def prepare(self, cell: Cell) -> list[Verdict]:
        """Make the cell's arrays, call every form once and judge its results."""
        self._cell = cell
        self._timed: dict[tuple[Form, bool], Timed] = {}
        try:
            data = self._data(cell)
            self._require(self._contestant.temporaries * cell.nbytes, "the temporaries")
            forms = self._contestant.prepare(cell, data)
            examiner = Examiner(cell, data)
        except Exception as error:  # a framework can raise any
            self._device.survived()
            return [self._declined("allocate", error)]
        return [self._enter(form, each, data, examiner) for form, each in forms.items()]

    def turn(self, form: Form, settings: Settings, whole: bool) -> list[float]:
        """Return samples of a form, in seconds a call; `whole` includes the host's part."""
        if not self._timed:
            self.prepare(self._cell)
        return self._timed[form, whole].turn(settings)

    def release(self) -> None:
        """Free the arrays, and all that was prepared with them."""
        self._timed = {}
        self._arrays: tuple[object, Data] | None = None
        self._device.hold(None)
        gc.collect()

    def _enter(
        self, form: Form, prepared: Prepared | Timing, data: Data, examiner: Examiner
    ) -> Verdict:
        if isinstance(prepared, Timing):
            return Verdict(form, "ok", timing=prepared)
        device, name = self._device, self._contestant.name
        call = device.timed(self._cell, prepared)
        try:
            device.spoil(data)
            returned, seconds = device.once(call)
            error = ""
            if name != FLOOR:
                error = examiner.error(name, prepared.results(returned))
            del returned
            if seconds > _SLOW:
                seconds = device.once(call)[1]
        except Exception as raised:  # a framework can raise any
            device.survived()
            return self._declined(form, raised)
        if error:
            return Verdict(form, "inaccurate", error)
        self._timed[form, False] = Timed(call, device.watch, seconds)
        watch = device.whole_watch(self._cell)
        if watch is not None:
            self._timed[form, True] = Timed(call, watch)
        return Verdict(form, "ok", whole=watch is not None)

    def _data(self, cell: Cell) -> Data:
        """Return the arrays of a cell; reuse those of the previous cell if they are the same."""
        identity = (cell.shape, cell.layout, cell.dtype)
        if self._arrays is None or self._arrays[0] != identity:
            self.release()
            self._require(base.ARRAYS * cell.nbytes, "x, dy and the result")
            data = make_data(cell)
            self._device.hold(data)
            self._arrays = identity, data
        return self._arrays[1]

    def _require(self, size: float, subject: str) -> None:
        free = min(available_memory(), self._device.free_memory())
        if size > base.SHARE * free:
            sizes = f"{size / 1e9:.1f} GB, and {free / 1e9:.1f} are free"
            raise Unsupported(f"{subject} would take {sizes}")

    def _declined(self, form: Form, error: Exception) -> Verdict:
        text = " ".join(str(error).split())[:200]
        if isinstance(error, Unsupported):
            return Verdict(form, "unsupported", text)
        # Our contestants must compute every cell.
        status = "crashed" if self._contestant.name in OF_OURS else "unsupported"
        return Verdict(form, status, f"{type(error).__name__}: {text}")


def load(place: str) -> Any:
    """Return the object at "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    serve_parent(Work())
