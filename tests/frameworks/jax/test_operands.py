"""A repeated call, then one with an operand or option absent, of another kind or swapped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import backnorm
import backnorm.jax as ours

from ...support.kinds import Kind
from .. import operands

FUNCTIONS = [name for name in operands.CANONICAL if hasattr(ours, name)]
KINDS = {"arrays": jnp.asarray, "NumPy's": np.asarray}


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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sample_of_hostile_calls_gives_documented_error_or_right_result(name):
    wrong, count = operands.failures(
        getattr(ours, name),
        jnp.asarray,
        more=of_jax,
        theirs=THEIRS,
        least_rank=1,
        share=operands.SHARE,
    )
    assert not wrong, f"{len(wrong)} kinds in {count} calls:\n" + "\n".join(wrong)
    assert count > 60


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "activation"), [*((name, None) for name in FUNCTIONS), ("batch_norm", "relu")]
)
def test_function_accepts_or_names_each_kind_of_operand(name, activation, kind):
    function = getattr(ours, name)
    more = {"more": of_jax, "theirs": THEIRS} if kind == "arrays" else {}
    more |= {"least_rank": 1, "activation": activation}
    wrong, count = operands.failures(function, KINDS[kind], **more)
    assert not wrong, f"{len(wrong)} kinds in {count} calls:\n" + "\n".join(wrong)
    assert count > 1500


def test_jax_module_has_each_canonical_function():
    assert set(FUNCTIONS) == set(operands.CANONICAL)


def test_numpy_backward_accepts_jax_arrays_and_names_bad_operands():
    arguments, canonical = operands.good(ours.batch_norm_backward)
    wanted = canonical(**arguments, epsilon=1e-3, data_format="NXC")
    for name, array in arguments.items():
        for kind in of_jax(array):
            changed = arguments | {name: kind.value}
            if kind.refused or kind.label in ("deleted", "donated", "traced elsewhere"):
                with pytest.raises(backnorm.ArgumentError, match=f"^{name}: "):
                    canonical(**changed, epsilon=1e-3, data_format="NXC")
                continue
            found = canonical(**changed, epsilon=1e-3, data_format="NXC")
            assert operands.differences(found, wanted) is None
