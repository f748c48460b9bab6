"""Write paddle_values.npz: what Paddle's batch_norm_grad returns on a CPU.

Run it where PaddlePaddle 3.3.1 is installed, which no dependency of the tests is. The name of a
case is its number, the element type, the format, the flags that are true, and the input that is
absent. A case has two arrays: `DATA`, and `CHANNELS` with NaN for what is absent.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import paddle
from paddle import _C_ops

EPSILON = 1e-3
FLAGS = "is_test", "use_global_stats", "trainable_statistics"
INPUTS = (
    "x", "scale", "bias", "mean_out", "variance_out", "saved_mean", "saved_variance",
    "reserve_space", "out_grad",
)  # fmt: skip
OUTPUTS = "x_grad", "scale_grad", "bias_grad"
DATA = "x", "out_grad", "x_grad"
CHANNELS = (*INPUTS[1:7], *OUTPUTS[1:])


def inputs_of(shape, axis, dtype, rng):
    channels, others = shape[axis], tuple(k for k in range(len(shape)) if k != axis)
    x = (rng.normal(size=shape) * 3 + 1).astype(dtype)
    wide = x.astype(np.float64)
    values = {
        "x": x,
        "scale": rng.normal(size=channels),
        "bias": rng.normal(size=channels),
        "mean_out": rng.normal(size=channels),
        "variance_out": rng.uniform(0.5, 2, channels),
        "saved_mean": wide.mean(others),
        "saved_variance": 1 / np.sqrt(wide.var(others) + EPSILON),
        "out_grad": rng.normal(size=shape),
    }
    return {name: value.astype(dtype) for name, value in values.items()}


def cases():
    rng = np.random.default_rng(0)
    for dtype, layout in itertools.product(("float32", "float64"), ("NCHW", "NHWC")):
        for flags in itertools.product((False, True), repeat=3):
            yield dtype, layout, flags, "", (2, 3, 2, 2), rng
        for shape in ((5, 3), (3, 3, 4), (2, 3, 2, 2, 3), (1, 3), (1, 3, 1, 1)):
            yield dtype, layout, (False,) * 3, "", shape, rng
        for absent in ("scale", "bias", "running"):
            yield dtype, layout, (False,) * 3, absent, (2, 3, 2, 2), rng


found = {"version": np.array(paddle.__version__)}
for number, (dtype, layout, flags, absent, shape, rng) in enumerate(cases()):
    axis = 1 if layout == "NCHW" else len(shape) - 1
    shape = shape if layout == "NCHW" else (shape[0], *shape[2:], shape[1])
    inputs = inputs_of(shape, axis, dtype, rng)
    for name in {"running": ("mean_out", "variance_out")}.get(absent, (absent,)):
        inputs.pop(name, None)
    operands = [paddle.to_tensor(inputs[name]) if name in inputs else None for name in INPUTS]
    results = _C_ops.batch_norm_grad(*operands, 0.9, EPSILON, layout, *flags)
    true = "+".join(name for name, flag in zip(FLAGS, flags, strict=True) if flag)
    case = f"{number:02},{dtype},{layout},{true},{absent}"
    arrays = inputs | {
        name: result.numpy()
        for name, result in zip(OUTPUTS, results, strict=True)
        if result._is_initialized()
    }
    none = np.full(shape[axis], np.nan, dtype)
    found[f"{case},data"] = np.stack([arrays[name] for name in DATA])
    found[f"{case},channels"] = np.stack([arrays.get(name, none) for name in CHANNELS])
np.savez_compressed(Path(__file__).with_name("paddle_values.npz"), **found)
