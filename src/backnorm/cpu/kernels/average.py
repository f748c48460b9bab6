"""Running statistics: what there were, averaged with those of a batch.

Dialects whose results are new arrays of them have this done here: fourteen operations of NumPy on a
few channels took longer than the whole call without them.
"""

from __future__ import annotations

from backnorm.cpu.kernels.jit import inlined, outlined
from backnorm.cpu.kernels.memory import load_one, load_some, store_some
from backnorm.cpu.kernels.record import doubles_at, singles_at
from backnorm.cpu.kernels.vector import splat
from backnorm.cpu.kernels.words import word
from backnorm.cpu.scratch import LANES

__all__ = ["average"]


@outlined
def average(cells):
    """Write kept * old + weight * (scale * new), computed in float64 and rounded once.

    Parameters
    ----------
    cells : address
        Nine integers: the header of an array object, the number of channels, whether new is float64
        (else float32, as all others); the objects of old, new and out, of the mean and then of the
        variance. And three float64: scale (of the variance; of the mean it is 1), kept and weight.
        scale * new is of new's type. Of a weight of 0 or 1 the other part is not looked at: it may
        be NaN.
    """
    scale = load_one(doubles_at(0, cells + 72), 0)
    if word(cells + 16) != 0:
        _average(doubles_at, cells, cells + 24, 1.0)
        _average(doubles_at, cells, cells + 48, scale)
    else:
        _average(singles_at, cells, cells + 24, 1.0)
        _average(singles_at, cells, cells + 48, scale)
    return 0


@inlined
def _average(at, cells, objects, scale):
    header, channels, wide = word(cells), word(cells + 8), word(cells + 16) != 0
    old = singles_at(0, word(word(objects) + header))
    new = at(0, word(word(objects + 8) + header))
    out = singles_at(0, word(word(objects + 16) + header))
    kept, weight = load_one(doubles_at(0, cells + 80), 0), load_one(doubles_at(0, cells + 80), 1)
    for c in range(0, channels, LANES):
        count = channels - c
        if weight == 0.0:
            store_some(out, c, count, load_some(old, c, count))
            continue
        batch = load_some(new, c, count) * splat(scale)
        store_some(out, c, count, batch)
        if weight != 1.0:
            value = batch if wide else load_some(out, c, count)
            part = load_some(old, c, count) * splat(kept)
            store_some(out, c, count, part + value * splat(weight))
