"""Private state of the package that tests change, count or read, by the name of its purpose.

Functions that change something take pytest's `monkeypatch`, which undoes it. The kernels and
modules of frameworks are imported by the functions that need them.
"""

from __future__ import annotations

import numpy as np

from backnorm import allocation, engines, executable, threads
from backnorm.arrays import NumPy
from backnorm.layout import MARK_BYTES
from backnorm.reference import _blocks
from backnorm.second_order import arrays as second_order

_NAN = np.array(np.nan).view(np.int64)


# Results and scratch memory of the kernels.


def poison_new_memory(monkeypatch):
    """Fill results and scratch memory with NaN before each call; return the list of results."""
    allocated, original = [], NumPy.new

    def new(self, forms, operands):
        results = original(self, forms, operands)
        for array in results:
            # A mask is of bytes and ends with a mark, reproducible sums are integers.
            used = array[:-MARK_BYTES] if array.dtype == np.uint8 else array
            used.fill({"u": 255, "i": -12345}.get(array.dtype.kind, np.nan))
        allocated.extend(results)
        return results

    monkeypatch.setattr(NumPy, "new", new)
    if engines.are_kernels_installed():
        _poison_scratch(monkeypatch)
    return allocated


def _poison_scratch(monkeypatch):
    from backnorm_kernels import stage

    scratch, fill = stage.SLOTS["scratch"], stage._fill

    def fill_in(view, *args):
        # For every call, and not only in new memory: records are kept for the next call.
        np.asarray(view)[view[scratch] // 8 :] = _NAN
        fill(view, *args)

    monkeypatch.setattr(stage, "_fill", fill_in)


def keep_no_records(monkeypatch):
    """Let no record of a call be used by the next."""
    from backnorm_kernels import stage

    monkeypatch.setattr(stage, "_KEPT", 0)
    monkeypatch.setattr(stage, "_LARGEST", 0)


def sizes_of_records(monkeypatch):
    """Return a list, to which each new record then adds its bytes."""
    from backnorm_kernels import stage

    sizes, aligned = [], stage.aligned

    def counted(shape, dtype):
        cells = aligned(shape, dtype)
        sizes.append(cells.nbytes)
        return cells

    monkeypatch.setattr(stage, "aligned", counted)
    return sizes


def leave_calls_early(monkeypatch, runner):
    """Let no participant of a call claim a second item, and `runner` run its stages."""
    from backnorm_kernels import stage

    monkeypatch.setattr(stage, "_LIMIT", 1)
    monkeypatch.setattr(stage, "runner", runner)


# Engines and plans.


def use_engine(monkeypatch, name):
    """Let an engine compute calls on NumPy arrays."""
    monkeypatch.setenv("BACKNORM_ENGINE", name)
    monkeypatch.setattr(engines, "_initial", lambda: name)
    executable.forget()


def forget_plans():
    """Empty the call cache, whose keys do not contain the engine that `use_engine` has set."""
    executable.forget()


def plan_for(monkeypatch, machine):
    """Plan for a machine that is made up, whatever the number of threads."""
    monkeypatch.setattr(engines, "_machine", lambda threads: machine)


def forget_number_of_threads(monkeypatch):
    """Let no number of threads be set, and processors be counted again."""
    monkeypatch.setattr(threads, "_most", None)
    count_processors_again(monkeypatch)


def count_processors_again(monkeypatch):
    """Let the number of processors that is known be out of date."""
    monkeypatch.setattr(threads, "_until", 0.0)


def complete_up_to(monkeypatch, elements):
    """Let plans of a GPU have the schedule "complete" for units of at most so many elements."""
    from backnorm.gpu import plan

    for limit in ("_COMPLETE", "_COMPLETE_ODD"):
        monkeypatch.setattr(plan, limit, elements)


# Blocks, in which memory is bounded.


def blocks_of_reference(monkeypatch, elements, channels):
    """Let the reference compute blocks of some elements and channels at a time."""
    monkeypatch.setattr(_blocks, "_BLOCK", elements)
    monkeypatch.setattr(_blocks, "_BLOCK_CHANNELS", channels)


def blocks_of_second_order(monkeypatch, elements):
    """Let the second order on arrays be computed in blocks of some elements."""
    monkeypatch.setattr(second_order, "_BLOCK", elements)


def blocks_of_second_order_on_gpu(monkeypatch, elements):
    """Let the second order on a GPU's tensors be computed in blocks of some elements."""
    from backnorm.torch import gpu

    monkeypatch.setattr(gpu, "_BLOCK", elements)


# Memory that is kept for the next array.


def spare_blocks():
    """Return the sizes of the blocks that are kept, small ones and large ones."""
    return [[end.block.size for end in list(shelf)] for shelf in allocation._shelves]


def drop_spare_blocks():
    """Keep no block."""
    for shelf in allocation._shelves:
        shelf.clear()


def let_spare_blocks_be_old(monkeypatch):
    """Let the next allocation drop all blocks that it does not use."""
    monkeypatch.setattr(allocation, "_MOMENT", 0.0)


def allocate_no_block(monkeypatch):
    """Let the system have no memory for a block."""

    def refuse(size):
        raise OSError("no memory")

    monkeypatch.setattr(allocation, "_Block", refuse)


# Libraries of machine code.


def libraries_in(monkeypatch, folder):
    """Look for libraries in a folder, each time anew."""
    from backnorm_kernels import library

    monkeypatch.setattr(library, "FOLDER", folder)
    monkeypatch.setattr(library, "_installed", library._installed.__wrapped__)


def no_library_loaded(monkeypatch, folder):
    """Let no library be loaded, and look for them in a folder; return those loaded by name."""
    from backnorm_kernels import library

    monkeypatch.setattr(library, "FOLDER", folder)
    loaded = {}
    monkeypatch.setattr(library, "_loaded", loaded)
    return loaded


def without_sources(monkeypatch):
    """Take the package for an installed one, which has no compiler."""
    from backnorm_kernels import library

    monkeypatch.setattr(library, "_FROM_SOURCES", False)


# Adapters of frameworks.


def strides_of_compiled_gradients(monkeypatch):
    """Return a list, to which each compiled backward of PyTorch adds the strides of x and dy."""
    from backnorm.torch import engines

    strides, original = [], engines.run

    def recorded(operation, operands, *others):
        if operation == "backward_coefficients":
            strides.append(tuple(each.stride() for each in operands[:2]))
        return original(operation, operands, *others)

    monkeypatch.setattr(engines, "run", recorded)
    return strides
