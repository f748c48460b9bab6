"""TensorFlow's FusedBatchNormV3 and FusedBatchNormGradV3, eager, on the CPU.

The operators take four axes. Arrays of other ranks are reshaped, without a change in memory, to
(N, S, 1, C) or (N, C, S, 1).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks.cells import Cell, Form
from benchmarks.peers.base import Contestant, Data, Missing, Prepared, Unsupported

__all__ = ["TensorFlow"]


class TensorFlow(Contestant):
    """TensorFlow, only allocating: the raw operators have no other form."""

    name = "tensorflow"
    temporaries = 4.0

    def start(self, threads: int) -> dict[str, str]:
        """Import TensorFlow and set its threads, which must precede its first operator."""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        try:
            import tensorflow
        except ModuleNotFoundError as error:
            raise Missing("tensorflow is not installed") from error
        tensorflow.config.threading.set_intra_op_parallelism_threads(threads)
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)
        self._tf = tensorflow
        return {"tensorflow": tensorflow.__version__}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the allocating form."""
        if cell.dtype == "float64":
            raise Unsupported("FusedBatchNorm takes no float64")
        raw, constant = self._tf.raw_ops, self._tf.constant
        shape = _four_axes(cell)
        mean, variance, gamma, beta = map(
            constant, (data.mean, data.variance, data.gamma, data.beta)
        )
        options = {
            "x": constant(data.x.reshape(shape)),
            "scale": gamma,
            "epsilon": data.epsilon,
            "data_format": "NCHW" if cell.layout == "NCX" else "NHWC",
            "is_training": cell.op != "inference",
        }
        empty = constant([], np.float32)
        if cell.op == "backward":
            # On the CPU the second reserved value is the biased variance.
            saved = {f"reserve_space_{k}": a for k, a in enumerate((mean, variance, empty), 1)}
            dy = constant(data.dy.reshape(shape))
            call = partial(raw.FusedBatchNormGradV3, y_backprop=dy, **saved, **options)
        else:
            statistics = (mean, variance) if cell.op == "inference" else (empty, empty)
            named = dict(zip(("mean", "variance"), statistics, strict=True))
            call = partial(raw.FusedBatchNormV3, offset=beta, **named, **options)

        def results(returned: Any) -> Mapping[str, np.ndarray]:
            first = returned[0].numpy().reshape(data.x.shape)
            if cell.op == "backward":
                return {"dx": first, "dgamma": returned[1].numpy(), "dbeta": returned[2].numpy()}
            if cell.op == "inference":
                return {"y": first}
            # The fifth result is the biased variance, the third the variance with M - 1.
            return {"y": first, "mean": returned[1].numpy(), "variance": returned[4].numpy()}

        return {"allocate": Prepared(call, results)}


def _four_axes(cell: Cell) -> tuple[int, ...]:
    batch, channels, *space = cell.shape
    if len(space) != 2:
        space = [math.prod(space), 1]
    return (batch, channels, *space) if cell.layout == "NCX" else (batch, *space, channels)
