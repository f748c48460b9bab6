"""The front doors for TensorFlow, as functions of arrays."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import tensorflow as tf

from backnorm import tensorflow as ours
from tests.contract.fronts import EPSILON


class Functions:
    """The functions on tensors: eagerly, or traced with nothing known but the ranks."""

    operands = "tensors of TensorFlow"

    def __init__(self, name, *, traced=False, explicit=False):
        self.name, self.traced, self.explicit = name, traced, explicit
        # Statistics are rounded to narrow parameters' type before the backward pass.
        self.takes = {"activation": [None], "residual": [False], "narrow": [False]}
        # A graph computes where no block is known.
        self.takes |= {"engine": []} if traced else {}
        # A function of its own has the arithmetic of its own call.
        self.takes |= {"backward_in": [None]} if explicit else {}

    def refuses(self, case):
        return False

    def tensor(self, array):
        return tf.convert_to_tensor(array)

    def numpy(self, tensor):
        return np.asarray(tensor)

    def run(self, data, options, backward=nullcontext):
        made = {name: self.tensor(each) for name, each in vars(data).items() if each is not None}
        names = list(made)

        def step(*tensors):
            return self.step(dict(zip(names, tensors, strict=True)), options, backward)

        if self.traced:
            signature = [tf.TensorSpec([None] * t.shape.rank, t.dtype) for t in made.values()]
            step = tf.function(step, input_signature=signature, autograph=False)
        return {name: self.numpy(each) for name, each in step(*made.values()).items()}

    def step(self, tensors, options, backward):
        x, dy, gamma, beta = map(tensors.get, ("x", "dy", "gamma", "beta"))
        settings = {"epsilon": EPSILON, "axis": options.axis, **options.of_sums}
        sources = {"dx": x, "dgamma": gamma, "dbeta": beta}
        sources = {name: each for name, each in sources.items() if each is not None}
        with tf.GradientTape() as tape:
            tape.watch(list(sources.values()))
            if options.training:
                y, mean, variance = ours.batch_norm(x, gamma, beta, **settings)
                found = {"y": y, "mean": mean, "variance": variance}
            else:
                mean, variance = tensors["mean"], tensors["variance"]
                y = ours.batch_norm_inference(x, mean, variance, gamma, beta, **settings)
                found = {"y": y}
        with backward():
            if self.explicit:
                gradients = ours.batch_norm_backward(
                    x, dy, mean, variance, gamma, training=options.training, **settings
                )
                return found | gradients._asdict()
            gradients = tape.gradient(y, list(sources.values()), output_gradients=dy)
        return found | dict(zip(sources, gradients, strict=True))


FRONTS = [
    Functions("eager"),
    Functions("traced", traced=True),
    Functions("backward", explicit=True),
    Functions("traced backward", traced=True, explicit=True),
]
