"""A caller whose floating-point mode is another: ``flushing.py CALLS DTYPE``; one result alone."""

import sys

import numpy as np
import torch
from layer import Layer, verdict

calls, dtype = int(sys.argv[1]), sys.argv[2]
layer = Layer(dtype=dtype)
# Gradients that are subnormal numbers.
least = {"float64": 2.0**-1060, "float32": 2.0**-140, "float16": 2.0**-20}[dtype]
layer.dy = (np.sign(layer.dy) * (1 + np.abs(layer.dy) * 7).round() * least).astype(dtype)
subnormal = bool(np.abs(layer().dx).max() < np.finfo(dtype).tiny * 64)
found = set()
for flush in (False, True):
    torch.set_flush_denormal(flush)
    for _ in range(calls):
        found.add(layer.bits())
    # It is the caller's own again afterwards.
    flushed = float(torch.tensor([2.0**-130]).mul(1.0)[0]) == 0
    if flushed != flush:
        found.add("mode")
torch.set_flush_denormal(False)
verdict(results=len(found) - 1, subnormal=subnormal)
