"""What the drivers have in common: cases come in one .npz file, results leave in another."""

from __future__ import annotations

import json
import sys

import numpy as np


def serve(backward):
    """Run `backward(case, x, dy, mean, variance, gamma)` on every case of argv[1] into argv[2]."""
    source, target = sys.argv[1:]
    results = {}
    with np.load(source) as arrays:
        for case in json.loads(str(arrays["cases"])):
            inputs = {
                name: arrays[f"{case['name']}/{name}"]
                for name in ("x", "dy", "mean", "variance", "gamma")
            }
            outputs = backward(case, **inputs)
            for name, value in zip(("dx", "dgamma", "dbeta"), outputs, strict=True):
                results[f"{case['name']}/{name}"] = value
    np.savez(target, **results)
