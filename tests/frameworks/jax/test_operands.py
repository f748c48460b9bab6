"""A repeated call, then one with an operand or option absent, of another kind or swapped."""

from __future__ import annotations

from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import backnorm.jax as ours

from ...support.kinds import Kind
from ..operands import OperandContract, differences, good

# What is JAX's own: see the functions' documentation.
THEIRS = {
    "deleted": "deleted",
    "donated": "deleted",
    "on another device": "incompatible devices",
    "traced elsewhere": "leaked",
}


def of_jax(array):
    """Yield arrays of JAX's that only JAX has, a Kind each."""
    tensor, devices = jnp.asarray(array), jax.devices()
    deleted, donated = jnp.array(array), jnp.array(array)
    deleted.delete()
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    yield Kind("deleted", deleted, array)
    yield Kind("donated", donated, array)
    yield Kind("on another device", jax.device_put(array, devices[1]), array)
    yield Kind("traced elsewhere", leaked(tensor), array)
    for axis, size in enumerate(array.shape):
        for count in (2, 4, 5):
            if size % count == 0 and count <= len(devices):
                mesh = Mesh(devices[:count], "d")
                spec = PartitionSpec(*[None] * axis, "d")
                placed = jax.device_put(array, NamedSharding(mesh, spec))
                yield Kind(f"sharded over {count} along {axis}", placed, array)
    everywhere = NamedSharding(Mesh(devices, "d"), PartitionSpec())
    yield Kind("replicated", jax.device_put(array, everywhere), array)
    refused = {
        "keys": jax.random.split(jax.random.key(0), array.shape),
        "float8": tensor.astype(jnp.float8_e4m3fn),
        "int4": tensor.astype(jnp.int4),
        "a shape": jax.ShapeDtypeStruct(array.shape, array.dtype),
        "a number of JAX's": jnp.float32(1.5),
    }
    for label, value in refused.items():
        yield Kind(label, value, None, refused=True)


def leaked(tensor):
    """Return a value that has no elements but within a function that has ended."""
    kept = []
    jax.jit(lambda x: kept.append(x * 1) or x)(tensor)
    return kept[0]


class TestOperands(OperandContract):
    module = ours
    kinds = MappingProxyType({"arrays": jnp.asarray, "NumPy's": np.asarray})
    own_kinds = staticmethod(of_jax)
    refused_by_numpy = ("deleted", "donated", "traced elsewhere")
    options = MappingProxyType({"least_rank": 1})
    theirs = MappingProxyType(THEIRS)

    @pytest.mark.sweep
    def test_batch_norm_with_relu_accepts_or_names_each_kind_of_operand(self):
        for kind in self.kinds:
            self.check("batch_norm", kind, 1500, activation="relu")

    def test_numpy_backward_accepts_arrays_that_only_jax_has(self):
        arguments, canonical = good(ours.batch_norm_backward)
        wanted = canonical(**arguments, epsilon=1e-3, data_format="NXC")
        for name, array in arguments.items():
            for kind in of_jax(array):
                if not kind.refused and kind.label not in self.refused_by_numpy:
                    changed = arguments | {name: kind.value}
                    found = canonical(**changed, epsilon=1e-3, data_format="NXC")
                    assert differences(found, wanted) is None
