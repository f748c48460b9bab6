"""The layer for Keras as a function of arrays, with the backend of the process."""

from __future__ import annotations

from contextlib import nullcontext

import keras

from backnorm.keras import BatchNormalization
from tests.contract.fronts import EPSILON
from tests.support.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

from .steps import STEPS

BACKEND = keras.backend.backend()
_POLICIES = {FLOAT16: "mixed_float16", FLOAT32: "float32", FLOAT64: "float64"}


_OPERANDS = {"torch": "tensors of PyTorch", "jax": "arrays of JAX"}


class Layer:
    """A step of a layer whose moving statistics are those of the batch."""

    name = "layer"
    operands = _OPERANDS.get(BACKEND, "tensors of TensorFlow")

    def __init__(self):
        # Keras computes with given statistics, and batches of no elements have none.
        self.takes = {"training": [True], "elements": ["usual", "non-finite"]}
        self.takes |= {"activation": [None], "residual": [False]}
        self.takes |= {"narrow": [False], "backward_in": [None]}
        if BACKEND == "jax":
            # JAX has float64 only by a setting of the whole process.
            self.takes["dtype"] = [FLOAT32, FLOAT16, BFLOAT16]

    def refuses(self, case):
        return False

    def tensor(self, array):
        return keras.ops.convert_to_tensor(array)

    def numpy(self, tensor):
        return keras.ops.convert_to_numpy(tensor)

    def run(self, data, options, backward=nullcontext):
        dtype = data.x.dtype
        layer = BatchNormalization(
            axis=options.axis, momentum=0.0, epsilon=EPSILON, center=data.beta is not None,
            scale=data.gamma is not None, dtype=_POLICIES.get(dtype, "mixed_bfloat16"),
            **options.of_sums,
        )  # fmt: skip
        layer.build(data.x.shape)
        channels = data.gamma, data.beta, data.mean, data.variance
        layer.set_weights([each for each in channels if each is not None])
        x, dy = (each.astype(data.mean.dtype) for each in (data.x, data.dy))
        results = STEPS[BACKEND](layer, x, dy, {"training": True})
        names = ["y", "dx"]
        names += ["dgamma"] if data.gamma is not None else []
        names += ["dbeta"] if data.beta is not None else []
        found = dict(zip(names, map(self.numpy, results), strict=True))
        found["mean"], found["variance"] = layer.get_weights()[-2:]
        # Keras gives the gradient of x in the type before its cast.
        found["dx"] = found["dx"].astype(dtype)
        return found


FRONTS = [Layer()]
