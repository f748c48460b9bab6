"""Without kernels, or within the block of another engine, calls on JAX's arrays raise one line."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import backnorm
import backnorm.jax
from backnorm.errors import ArgumentValueError


def test_import_without_kernels_succeeds_and_calls_raise_one_line(without_kernels):
    code = """
import jax
import jax.numpy as jnp
import backnorm.jax
from backnorm.errors import MachineCodeError
x, ones = jnp.ones((4, 3, 2)), jnp.ones(3)
def forward(x):
    return backnorm.jax.batch_norm(x, ones, ones, epsilon=1e-5, axis=1)[0].sum()
def inference(x):
    return backnorm.jax.batch_norm_inference(x, ones, ones, ones, ones, epsilon=1e-5, axis=1)
for _ in range(2):
    for call in (forward, jax.jit(forward), jax.grad(forward), inference, jax.jit(inference)):
        try:
            call(x)
        except MachineCodeError as error:
            print(error)
"""
    done = without_kernels(code, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    message = (
        "calls on arrays of JAX on the CPU need the kernels: "
        "pip install ./kernels in a checkout of backnorm"
    )
    assert done.stdout.splitlines() == 10 * [message]


@pytest.mark.parametrize("transform", [lambda call: call, jax.jit, jax.grad])
def test_call_within_numpy_engine_raises_until_the_block_ends(transform):
    x, ones = jnp.ones((5, 3, 2)), jnp.ones(3)

    def loss(x):
        return backnorm.jax.batch_norm(x, ones, ones, epsilon=1e-5, axis=1)[0].sum()

    call = transform(loss)
    with (
        pytest.raises(ArgumentValueError, match=r"^engine: calls on arrays of JAX") as caught,
        backnorm.engine("numpy"),
    ):
        call(x)
    assert "got 'numpy'; expected 'kernels'" in str(caught.value)
    assert "\n" not in str(caught.value)
    call(x)
