"""The contract of all front doors, for the functions on tensors."""

from __future__ import annotations

from types import MappingProxyType

import tensorflow as tf

from backnorm import tensorflow as ours
from tests.contract.fronts import FrontContract
from tests.contract.refusals import RefusalContract

from .fronts import FRONTS


class TestFronts(FrontContract):
    fronts = FRONTS
    imports = "from tests.frameworks.tensorflow.fronts import FRONTS as fronts"


def _traced(function):
    return lambda **arguments: tf.function(lambda: function(**arguments))()


class TestRefusals(RefusalContract):
    functions = MappingProxyType({
        "forward": ours.batch_norm, "inference": ours.batch_norm_inference,
        "backward": ours.batch_norm_backward,
    })  # fmt: skip
    tensor = staticmethod(tf.convert_to_tensor)
    ways = MappingProxyType({"eager": lambda function: function, "traced": _traced})
