"""The contract of all front doors, for the functions and the layers of flax."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp

import backnorm.jax as ours
from tests.contract.fronts import FrontContract
from tests.contract.refusals import RefusalContract

from .fronts import FRONTS


class TestFronts(FrontContract):
    fronts = FRONTS
    imports = "from tests.frameworks.jax.fronts import FRONTS as fronts"


def _compiled(function):
    """Return a function whose arrays are traced."""

    def call(**arguments):
        arrays = {name: each for name, each in arguments.items() if isinstance(each, jax.Array)}
        others = {name: each for name, each in arguments.items() if name not in arrays}
        return jax.jit(partial(function, **others))(**arrays)

    return call


class TestRefusals(RefusalContract):
    functions = MappingProxyType({
        "forward": ours.batch_norm, "inference": ours.batch_norm_inference,
        "backward": ours.batch_norm_backward,
    })  # fmt: skip
    tensor = staticmethod(jnp.asarray)
    ways = MappingProxyType({"eager": lambda function: function, "jit": _compiled})
